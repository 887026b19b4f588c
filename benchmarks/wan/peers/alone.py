"""Peer without exchanges: the training loop of all peers by itself."""

from benchmarks.wan.peers.peer import job, make_loop, measure


def main() -> None:
    """Train at one site, without exchange."""
    told = job()
    measure(told, make_loop(told), lambda: 0.0)


if __name__ == "__main__":
    main()
