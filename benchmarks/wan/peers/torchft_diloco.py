"""torchft's DiLoCo: the whole model's pseudo-gradients at once, while training stands still."""

from benchmarks.wan.peers.peer import job
from benchmarks.wan.peers.torchft_site import train

if __name__ == "__main__":
    train(job())
