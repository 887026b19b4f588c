"""All that makes one rank go on bit for bit, as tensors and numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dilocox import checkpoint
from dilocox.outer.coordinator.messages import ExchangeKey, RoundPlan
from dilocox.outer.pending import Pending

if TYPE_CHECKING:
    from dilocox.trainer import Trainer


def capture(
    trainer: Trainer, probes: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors and numbers that make this rank go on bit for bit.

    `probes`: with what a gate goes by, on which no training of this site depends.
    """
    rank, outer = trainer.rank, trainer.outer
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
    at = trainer.at
    state = {
        "round": at.round,
        "slot": at.slot,
        "pending": pending,
        "warm_codecs": [fragment.warm_codec for fragment in rank.states],
        "owner_landings": outer.owner_landings,
        "dropping": outer.dropping,
        "dropped_round": trainer.dropped_round,
        "weight": trainer.weight,
        "round_so_far": trainer.meter.so_far(outer),
        "non_finite": trainer.meter.non_finite(),
        "dropped": trainer.meter.dropped,
        "stages": rank.mesh.stages,
        "shards": rank.mesh.shards,
    }
    return tensors, state


OF_A_ROUND = ("round_so_far", "non_finite", "dropped", "weight")
"""What `capture` says of the part of a round that was trained, or of the round before."""


def capture_round(trainer: Trainer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """`capture` between two rounds: no times, the same numbers for the same training."""
    tensors, state = capture(trainer, probes=False)
    return tensors, {name: said for name, said in state.items() if name not in OF_A_ROUND}


def restore_round(
    trainer: Trainer, tensors: dict[str, torch.Tensor], state: Mapping[str, Any], tick: int
) -> None:
    """The inverse of `capture_round`, `tick` slots into the run."""
    restore(trainer, checkpoint.Loaded(tensors, {**state, "tick": tick}))


def restore(trainer: Trainer, loaded: checkpoint.Loaded) -> None:
    """The inverse of `capture`; exchanges that were under way begin again with the run."""
    rank, outer, tensors, state = trainer.rank, trainer.outer, loaded.tensors, loaded.state
    for name, tensor in rank.live.items():
        tensor.copy_(tensors[f"live/{name}"])
    rank.model.sync_tied()
    rank.model.load_optimizer_state(_below(tensors, "inner/"))
    for number, fragment in enumerate(rank.states):
        fragment.load(_below(tensors, f"outer/{number}/"), state["warm_codecs"][number])
    torch.set_rng_state(tensors["random/cpu"])
    if rank.mesh.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random/cuda"], rank.mesh.device)
    outer.owner_landings = list(state["owner_landings"])
    outer.dropping = bool(state["dropping"])
    trainer.dropped_round = int(state["dropped_round"])
    trainer.weight = _weight(state, rank.place.site)
    if "round_so_far" in state:
        trainer.meter.go_on(state["round_so_far"], state["non_finite"], state["dropped"])
    trainer.at.round = int(state["round"])
    trainer.at.slot = int(state["slot"])
    trainer.at.tick = int(state["tick"])
    for number, item in enumerate(state["pending"]):
        key = ExchangeKey.parse(item["key"])
        plan = RoundPlan.model_validate_json(json.dumps(item["plan"]))
        outer.restored.append(
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


def _weight(state: Mapping[str, Any], site: str) -> float:
    """Of `site` in the last round that it trained before the state; what a plan of an exchange
    under way says, where a checkpoint of an earlier version has it nowhere else; else 1."""
    if "weight" in state:
        return float(state["weight"])
    plans = [item["plan"] for item in state["pending"] if site in item["plan"]["members"]]
    latest = max(plans, key=lambda plan: plan["round"], default=None)
    return 1.0 if latest is None else float(latest["members"][site]["weight"])


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
