"""Estimates the size of a run's record: bytes in the store, and bytes per day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.controller.candidates import INNER_STEPS, codecs
from dilocox.record.writer.windows import PARTS, Bound, bound_of, start_bytes_per_parameter
from dilocox.training.builder import ModelPlan
from dilocox.training.payload_sizes import model_shapes, sizes_by_codec
from dilocox.utils.formatting import size

STATE_BYTES = 32
"""Bytes per parameter of the state in which a round begins: fp32 parameters, two moments, anchor,
outer momentum, reference, residual, and exchanges in flight. SGD, or no error feedback, needs
fewer."""
DAY = 86_400
"""Seconds per day."""
PER_GBIT = 10**9 // 8
"""Bytes per second of a link of 1 Gbps."""


def record_bytes(config: RunConfig, blueprint: ModelPlan, parameters: int) -> int:
    """Return the least bytes of theta_0, of all sites' payloads, and of kept states together.

    Rounds and codec are those of the run file. If the controller chooses them by the link, the
    fewest rounds and the smallest payloads count, because its choice is not known in advance.
    `record.keep` bounds the payloads that are kept; pieces of `[availability]` count, too.
    `parameters`: number of parameters whose
    states and theta_0 are kept on this machine.
    """
    if config.exchanges_gradients:
        return 4 * parameters
    rounds = 1 + -(-config.total_steps // _most_inner_steps(config))
    payloads = rounds * min(payload_bytes(config, blueprint, _codecs(config)))
    states = states_bytes(config, rounds - 1, parameters)
    bound = bound_of(config, blueprint.trained)
    pieces = 0
    if config.availability is not None:
        pieces = payloads // config.availability.code(config.sites).needed
        payloads = payloads if config.availability.keep_whole else 0
    if bound is not None:
        payloads = min(payloads, _bounded(config, bound, parameters, payloads // rounds))
    payloads += pieces
    return 4 * parameters + len(config.sites) * (payloads + states)


def states_bytes(config: RunConfig, rounds: int, parameters: int) -> int:
    """Return the most bytes of states that one site keeps at a time in a run of `rounds` rounds.

    `parameters`: number of parameters whose states the site keeps.
    """
    every = config.record.states_every
    kept = -(-rounds // every) if every else 0
    if config.record.states_keep:
        # The newest states, and the one that is being written before an older one goes.
        kept = min(kept, config.record.states_keep + 1)
    return kept * STATE_BYTES * parameters


def payload_bytes(config: RunConfig, blueprint: ModelPlan, names: Sequence[str]) -> list[int]:
    """Return the bytes of one site's payloads of a round, for each codec of `names`."""
    sizes = sizes_by_codec(config, model_shapes(config, blueprint), names)
    return [sum(map(sum, sizes[name])) for name in names]


def _bounded(config: RunConfig, bound: Bound, parameters: int, of_round: int) -> int:
    """Return the bytes of payloads and window starts that `bound` keeps per site.

    `of_round`: bytes of one site's payloads of a round.
    """
    if bound.bytes is not None:
        sites = len(config.sites)
        return _kept_bytes(config, bound.bytes, parameters, sites * of_round) // sites
    assert bound.rounds is not None
    window = max(1, -(-bound.rounds // PARTS))
    starts = -(-bound.rounds // window) + 1
    rounds = bound.rounds + 2 * window
    return rounds * of_round + starts * start_bytes_per_parameter(config) * parameters


def _kept_bytes(config: RunConfig, budget: int, parameters: int, of_round: int) -> int:
    """Return the most bytes that a site keeps with a byte `budget`.

    `of_round`: bytes of all sites' payloads of a round. Two windows always stay while a third
    window is written.
    """
    window = start_bytes_per_parameter(config) * parameters + of_round
    return max(budget, (PARTS - 1) * window if PARTS * window > budget else 0)


@dataclass(frozen=True)
class SmallBudget:
    """A byte budget that is too small: a quarter of it does not hold a state and one round."""

    of_round: int
    """Bytes of all sites' payloads of a round."""
    least: int
    """Smallest budget in bytes that is large enough."""


def budget_below_rounds(
    config: RunConfig, blueprint: ModelPlan, parameters: int
) -> SmallBudget | None:
    """Return why the record cannot stay below `record.keep` in bytes. None if it can.

    A window holds at least a state and a round, and has a quarter of the budget. If the
    controller chooses the codec, the smallest payloads count. The result is always None for
    "auto", whose budget is no promise: with large rounds it keeps more. `parameters`: number of
    parameters of the whole model.
    """
    bound = bound_of(config, parameters)
    if bound is None or bound.bytes is None or config.record.keep == "auto":
        return None
    of_round = len(config.sites) * min(payload_bytes(config, blueprint, _codecs(config)))
    least = PARTS * (start_bytes_per_parameter(config) * parameters + of_round)
    return SmallBudget(of_round, least) if bound.bytes < least else None


def _codecs(config: RunConfig) -> list[str]:
    """Return the codecs among which the run may choose."""
    own = config.compression.codec
    return codecs(config) if config.control.adapt == "link" else [own]


def _most_inner_steps(config: RunConfig) -> int:
    own = config.outer.inner_steps
    free = config.control.adapt == "link" and "inner_steps" not in config.control.pinned
    return max(own, INNER_STEPS[-1]) if free else own


def record_line(config: RunConfig, blueprint: ModelPlan, parameters: int) -> str:
    """Return one line for users with the size of each site's record.

    `parameters`: number of parameters of the whole model.
    """
    codec, sites = config.compression.codec, len(config.sites)
    (own,) = payload_bytes(config, blueprint, [codec])
    # A site keeps its own payload and those of all others.
    of_round = sites * own
    line = (
        f"record: {size(of_round)} a round and site with codec {codec}, {_by_day(config, of_round)}"
    )
    bound = bound_of(config, parameters)
    availability = config.availability
    if availability is not None:
        part = 1 / availability.code(config.sites).needed
        line += f"; {size(part * of_round)} a round for this site's pieces"
        if not availability.keep_whole:
            return f"{line}, and nothing else of rounds whose pieces two thirds of the sites hold"
    if bound is None:
        return f"{line}; the whole record stays"
    if bound.bytes is None:
        stays = f"{bound.rounds} rounds"
    else:
        stays = size(_kept_bytes(config, bound.bytes, parameters, of_round))
    return f"{line}; the newest {stays} stay (record.keep)"


def _by_day(config: RunConfig, of_round: int) -> str:
    """Describe the bytes per day, by the declared step time, or by the link as an upper bound."""
    control, sites = config.control, len(config.sites)
    if control.step_seconds is not None:
        rounds = DAY / (control.step_seconds * config.outer.inner_steps)
        return f"{size(of_round * rounds)} a day at control.step_seconds"
    # With gather a site's uplink carries its payload to every other site.
    share = sites / max(1, sites - 1)
    if control.link_rate is not None:
        most = control.link_rate * share * DAY
        return f"{size(most)} a day at most over control.link = {control.link}"
    return f"{size(PER_GBIT * share * DAY)} a day at most for each Gbps of a site's uplink"
