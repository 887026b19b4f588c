"""What a plan is predicted to cost: a committed table of measured losses, read between its points.

The table, `loss_table.json`, is data: rises of the held-out loss over synchronous training, as a
share of it, for local steps, late landing and codec. The three are added. Between its rows it is
read linearly in the logarithm of the inner steps, between densities of top-k linearly in both
logarithms; beyond its ends the last row or column holds. A codec that is not in the table counts
as lossless: such a codec is only ever in force because it is, or because the run file sets it.

What is known of an inner optimizer (`inner.optimizer`) in particular stands in the table by its
name, and holds instead of what was measured with AdamW.

What `top1` loses stands by itself where it is known; elsewhere, and in all else, it counts as a
`topk` that sends as many values. The densest that was seen to lose less than such a `topk` stands
with it: what is as dense or less is offered instead of `topk`.

All of this, and the rates that go with it, is of runs of one length. In longer ones local steps
cost less, and codecs that send few values more: what is known of them stands under `longer`, and
holds there instead. Between two lengths everything is read linearly in the logarithm of the run's
inner steps; in shorter and longer runs than all that are known, that of the nearest holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from dilocox.config.codec_spec import Spec, parse_spec

ADAMW = "adamw"
LossTable = Mapping[str, Any]
LARGEST = ("topk", "top1")
"""Kinds that send the largest values."""
LOSSLESS = ("fp16", "bf16")
"""Kinds of codecs that are not in the table, because they lose nothing."""


@lru_cache(maxsize=1)
def committed() -> dict[str, Any]:
    """The committed table, as it is written."""
    text = files("dilocox.coordinator.controller").joinpath("loss_table.json").read_text("utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@lru_cache(maxsize=1)
def run_lengths() -> tuple[int, ...]:
    """Inner steps of the runs that the table is of, rising."""
    whole = committed()
    return (whole["steps"], *(longer["steps"] for longer in whole["longer"]))


@lru_cache(maxsize=32)
def table(optimizer: str = ADAMW, steps: int | None = None) -> dict[str, Any]:
    """The committed table for an inner optimizer, AdamW's for one of which it says nothing, in runs
    of `steps` inner steps: one of `run_lengths`, without it the shortest.

    Raises ValueError for another length.
    """
    whole = committed()
    if steps is not None and steps not in run_lengths():
        raise ValueError(f"steps {steps}: the table is of runs of {run_lengths()} inner steps")
    longer: LossTable = next((known for known in whole["longer"] if known["steps"] == steps), {})
    own = whole["optimizers"].get(optimizer)
    if own is None:
        return {**whole, **longer}
    # What was measured of top1 was with AdamW: with another optimizer it counts as topk.
    return {**whole, **longer, "top1": None, **own}


@lru_cache(maxsize=65536)
def loss_of(
    inner_steps: int, codec: str, delay_share: float, steps: int, optimizer: str = ADAMW
) -> float:
    """Predicted rise of the loss over synchronous training with `optimizer`, 0.1 for 10 %.

    `inner_steps` per round; `delay_share`: delay over round, 0 to 1; `steps`: inner steps of the
    run. Raises `ConfigError` for a `codec` that is no spec.
    """

    def local_and_late(known: LossTable) -> float:
        delay = known["delay"]
        late = [_line(delay_share, delay["share"], row) for row in delay["loss"]]
        return _at(inner_steps, known["local"]) + _at(inner_steps, late)

    parts = _over_lengths(steps, local_and_late, optimizer)
    return parts + codec_loss(inner_steps, codec, steps, optimizer)


def is_known(codec: str) -> bool:
    """The table says what a codec loses, or it loses nothing. Raises `ConfigError` for a `codec`
    that is no spec."""
    kind = parse_spec(codec).kind
    return kind in LARGEST or kind in LOSSLESS or kind in committed()["flat"]


@lru_cache(maxsize=64)
def top1_up_to(steps: int, optimizer: str = ADAMW) -> float:
    """The densest `top1` that is known to lose less than `topk`, in values of 4,096; 0 where none
    is: what the table has of the longest runs that are no longer than `steps`, of the shortest if
    all are."""
    lengths = run_lengths()
    nearest = max((length for length in lengths if length <= steps), default=lengths[0])
    known = table(optimizer, nearest).get("top1")
    return float(known["densest"]) if known else 0.0


@lru_cache(maxsize=4096)
def codec_loss(inner_steps: int, codec: str, steps: int, optimizer: str = ADAMW) -> float:
    """The codec's part of `loss_of`."""
    spec = parse_spec(codec)

    def of_table(known: LossTable) -> float:
        if spec.kind not in LARGEST:
            rows = known["flat"].get(spec.kind)
            return 0.0 if rows is None else _at(inner_steps, rows)
        picked = known["top1"] if spec.kind == "top1" and known.get("top1") else known["topk"]
        kept = [math.log(k) for k in picked["kept"]]
        logs = [
            _line(math.log(spec.density), kept, [math.log(value) for value in row])
            for row in picked["loss"]
        ]
        return _at(inner_steps, [math.exp(value) for value in logs])

    return _over_lengths(steps, of_table, optimizer)


def outer_rates(inner_steps: int, codec: str, steps: int) -> tuple[float, float]:
    """(gamma, mu) that are best with so many inner steps per round and such a codec.

    With `topk` and `top1` most of what a site has to say decays in its residual before its turn
    comes, so that what travels has to count for more: gamma rises as the values kept become fewer,
    and the less so, the less decays in a run of so many inner `steps`. Raises `ConfigError` for a
    `codec` that is no spec.
    """
    spec = parse_spec(codec)

    def rate(known: LossTable) -> float:
        rates = known["outer"][_family(spec)]
        found = float(_at(inner_steps, rates["learning_rate"]))
        if spec.kind not in LARGEST:
            return found
        rise = known["rise"]
        fewer = max(1.0, _at(inner_steps, rise["kept"]) / spec.density)
        by_density = float(min(rise["most"], fewer ** rise["power"]))
        return found * (1 + (by_density - 1) * _at(inner_steps, rise["share"]))

    def momentum(known: LossTable) -> float:
        return _at(inner_steps, known["outer"][_family(spec)]["momentum"])

    return round(_over_lengths(steps, rate), 4), round(_over_lengths(steps, momentum), 4)


def residual_decay(inner_steps: int, codec: str, steps: int) -> float:
    """beta that is best with a codec in rounds of `inner_steps` of a run of `steps`: where there
    are many rounds, forget less in each.

    Raises `ConfigError` for a `codec` that is no spec.
    """
    return _by_kind("residual_decay", 1.0, inner_steps, codec, steps, ADAMW)


def residual_view(inner_steps: int, codec: str, steps: int, optimizer: str = ADAMW) -> float:
    """lambda that is best with so many inner steps per round and such a codec, in a run of `steps`.

    Longer rounds leave more in the residual: a share of it that helps short ones harms them.
    Raises `ConfigError` for a `codec` that is no spec.
    """
    return _by_kind("residual_view", 0.0, inner_steps, codec, steps, optimizer)


def kept_progress(inner_steps: int, delay_share: float, codec: str = "none") -> float:
    """kappa of overlap `keep`: less than 1 where long rounds land late (docs/algorithm.md §2).

    With top-k shorter ones, too: what a landing brings is little of what the site itself has
    trained since (docs/notes/quality.md). Raises `ConfigError` for a `codec` that is no spec.
    """
    rule = table()["keep"]
    least = rule["inner_steps"][_family(parse_spec(codec))]
    late = inner_steps >= least and delay_share > rule["share"]
    return float(rule["late" if late else "else"])


def _by_kind(
    name: str, otherwise: float, inner_steps: int, codec: str, steps: int, optimizer: str
) -> float:
    """What the table has under `name` for the codec's kind, `otherwise` if it has nothing."""
    spec = parse_spec(codec)

    def of_table(known: LossTable) -> float:
        rows = known[name].get(_family(spec))
        return otherwise if rows is None else _at(inner_steps, rows)

    return round(_over_lengths(steps, of_table, optimizer), 4)


def _over_lengths(steps: int, read: Callable[[LossTable], float], optimizer: str = ADAMW) -> float:
    """What `read` finds in the tables of the run lengths, read at `steps`."""
    lengths = run_lengths()
    found = [read(table(optimizer, length)) for length in lengths]
    return _line(math.log(steps), [math.log(length) for length in lengths], found)


def _family(spec: Spec) -> str:
    """What the table tells apart where it does not name codecs."""
    return "topk" if spec.kind in LARGEST else "flat"


def _at(inner_steps: int, values: Sequence[float]) -> float:
    """A column of the table, one value per row of `inner_steps`, read at `inner_steps`."""
    return _line(math.log(inner_steps), [math.log(h) for h in table()["inner_steps"]], values)


def _line(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Piecewise linear through (xs, ys), xs rising; constant beyond the ends."""
    if x <= xs[0]:
        return float(ys[0])
    for left, right, low, high in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return float(ys[-1])
