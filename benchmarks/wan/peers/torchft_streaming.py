"""torchft's Streaming DiLoCo: fragment after fragment, beside `delay` steps of training."""

from benchmarks.wan.peers.peer import job
from benchmarks.wan.peers.torchft_site import train

if __name__ == "__main__":
    train(job())
