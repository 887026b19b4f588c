"""A network that falls apart and heals: one side goes on, the other waits, one anchor after it.

Real sites and a real coordinator between network namespaces, on a switch that becomes two.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence

import pytest

from dilocox.tools.testbed import Network, unsupported_reason
from dilocox.tools.testbed.commands import ip
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import Workshop

REASON = unsupported_reason()
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.slow,
]
HUB, SITES = "hub", ("paris", "lyon", "oslo")
LONG = 240.0
WAITS = 35.0
"""Seconds of the partition in which nobody may go on: longer than an exchange may take (29 s)."""


class Switch:
    """The lab's switch, whose ports can be moved to another one that nothing else is on."""

    def __init__(self, network: Network) -> None:
        self._network, self._where = network, network.layout.switch
        ip("-n", self._where, "link", "add", "br1", "type", "bridge", "mcast_snooping", "0")
        ip("-n", self._where, "link", "set", "br1", "up")

    @contextlib.contextmanager
    def apart(self, sites: Sequence[str]) -> Iterator[None]:
        """`sites` reach each other, and nobody else."""
        self._move(sites, "br1")
        try:
            yield
        finally:
            self._move(sites, "br0")

    def _move(self, sites: Sequence[str], bridge: str) -> None:
        for site in sites:
            port = self._network.layout.port(site)
            ip("-n", self._where, "link", "set", port, "master", bridge)


def last_round(run: ForkedRun, site: str) -> int:
    """The last round that a site has reported; -1 before the first."""
    rows = run.records("round", site)
    return int(rows[-1]["round"]) if rows else -1


def all_go_on(run: ForkedRun, rounds: int = 3) -> None:
    """Wait until all sites together have trained some more rounds."""
    start = max(last_round(run, site) for site in SITES)
    run.until(lambda: all(last_round(run, site) > start for site in SITES), LONG)
    whole = [r for r in run.records() if r["sites"] == len(SITES)]
    first = whole[-1]["round"] if whole else start
    run.until(
        lambda: any(r["round"] >= first + rounds and r["sites"] == len(SITES)
                    for r in run.records()), LONG
    )  # fmt: skip


def test_the_side_with_the_coordinator_goes_on_if_it_has_min_sites(
    workshop: Workshop, forge: Forge
) -> None:
    with Network([HUB, *SITES]) as network:
        sets = (
            "outer.rounds=5000", "outer.min_sites=2", "checkpoint.every_rounds=0",
            "site.stages=1", "network.link_timeout=6", "network.heartbeat=5",
            f"network.host={network.address(HUB)}",
        )  # fmt: skip
        words = workshop.run_file("partition", *sets, sites=SITES)
        run = forge.command(
            workshop, "partition", "coordinator", *words, namespace=network.namespace(HUB)
        )
        run.until(lambda: run.printed().count("dilocox join") == len(SITES), LONG)
        address = re.findall(r"dilocox join (\S+) ", run.printed())[0]
        tokens = run.folder / "coordinator" / "tokens"
        for site in SITES:
            words_there = ["join", address, "--site", site, "--run-file", *words]
            forge.command(
                workshop, "partition", *words_there, "--token-file", str(tokens / site),
                namespace=network.namespace(site),
            )  # fmt: skip
        all_go_on(run)
        switch = Switch(network)

        # Two sites with the coordinator, one without.
        with switch.apart(["oslo"]):
            run.until(lambda: "oslo is gone: " in run.printed(), LONG)
            alone = last_round(run, "oslo")
            run.until(lambda: last_round(run, "paris") > alone + 5, LONG)
            assert last_round(run, "oslo") == alone
            assert run.records()[-1]["sites"] == 2
        all_go_on(run)

        # One site with the coordinator, two without: too few on the one side, nobody to say what
        # counts on the other. The coordinator waits for longer than any exchange may take.
        with switch.apart(["paris", "lyon"]):
            said = run.printed()
            run.until(
                lambda: all(
                    f"{site} is gone: " in run.printed()[len(said) :] for site in ("paris", "lyon")
                ),
                LONG,
            )
            before = [last_round(run, site) for site in SITES]
            end = time.monotonic() + WAITS
            run.until(lambda: time.monotonic() > end, 2 * WAITS)
            # What was decided when the others went may still be reported, and no more.
            after = [last_round(run, site) for site in SITES]
            assert after[:2] == before[:2]
            assert after[2] <= before[2] + 2
            assert "oslo is gone" not in run.printed()[len(said) :]
        all_go_on(run)

        run.ctrl_c()
        assert run.wait(LONG) == 130, run.output()
    summary = run.summary()
    assert (summary["phase"], summary["sequences_doubled"]) == ("stopped", 0)
    assert summary["sequences_missing"] == 0
    # The coordinator compares anchors, too: a run whose sites differ fails.
    by_round: dict[int, set[str]] = {}
    for site in SITES:
        for record in run.records("round", site):
            if record["anchor_digest"] is not None:
                by_round.setdefault(record["round"], set()).add(record["anchor_digest"])
    assert all(len(digests) == 1 for digests in by_round.values())
    assert len(by_round) == max(by_round) + 1, "no round is missing"
