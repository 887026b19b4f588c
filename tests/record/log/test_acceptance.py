"""A site signs first what it takes part in; a manifest that was put in its place is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig, digest_of, load_run, resolve_run
from dilocox.coordinator.client.endpoint import Endpoint
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import DataError, JoinError, RecordError, RetryLaterError
from dilocox.record.log import statements as s
from dilocox.record.log.acceptance import OwnFacts, accept, digest_of_entry
from dilocox.record.log.manifest import manifest
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.transparency_log import read_log
from dilocox.record.verify.acceptance_claims import accepted, accepted_code, accepted_data
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.run_history import RunHistory, read_history
from dilocox.record.writer.exchange_statements import commitment
from dilocox.record.writer.notary import TransparencyLogSink
from dilocox.training.launch.site import _accept
from tests.support.coordinator_driver import VERSIONS, run_config
from tests.support.harness import verdicts
from tests.support.older_record import log_key, resign, unpacked
from tests.support.record_scene import KEY, KEYS, ONE, SIGNERS, Scene
from tests.support.served_run import Run

TWO = "2" * 64
FACTS = OwnFacts(None, None, ONE, VERSIONS.named())


def other_manifest(signer: s.Signer, entry: str, **changes: Any) -> str:
    """Another run file and other data under a log's key, `changes` to it made."""
    said = dict(s.opened(entry)[0].predicate)
    config = {**said["config"], "run": {**said["config"]["run"], "seed": 7}}
    said.update({"config": config, "config_digest": digest_of(config), **changes})
    return signer.sign(s.Statement(s.MANIFEST, {"run-file": ONE}, said))


def rewrite(run: Path, **changes: Any) -> None:
    """The run file of the folder is made to fit what the log's key has signed anew."""
    text = (run / "run.toml").read_text(encoding="utf-8")
    assert "\nseed = 0\n" in text
    (run / "run.toml").write_text(text.replace("\nseed = 0\n", "\nseed = 7\n"), encoding="utf-8")
    config = load_run(run / "run.toml").shared()
    changes.update(config=config, config_digest=digest_of(config))

    def change(entries: list[str]) -> None:
        entries[0] = other_manifest(s.Signer(log_key(run)), entries[0], **changes)

    resign(run, change)


def test_an_older_record_says_that_its_run_file_is_the_coordinator_s_word(tmp_path: Path) -> None:
    """All else is verified as it was; so it is with another manifest, which nobody can tell."""
    run = unpacked(tmp_path)
    unknown = dict.fromkeys(("run-file", "data", "code", "metrics"), "NOT_RUN")
    assert verdicts(run, data=tmp_path / "data") == unknown
    rewrite(run)
    # Its seed gives another theta_0, but on another machine the true one might, too.
    assert verdicts(run, data=tmp_path / "data") == {**unknown, "start": "NOT_RUN"}


def test_other_token_files_than_an_older_record_s_are_still_found(tmp_path: Path) -> None:
    run = unpacked(tmp_path)
    found = json.loads((tmp_path / "data/manifest.json").read_text(encoding="utf-8"))
    rewrite(run, data={"manifest": TWO, "croissant": TWO})
    assert found["digest"] != TWO
    assert verdicts(run, data=tmp_path / "data")["data"] == "FAIL"


def read(scene: Scene, change: Any = None) -> RunHistory:
    """The log of a scene, its entries changed, as whoever holds its key could."""
    scene.notary.close()
    content = read_log(scene.config.folder / "record")
    entries = list(content.entries)
    if change is not None:
        change(entries, s.Signer.from_hex((scene.folder / "record-key").read_text().strip()))
    return read_history(entries, NoteKey.parse(content.public))


def test_what_sites_sign_names_the_manifest(scene: Scene) -> None:
    """Whoever holds the log's key changes the run file: what the sites signed is of another run."""
    scene.exchange()
    assert read(scene).run == digest_of_entry(scene.entries()[0])

    def other(entries: list[str], signer: s.Signer) -> None:
        entries[0] = other_manifest(signer, entries[0])

    with pytest.raises(RecordError, match="statement 1: enrolment of run"):
        read(scene, other)

    def all_by_the_log(entries: list[str], signer: s.Signer) -> None:
        other(entries, signer)
        for number, entry in enumerate(entries[1:], 1):
            found = s.opened(entry)[0]
            if found.kind in s.BY_LOG:
                said = {**found.predicate, "run": digest_of_entry(entries[0])}
                entries[number] = signer.sign(s.Statement(found.kind, found.subjects, said))

    with pytest.raises(RecordError, match="statement 2: acceptance of run"):
        read(scene, all_by_the_log)

    def as_an_older_one(entries: list[str], signer: s.Signer) -> None:
        entries[0] = other_manifest(signer, entries[0], run=digest_of_entry(entries[0]))

    with pytest.raises(RecordError, match="no id that a manifest may choose"):
        read(scene, as_an_older_one)


def test_a_site_signs_nothing_before_it_has_accepted(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for site, signer in SIGNERS.items():
        scene.driver.enrol(site, record_key=signer.public)
    scene.accept("a")
    scene.accept("b")
    for site in SIGNERS:
        scene.driver.ready(site)
    scene.driver.plan(0, "a")
    scene.commit("a")
    with pytest.raises(Refused, match="its site has not signed an acceptance of the run"):
        scene.commit("c")
    # Again after a restart, and after every new start of a site.
    scene.reopen()
    with pytest.raises(Refused, match="has not signed an acceptance"):
        scene.commit("c")
    scene.accept("c")
    scene.commit("c")
    scene.driver.leave("b")
    scene.driver.enrol("b", KEYS["b"])
    rank = m.RankId(site="b", stage=0, shard=0)
    text = SIGNERS["b"].sign(commitment(scene.notary.run, rank, KEY, ONE, ONE))
    with pytest.raises(Refused, match="has not signed an acceptance"):
        scene.notary.committed(rank, KEY, text, bound=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"entry": "another"}, "its acceptance names another manifest"),
        ({"facts": {"data": TWO}}, "names another data than"),
        ({"facts": {"versions": {"dilocox": "0"}}}, "names another versions than"),
        ({"incarnation": 2}, "names another incarnation than"),
        ({"key": SIGNERS["b"].public}, "names another key than"),
        ({"site": "b", "key": SIGNERS["b"].public, "incarnation": 1}, "names another site"),
        ({"signer": "b"}, "not one of key"),
    ],
)
def test_an_acceptance_says_what_the_site_has_joined_with(
    scene: Scene, changes: dict[str, Any], reason: str
) -> None:
    before = scene.entries()
    with pytest.raises(Refused, match=reason):
        scene.accept("a", **changes)
    with pytest.raises(Refused, match="it has signed a different acceptance before"):
        scene.accept("a", facts={"code": TWO})
    scene.accept("a")
    assert scene.entries() == before, "the same again is said once"


def test_the_claims_need_it_of_all_who_count(scene: Scene) -> None:
    scene.exchange()
    assert accepted(read(scene), "this") == "accepted by a, b, c"

    def without_a(entries: list[str], signer: s.Signer) -> None:
        entries.remove(next(e for e in entries if s.opened(e)[0].kind == s.ACCEPTANCE))

    with pytest.raises(RecordError, match="a signed statements without the acceptance"):
        accepted(read(scene, without_a), "this")

    def other_versions(entries: list[str], signer: s.Signer) -> None:
        number = next(n for n, e in enumerate(entries) if s.opened(e)[0].kind == s.ENROLMENT)
        found = s.opened(entries[number])[0]
        said = {**found.predicate, "versions": {"dilocox": "9"}}
        entries[number] = signer.sign(s.Statement(s.ENROLMENT, found.subjects, said))

    with pytest.raises(RecordError, match="a's acceptance names another versions"):
        accepted(read(scene, other_versions), "this")
    course = read(scene)
    first = course.acceptances[0]
    course.first = TWO
    with pytest.raises(RecordError, match=f"{first.site} has accepted another manifest"):
        accepted(course, "this")


def test_data_and_code_are_what_the_sites_have_signed(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for site, signer in SIGNERS.items():
        scene.driver.enrol(site, record_key=signer.public, data_digest=ONE)
        own = {"own_data": TWO} if site == "b" else {}
        scene.accept(site, facts={"data": ONE, "code": TWO if site == "c" else ONE, **own})
    for site in SIGNERS:
        scene.driver.ready(site)
    scene.driver.plan(0, "a")
    scene.exchange()
    course = read(scene)
    text = accepted_data(course, ONE, "data")
    assert text.endswith("accepted by a, b, c; not the own token files of b")
    with pytest.raises(DataError, match="digest 2222"):
        accepted_data(course, TWO, "data")
    course.manifest = {**course.manifest, "code": ONE}
    assert accepted_code(course) == "a, b signed the same; c signed other code"

    def enrolled_with_two(entries: list[str], signer: s.Signer) -> None:
        for number, entry in enumerate(entries):
            found = s.opened(entry)[0]
            if found.kind == s.ENROLMENT:
                said = {**found.predicate, "data": TWO}
                entries[number] = signer.sign(s.Statement(s.ENROLMENT, found.subjects, said))

    with pytest.raises(DataError, match="the sites named others"):
        accepted_data(read(scene, enrolled_with_two), TWO, "data")


def test_a_log_that_an_older_dilocox_has_begun_is_gone_on_with(tmp_path: Path) -> None:
    """Its sites of then have accepted nothing; those that join now do, and its id stays."""
    scene = Scene(tmp_path)
    run = "ab" * 16
    said = s.opened(scene.entries()[0])[0]
    older = {name: one for name, one in said.predicate.items() if name != "nonce"} | {"run": run}
    scene.notary.close()
    signer = scene.notary.signer
    folder = scene.config.folder / "record"
    (folder / "checkpoint").unlink()
    text = signer.sign(s.Statement(s.MANIFEST, said.subjects, older))
    (folder / "statements.jsonl").write_text(f"{text}\n")
    scene.reopen()
    assert scene.notary.run == run
    for site, one in SIGNERS.items():
        scene.driver.enrol(site, record_key=one.public)
        if site != "c":
            scene.accept(site)
    for site in SIGNERS:
        scene.driver.ready(site)
    scene.driver.plan(0, "a")
    scene.exchange()
    course = read(scene)
    assert (course.run, course.bound) == (run, False)
    with pytest.raises(NotRunError, match="the coordinator's word: this is not signed"):
        accepted(course, "this")


def shown(run_file: RunConfig, **changes: Any) -> tuple[Identity, str]:
    """A site of a run, and the manifest that its coordinator shows it, fields of it changed."""
    signer = SIGNERS["a"]
    key = NoteKey("dilocox/run", bytes.fromhex(signer.public))
    said = {"nonce": "0", **manifest(run_file, str(key)), **changes}
    entry = signer.sign(s.Statement(s.MANIFEST, {"run-file": ONE}, said))
    run = digest_of_entry(entry)
    return Identity("b", 1, "", "", "", "", record_key="02" * 32, record_run=run), entry


def test_a_site_compares_the_manifest_with_its_own_run_file(tmp_path: Path) -> None:
    config = run_config(run={"folder": str(tmp_path)})
    identity, entry = shown(config)
    text = accept(config, identity, entry, FACTS)
    found = s.open_signed(
        text, SIGNERS["b"].public, run=digest_of_entry(entry), kinds=(s.ACCEPTANCE,)
    )
    assert found.predicate["site"] == "b"
    with pytest.raises(RecordError, match=r"run\.seed is not what the run was begun with"):
        accept(run_config(run={"folder": str(tmp_path), "seed": 7}), identity, entry, FACTS)
    other = shown(config, nonce="1")[1]
    with pytest.raises(RecordError, match="does not have the digest that it announced"):
        accept(config, identity, other, FACTS)
    for changes, reason in (
        ({"config_digest": TWO}, "not the one with the digest"),
        ({"data": {"manifest": TWO}}, "remove the coordinator's"),
        ({"config": {}}, "is not what the run was begun with"),
        ({"config": None}, "is malformed"),
    ):
        mine, changed = shown(config, **changes)
        facts = OwnFacts(ONE, None, ONE, FACTS.versions)
        with pytest.raises(RecordError, match=reason):
            accept(config, mine, changed, facts)


def test_a_default_that_was_another_when_the_run_was_begun_is_accepted(tmp_path: Path) -> None:
    """As in a run that goes on: its record has the former default of `model.compile`."""
    config = run_config(run={"folder": str(tmp_path)})
    raw = config.model_dump(mode="json", exclude_defaults=True)
    raw["model"]["compile"] = False
    identity, entry = shown(resolve_run(raw))
    assert accept(config, identity, entry, FACTS)
    raw["model"]["compile"] = True
    identity, entry = shown(resolve_run(raw))
    with pytest.raises(RecordError, match=r"model\.compile is not what"):
        accept(config, identity, entry, FACTS)


def test_a_site_that_does_not_accept_leaves(tmp_path: Path) -> None:
    """The others do not wait for it, and it says why."""
    config = run_config("ab", run={"folder": str(tmp_path / "run")})
    notary = TransparencyLogSink.open(config, tmp_path / "coordinator", print)
    served = Run(tmp_path / "coordinator", notary=notary)
    try:
        served.enrol("a")
        endpoint = Endpoint(served.url, {}, "")
        other = run_config("ab", run={"folder": str(tmp_path / "run"), "seed": 7})
        with pytest.raises(JoinError, match=r"site a: this site's run file: run\.seed is not what"):
            _accept(other, endpoint, served.identities["a"], notary.manifest, FACTS)
        found = served.core.state.sites["a"]
        assert found.role == "gone"
        assert "does not accept the run's manifest" in found.reason
        # One that has gone meanwhile may come again.
        with pytest.raises(RetryLaterError):
            _accept(config, endpoint, served.identities["a"], notary.manifest, FACTS)
    finally:
        served.close()
        notary.close()
