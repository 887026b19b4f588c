"""Predicted loss of a plan, from a table of measured losses with interpolation.

The table `loss_table.json` holds rises of the held-out loss, relative to the loss of synchronous
training. A plan's rise is the sum of three values: for local steps, late landing and codec. Values
are interpolated linearly in the logarithm of the inner steps, and between densities of top-k
linearly in both logarithms. Beyond the table's ends the last row or column is used. A codec that is
not in the table counts as lossless: it is used only if it is lossless, or if the run file sets it.

All values were measured with AdamW and all parameters trained. The values of another inner
optimizer (`inner.optimizer`) and those of adapters are in `parts` of the table, under the names of
`part_of`. The values of a part replace the others, for runs of any length.

The loss of `top1` has its own entry where it was measured. Otherwise, and in all other values,
`top1` counts as a `topk` that sends as many values. The entry names the highest density at which
`top1` lost less than such a `topk`. Up to this density `top1` is offered instead of `topk`.

All values and outer rates belong to runs of one length. In longer runs local steps cost less, and
codecs that send few values cost more. The values of longer runs are under `longer`. Between two
lengths, values are interpolated linearly in the logarithm of the run's inner steps. Beyond the
lengths, the values of the nearest length are used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from dilocox.config.codec_spec import Spec, parse_spec
from dilocox.config.run_config import RunConfig

ADAMW = "adamw"
ADAPTERS = "adapters"
LossTable = Mapping[str, Any]
LARGEST = ("topk", "top1")
"""Rows of the table for codecs that send only the largest values."""


@lru_cache(maxsize=1)
def committed() -> dict[str, Any]:
    """Return the content of `loss_table.json`."""
    text = files("dilocox.coordinator.controller").joinpath("loss_table.json").read_text("utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@lru_cache(maxsize=1)
def run_lengths() -> tuple[int, ...]:
    """Return the run lengths of the table, in inner steps, in ascending order."""
    whole = committed()
    return (whole["steps"], *(longer["steps"] for longer in whole["longer"]))


def part_of(config: RunConfig) -> str:
    """Return the part of the table for a run: that of adapters, or of its inner optimizer."""
    return config.inner.optimizer if config.adapter is None else ADAPTERS


@lru_cache(maxsize=32)
def table(part: str = ADAMW, steps: int | None = None) -> dict[str, Any]:
    """Return the table with the values of a part, for runs of `steps` inner steps.

    `steps` is one of `run_lengths`; None: the shortest. A part that is not in the table has the
    values of AdamW. Raises `ValueError` for another length.
    """
    whole = committed()
    if steps is not None and steps not in run_lengths():
        raise ValueError(f"steps {steps}: the table is of runs of {run_lengths()} inner steps")
    longer: LossTable = next((known for known in whole["longer"] if known["steps"] == steps), {})
    own = whole["parts"].get(part)
    if own is None:
        return {**whole, **longer}
    # The values of top1 were measured with AdamW; in the other parts it counts as topk.
    return {**whole, **longer, "top1": None, **own}


@lru_cache(maxsize=65536)
def loss_of(
    inner_steps: int, codec: str, delay_share: float, steps: int, part: str = ADAMW
) -> float:
    """Return the predicted rise of the loss over synchronous training (0.1 means 10 %).

    Args:
        inner_steps: Inner steps per round.
        codec: Codec, as in the run file.
        delay_share: Delay divided by the length of the round, 0 to 1.
        steps: Inner steps of the run.
        part: Part of the table (`part_of`).

    Raises:
        ConfigError: `codec` is not a codec.
    """

    def local_and_late(known: LossTable) -> float:
        delay = known["delay"]
        late = [_line(delay_share, delay["share"], row) for row in delay["loss"]]
        return _at(inner_steps, known["local"]) + _at(inner_steps, late)

    parts = _over_lengths(steps, local_and_late, part)
    return parts + codec_loss(inner_steps, codec, steps, part)


def is_known(codec: str) -> bool:
    """Return whether the codec's loss is in the table.

    Raises `ConfigError` if `codec` is not a codec.
    """
    return bool(_row(parse_spec(codec)))


def is_offered(codec: str, steps: int, part: str = ADAMW) -> bool:
    """Return whether no better codec has the same density.

    Of `topk` and `top1` with one density, one loses less by the table. Other codecs have no rival.
    Raises `ConfigError` if `codec` is not a codec.
    """
    spec = parse_spec(codec)
    if _row(spec) not in LARGEST:
        return True
    return (spec.density <= top1_up_to(steps, part)) == (_row(spec) == "top1")


@lru_cache(maxsize=64)
def top1_up_to(steps: int, part: str = ADAMW) -> float:
    """Return the highest density at which `top1` loses less than `topk`, in values of 4,096.

    The value is that of the longest run length up to `steps`, or of the shortest length. 0 if no
    such density is known.
    """
    lengths = run_lengths()
    nearest = max((length for length in lengths if length <= steps), default=lengths[0])
    known = table(part, nearest).get("top1")
    return float(known["densest"]) if known else 0.0


@lru_cache(maxsize=4096)
def codec_loss(inner_steps: int, codec: str, steps: int, part: str = ADAMW) -> float:
    """Return the codec's part of `loss_of`."""
    spec = parse_spec(codec)

    def of_table(known: LossTable) -> float:
        row = _row(spec)
        if row not in LARGEST:
            rows = known["flat"].get(row)
            return 0.0 if rows is None else _at(inner_steps, rows)
        picked = known["top1"] if row == "top1" and known.get("top1") else known["topk"]
        kept = [math.log(k) for k in picked["kept"]]
        logs = [
            _line(math.log(spec.density), kept, [math.log(value) for value in row])
            for row in picked["loss"]
        ]
        return _at(inner_steps, [math.exp(value) for value in logs])

    return _over_lengths(steps, of_table, part)


def outer_rates(inner_steps: int, codec: str, steps: int, part: str = ADAMW) -> tuple[float, float]:
    """Return the best outer learning rate gamma and momentum mu for a plan.

    `inner_steps` are those per round, `steps` those of the run. With `topk` and `top1` most of a
    contribution decays in the residual before it is sent, so sent values have to count for more.
    Gamma rises as fewer values are kept, and rises less if less decays in a run of this length.
    Raises `ConfigError` if `codec` is not a codec.
    """
    spec = parse_spec(codec)

    def rate(known: LossTable) -> float:
        rates = known["outer"][_family(spec)]
        found = float(_at(inner_steps, rates["learning_rate"]))
        if _row(spec) not in LARGEST:
            return found
        rise = known["rise"]
        fewer = max(1.0, _at(inner_steps, rise["kept"]) / spec.density)
        by_density = float(min(rise["most"], fewer ** rise["power"]))
        return found * (1 + (by_density - 1) * _at(inner_steps, rise["share"]))

    def momentum(known: LossTable) -> float:
        return _at(inner_steps, known["outer"][_family(spec)]["momentum"])

    found = _over_lengths(steps, rate, part), _over_lengths(steps, momentum, part)
    return round(found[0], 4), round(found[1], 4)


def residual_decay(inner_steps: int, codec: str, steps: int, part: str = ADAMW) -> float:
    """Return the best residual decay beta for a codec, `inner_steps` per round and `steps` in all.

    With many rounds, less is forgotten in each. Raises `ConfigError` if `codec` is not a codec.
    """
    return _by_kind("residual_decay", 1.0, inner_steps, codec, steps, part)


def residual_view(inner_steps: int, codec: str, steps: int, part: str = ADAMW) -> float:
    """Return the best lambda (`compression.residual_view`) for a codec and a plan.

    `inner_steps` are those per round, `steps` those of the run.

    Longer rounds leave more in the residual: a share of it that helps in short rounds harms in long
    ones. Raises `ConfigError` if `codec` is not a codec.
    """
    return _by_kind("residual_view", 0.0, inner_steps, codec, steps, part)


def kept_progress(
    inner_steps: int, delay_share: float, codec: str = "none", part: str = ADAMW
) -> float:
    """Return kappa (`outer.keep`) of the overlap rule `keep` (docs/algorithm.md §2).

    Kappa is less than 1 if long rounds land late. With top-k this also holds for shorter rounds,
    because a landing is then small beside the site's own training since (docs/notes/quality.md).
    Raises `ConfigError` if `codec` is not a codec.
    """
    rule = table(part)["keep"]
    least = rule["inner_steps"][_family(parse_spec(codec))]
    late = inner_steps >= least and delay_share > rule["share"]
    return float(rule["late" if late else "else"])


def _by_kind(
    name: str, otherwise: float, inner_steps: int, codec: str, steps: int, part: str
) -> float:
    """Return the table's value under `name` for the codec's kind, or `otherwise` without one."""
    spec = parse_spec(codec)

    def of_table(known: LossTable) -> float:
        rows = known[name].get(_family(spec))
        return otherwise if rows is None else _at(inner_steps, rows)

    return round(_over_lengths(steps, of_table, part), 4)


def _over_lengths(steps: int, read: Callable[[LossTable], float], part: str = ADAMW) -> float:
    """Return `read` of the tables of all run lengths, interpolated at `steps`."""
    lengths = run_lengths()
    found = [read(table(part, length)) for length in lengths]
    return _line(math.log(steps), [math.log(length) for length in lengths], found)


def _row(spec: Spec) -> str:
    """Return the name of the codec's row in the table, or "" if the table has none."""
    return spec.record.loses_like


def _family(spec: Spec) -> str:
    """Return the table's group of codecs, for values that are not given by codec."""
    return "topk" if _row(spec) in LARGEST else "flat"


def _at(inner_steps: int, values: Sequence[float]) -> float:
    """Interpolate a column of the table at `inner_steps`; it has a value per row of the table."""
    return _line(math.log(inner_steps), [math.log(h) for h in table()["inner_steps"]], values)


def _line(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate linearly between the points (xs, ys), xs ascending; constant beyond the ends."""
    if x <= xs[0]:
        return float(ys[0])
    for left, right, low, high in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return float(ys[-1])
