"""Measures the loss that an outer momentum in bf16 costs, against one in fp32.

Two sites train a small byte-level transformer together, in one process, with dilocox's own fragment
states, codec, averages, schedule and overlap rule. The rule is `keep`. Rounds have 20 inner steps,
4 fragments, a delay of a quarter of the round, and `int4` with error feedback. The runs of a pair
differ only in `outer.momentum_dtype`; every pair has another seed for weights and data.
`difference` is the loss with bf16 over that with fp32, less one. For comparison, `spread` is the
standard deviation of the fp32 losses over seeds, relative to their mean. Nothing is timed, so other
load does not matter. It takes about three minutes on an idle core, less than one with --quick.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

import torch

from benchmarks import common
from benchmarks.uneven import weights as lm
from dilocox.compression import codec
from dilocox.coordinator.protocol.round_plan import boundary_slots
from dilocox.coordinator.protocol.step_share import FULL
from dilocox.outer.averaging import average
from dilocox.outer.outer_step import MOMENTUM_DTYPES, Rule

OUTER = ((0.8, 0.5), (0.7, 0.9))
"""Outer learning rate and momentum: the pair of `dilocox`, and DiLoCo's pair with stronger
momentum."""
CODEC = "int4"
ROUND, FRAGMENTS, DELAY = lm.ROUND, lm.FRAGMENTS, lm.DELAY


def train(
    texts: Sequence[torch.Tensor],
    held_out: torch.Tensor,
    rounds: int,
    seed: int,
    outer: tuple[float, float],
    dtype: str,
) -> float:
    """Train two sites, and return the held-out loss of the anchor at the end.

    `outer` is (outer learning rate, outer momentum); `dtype` is the dtype of the stored momentum.
    """
    kept = MOMENTUM_DTYPES[dtype]
    sites = [lm.Site(texts, seed, number, FULL, True, kept) for number in range(2)]
    rule = Rule(overlap="keep", learning_rate=outer[0], momentum=outer[1])
    form = codec(CODEC)
    flying: list[tuple[int, int, torch.Tensor]] = []
    total = rounds * ROUND

    def land(until: int) -> None:
        for item in [item for item in flying if item[0] <= until]:
            flying.remove(item)
            for site in sites:
                site.states[item[1]].land(site.live, item[2], rule)

    for done in range(1, total + 1):
        rate = lm.INNER_RATE * min(1.0, done / 20, 0.1 + 0.9 * (total - done) / (total - 20))
        for site in sites:
            site.step(rate)
        land(done)
        for fragment, due in enumerate(boundary_slots(0, 1, FRAGMENTS, ROUND)):
            if due != (done - 1) % ROUND + 1:
                continue
            sent = []
            for site in sites:
                state = site.states[fragment]
                u, _ = state.boundary(site.live, 1.0, 1.0)
                sent.append(form.decode(form.encode(u), len(u)))
                state.committed(u, sent[-1])
            flying.append((done + DELAY, fragment, average(sent, [1.0, 1.0])))
    land(total + DELAY)
    for state in sites[0].states:
        state.layout.unpack(state.anchor, sites[0].live)
    with torch.no_grad():
        return float(lm.loss_of(sites[0].net, held_out))


def row(outer: tuple[float, float], fp32: Sequence[float], bf16: Sequence[float]) -> common.Row:
    """Return the row of one setting, from losses with fp32 and bf16 momentum in the order of the
    seeds."""
    differences = [narrow / wide - 1 for wide, narrow in zip(fp32, bf16, strict=True)]
    known = common.median_interval(differences)
    spread = statistics.stdev(fp32) / statistics.mean(fp32) if len(fp32) > 1 else None
    return {
        "outer_learning_rate": outer[0],
        "outer_momentum": outer[1],
        "seeds": len(fp32),
        "fp32": round(statistics.mean(fp32), 4),
        "bf16": round(statistics.mean(bf16), 4),
        "difference": round(known.median, 6),
        "difference_low": round(known.low, 6),
        "difference_high": round(known.high, 6),
        "spread": None if spread is None else round(spread, 6),
    }


COLUMNS = {
    "outer_learning_rate": ".1f", "outer_momentum": ".1f", "seeds": "d", "fp32": ".4f",
    "bf16": ".4f", "difference": "+.3%", "difference_low": "+.3%", "difference_high": "+.3%",
    "spread": ".3%",
}  # fmt: skip


def main() -> int:
    """Train all pairs, print and write the rows. Returns the exit code."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    torch.set_num_threads(1)
    on = common.machine()
    rounds, seeds = (6, 2) if options.quick else (16, 6)
    texts = lm.corpora()
    parts = [text[: int(0.95 * len(text))] for text in texts]
    draws = torch.Generator().manual_seed(1)
    held_out = torch.cat([lm.draw(t[int(0.95 * len(t)) :], lm.HELD_OUT, draws) for t in texts])
    rows = []
    for outer in OUTER:
        losses: dict[str, list[float]] = {dtype: [] for dtype in MOMENTUM_DTYPES}
        for seed in range(seeds):
            for dtype, known in losses.items():
                known.append(train(parts, held_out, rounds, seed, outer, dtype))
            common.say(f"{outer}, seed {seed}: {losses['fp32'][-1]:.4f} {losses['bf16'][-1]:.4f}")
        rows.append(row(outer, losses["fp32"], losses["bf16"]))
    print(common.table(rows, COLUMNS))
    if options.json:
        about = {"codec": CODEC, "inner_steps": ROUND, "rounds": rounds, "sites": 2,
                 "fragments": FRAGMENTS, "delay": DELAY,
                 "parameters": sum(p.numel() for p in lm.model(0).parameters())}  # fmt: skip
        common.write_json(options.json, "momentum_dtype", on, about, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
