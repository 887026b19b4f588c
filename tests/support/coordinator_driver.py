"""A coordinator with a clock of its own, and its calls without a network."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.identity import new_request
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.record_keys import RecordKey
from dilocox.coordinator.server.refusals import Caller
from dilocox.coordinator.server.reports import RunListener
from dilocox.coordinator.server.service import Coordinator
from dilocox.coordinator.server.startup import RunStart
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.version import __version__

VERSIONS = m.Versions(dilocox=__version__, torch="2.13.0+cpu", python="3.12.1")
_, CSR = new_request("anyone")


class Clock:
    """Time that only moves when told."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def run_config(sites: str = "abc", stages: int = 1, shards: int = 1, **sections: Any) -> RunConfig:
    """A small run; `sections` update the sections of the run file."""
    raw: dict[str, Any] = {
        "model": {"architecture": {"model_type": "qwen3"}},
        "site": {"stages": stages, "shards": shards, "batch_size": 4, "micro_batch_size": 1},
        "outer": {"rounds": 4, "inner_steps": 4, "fragments": 2},
        "control": {"adapt": "off"},
        "sites": {name: {} for name in sites},
        "network": {"heartbeat": 5.0, "link_timeout": 30.0},
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    return resolve_run(raw)


def open_coordinator(config: RunConfig, folder: Path, **options: Any) -> Coordinator:
    """A coordinator; `options` are its own, or fields of its start or listener."""
    facts = [each.name for each in dataclasses.fields(RunStart)]
    start = RunStart(**{name: options.pop(name) for name in facts if name in options})
    told = [each.name for each in dataclasses.fields(RunListener)]
    listener = RunListener(**{name: options.pop(name) for name in told if name in options})
    return Coordinator(config, folder, start, listener, **options)


class Driver:
    """Plays all sites against a `Coordinator`."""

    def __init__(self, folder: Path, config: RunConfig, **options: Any) -> None:
        self.clock = Clock()
        self.config, self.folder = config, folder
        self.options = {"now": self.clock, "wall": self.clock, **options}
        self.core = open_coordinator(config, folder, **self.options)
        self.incarnations: dict[str, int] = {}

    def reopen(self) -> None:
        """Kill the coordinator and start it on the same log."""
        self.core.close()
        self.core = open_coordinator(self.config, self.folder, **self.options)

    def enrol(self, site: str, own: RecordKey | None = None, **changes: Any) -> m.EnrolReply:
        """Enrol, with fields of the request changed; `own`: with this key, and the proof of it."""
        fields: dict[str, Any] = {
            "site": site,
            "token": self.token(site),
            "run_digest": self.config.digest(),
            "versions": VERSIONS,
            "stages": self.config.site.stages,
            "shards": self.config.site.shards,
            # Another text for every try, as another key would give.
            "csr": CSR + "\n" * sum(self.incarnations.values()),
        }
        if own is not None:
            proof = own.prove(site, self.core.authority.fingerprint, fields["csr"])
            fields.update(record_key=own.public, record_proof=proof)
        reply = self.core.enrol(m.EnrolRequest(**{**fields, **changes}))
        self.incarnations[site] = reply.incarnation
        return reply

    def token(self, site: str) -> str:
        """The join token of a site; for a name that there is not, another site's."""
        issues = self.core.state.token_issues
        known = site if site in issues else next(iter(issues))
        return str(self.core.tokens.of(known, issues[known]))

    def ranks(self, site: str) -> list[m.RankId]:
        """All ranks of a site."""
        return [m.RankId(site=site, stage=i, shard=j) for i, j in self.core.state.ranks]

    def check(self, rank: m.RankId) -> m.RankId:
        """What the server does before every call."""
        self.core.check(Caller(rank.site, self.incarnations[rank.site]), rank)
        return rank

    def ready(self, site: str) -> None:
        """All ranks hold the state."""
        for rank in self.ranks(site):
            self.core.ready(m.ReadyRequest(rank=self.check(rank)))

    def beat(self, site: str, tick: int = 0, **fields: Any) -> m.BeatReply:
        """All ranks beat; the last one's reply."""
        for rank in self.ranks(site):
            request = m.BeatRequest(rank=self.check(rank), tick=tick, round=0, slot=0, **fields)
            reply = self.core.beat(request)
        return reply

    def enrol_all(self) -> None:
        """All sites enrol."""
        for site in self.config.sites:
            self.enrol(site)

    def start(self) -> None:
        """All sites enrol and get ready."""
        self.enrol_all()
        for site in self.config.sites:
            self.ready(site)

    def join(self, site: str) -> None:
        """A site comes later: it enters and gets ready."""
        self.enrol(site)
        self.beat(site)
        self.ready(site)

    def plan(self, round_: int, site: str) -> m.RoundPlan | None:
        """Ask for a plan as one site."""
        caller = Caller(site, self.incarnations[site])
        return self.core.plan(round_, caller).plan

    def round_done(self, site: str, round_: int, measured: m.Measured | None = None) -> None:
        """All ranks are through with a round; the leading one says what the site measured."""
        for number, rank in enumerate(self.ranks(site)):
            said = measured if number == 0 else None
            request = m.RoundDoneRequest(rank=self.check(rank), round=round_, measured=said)
            self.core.round_done(request)

    def begin(
        self, key: m.ExchangeKey, site: str, shard: int = 0, commitment: str | None = None
    ) -> m.BeginReply:
        """One rank begins."""
        rank = self.check(m.RankId(site=site, stage=key.stage, shard=shard))
        return self.core.begin(m.BeginRequest(key=key.text, rank=rank, commitment=commitment))

    def vote(
        self, key: m.ExchangeKey, site: str, attempt: int = 1, shard: int = 0, **fields: Any
    ) -> m.VoteReply:
        """One rank votes."""
        rank = self.check(m.RankId(site=site, stage=key.stage, shard=shard))
        request = m.VoteRequest(key=key.text, rank=rank, attempt=attempt, wait=0.0, **fields)
        return self.core.vote(request)

    def leave(self, site: str, reason: str = "told to", failed: bool = False) -> None:
        """A site goes."""
        rank = self.check(m.RankId(site=site, stage=0, shard=0))
        self.core.departures.leave(m.LeaveRequest(rank=rank, reason=reason, failed=failed))

    def write_checkpoint(self, site: str, tick: int, round_: int, slot: int) -> None:
        """All ranks write their part."""
        for rank in self.ranks(site):
            self.core.saves.wrote(
                m.CheckpointRequest(
                    rank=self.check(rank), tick=tick, round=round_, slot=slot,
                    digests={"part": "0" * 64},
                )
            )  # fmt: skip

    def finish(self, site: str, complete: bool = True) -> None:
        """All ranks are done."""
        for rank in self.ranks(site):
            self.core.departures.finish(m.FinishRequest(rank=self.check(rank), complete=complete))


def numbers(plan: m.RoundPlan) -> list[int]:
    return [
        number
        for member in plan.members.values()
        for start, count in member.ranges
        for number in range(start, start + count)
    ]


def replayed(driver: Driver) -> CoordinatorState:
    state = CoordinatorState(driver.config)
    for event in driver.core.log.events():
        state.apply(event)
    return state
