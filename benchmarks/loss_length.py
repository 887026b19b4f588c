"""What a plan costs in runs of different length: four sites of a small model, simulated.

The loss table of the controller is of runs of one length, and longer ones differ: what local steps
cost shrinks, what a sparse codec withholds less so. Runs of the engine long enough to see that take
half an hour and more each (quality.py --regime long); this takes a minute or two. It is no engine:
four copies of a transformer of 0.06M parameters over bytes step side by side in one process, one
batched computation for all of them, and exchange through the engine's own codecs, with residuals as
docs/algorithm.md has them, in one fragment, by the overlap rule `keep`. Batches are of 4 sequences
of 48 bytes per site and step; the text is Python's standard library, a contiguous quarter for each
site.

A row is one plan at one length and one inner rate: of four in the shortest runs, in longer ones of
the best before and half of it, unless --rates says others. Outer rates, beta and lambda (`gamma`,
`mu`, `beta`, `view`) are those of the controller's table, unless --gamma and so on say others.
`gap` is its held-out loss over that of
synchronous training of the same length and seed at its best rate, less one. `reduction` is what
synchronous training sends over what the plan sends to three others (`gather`), without the flush.

Rows are written as they are made; started again with the same --json the benchmark goes on. All of
it takes about an hour on two cores; --quick makes the shortest length of four plans.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import common
import torch
from loss_length_model import (
    BATCH,
    HELD_OUT,
    LAYOUT,
    LENGTH,
    SITES,
    Text,
    first_weights,
    losses,
    shapes,
    views,
)
from torch import Tensor

from dilocox.compression import LowRank, compressor
from dilocox.compression.moments import PERIOD
from dilocox.compression.parts import Part
from dilocox.outer.controller import loss
from dilocox.outer.optimizer import nesterov_step
from dilocox.outer.overlap import Rule, local_view

RESULTS = Path(__file__).parent / "results" / "loss_length-cpu.json"
CLIP, DECAY, BETAS, EPS = 1.0, 0.1, (0.9, 0.95), 1e-8
LENGTHS = (640, 3300)
"""Inner steps of a run."""
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
"""Inner rates of the shortest runs. Longer ones have the best before, and half of it."""
SYNCHRONOUS = "synchronous"
PLANS = (
    (1, "topk:20"), (2, "topk:8"), (2, "topk:17"), (5, "topk:7"), (5, "topk:24"), (5, "topk:58"),
    (8, "topk:13"), (12, "topk:23"), (12, "topk:64"), (20, "topk:41"), (20, "topk:328"),
    (30, "topk:64"), (30, "topk:164"), (20, "none"), (66, "int2"), (125, "int4"), (125, "int2"),
)  # fmt: skip
QUICK = ((2, "topk:17"), (20, "none"), (30, "topk:64"))


@dataclass(frozen=True)
class Plan:
    """Rounds of `inner_steps` with `codec`; `none` and no exchange of parameters but of gradients
    after every step where it is synchronous training (0 steps)."""

    inner_steps: int
    codec: str

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"H={self.inner_steps} {self.codec}" if self.inner_steps else SYNCHRONOUS

    @property
    def delay(self) -> int:
        """Steps after which a round lands: a quarter of it."""
        return max(1, round(self.inner_steps / 4))


@dataclass(frozen=True)
class Outside:
    """Outer learning rate and momentum, residual decay and the residual's share in view."""

    gamma: float
    mu: float
    beta: float
    view: float

    @classmethod
    def of_table(cls, plan: Plan, steps: int) -> Outside:
        """As the controller has them for a plan in a run of so many inner steps; of synchronous
        training, which has none, those that change nothing."""
        if plan.inner_steps == 0:
            return cls(1.0, 0.0, 1.0, 0.0)
        asked = plan.inner_steps, plan.codec, steps
        return cls(
            *loss.outer_rates(*asked), loss.residual_decay(*asked), loss.residual_view(*asked)
        )


class Inner:
    """AdamW of all copies, with clipping, warm-up and a cosine to a tenth of the rate."""

    def __init__(self, copies: int, rate: float, steps: int) -> None:
        self.first = torch.zeros(copies, LAYOUT.length)
        self.second = torch.zeros(copies, LAYOUT.length)
        self._rate, self._steps, self._taken = rate, steps, 0
        self._decay = torch.zeros(LAYOUT.length)
        for view in LAYOUT.views(self._decay).values():
            view.fill_(DECAY if view.dim() > 1 else 0.0)

    def step(self, flat: Tensor, gradients: Tensor) -> None:
        """One step of every copy, in place; `gradients` are used up."""
        norms = gradients.norm(dim=1, keepdim=True)
        gradients *= (CLIP / (norms + 1e-6)).clamp(max=1.0)
        self._taken += 1
        warm = max(1, self._steps // 16)
        done = max(0.0, (self._taken - warm) / max(1, self._steps - warm))
        rate = self._rate * min(1.0, self._taken / warm)
        rate *= 0.55 + 0.45 * math.cos(math.pi * done)
        self.first.lerp_(gradients, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradients, gradients, value=1 - BETAS[1])
        root = (self.second / (1 - BETAS[1] ** self._taken)).sqrt_().add_(EPS)
        flat.mul_(1 - rate * self._decay)
        flat.addcdiv_(self.first, root, value=-rate / (1 - BETAS[0] ** self._taken))

    def share_moments(self, due: int) -> None:
        """Scale rows of second moments, every `PERIOD`th from `due` on, to the mean over copies."""
        for second in views(self.second).values():
            if second.dim() > 2:
                rows = second[:, due::PERIOD]
                means = rows.mean(-1, keepdim=True)
                # A row without moments has nothing to scale.
                rows *= torch.where(means > 0, means.mean(0) / means, 1.0)


def train(text: Text, plan: Plan, rate: float, steps: int, seed: int, outside: Outside) -> float:
    """Held-out loss of the anchor after `steps` inner steps of every site."""
    draw = torch.Generator().manual_seed(seed)
    synchronous = plan.inner_steps == 0
    copies = 1 if synchronous else SITES
    live = first_weights(seed).repeat(copies, 1).requires_grad_()
    inner = Inner(copies, rate, steps)
    outer = None if synchronous else Outer(live.detach(), plan, steps, outside)
    for taken in range(1, steps + 1):
        ids = text.batch(draw)
        if synchronous:
            ids = ids.view(1, SITES * BATCH, LENGTH + 1)
        (gradients,) = torch.autograd.grad(losses(live, ids).sum(), live)
        with torch.no_grad():
            inner.step(live, gradients)
            if outer is not None:
                outer.after(taken, live, inner)
    found = live.detach() if outer is None else outer.anchor[None]
    with torch.no_grad():
        pieces = text.held_out.view(SITES, 1, -1, LENGTH + 1)
        return sum(float(losses(found, piece)) for piece in pieces) / SITES


class Outer:
    """Anchor, momentum, residuals and what is under way: one fragment, overlap `keep`."""

    def __init__(self, live: Tensor, plan: Plan, steps: int, outside: Outside) -> None:
        self.anchor = live[0].clone()
        self._momentum = torch.zeros_like(self.anchor)
        self._reference = live.clone()
        self._residual = torch.zeros_like(live)
        self._plan, self._steps, self._rounds = plan, steps, 0
        self._mean: Tensor | None = None
        self._part = whole_part(plan.codec)
        self._rule = Rule("keep", outside.gamma, outside.mu, residual=outside.view)
        self._decay = outside.beta

    def after(self, taken: int, live: Tensor, inner: Inner) -> None:
        """What is due after so many inner steps: a landing, then a boundary; all at the end."""
        plan, last = self._plan, taken == self._steps
        since = taken % plan.inner_steps
        if self._mean is not None and (since == plan.delay % plan.inner_steps or last):
            self._land(live)
        if since == 0 or last:
            self._boundary(live, inner)
        if last:
            self._land(live)

    def _boundary(self, live: Tensor, inner: Inner) -> None:
        delta = self._reference - live
        self._reference.copy_(live)
        wanted = delta + self._decay * self._residual
        sent = torch.stack([self._through(each) for each in wanted])
        self._residual = wanted - sent
        self._mean = sent.mean(0)
        inner.share_moments(self._rounds % PERIOD)
        self._rounds += 1

    def _through(self, values: Tensor) -> Tensor:
        return self._part.decode(self._part.encode(values.contiguous()))

    def _land(self, live: Tensor) -> None:
        assert self._mean is not None
        rule = self._rule
        nesterov_step(self.anchor, self._momentum, self._mean, rule.learning_rate, rule.momentum)
        moved = live - self._reference
        live.copy_(local_view(rule, self.anchor, moved, None, self._residual))
        self._reference = live - moved
        self._mean = None


def whole_part(codec: str) -> Part:
    """The engine's codec of that name, for all of the model at once."""
    found = compressor(codec, LAYOUT.geometry)
    assert not isinstance(found, LowRank)
    return found.part(0, LAYOUT.length)


def reduction(plan: Plan) -> float:
    """Bytes of synchronous training over the plan's, to every other site."""
    if plan.inner_steps == 0:
        return 1.0
    payload = whole_part(plan.codec).payload_bytes
    return 8 * LAYOUT.length * plan.inner_steps / SITES / payload


@dataclass(frozen=True)
class Job:
    """One row to make."""

    plan: Plan
    steps: int
    rate: float
    seed: int
    outside: Outside

    @property
    def key(self) -> tuple[object, ...]:
        """What tells rows apart."""
        return self.plan.name, self.steps, self.rate, self.seed, *astuple(self.outside)


def key_of(row: common.Row) -> tuple[object, ...]:
    """The `Job.key` that a row is of."""
    named = ("plan", "steps", "rate", "seed", *(field.name for field in fields(Outside)))
    return tuple(row[name] for name in named)


def jobs(
    rows: Sequence[common.Row],
    plans: Sequence[Plan],
    lengths: Sequence[int],
    seed: int,
    given: Sequence[float] = (),
    outside: Mapping[str, float] | None = None,
) -> list[Job]:
    """Those that are not among `rows` and can be made now, the shortest runs first: a longer one
    goes by the best rate of the length before, when all of that are there. `given`: rates of all
    lengths instead. `outside`: what is not to be as in the controller's table."""
    made, found = {key_of(row) for row in rows}, []
    for plan in plans:
        for number, steps in enumerate(lengths):
            rates: Sequence[float] = given or RATES
            if number and not given:
                best_rate = _best_rate(rows, plan, lengths[number - 1], seed)
                rates = (best_rate, best_rate / 2)
            wanted = Outside.of_table(plan, steps)
            if plan.inner_steps and outside:
                wanted = replace(wanted, **outside)
            missing = [Job(plan, steps, rate, seed, wanted) for rate in rates]
            missing = [job for job in missing if job.key not in made]
            found += missing
            if missing:
                break
    return sorted(found, key=lambda job: job.steps)


def _best_rate(rows: Sequence[common.Row], plan: Plan, steps: int, seed: int) -> float:
    """Of the runs of a plan that are so long."""
    wanted = (plan.name, steps, seed)
    same = [row for row in rows if (row["plan"], row["steps"], row["seed"]) == wanted]
    return float(min(same, key=_loss)["rate"])


def _loss(row: common.Row) -> float:
    return math.inf if row["loss"] is None else float(row["loss"])


def best(rows: Sequence[common.Row]) -> list[common.Row]:
    """The best rate of every plan, length and seed, with its gap."""
    chosen: dict[tuple[object, ...], common.Row] = {}
    for row in sorted(rows, key=_loss, reverse=True):
        chosen[row["plan"], row["steps"], row["seed"]] = row
    found = []
    for (_, steps, seed), row in chosen.items():
        base = chosen.get((SYNCHRONOUS, steps, seed))
        gap = None if base is None else _loss(row) / _loss(base) - 1
        found.append({**row, "gap": gap})
    return sorted(found, key=lambda row: (row["steps"], row["seed"], row["reduction"]))


_TEXT: list[Text] = []


def _prepare() -> None:
    torch.set_num_threads(1)
    _TEXT.append(Text.read())


def _make(job: Job) -> common.Row:
    began = time.monotonic()
    found = train(_TEXT[0], job.plan, job.rate, job.steps, job.seed, job.outside)
    return {
        "plan": job.plan.name,
        "inner_steps": job.plan.inner_steps,
        "codec": job.plan.codec,
        "steps": job.steps,
        "rate": job.rate,
        "seed": job.seed,
        **asdict(job.outside),
        "loss": found if math.isfinite(found) else None,
        "reduction": reduction(job.plan),
        "seconds": round(time.monotonic() - began, 1),
        "commit": common.commit(),
        "date": common.today(),
    }


def made(wanted: Sequence[Job], workers: int) -> Iterator[common.Row]:
    """Their rows, as they come."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _prepare) as pool:
        try:
            for done in as_completed([pool.submit(_make, job) for job in wanted]):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def report(rows: Sequence[common.Row]) -> str:
    """The best rows as a table."""
    return common.table(
        best(rows),
        {
            "steps": ",d", "plan": str, "reduction": ",.0f", "rate": "g", "gamma": "g", "beta": "g",
            "view": "g", "loss": ".3f", "gap": "+.1%", "seconds": ".0f",
        },
    )  # fmt: skip


def main() -> int:
    """Make what is missing, print and write what came of it."""
    parser = common.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="instead of searching")
    parser.add_argument(
        "--plans", nargs="+", metavar="H:CODEC", help="such as 2:topk:17; 0: synchronous training"
    )
    for field in fields(Outside):
        parser.add_argument(f"--{field.name}", type=float, help="instead of the controller's")
    options = parser.parse_args()
    common.end_on_signals()
    given = {field.name: getattr(options, field.name) for field in fields(Outside)}
    outside = {name: value for name, value in given.items() if value is not None}
    path = options.json or (None if options.quick else RESULTS)
    plans = [Plan(0, ""), *itertools.starmap(Plan, QUICK if options.quick else PLANS)]
    if options.plans:
        cut = [text.partition(":") for text in options.plans]
        plans = [Plan(int(steps), codec) for steps, _, codec in cut]
    lengths = [LENGTHS[0]] if options.quick else options.steps
    rows: list[common.Row] = []
    if path is not None and path.exists():
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    on = common.machine()
    settings: Mapping[str, Any] = {
        "sites": SITES, "parameters": sum(map(math.prod, shapes().values())), "batch": BATCH,
        "sequence_length": LENGTH, "held_out": SITES * HELD_OUT,
    }  # fmt: skip
    while wanted := jobs(rows, plans, lengths, options.seed, options.rates, outside):
        for number, row in enumerate(made(wanted, on["cores"])):
            rows.append(row)
            if path is not None:
                common.write_json(path, "loss_length", on, settings, rows)
            reached = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
            common.say(
                f"{row['steps']} steps, {row['plan']} at {row['rate']:g}: {reached}; "
                f"{row['seconds']:.0f} s, {len(wanted) - number - 1} to come"
            )
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
