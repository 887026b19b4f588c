"""A recorded run is verified; whatever is done to its folder or its log flips just the claim that
covers it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file, save_file

from dilocox.cli.verify import judged, run
from dilocox.config.run_config import digest_of, load_run
from dilocox.data import TokenFiles
from dilocox.errors import DataError, RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.transparency_log import CHECKPOINT, ENTRIES, PUBLIC, LogWriter, read_log
from dilocox.record.verify.consumed_data import command as seen_command
from dilocox.record.verify.consumed_data import from_ledger, seen_by
from dilocox.record.verify.places import Places
from dilocox.record.verify.report_json import as_json
from dilocox.record.verify.verify import verify
from dilocox.tools.release.release import release
from dilocox.tools.release.signature import public_pem, signing_key
from dilocox.tools.report.folder import read_run
from dilocox.tools.report.page import build
from dilocox.tools.report.render import render
from tests.support.harness import PATIENT, Workshop, verdicts
from tests.support.older_record import log_key, resign, unpacked
from tests.support.secret_search import coordinator_secrets, leaks, private_part

pytestmark = pytest.mark.runs

Change = Callable[[Path], object]
BLOBS = "record/store/sha256"


@pytest.fixture(scope="module")
def recorded(shared_workshop: Workshop) -> Path:
    sets = ("outer.rounds=2", "checkpoint.every_rounds=0", PATIENT)
    run = shared_workshop.train("recorded", *sets)
    return run.folder


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    """The parts of the run that are verified, to be changed."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("record", "model"):
        shutil.copytree(recorded / name, folder / name)
    shutil.copytree(recorded.parent / "data", folder / "data")
    for name in ("run.toml", "metrics.jsonl", "coordinator/record-key"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(recorded / name, folder / name)
    return folder


def said(folder: Path) -> list[tuple[str, s.Statement]]:
    return [(line, s.opened(line)[0]) for line in read_log(folder / "record").entries]


def test_a_recorded_run_is_verified(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(Places(recorded), lambda what, share: None)
    assert {f.claim.name: f.verdict for f in report.findings} == dict.fromkeys(
        ("log", "signatures", "complete", "commitments", "run-file", "payloads", "replay", "model",
         "data", "code", "start", "metrics"), "PASS",
    )  # fmt: skip
    assert report.exit_code == 0
    assert report.rounds == 3
    found = json.loads(json.dumps(as_json(report)))
    assert found["claims"][0]["name"] == "log"
    assert all(claim["proves"] and claim["not_proved"] for claim in found["claims"])
    # The log says the course: who enrolled, two sites' payloads and one step for each exchange.
    kinds = [statement.kind for _, statement in said(recorded)]
    assert kinds[0] == s.MANIFEST
    exchanges = 3 * 2 * 2
    evaluations = (recorded / "metrics.jsonl").read_text().count('"kind": "evaluation"')
    assert evaluations > 0
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        s.MANIFEST: 1, s.ENROLMENT: 2, s.ACCEPTANCE: 2, s.COMMITMENT: 2 * exchanges,
        s.CONTRIBUTION: 2 * exchanges, s.STEP: exchanges, s.CHECKPOINT: 2 + 2,
        s.REPORT: 2 * 3 + evaluations,
    }  # fmt: skip
    assert (recorded / "coordinator" / "record-key").stat().st_mode & 0o777 == 0o600


def test_a_run_that_is_not_recorded_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="was this run recorded"):
        verify(Places(tmp_path), lambda what, share: None)


# --- single files ---------------------------------------------------------------------------


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def blob(folder: Path, digest: str) -> Path:
    return folder / BLOBS / digest[:2] / digest[2:]


def payload(folder: Path) -> Path:
    steps = [found for _, found in said(folder) if found.kind == s.STEP]
    return blob(folder, next(iter(steps[5].subjects.values())))


def state(folder: Path, kind: str) -> s.Statement:
    return next(f for _, f in said(folder) if f.predicate.get("kind") == kind)


def theta(folder: Path) -> Path:
    listing = json.loads(blob(folder, state(folder, "initial").subjects["tensors"]).read_bytes())
    return blob(folder, listing[0]["sha256"])


def one_weight(folder: Path) -> None:
    path = folder / "model" / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[0] += 2**-20
    save_file(tensors, path, metadata={"format": "pt"})


FILES: dict[str, tuple[Change, dict[str, str]]] = {
    "run file": (lambda f: edit(f / "run.toml", "learning_rate = 0.003", "learning_rate = 0.004"),
                 {"run-file": "FAIL"}),
    "run file gone": (lambda f: (f / "run.toml").unlink(), {"run-file": "NOT_RUN"}),
    "one weight": (one_weight, {"model": "FAIL"}),
    "weights gone": (lambda f: shutil.rmtree(f / "model"), {"model": "NOT_RUN"}),
    "model's config": (lambda f: edit(f / "model/config.json", "300", "301"), {"model": "FAIL"}),
    "model's tokenizer": (lambda f: edit(f / "model/tokenizer.json", "a", "b"),
                          {"model": "FAIL"}),
    "model's index": (lambda f: edit(f / "model/model.safetensors.index.json", "00001", "00002"),
                      {"model": "FAIL"}),
    "a file more": (lambda f: (f / "model/modeling.py").write_text("import os"),
                    {"model": "FAIL"}),
    "a payload": (lambda f: flip(payload(f)), {"payloads": "FAIL", "replay": "NOT_RUN"}),
    "a payload gone": (lambda f: payload(f).unlink(),
                       {"payloads": "NOT_RUN", "replay": "NOT_RUN"}),
    "theta_0": (lambda f: flip(theta(f)), {"payloads": "FAIL", "replay": "NOT_RUN"}),
    "final tensors' list": (
        lambda f: flip(blob(f, state(f, "final").subjects["tensors"])),
        {"payloads": "FAIL", "replay": "NOT_RUN", "model": "NOT_RUN"}),
    "token files": (lambda f: flip(next((f / "data").glob("train*"))), {"data": "FAIL"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_flips_its_claim(copied: Path, name: str) -> None:
    change, expected = FILES[name]
    change(copied)
    assert verdicts(copied) == expected


# --- the log, by somebody who does not hold its key -------------------------------------------


def lines(change: Callable[[list[str]], object]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / "record" / ENTRIES
        entries = path.read_text().splitlines()
        change(entries)
        path.write_text("".join(f"{entry}\n" for entry in entries))

    return apply


def swap(entries: list[str]) -> None:
    entries[7], entries[8] = entries[8], entries[7]


def own_key(folder: Path) -> None:
    """Sign the same statements under another key."""
    entries = read_log(folder / "record").entries
    for name in (ENTRIES, CHECKPOINT, PUBLIC):
        (folder / "record" / name).unlink()
    log = LogWriter(folder / "record", "dilocox/mine", Ed25519PrivateKey.generate())
    for entry in entries:
        log.append(entry)
    log.close()


def older_checkpoint(folder: Path) -> None:
    """Signed by the log's own key, when the log was shorter."""
    content, newest = read_log(folder / "record"), folder / "record" / CHECKPOINT
    log = LogWriter(folder / "older", content.public.split("+")[0], log_key(folder))
    for entry in content.entries[:20]:
        log.append(entry)
    log.close()
    shutil.copy(folder / "older" / CHECKPOINT, newest)


LOG: dict[str, Change] = {
    "older checkpoint": older_checkpoint,
    "unsigned line": lines(lambda entries: entries.insert(9, "{}")),
    "last statement gone": lines(lambda entries: entries.pop()),
    "statement gone": lines(lambda entries: entries.pop(9)),
    "all gone": lines(lambda entries: entries.clear()),
    "statements swapped": lines(swap),
    "statement twice": lines(lambda entries: entries.append(entries[5])),
    "letter changed": lambda f: flip(f / "record" / ENTRIES, 2000),
    "size changed": lambda f: edit(f / "record" / CHECKPOINT, "\n77\n", "\n76\n"),
    "signature changed": lambda f: flip(f / "record" / CHECKPOINT, -5),
    "root changed": lambda f: flip(f / "record" / CHECKPOINT, 40),
    "key changed": lambda f: flip(f / "record" / PUBLIC, -5),
}


@pytest.mark.parametrize("name", LOG)
def test_a_changed_log_is_no_log(copied: Path, name: str) -> None:
    """Nothing else can then be said; the rest of the run is not looked at."""
    LOG[name](copied)
    found = verdicts(copied)
    assert found.pop("log") == "FAIL"
    assert set(found.values()) == {"NOT_RUN"}


def test_a_log_under_another_key(copied: Path) -> None:
    """It is whole by itself, but the run's own manifest names another key; so may the reader."""
    known = read_log(copied / "record").public
    own_key(copied)
    assert verdicts(copied)["signatures"] == "FAIL"
    assert verdicts(copied, key=known)["log"] == "FAIL"


def test_a_log_that_was_seen_before(copied: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    shutil.copy(copied / "record" / CHECKPOINT, seen)
    assert verdicts(copied, seen=seen) == {}
    resigned(lambda entries: entries.pop())(copied)
    assert verdicts(copied, seen=seen)["log"] == "FAIL"


# --- the log, by its own key's holder ---------------------------------------------------------


def resigned(change: Callable[[list[str]], object]) -> Change:
    """Change statements and sign the log anew, as a dishonest coordinator could."""

    return lambda folder: resign(folder, change)


def said_again(
    kind: str,
    change: Callable[[dict[str, Any], dict[str, str]], object],
    signer: str = "",
    number: int = 1,
) -> Change:
    """A statement of a type, the second if not `number`, changed and signed by the log's key or
    another."""

    def apply(folder: Path) -> None:
        def within(entries: list[str]) -> None:
            place = [n for n, e in enumerate(entries) if s.opened(e)[0].kind == kind][number]
            found = s.opened(entries[place])[0]
            predicate, subjects = dict(found.predicate), dict(found.subjects)
            change(predicate, subjects)
            key = s.Signer.from_hex(signer) if signer else s.Signer(log_key(folder))
            entries[place] = key.sign(s.Statement(kind, subjects, predicate))

        resigned(within)(folder)

    return apply


def drop(kind: str, number: int = 0) -> Change:
    def within(entries: list[str]) -> None:
        entries.pop([n for n, e in enumerate(entries) if s.opened(e)[0].kind == kind][number])

    return resigned(within)


def later(entries: list[str]) -> None:
    """A commitment stands behind all that came of its exchange."""
    number = next(n for n, e in enumerate(entries) if s.opened(e)[0].kind == s.COMMITMENT)
    key = s.opened(entries[number])[0].predicate["exchange_key"]
    last = max(
        n for n, e in enumerate(entries) if s.opened(e)[0].predicate.get("exchange_key") == key
    )
    entries.insert(last, entries.pop(number))


def other_run(folder: Path) -> None:
    """Another seed and other token files: in the manifest, in run.toml, in what sites joined with,
    all that the log's key can sign."""
    edit(folder / "run.toml", "seed = 0", "seed = 7")
    config = load_run(folder / "run.toml").shared()
    files = {"manifest": "0" * 64, "croissant": "0" * 64}

    def within(entries: list[str]) -> None:
        first = s.opened(entries[0])[0].predicate
        signer = s.Signer(log_key(folder))
        said = {**first, "config": config, "config_digest": digest_of(config), "data": files}
        entries[0] = signer.sign(s.Statement(s.MANIFEST, {}, said))
        for number, entry in enumerate(entries[1:], 1):
            found = s.opened(entry)[0]
            if found.kind in s.BY_LOG:
                own = {**found.predicate, "run": hashlib.sha256(entries[0].encode()).hexdigest()}
                if found.kind == s.ENROLMENT:
                    own["data"] = files["manifest"]
                entries[number] = signer.sign(s.Statement(found.kind, found.subjects, own))

    resigned(within)(folder)


INCOMPLETE = {"complete": "FAIL", "commitments": "NOT_RUN", "replay": "NOT_RUN"}
UNSIGNED = {
    "signatures": "FAIL",
    **dict.fromkeys(
        (
            "complete",
            "commitments",
            "run-file",
            "payloads",
            "replay",
            "model",
            "data",
            "code",
            "start",
            "metrics",
        ),
        "NOT_RUN",
    ),
}
DISHONEST: dict[str, tuple[Change, dict[str, str]]] = {
    "other digest of the run file": (
        said_again(s.MANIFEST, lambda p, _: p.update(config_digest="0" * 64), number=0),
        UNSIGNED),
    "other run file and data": (other_run, UNSIGNED),
    "another seed": (
        said_again(s.MANIFEST, lambda p, _: p["config"]["run"].update(seed=1), number=0), UNSIGNED),
    "acceptance gone": (drop(s.ACCEPTANCE), {"run-file": "FAIL", "data": "FAIL"}),
    "acceptance by the log's key": (said_again(s.ACCEPTANCE, lambda *_: None), UNSIGNED),
    "joined with other data": (
        said_again(s.ENROLMENT, lambda p, _: p.update(data="0" * 64)), {"data": "FAIL"}),
    "commitment gone": (drop(s.COMMITMENT, 3), {"commitments": "FAIL"}),
    "committed late": (resigned(later), {"commitments": "FAIL"}),
    "commitment by another key": (said_again(s.COMMITMENT, lambda *_: None, "03" * 32), UNSIGNED),
    "contribution gone": (drop(s.CONTRIBUTION, 3), INCOMPLETE),
    "step gone": (drop(s.STEP, 3), INCOMPLETE),
    "flush gone": (drop(s.STEP, -1), INCOMPLETE),
    "enrolment gone": (drop(s.ENROLMENT), UNSIGNED),
    "manifest gone": (drop(s.MANIFEST), UNSIGNED),
    "other learning rate": (said_again(s.STEP, lambda p, _: p.update(learning_rate=0.81)),
                            {"replay": "FAIL"}),
    "other momentum": (said_again(s.STEP, lambda p, _: p.update(momentum=0.51)),
                       {"replay": "FAIL"}),
    "other weights": (
        said_again(s.STEP, lambda p, _: p.update(weights={"paris": 1.5, "lyon": 0.9})),
        {"replay": "FAIL"}),
    "other codec": (said_again(s.STEP, lambda p, _: p.update(codec="int8")), {"replay": "FAIL"}),
    "a site left out": (
        said_again(s.STEP, lambda p, d: (p.update(set=["paris"]), d.pop("lyon/0"))),
        {"replay": "FAIL"}),
    "payloads exchanged": (
        said_again(s.STEP, lambda _, d: d.update({"paris/0": d["lyon/0"]})), INCOMPLETE),
    "of another round": (
        said_again(s.STEP, lambda p, _: p.update(
            round=9, exchange_key=f"outer/9/{p['stage']}/{p['fragment']}")),
        INCOMPLETE),
    "of another run": (said_again(s.STEP, lambda p, _: p.update(run="00" * 16)), UNSIGNED),
    "contribution by another key": (
        said_again(s.CONTRIBUTION, lambda *_: None, "03" * 32), UNSIGNED),
    "contribution by the log's key": (said_again(s.CONTRIBUTION, lambda *_: None), UNSIGNED),
    "step by another key": (said_again(s.STEP, lambda *_: None, "03" * 32), UNSIGNED),
}  # fmt: skip


def test_a_record_by_an_older_version(tmp_path: Path) -> None:
    """Of one that knew less keys, and no commitments."""
    folder = unpacked(tmp_path)
    shared = load_run(folder / "run.toml").shared()
    del shared["outer"]["momentum_dtype"]

    def older(predicate: dict[str, Any], _: dict[str, str]) -> None:
        del predicate["commitments"]
        predicate.update(config=shared, config_digest=digest_of(shared))

    text = (folder / "run.toml").read_text()
    assert text.count('momentum_dtype = "fp32"\n') == 1
    (folder / "run.toml").write_text(text.replace('momentum_dtype = "fp32"\n', ""))
    said_again(s.MANIFEST, older, number=0)(folder)
    unknown = dict.fromkeys(("run-file", "data", "code", "metrics"), "NOT_RUN")
    assert verdicts(folder, data=tmp_path / "data") == {"commitments": "NOT_RUN", **unknown}


@pytest.mark.parametrize("name", DISHONEST)
def test_a_dishonest_coordinator_is_found(copied: Path, name: str) -> None:
    change, expected = DISHONEST[name]
    change(copied)
    assert verdicts(copied) == expected


# --- the command ------------------------------------------------------------------------------


def test_the_command_says_it(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dilocox.cli.main import _parser

    def ended(*more: str) -> tuple[int, str]:
        code = run(_parser().parse_args(["verify", str(copied), *more]))
        return code, capsys.readouterr().out

    code, text = ended()
    assert code == 0
    assert text.count("PASS") >= 10
    assert "proves:" in text
    assert "No claim covers what happened inside a site" in text
    assert json.loads(ended("--json")[1])["exit_code"] == 0
    elsewhere = copied.parent / "elsewhere"
    shutil.move(copied / "record" / "store", elsewhere)
    shutil.move(copied / "model", copied.parent / "released")
    code, text = ended()
    assert code == 3
    assert "--store" in text
    assert "--model" in text
    code, text = ended("--store", str(elsewhere), "--model", str(copied.parent / "released"))
    assert code == 0, text
    flip(payload_in(elsewhere, copied))
    assert ended("--store", str(elsewhere), "--model", str(copied.parent / "released"))[0] == 1


def payload_in(store: Path, folder: Path) -> Path:
    path = payload(folder)
    return store / path.relative_to(folder / "record" / "store")


def test_a_run_behind_a_url(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fsspec

    from dilocox.cli.main import _parser

    files = fsspec.filesystem("memory")
    files_of = [*copied.glob("record/**/*"), *copied.glob("model/*"), *copied.glob("metrics.jsonl")]
    for path in [*files_of, copied / "run.toml"]:
        if path.is_file():
            files.pipe(f"/published/{path.relative_to(copied)}", path.read_bytes())

    def ended() -> tuple[int, dict[str, str]]:
        code = run(_parser().parse_args(["verify", "memory://published", "--json"]))
        claims = json.loads(capsys.readouterr().out)["claims"]
        return code, {claim["name"]: claim["verdict"] for claim in claims}

    code, found = ended()
    assert code == 0
    assert set(found.values()) == {"PASS"}
    files.rm(f"/published/{payload(copied).relative_to(copied)}")
    code, found = ended()
    assert (code, found["payloads"], found["model"]) == (3, "NOT_RUN", "PASS")
    files.rm("/published/record/checkpoint")
    with pytest.raises(RecordError, match="memory://published: cannot be fetched"):
        ended()


# --- what the model had seen, and what is handed out -------------------------------------------


def test_the_log_names_the_token_ranges_that_the_ledger_has(recorded: Path) -> None:
    data = TokenFiles.open(recorded.parent / "data")
    manifest = next(found for _, found in said(recorded) if found.kind == s.MANIFEST)
    croissant = hashlib.sha256((data.folder / "croissant.json").read_bytes()).hexdigest()
    assert manifest.predicate["data"] == {"manifest": data.digest, "croissant": croissant}
    answer = seen_by(recorded, rounds=None, tick=None)
    ledger = json.loads((recorded / "ledger.json").read_text(encoding="utf-8"))
    assert answer.signed
    assert set(answer.ranges) == set(from_ledger(ledger, None))
    assert sum(each.count for each in answer.ranges) == 2 * 2 * 8 * 4
    one = seen_by(recorded, rounds=1, tick=None)
    assert set(one.ranges) == {each for each in answer.ranges if each.round == 0}
    assert one.documents
    assert one == seen_by(recorded, rounds=None, tick=8)
    found = json.loads(seen_command(recorded, 1, None, None, True))
    assert [each["document"] for each in found["documents"]] == [d.document for d in one.documents]
    text = seen_command(recorded, None, None, None, False)
    assert text.startswith("seen         128 sequences of 32 tokens (4,096 tokens) in 2 rounds")
    with pytest.raises(DataError, match="--round 0: give 1 or more"):
        seen_command(recorded, 0, None, None, False)


def test_a_release_is_the_verified_model(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    made = release(recorded, tmp_path / "released", key=tmp_path / "key.pem")
    secrets = {str(path): secret for path, secret in coordinator_secrets(recorded).items()}
    secrets["release"] = private_part((tmp_path / "key.pem").read_text())
    texts = {str(path): path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}
    assert len(texts) > 5
    assert not leaks(secrets, texts)
    assert verdicts(recorded, model=made.folder) == {}
    card = made.folder / "README.md"
    text = card.read_text(encoding="utf-8")
    assert "bit for bit" in text
    card.write_text(text + "better than it is", encoding="utf-8")
    assert verdicts(recorded, model=made.folder) == {"release": "FAIL"}
    card.write_text(text, encoding="utf-8")
    made.public_key.unlink()
    assert verdicts(recorded, model=made.folder) == {"release": "NOT_RUN"}
    flip(made.folder / "model.safetensors.index.json", 20)
    key = signing_key(tmp_path / "key.pem")
    made.public_key.write_bytes(public_pem(key))
    found = verdicts(recorded, model=made.folder, release_key=made.public_key)
    assert found == {"model": "FAIL", "release": "FAIL"}
    assert read_log(recorded / "record").public in text.replace("\\", "")


def test_its_page_shows_keys_states_and_verdicts(recorded: Path) -> None:
    page = build(read_run(recorded), 0.0, judged(recorded))
    assert not page.missing
    assert {claim["verdict"] for claim in page.claims} == {"PASS"}
    assert [event.text for event in page.membership][-1] == "finished"
    assert len(page.states.rows) == 4
    assert dict(page.sites[0].cells)["joined"] == "once"
    assert page.sources[0].licence == ""
    html = render(page)
    assert page.states.rows[0][2] in html
    assert "licence not stated" in html
