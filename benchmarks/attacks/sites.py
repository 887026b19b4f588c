"""Eight sites in one process with the engine's own admission and outer code; two may be dishonest.

Training is batched over the sites. From a boundary on, the code is that of a real site: fragment
state, codec, frames, `Weighing`, `judge`, landing; only the network is missing. All sites see the
same payloads, so one opinion stands for the opinions of all voters. A slope is that of the first
site, which is honest, like most sites.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

import dilocox
from benchmarks.attacks.lm import Text, initial, loss_of, losses, slope_of
from benchmarks.attacks.moves import Move, contributed, of_wrong_shape, with_nan
from dilocox.compression import (
    frame_digest,
    pack_frame,
    payload_digest,
    unpack_frame,
)
from dilocox.compression.compressor import Part
from dilocox.coordinator.protocol.messages import EnrolRequest, ExchangeKey, RankId, Versions
from dilocox.coordinator.protocol.verdicts import MICRO, RankOpinion
from dilocox.coordinator.server.contribution_rules import Evidence, Judgement, judge
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import ExchangeError
from dilocox.outer.contribution import Contribution, Probe
from dilocox.outer.contribution_set import Weighing
from dilocox.outer.fragment_state import FragmentState
from dilocox.outer.layout import Layout, split_pieces
from dilocox.outer.loss_gate import Gate, GradientProbe
from dilocox.outer.outer_step import Rule
from dilocox.record.log.acceptance import Acceptance, OwnFacts, digest_of_entry
from dilocox.record.log.statements import Signer
from dilocox.record.writer.exchange_statements import contribution
from dilocox.record.writer.notary import TransparencyLogSink

SITES = tuple(f"site-{number}" for number in range(8))
ATTACKERS = SITES[-2:]
FRAGMENTS = 2
CODEC = "int4"
OUTER_RATE, OUTER_MOMENTUM = 0.8, 0.5
INNER_RATE = 4e-3
BATCH = 4
TOLERANCE = 0.002
RULES = {
    "mean": ("mean", ""),
    "clip": ("clip", ""),
    "clip+gate": ("clip", "trials"),
    "clip+slope": ("clip", "slope"),
    "median": ("median", ""),
    "trimmed": ("trimmed", ""),
    "rfa": ("rfa", ""),
}
"""By column: the aggregation, and the way in which its gate judges. Sites of one rank use trials,
sites of several ranks the slope. Empty: no gate."""


@dataclass(frozen=True)
class Length:
    """Length of a training run."""

    rounds: int
    inner_steps: int


@dataclass
class Tally:
    """Counts of the admission verdicts in a training run."""

    exchanges: int = 0
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(site, code), over all exchanges."""
    flagged: Counter[str] = field(default_factory=Counter)

    def note(self, found: Judgement) -> None:
        """Count the verdicts of an exchange."""
        self.exchanges += 1
        for site, verdict in found.verdicts.items():
            if verdict.code != "admitted":
                self.rejected[site, verdict.code] += 1
            if verdict.flags:
                self.flagged[site] += 1

    def share(self, sites: Sequence[str]) -> float:
        """Share of these sites' contributions that did not count."""
        count = sum(n for (site, _), n in self.rejected.items() if site in sites)
        return count / (self.exchanges * len(sites))

    def flag_share(self, sites: Sequence[str]) -> float:
        """Share of these sites' contributions that were flagged."""
        return sum(self.flagged[site] for site in sites) / (self.exchanges * len(sites))

    def codes(self, sites: Sequence[str]) -> str:
        """Return the reasons for which these sites' contributions did not count, most frequent
        first."""
        counts: Counter[str] = Counter()
        for (site, code), number in self.rejected.items():
            if site in sites:
                counts[code] += number
        return ", ".join(code for code, _ in counts.most_common())


class Door:
    """The coordinator's notary, which checks the signatures of votes."""

    def __init__(self, folder: Path) -> None:
        raw: dict[str, Any] = {
            "run": {"folder": str(folder)},
            "model": {"architecture": {"model_type": "qwen3"}},
            "site": {"batch_size": BATCH, "micro_batch_size": BATCH},
            "sites": {site: {} for site in SITES},
        }
        self._notary = TransparencyLogSink.open(
            dilocox.resolve_run(raw), folder / "c", lambda text: None
        )
        self.signers = {site: Signer(Ed25519PrivateKey.generate()) for site in SITES}
        versions = Versions(dilocox=dilocox.__version__, torch="", python="")
        for site, signer in self.signers.items():
            request = EnrolRequest(
                site=site, token="", run_digest="0" * 64, versions=versions, stages=1, shards=1,
                csr="", record_key=signer.public,
            )  # fmt: skip
            self._notary.enrolled(request, 1)
            self._accept(site, signer, versions)

    def _accept(self, site: str, signer: Signer, versions: Versions) -> None:
        """Sign the run's manifest for a site, before any of its votes counts."""
        manifest = self._notary.manifest
        facts = OwnFacts(None, None, "0" * 64, versions.named())
        said = Acceptance(site, 1, signer.public, digest_of_entry(manifest), facts, 0)
        signed = signer.sign(said.statement(self._notary.run))
        self._notary.checkpoint(RankId(site=site, stage=0, shard=0), signed)

    def signed(self, site: str, key: ExchangeKey, digest: str) -> str:
        """Return the statement of `site` about its own payload, which goes with its vote."""
        rank = RankId(site=site, stage=0, shard=0)
        return self.signers[site].sign(contribution(self._notary.run, rank, key, 1, digest))

    def lets_in(self, site: str, key: ExchangeKey, digest: str, statement: str) -> bool:
        """Return whether the vote counts."""
        try:
            rank = RankId(site=site, stage=0, shard=0)
            self._notary.contribution(rank, key, 1, digest, statement)
        except Refused:
            return False
        return True

    def close(self) -> None:
        """Close the log."""
        self._notary.close()


class Course:
    """One training of all sites under one attack and one rule."""

    def __init__(self, move: Move, rule: str, length: Length, seed: int, text: Text) -> None:
        self.move, self.length, self.seed, self.text = move, length, seed, text
        self.aggregation, self.judges_by = RULES[rule]
        self.tally = Tally()
        self.refused = 0
        """Number of votes of dishonest sites that did not count."""
        start = initial(seed)
        self.models = {
            name: torch.stack([tensor] * len(SITES)).requires_grad_()
            for name, tensor in start.items()
        }
        self.optimizer = torch.optim.AdamW(
            list(self.models.values()), lr=INNER_RATE, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.live = {
            site: {name: each.detach()[number] for name, each in self.models.items()}
            for number, site in enumerate(SITES)
        }
        sizes = {name: tensor.numel() for name, tensor in start.items()}
        self.layouts = [
            Layout.of({name: start[name].shape for name in names})
            for names in split_pieces(sizes, FRAGMENTS)
        ]
        self.states = {
            site: [FragmentState(each, live, error_feedback=True) for each in self.layouts]
            for site, live in self.live.items()
        }
        self.gate = Gate(lambda model: loss_of(model, text.gate))
        self.usual: list[int | None] = [None] * FRAGMENTS
        self.before: list[dict[str, Tensor]] = [{}] * FRAGMENTS
        self.rule = Rule("none", OUTER_RATE, OUTER_MOMENTUM)

    @property
    def attackers(self) -> tuple[str, ...]:
        """The dishonest sites."""
        return () if self.move.name == "none" else ATTACKERS

    def run(self) -> float:
        """Train, and return the held-out loss of the anchor at the end; NaN if training broke
        down."""
        with tempfile.TemporaryDirectory() as folder:
            door = Door(Path(folder) / "run")
            try:
                for number in range(self.length.rounds):
                    self._train(number)
                    for fragment in range(FRAGMENTS):
                        self._exchange(ExchangeKey.outer(number, 0, fragment), door)
                    self._check_equal()
            except dilocox.DilocoxError:
                return math.nan
            finally:
                door.close()
        return loss_of(self._anchors(), self.text.held_out)

    def _train(self, number: int) -> None:
        total = self.length.rounds * self.length.inner_steps
        for step in range(number * self.length.inner_steps, (number + 1) * self.length.inner_steps):
            windows = torch.stack(
                [self.text.batch(site, step, BATCH, self.seed) for site in range(len(SITES))]
            )
            inputs, labels = windows[..., :-1], windows[..., 1:].clone()
            if self.move.labels is not None:
                draw = torch.Generator().manual_seed(step)
                for site in self.attackers:
                    at = SITES.index(site)
                    labels[at] = self.move.labels(labels[at], draw)
            rate = INNER_RATE * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / total)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.zero_grad()
            losses(self.models, inputs, labels).sum().backward()
            self.optimizer.step()

    def _exchange(self, key: ExchangeKey, door: Door) -> None:
        fragment, layout = key.fragment, self.layouts[key.fragment]
        own = {s: self.states[s][fragment].boundary(self.live[s], 1.0, 1.0)[0] for s in SITES}
        given = contributed(self.move, own, self.attackers)
        codec = self.states[SITES[0]][fragment].compressor(CODEC)
        part = codec.part(0, layout.length, key.seed)
        frames = self._frames(part, key, given)
        payloads, opinions = {}, {}
        for site, frame in frames.items():
            try:
                payloads[site] = unpack_frame(frame, part)
            except ExchangeError:
                opinions[site] = RankOpinion(code="malformed")
        weights = dict.fromkeys(SITES, 1.0)
        what = Contribution(
            key, layout.length, None, codec, "gather", weights, aggregation=self.aggregation,
            examines=True, probe=self._probe(layout),
        )  # fmt: skip
        weighing = Weighing(what, SITES[0], SITES, part.decode)
        opinions |= weighing.examined(payloads)
        found = judge(self._evidence(key, door, frames, opinions, weighing.held))
        self.usual[fragment] = found.usual
        self.before[fragment] = payloads
        self.tally.note(found)
        shares = {site: by_shard[0] for site, by_shard in found.shares.items()}
        average = weighing.settled(found.set, shares)
        for site in SITES:
            state = self.states[site][fragment]
            sent = part.decode(payloads[site]) if site in found.set else None
            if site in self.attackers:
                # An attacker's residual is never seen by others: it continues as if honest.
                sent = own[site]
            state.committed(own[site], sent)
            state.land(self.live[site], average, self.rule)

    def _probe(self, layout: Layout) -> Probe | None:
        if self.judges_by == "trials":
            return self.gate.probe(self._anchors(), layout)
        if self.judges_by == "slope":
            where, live = self._anchors(), self.live[SITES[0]]
            where |= {name: where[name].lerp(live[name], 0.5) for name in layout.names}
            return GradientProbe(*slope_of(where, self.text.gate)).probe(layout)
        return None

    def _frames(
        self, part: Part, key: ExchangeKey, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        payloads = {site: part.encode(u) for site, u in given.items()}
        before = self.before[key.fragment]
        frames = {}
        for site, payload in payloads.items():
            kind = self.move.payload if site in self.attackers else None
            if kind == "shape":
                frames[site] = of_wrong_shape(part, payload)
                continue
            if kind == "copy":
                payload = payloads[SITES[0]]
            elif kind == "stale":
                payload = before.get(site, payload)
            elif kind == "nan":
                payload = with_nan(payload)
            frames[site] = pack_frame(part, payload)
        return frames

    def _evidence(
        self,
        key: ExchangeKey,
        door: Door,
        frames: Mapping[str, Tensor],
        opinions: Mapping[str, RankOpinion],
        held: Sequence[str],
    ) -> Evidence:
        digests = {site: frame_digest(frame).hex() for site, frame in frames.items()}
        let_in = [site for site in SITES if self._let_in(site, key, door, digests[site])]
        self.refused += len(SITES) - len(let_in)
        seen = {
            site: each.model_copy(update={"digest": digests[site]})
            for site, each in opinions.items()
        }
        other = dict(seen)
        if self.move.payload == "equivocation":
            # Half of the sites received other bytes than the rest.
            for site in self.attackers:
                other[site] = seen[site].model_copy(update={"digest": "0" * 64})
        half = len(let_in) // 2
        before = self.before[key.fragment].values()
        earlier = frozenset(payload_digest(payload).hex() for payload in before)
        checked = self.move.checks_copies
        return Evidence(
            whole=[site for site in let_in if site in held],
            opinions=[[seen] * half + [other] * (len(let_in) - half)],
            digests={site: [digests[site]] for site in SITES} if checked else {},
            earlier=earlier if checked else frozenset(),
            missing=[site for site in let_in if site not in held],
            tolerance=round(TOLERANCE * MICRO) if self.judges_by else None,
            usual=self.usual[key.fragment],
        )

    def _let_in(self, site: str, key: ExchangeKey, door: Door, digest: str) -> bool:
        statement = door.signed(site, key, digest)
        if site in self.attackers and self.move.payload == "identity":
            # The attacker claims to be another site, and can only sign with its own key.
            return door.lets_in(SITES[0], key, digest, statement)
        if site in self.attackers and self.move.payload == "replay":
            earlier = key._replace(round=max(0, key.round - 1), fragment=1 - key.fragment)
            statement = door.signed(site, earlier, digest)
        return door.lets_in(site, key, digest, statement)

    def _anchors(self) -> dict[str, Tensor]:
        """Return the model that all sites agree on, by name."""
        states = self.states[SITES[0]]
        return {
            name: view.clone()
            for state in states
            for name, view in state.layout.views(state.anchor).items()
        }

    def _check_equal(self) -> None:
        for fragment in range(FRAGMENTS):
            first = self.states[SITES[0]][fragment].anchor
            for site in SITES:
                if not torch.equal(self.states[site][fragment].anchor, first):
                    raise ExchangeError(f"{site} holds another anchor")
