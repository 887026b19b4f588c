"""One rank's state: all tensors and numbers from which the rank continues bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.protocol.messages import ExchangeKey, RoundPlan
from dilocox.outer.in_flight import Pending
from dilocox.outer.loop import OuterLoop
from dilocox.training import checkpoint_io
from dilocox.training.builder import RankParts
from dilocox.training.round_meter import RoundMetrics


@dataclass
class RunPosition:
    """The position of a rank in the run."""

    round: int = 0
    slot: int = 0
    """Number of slots of round `round` that are finished."""
    tick: int = 0
    """Number of slots of the whole run that are finished."""


@dataclass
class RankState:
    """The parts of one rank, and the rank's position in the run."""

    config: RunConfig
    rank: RankParts
    outer: OuterLoop
    at: RunPosition = field(default_factory=RunPosition)
    dropped_round: int = -2
    """Last round in which this site met a non-finite value."""
    weight: float = 1.0
    """Weight of this site's contributions in the last round that the site trained."""

    def __post_init__(self) -> None:
        self.meter = RoundMetrics(self.config, self.rank)

    @property
    def site(self) -> str:
        """Name of the rank's site."""
        return self.rank.place.site


def capture(own: RankState, probes: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return all tensors and numbers from which this rank continues bit for bit.

    `probes`: include the probes of a gate. This site's own training does not depend on them.
    """
    rank, outer = own.rank, own.outer
    tensors = {f"live/{name}": tensor for name, tensor in rank.live.items()}
    tensors |= {f"inner/{name}": tensor for name, tensor in rank.model.optimizer_state().items()}
    for number, fragment in enumerate(rank.states):
        tensors |= {f"outer/{number}/{name}": t for name, t in fragment.state_tensors().items()}
    tensors["random/cpu"] = torch.get_rng_state()
    if rank.mesh.device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(rank.mesh.device)
    pending = []
    for number, item in enumerate(outer.under_way_now()):
        if item.contribution is not None:
            tensors[f"pending/{number}"] = item.contribution
        if item.moments is not None:
            tensors[f"moments/{number}"] = item.moments
        if probes and item.probe is not None:
            kept = item.probe.tensors(outer.anchors())
            tensors |= {f"probe/{number}/{name}": tensor for name, tensor in kept.items()}
        pending.append(
            {
                "key": item.key.text,
                "plan": item.plan.model_dump(mode="json"),
                "lands_at": item.lands_at,
                "contributes": item.contributes,
                "contribution": item.contribution is not None,
            }
        )
    at = own.at
    state = {
        "round": at.round,
        "slot": at.slot,
        "pending": pending,
        "warm_codecs": [fragment.warm_codec for fragment in rank.states],
        "owner_landings": outer.owner_landings,
        "dropping": outer.status.dropping,
        "dropped_round": own.dropped_round,
        "weight": own.weight,
        "round_so_far": own.meter.so_far(outer),
        "non_finite": own.meter.non_finite(),
        "dropped": own.meter.dropped,
        "stages": rank.mesh.stages,
        "shards": rank.mesh.shards,
    }
    return tensors, state


OF_A_ROUND = ("round_so_far", "non_finite", "dropped", "weight")
"""Names of the values of `capture` that describe a partly trained round, or the round before."""


def capture_round(own: RankState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state between two rounds, as `capture` does.

    The values of `OF_A_ROUND` are left out. So the state has no times, and equal training gives
    equal states.
    """
    tensors, state = capture(own, probes=False)
    return tensors, {name: said for name, said in state.items() if name not in OF_A_ROUND}


def restore_round(
    own: RankState, tensors: dict[str, torch.Tensor], state: Mapping[str, Any], tick: int
) -> None:
    """Restore a state of `capture_round`. `tick`: slots of the run that are finished."""
    restore(own, checkpoint_io.Loaded(tensors, {**state, "tick": tick}))


def restore(own: RankState, loaded: checkpoint_io.Loaded) -> None:
    """Restore a state of `capture`. Exchanges that were in flight are started again later."""
    rank, outer, tensors, state = own.rank, own.outer, loaded.tensors, loaded.state
    for name, tensor in rank.live.items():
        tensor.copy_(tensors[f"live/{name}"])
    rank.model.sync_tied()
    rank.model.load_optimizer_state(_below(tensors, "inner/"))
    for number, fragment in enumerate(rank.states):
        fragment.load(_below(tensors, f"outer/{number}/"), state["warm_codecs"][number])
    torch.set_rng_state(tensors["random/cpu"])
    if rank.mesh.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random/cuda"], rank.mesh.device)
    own.dropped_round = int(state["dropped_round"])
    own.weight = _weight(state, rank.place.site)
    if "round_so_far" in state:
        own.meter.go_on(state["round_so_far"], state["non_finite"], state["dropped"])
    own.at.round = int(state["round"])
    own.at.slot = int(state["slot"])
    own.at.tick = int(state["tick"])
    outer.restore(
        _in_flight(outer, tensors, state["pending"]),
        state["owner_landings"],
        bool(state["dropping"]),
    )


def _in_flight(
    outer: OuterLoop, tensors: dict[str, torch.Tensor], pending: Sequence[Mapping[str, Any]]
) -> list[Pending]:
    """Return the exchanges that `capture` has described in `tensors` and `pending`."""
    found = []
    for number, item in enumerate(pending):
        key = ExchangeKey.parse(item["key"])
        plan = RoundPlan.model_validate_json(json.dumps(item["plan"]))
        found.append(
            Pending.waiting(
                key,
                plan,
                int(item["lands_at"]),
                tensors[f"pending/{number}"] if item["contribution"] else None,
                bool(item["contributes"]),
                outer.probe_again(key, plan, _below(tensors, f"probe/{number}/")),
                tensors.get(f"moments/{number}"),
            )
        )
    return found


def _weight(state: Mapping[str, Any], site: str) -> float:
    """Return the weight of `site` in the last round that it trained before the state.

    A checkpoint of an earlier version has no such value. The weight then comes from the latest
    plan of an exchange in flight; without one it is 1.
    """
    if "weight" in state:
        return float(state["weight"])
    plans = [item["plan"] for item in state["pending"] if site in item["plan"]["members"]]
    latest = max(plans, key=lambda plan: plan["round"], default=None)
    return 1.0 if latest is None else float(latest["members"][site]["weight"])


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
