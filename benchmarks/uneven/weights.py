"""Compares weights for contributions of unequal numbers of inner steps: equal, tokens, FedNova.

Four sites of speeds 1 : 0.8 : 0.5 : 0.25 train a small byte-level transformer together, in one
process, with dilocox's own fragment states, averages, schedule and overlap rule. The rule is
`keep`, with 4 fragments, a delay of a quarter of the round, and no compression. The sites take 20,
16, 10 and 5 steps per round. Nothing is timed, so other load does not matter. The held-out loss is
over equal parts of all sites' text.

`non-iid`: every site has one kind of text (Python source of two kinds, tables, prose). `iid`: all
sites draw from all four kinds. Every rule is tuned over the same outer learning rates with the
first seed, and its best rate is repeated with more seeds. The seed also decides which kind of text
the fastest site has. The reference `equal steps` has rounds of 20 steps at every site; in the same
time the slowest site can make only a quarter as many such rounds.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import common
from dilocox.coordinator.controller.pace import site_weights
from dilocox.coordinator.protocol.round_plan import boundary_slots
from dilocox.coordinator.protocol.step_share import FULL, carried, steps_taken
from dilocox.outer.averaging import average
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout, split_pieces
from dilocox.outer.outer_step import Rule

SPEEDS = (1.0, 0.8, 0.5, 0.25)
ROUND = 20
FRAGMENTS = 4
DELAY = 5
MOMENTUM = 0.5
RATES = (0.45, 0.6, 0.8, 1.05, 1.4)
INNER_RATE = 3e-3
BATCH, LENGTH = 8, 64
KINDS = (
    ("asyncio", "concurrent", "multiprocessing"),
    ("idlelib", "turtledemo", "tkinter"),
    ("encodings",),
    ("pydoc_data",),
)
"""Packages of the standard library by kind of text: two of source, tables, prose."""
RULES = ("equal", "tokens", "fednova")
HELD_OUT = 64


@dataclass(frozen=True)
class Trial:
    """Settings of one training: weights, text, outer rate, seed, rounds and paces."""

    rule: str
    data: str
    rate: float
    seed: int
    rounds: int
    paces: tuple[int, ...]


def corpora() -> list[torch.Tensor]:
    """Return the bytes of every kind of text, uint8, from whole files in order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for packages in KINDS:
        text = b"".join(
            path.read_bytes() for name in packages for path in sorted((root / name).rglob("*.py"))
        )
        found.append(torch.frombuffer(bytearray(text[:600_000]), dtype=torch.uint8))
    return found


def draw(text: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return `count` pieces of LENGTH + 1 bytes, int64 [count, LENGTH + 1]."""
    starts = torch.randint(0, len(text) - LENGTH - 1, (count,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts]).long()


def model(seed: int) -> Qwen3ForCausalLM:
    """Return a model of 0.1 million parameters."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            max_position_embeddings=128, tie_word_embeddings=True, attn_implementation="sdpa",
        )
    )  # fmt: skip


class Site:
    """One site's model, optimizer and text."""

    def __init__(
        self,
        texts: Sequence[torch.Tensor],
        seed: int,
        number: int,
        pace: int,
        error_feedback: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.net, self.pace, self.carry, self._texts = model(seed), pace, 0, texts
        self._draws = torch.Generator().manual_seed(1000 * seed + number)
        self.live = {name: p.data for name, p in self.net.named_parameters()}
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=INNER_RATE, betas=(0.9, 0.95))
        sizes = {name: tensor.numel() for name, tensor in self.live.items()}
        self.states = [
            FragmentState(
                Layout.of({name: self.live[name].shape for name in names}),
                self.live,
                error_feedback=error_feedback,
                momentum_dtype=momentum_dtype,
            )
            for names in split_pieces(sizes, FRAGMENTS)
        ]

    def step(self, rate: float) -> None:
        """Train one inner step at the learning rate `rate`."""
        each = BATCH // len(self._texts)
        rows = torch.cat([draw(text, each, self._draws) for text in self._texts])
        for group in self.inner.param_groups:
            group["lr"] = rate
        self.inner.zero_grad()
        loss_of(self.net, rows).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.inner.step()


def loss_of(net: Qwen3ForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next byte. `rows` is int64 [n, LENGTH + 1]."""
    logits = net(input_ids=rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(trial: Trial, texts: Sequence[torch.Tensor], held_out: torch.Tensor) -> float:
    """Train, and return the held-out loss of the anchor at the end."""
    order = [(number + trial.seed) % len(texts) for number in range(len(texts))]
    own = [[texts[kind]] if trial.data == "non-iid" else list(texts) for kind in order]
    sites = [Site(own[number], trial.seed, number, pace) for number, pace in enumerate(trial.paces)]
    names = [str(number) for number in range(len(sites))]
    rule = trial.rule if trial.rule in RULES else "equal"
    weights = site_weights(
        rule, dict.fromkeys(names, BATCH), dict(zip(names, trial.paces, strict=True))
    )
    flying: list[tuple[int, int, torch.Tensor]] = []
    outer = Rule(overlap="keep", learning_rate=trial.rate, momentum=MOMENTUM)
    total = trial.rounds * ROUND

    def land(until: int) -> None:
        for item in [item for item in flying if item[0] <= until]:
            flying.remove(item)
            for site in sites:
                site.states[item[1]].land(site.live, item[2], outer)

    for round_ in range(trial.rounds):
        carries = [carried(site.pace, site.carry, ROUND) for site in sites]
        for slot in range(1, ROUND + 1):
            done = round_ * ROUND + slot
            rate = INNER_RATE * min(1.0, done / 20, 0.1 + 0.9 * (total - done) / (total - 20))
            for site, (carry, _) in zip(sites, carries, strict=True):
                now = steps_taken(site.pace, carry, slot)
                for _ in range(now - steps_taken(site.pace, carry, slot - 1)):
                    site.step(rate)
            land(done)
            for fragment, due in enumerate(boundary_slots(0, 1, FRAGMENTS, ROUND)):
                if due == slot:
                    sent = [
                        site.states[fragment].boundary(site.live, weights[name], 1.0)[0]
                        for name, site in zip(names, sites, strict=True)
                    ]
                    mean = average(sent, [weights[name] for name in names])
                    flying.append((done + DELAY, fragment, mean))
        for site, (_, left) in zip(sites, carries, strict=True):
            site.carry = left
    land(total + DELAY)
    for state in sites[0].states:
        state.layout.unpack(state.anchor, sites[0].live)
    with torch.no_grad():
        return float(loss_of(sites[0].net, held_out))


def row(trial: Trial, loss: float) -> common.Row:
    """Return the row of one training."""
    return {
        "rule": trial.rule, "data": trial.data, "outer_learning_rate": trial.rate,
        "seed": trial.seed, "rounds": trial.rounds,
        "steps": " ".join(str(ROUND * pace / FULL).removesuffix(".0") for pace in trial.paces),
        "val_loss": round(loss, 4),
    }  # fmt: skip


def best_rate(rows: Sequence[common.Row], rule: str, data: str) -> float:
    """Return the tried outer learning rate with the lowest loss."""
    tried = [each for each in rows if (each["rule"], each["data"]) == (rule, data)]
    return float(min(tried, key=lambda each: float(each["val_loss"]))["outer_learning_rate"])


def main() -> int:
    """Train everything, print and write the rows. Returns the exit code."""
    arguments = common.parser(__doc__).parse_args()
    common.end_on_signals()
    torch.set_num_threads(1)
    on = common.machine()
    rounds, seeds = (4, 1) if arguments.quick else (16, 3)
    rates = RATES[1:3] if arguments.quick else RATES
    texts = corpora()
    train_texts = [text[: int(0.95 * len(text))] for text in texts]
    draws = torch.Generator().manual_seed(1)
    held_out = torch.cat([draw(t[int(0.95 * len(t)) :], HELD_OUT, draws) for t in texts])
    uneven = tuple(int(FULL * speed) for speed in SPEEDS)
    alike = (FULL,) * len(SPEEDS)
    rounds_of = dict.fromkeys(RULES, (rounds, uneven))
    rounds_of["equal steps"] = (rounds // 4, alike)
    rows: list[common.Row] = []

    def measure(rule: str, data: str, rate: float, seed: int) -> None:
        count, paces = rounds_of[rule]
        trial = Trial(rule, data, rate, seed, count, paces)
        rows.append(row(trial, train(trial, train_texts, held_out)))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)

    for data in ("non-iid", "iid"):
        for rule in rounds_of:
            for rate in rates:
                measure(rule, data, rate, 0)
            best = best_rate(rows, rule, data)
            for seed in range(1, seeds):
                measure(rule, data, best, seed)
            own = [
                float(each["val_loss"]) for each in rows
                if (each["rule"], each["data"], each["outer_learning_rate"]) == (rule, data, best)
            ]  # fmt: skip
            print(f"{data} {rule}: {statistics.mean(own):.4f} at {best}", flush=True)
    settings = {
        "speeds": " ".join(map(str, SPEEDS)), "inner_steps": ROUND, "fragments": FRAGMENTS,
        "delay": DELAY, "momentum": MOMENTUM, "inner_learning_rate": INNER_RATE,
        "parameters": sum(p.numel() for p in model(0).parameters()),
        "commit": common.commit(),
    }  # fmt: skip
    if arguments.json is not None:
        common.write_json(arguments.json, "uneven_weights", on, settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
