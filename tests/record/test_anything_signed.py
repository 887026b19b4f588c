"""A member may sign anything, and a stranger's record may hold anything.

What a member signs is kept or refused, and the record stays one that readers read and a restart
goes on with; on a disk that is full now and then. What a record holds ends in verdicts.
"""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dilocox.cli.verify import show
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import TrainingError
from dilocox.record.log import statements as s
from dilocox.record.log.acceptance import Acceptance, OwnFacts, digest_of_entry
from dilocox.record.log.attestation_statements import MACHINE, Attestation, MachineFacts
from dilocox.record.log.transparency_log import LogWriter
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.record.writer.exchange_statements import commitment, contribution
from tests.support.coordinator_driver import VERSIONS
from tests.support.full_disk import FullDisk
from tests.support.record_scene import KEY, ONE, SIGNERS, Scene, own_digest

LIAR = "c"
RANK = m.RankId(site=LIAR, stage=0, shard=0)
SECOND = ExchangeKey.outer(0, 0, 1)
KINDS = (*s.BY_SITE, *s.BY_LOG, *s.BY_AUDITOR, "https://example.org/other")
ODD: tuple[Any, ...] = (
    True, False, None, -1, 0, 1, 2, 10**15, 2**53 - 1, 0.5, -1e300, "", "0", "1", "a", "b", LIAR,
    "initial", "final", "flush", "yes", "round", "\x1b[2J", "\u202e", "../../etc", "é" * 40, ONE,
    "A" * 64, KEY.text, "outer/9/9/9", [], [0], [True], ["a", "b", "c"], [[0]], {}, {"a": 1},
    {"a": ONE}, {"a": {"b": []}},
)  # fmt: skip


def whole(scene: Scene) -> list[s.Statement]:
    """What an honest member signs, one statement of each type and form."""
    run = scene.notary.run
    of_rank = {"run": run, "site": LIAR, "stage": 0, "shard": 0, "round": 0}
    facts = OwnFacts(None, None, ONE, VERSIONS.named())
    accepted = Acceptance(
        LIAR, scene.driver.incarnations[LIAR], SIGNERS[LIAR].public,
        digest_of_entry(scene.notary.manifest), facts, 0,
    )  # fmt: skip
    state = {"state": ONE, "tensors": ONE}
    machine = MachineFacts(1, 0, 1, 3, ONE, "07", int(time.time()))
    return [
        Attestation(LIAR, MACHINE, ONE, machine).statement(run),
        accepted.statement(run),
        commitment(run, RANK, KEY, ONE, own_digest(LIAR)),
        contribution(run, RANK, KEY, 1, own_digest(LIAR)),
        s.Statement(s.CHECKPOINT, state, {**of_rank, "kind": "initial", "class": {}}),
        s.Statement(s.CHECKPOINT, state, {**of_rank, "kind": "final", "files": {"a": ONE}}),
        s.Statement(s.ROUND, {"state": ONE, "document": ONE, "steps": ONE},
                    {**of_rank, "tick": 0, "served": "yes"}),
        s.Statement(s.ANCHOR, state, {**of_rank, "tick": 0, "landed": [-1, -1]}),
        s.Statement(s.ATTESTATION, {"evidence": ONE}, {**of_rank, "format": "tdx"}),
        s.Statement(s.REPORT, {"report": ONE}, {**of_rank, "kind": "round"}),
    ]  # fmt: skip


def changed(rng: random.Random, found: s.Statement) -> s.Statement:
    """A statement with one to three of its parts replaced, lost or added; or one that Python takes
    for the same, since true is 1 to it."""
    if rng.randrange(3) == 0:
        said = dict(found.predicate)
        name = rng.choice([name for name, value in said.items() if value in (0, 1)] or ["more"])
        return s.Statement(found.kind, found.subjects, {**said, name: bool(said.get(name))})
    kind, subjects, said = found.kind, dict(found.subjects), dict(found.predicate)
    for _ in range(rng.randrange(1, 4)):
        place: dict[str, Any] = rng.choice([said, said, subjects])
        name = rng.choice([*place, "more"])
        how = rng.randrange(8)
        if how == 0:
            place.pop(name, None)
        elif how == 1:
            kind = rng.choice(KINDS)
        elif how == 2 and isinstance(place.get(name), dict) and place[name]:
            inner = rng.choice(list(place[name]))
            place[name] = {**place[name], inner: rng.choice(ODD)}
        elif name != "run" or rng.randrange(4) == 0:
            place[name] = rng.choice(ODD)
    return s.Statement(kind, subjects, said)


def say(scene: Scene, rng: random.Random, text: str) -> None:
    """The liar sends what it has signed, by one of the three requests that take it."""
    core = scene.driver.core
    key = rng.choice([KEY, SECOND])
    try:
        usual = {s.COMMITMENT: 0, s.CONTRIBUTION: 1}.get(s.opened(text)[0].kind, 2)
        which = rng.choice([usual, usual, usual, 0, 1, 2])
        if which == 0:
            scene.driver.begin(key, LIAR, commitment=text)
        elif which == 1:
            digests = {LIAR: own_digest(LIAR)}
            attempt = (
                core.state.exchanges[key.text].attempt if key.text in (core.state.exchanges) else 1
            )
            scene.driver.vote(key, LIAR, attempt, held=list("abc"), digests=digests, statement=text)
        else:
            core.witness.state(m.StateRequest(rank=RANK, statement=text))
    except (Refused, TrainingError):
        return  # the latter where the disk is full; nothing else may come


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("part", ["commits", "votes"])
def test_what_a_member_signs_is_kept_or_refused(
    tmp_path: Path, full_disk: FullDisk, seed: int, part: str
) -> None:
    rng = random.Random(f"{part} {seed}")
    scene = Scene(tmp_path, record={"states_every": 1})
    scene.enrol()
    scene.driver.plan(0, "a")
    for site in "ab":
        scene.commit(site)
    if part == "votes":
        scene.commit(LIAR)
    for number in range(150):
        if number % 25 == 24:
            full_disk.leave(rng.randrange(2000), failures=1)
        statement = changed(rng, rng.choice(whole(scene)))
        signer = SIGNERS[LIAR if rng.randrange(9) else "a"]
        say(scene, rng, signer.sign(statement))
    full_disk.free()
    scene.reopen()
    exchange = scene.driver.core.state.exchanges[KEY.text]
    for site in "ab":
        if (site, 0, 0) not in exchange.votes and exchange.decision is None:
            scene.vote(site, attempt=exchange.attempt, held=["a", "b"])
    # The liar's part is as honest as it still can be: nobody else's is spoiled by what it said.
    course = scene.course()
    assert {site for _, _, site, _ in course.contributions} <= set("abc")
    found = {each.claim.name: each for each in verify(Places(scene.config.folder), print).findings}
    assert found["signatures"].verdict == "PASS", found["signatures"].reason
    assert found["log"].verdict == "PASS"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A record with a statement of every type."""
    scene = Scene(tmp_path_factory.mktemp("record"), record={"states_every": 1})
    scene.enrol()
    scene.driver.plan(0, "a")
    scene.notary.resumed(0, 0)
    scene.exchange()
    scene.exchange(SECOND)
    for each in whole(scene)[3:]:
        if each.predicate.get("kind") != "final":
            scene.notary._file(SIGNERS[LIAR].sign(each), each)
    scene.notary.standing("a", "forget-key")
    scene.notary.close()
    return scene


def rewritten(scene: Scene, rng: random.Random) -> Iterator[str]:
    """The record with some statements changed, doubled or lost, each signed by whom it must be."""
    log = scene.notary.signer
    entries = scene.entries()
    several = rng.randrange(1, 4)
    chosen = set(rng.sample(range(1, len(entries)), several))
    for number, entry in enumerate(entries):
        statement = s.opened(entry)[0]
        if number in chosen:
            how = rng.randrange(5)
            if how == 0:
                continue
            if how == 1:
                yield entry
            else:
                statement = deeply_changed(rng, statement)
                site = str(statement.predicate.get("site"))
                by_site = statement.kind in s.BY_SITE and site in SIGNERS
                entry = (SIGNERS[site] if by_site else log).sign(statement)
        yield entry


def deeply_changed(rng: random.Random, found: s.Statement) -> s.Statement:
    """As `changed`, in places that lie deeper, too, and of the same run."""
    said = json.loads(json.dumps(dict(found.predicate)))
    subjects: dict[str, Any] = dict(found.subjects)
    for _ in range(rng.randrange(1, 4)):
        place: Any = rng.choice([said, said, said, subjects])
        while isinstance(place, dict) and place:
            name = rng.choice(list(place))
            deeper = place[name]
            if isinstance(deeper, dict) and deeper and rng.randrange(3):
                place = deeper
                continue
            if name != "run":
                place[name] = rng.choice(ODD)
            break
    return s.Statement(found.kind, subjects, said)


@pytest.mark.parametrize("seed", range(2))
def test_what_a_record_says_ends_in_verdicts(honest: Scene, tmp_path: Path, seed: int) -> None:
    rng = random.Random(f"record {seed}")
    key = honest.notary.writer._key
    origin = honest.notary.writer._origin
    for number in range(20):
        folder = tmp_path / str(number)
        (folder / "record").mkdir(parents=True)
        with_key = LogWriter(folder / "record", origin, key)
        for entry in rewritten(honest, rng):
            with_key.append(entry)
        with_key.close()
        report = verify(Places(folder), lambda what, share: None)
        verdicts = {each.claim.name: each.verdict for each in report.findings}
        assert verdicts["log"] == "PASS"
        said = io.StringIO()
        show(report, Console(file=said, force_terminal=True, color_system=None, soft_wrap=True))
        assert "\x1b" not in said.getvalue()
