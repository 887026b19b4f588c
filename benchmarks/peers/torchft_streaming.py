"""torchft's Streaming DiLoCo: fragment after fragment, beside `delay` steps of training."""

from peer import job
from torchft_site import train

if __name__ == "__main__":
    train(job())
