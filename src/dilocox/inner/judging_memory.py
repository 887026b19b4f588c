"""Memory in which exchanges judge contributions before the vote, in bytes per parameter."""

from __future__ import annotations

from dilocox.config.run_config import RunConfig


def gate_probe_bytes_per_parameter(
    config: RunConfig, waiting: int = 1, fragments: int | None = None
) -> float:
    """Return the bytes that a gate keeps of the boundaries of exchanges in flight, fp32.

    They are in the machine's memory. At the single rank of a site they are the anchors of the whole
    model. Exchanges share the anchors that have not changed between their boundaries; one fragment
    lands between two boundaries. With several ranks they are the gradients of each fragment.

    Args:
        config: the run file.
        waiting: number of fragments that wait for their landing.
        fragments: fragments of a round. None: those of the run file.
    """
    if not config.admission.gate:
        return 0
    fragments = fragments or config.outer.fragments
    if config.site.ranks == 1:
        return 4 * (1 + (waiting - 1) / fragments)
    return 4 * waiting / fragments


def probe_copy_bytes_per_parameter(
    config: RunConfig, waiting: int | None = None, fragments: int | None = None
) -> float:
    """Return the bytes of what a gate keeps in the copy that a checkpoint is written from.

    At the single rank of a site the copy has, for each exchange in flight, the anchors that have
    landed since the exchange's boundary. With several ranks it has the gradients of each fragment.
    `waiting` and `fragments`: see `gate_probe_bytes_per_parameter`. None means one fragment that
    waits if the plan has a delay, else no fragment.
    """
    if not config.admission.gate:
        return 0
    fragments = fragments or config.outer.fragments
    if waiting is None:
        waiting = int(config.outer.delay > 0)
    if config.site.ranks == 1:
        return 4 * waiting * max(0, waiting - 1) / 2 / fragments
    return 4 * waiting / fragments


def decoded_bytes_per_parameter(
    config: RunConfig, sites: int, fragments: int | None = None
) -> float:
    """Return the bytes of the decoded contributions of one exchange, fp32, before the vote.

    An exchange that compares contributions holds those of all `sites`. Any other exchange holds one
    at a time. `fragments`: fragments of a round. None: those of the run file.
    """
    held = sites if config.admission.examines else 1
    return 4 * held / (fragments or config.outer.fragments)
