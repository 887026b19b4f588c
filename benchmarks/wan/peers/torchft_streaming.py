"""torchft's Streaming DiLoCo: one fragment after another, during `delay` steps of training."""

from benchmarks.wan.peers.peer import job
from benchmarks.wan.peers.torchft_site import train

if __name__ == "__main__":
    train(job())
