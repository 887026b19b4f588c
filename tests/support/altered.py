"""Sites whose processes are altered, for tests of admission; the shipped code has no such thing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.outer.fragment_state import FragmentState
from dilocox.training import builder
from dilocox.transport.groups import PeerGroup
from dilocox.transport.link.transfer import Transfer


def contributions_times(factors: Mapping[str, float]) -> None:
    """From now on, ranks forked from this process contribute their u times the factor of their
    site; sites that are not named stay honest."""

    class Altered(FragmentState):
        def boundary(
            self, live: Mapping[str, Tensor], weight: float, decay: float
        ) -> tuple[Tensor, bool]:
            u, finite = super().boundary(live, weight, decay)
            return u.mul(factors.get(_site(), 1.0)), finite

        def committed(
            self, u: Tensor, sent: Tensor | None, second_error: tuple[int, Tensor] | None = None
        ) -> None:
            # What did not count must not come back and be altered again.
            super().committed(u, u if _site() in factors else sent, second_error)

    builder.FragmentState = Altered  # type: ignore[misc]


def holds_only_its_own(site: str) -> None:
    """From now on, the ranks of `site` vote that they hold nobody else's contribution."""

    def lie(fields: dict[str, Any]) -> None:
        fields["held"] = [site]

    _in_votes_of(site, lie)


def saw_other_payloads(site: str) -> None:
    """From now on, the ranks of `site` vote that all others have sent them something else."""

    def lie(fields: dict[str, Any]) -> None:
        other = RankOpinion(digest="0" * 64)
        fields["opinions"] |= {name: other for name in fields["held"] if name != site}

    _in_votes_of(site, lie)


def spoils_what_it_sends(site: str, to: str) -> None:
    """From now on, payloads that the ranks of `site` send to site `to` are damaged."""
    honest = PeerGroup.send

    def send(self: PeerGroup, tensor: Tensor, peer: str, tag: int) -> Transfer:
        if (_site(), peer) == (site, to) and bytes(tensor[:4].tolist()) == b"DLCX":
            tensor = tensor.clone()
            tensor[-1] ^= 1
        return honest(self, tensor, peer, tag)

    PeerGroup.send = send  # type: ignore[method-assign]


def _in_votes_of(site: str, lie: Callable[[dict[str, Any]], None]) -> None:
    honest = CoordinatorClient._vote

    def vote(
        self: CoordinatorClient, key: Any, attempt: int, fields: dict[str, Any], limit: float | None
    ) -> Any:
        if _site() == site and fields.get("held"):
            lie(fields)
        return honest(self, key, attempt, fields, limit)

    CoordinatorClient._vote = vote  # type: ignore[method-assign]


def _site() -> str:
    return multiprocessing.current_process().name.split("-")[0]
