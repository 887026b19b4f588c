"""torchft's DiLoCo: the whole model's pseudo-gradients at once, while training stands still."""

from peer import job
from torchft_site import train

if __name__ == "__main__":
    train(job())
