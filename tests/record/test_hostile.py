"""A record that a stranger has made: it hangs nobody, grows without bound for nobody, and says
nothing to a terminal but its words."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console

from dilocox.cli import main
from dilocox.cli.verify import show
from dilocox.config.run_config import resolve_run
from dilocox.config.site import MOST_RANKS
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import ConfigError, RecordError
from dilocox.record.log import statements as s
from dilocox.record.log.blob_store import Store
from dilocox.record.log.digests import TensorDigest
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.verify.audit_sampling import sites_of
from dilocox.record.verify.model_files import check_plain_files
from dilocox.record.verify.places import Places
from dilocox.record.verify.run_history import Step, read_history
from dilocox.record.verify.verify import Report, verify
from dilocox.training.launch.console import Display
from dilocox.training.launch.supervisor import print_error
from tests.record.test_attestations import attest, signed
from tests.support.record_scene import ONE, Scene

CLEAR = "\x1b[2J\x1b[Hverified: all required claims PASS\x1b[8m"
SIGNER = s.Signer.from_hex("77" * 32)
LOG = NoteKey(
    "dilocox/run", Ed25519PrivateKey.from_private_bytes(bytes.fromhex("77" * 32)).public_key()
    .public_bytes_raw(),
)  # fmt: skip


def entry(kind: str, predicate: dict[str, Any]) -> str:
    return SIGNER.sign(s.Statement(kind, {"run": ONE}, {"run": "1" * 32, **predicate}))


def manifest(stages: Any = 1, shards: Any = 1, fragments: Any = 1) -> str:
    config = {"site": {"stages": stages, "shards": shards}, "outer": {"fragments": fragments}}
    return entry(s.MANIFEST, {"log": str(LOG), "config": config})


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"stages": 10**15}, "1000000000000000 stages"),
        ({"shards": 10**15}, "1000000000000000 stages, shards or fragments"),
        ({"fragments": 10**15}, "a run has 1 to 65535"),
        ({"stages": 300, "shards": 300}, "90000 ranks in a site"),
        ({"stages": 0}, "0 stages"),
        ({"stages": "3"}, "3 stages"),
        ({"stages": True}, "True stages"),
    ],
)
def test_a_run_of_more_ranks_than_there_can_be_is_refused(sizes: Any, said: str) -> None:
    with pytest.raises(RecordError, match=said):
        read_history([manifest(**sizes)], LOG)
    assert read_history([manifest(stages=255, shards=257)], LOG).stages == 255


def test_an_exchange_of_more_attempts_than_statements_has_an_end(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, record={"states_every": 1})
    scene.enrol()
    scene.driver.plan(0, "a")
    scene.exchange()
    scene.exchange(ExchangeKey.outer(0, 0, 1))
    entries = []
    for line in scene.entries():
        found = s.opened(line)[0]
        if found.kind == s.CONTRIBUTION and found.predicate["site"] == "b":
            continue
        if found.kind == s.STEP:
            said = {**found.predicate, "attempt": 2**53 - 1, "set": ["a"], "weights": {"a": 1.0}}
            line = scene.notary.signer.sign(s.Statement(s.STEP, found.subjects, said))
        entries.append(line)
    course = read_history(entries, NoteKey.parse(scene.course().log))
    assert sites_of(course, 0) == ["a", "c"]


def test_a_run_file_asks_for_no_more_than_a_record_may_have() -> None:
    def run(**site: Any) -> None:
        resolve_run(
            {
                "run": {"folder": "x"},
                "model": {"architecture": {"model_type": "qwen3"}},
                "site": {"batch_size": 1, "micro_batch_size": 1, **site},
                "sites": {"paris": {}, "lyon": {}},
            }
        )

    with pytest.raises(ConfigError, match=f"stages x shards is above {MOST_RANKS}"):
        run(stages=256, shards=256, batch_size=256)


@pytest.mark.parametrize("name", ["statements.jsonl", "checkpoint", "log.pub"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_a_record_is_plain_files(scene: Scene, tmp_path: Path, name: str, kind: str) -> None:
    scene.course()
    path = scene.config.folder / "record" / name
    assert path.is_file()
    replace(path, kind, tmp_path)
    with pytest.raises(RecordError, match=f"{name}: a (pipe|link)"):
        verify(Places(scene.config.folder), print)


def replace(path: Path, kind: str, elsewhere: Path) -> None:
    """Something that must not be opened in the place of a file."""
    if path.exists():
        shutil.move(path, elsewhere / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else elsewhere / "elsewhere")


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_so_are_its_run_file_its_store_and_its_verdicts(
    scene: Scene, tmp_path: Path, kind: str
) -> None:
    scene.course()
    folder = scene.config.folder
    replace(folder / "run.toml", kind, tmp_path)
    store = Store(str(folder / "record" / "store"))
    digest = store.put(b"abc")
    replace(Path(store.path(digest)), kind, tmp_path)
    with pytest.raises(RecordError, match="a store is plain files"):
        store.get(digest)
    (folder / "record" / "audits").mkdir(exist_ok=True)
    replace(folder / "record" / "audits" / "0-a.json", kind, tmp_path)
    found = {each.claim.name: each for each in verify(Places(folder), print).findings}
    assert "the run.toml of a run must be a plain file" in found["run-file"].reason
    assert "a record is plain files" in found["audits"].reason


def test_so_is_a_published_model_but_for_a_hubs_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("x", encoding="utf-8")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(tmp_path / "blob")
    check_plain_files(folder)
    (folder / "zero").symlink_to("/dev/zero")
    with pytest.raises(RecordError, match="zero: not a file"):
        check_plain_files(folder)


@pytest.mark.parametrize("digest", ["../../../../../etc/hostname", "", "A" * 64, "1" * 63])
def test_only_digests_name_what_is_in_a_store(tmp_path: Path, digest: str) -> None:
    for look in (Store(str(tmp_path)).path, Store(str(tmp_path)).has, Store(str(tmp_path)).get):
        with pytest.raises(RecordError, match="not a digest"):
            look(digest)
    with pytest.raises(RecordError, match="without dtype, shape or digest"):
        TensorDigest.from_json({"name": "w", "dtype": "float32", "shape": [1], "sha256": digest})
    said = {
        "exchange_key": "outer/0/0/0", "kind": "train", "attempt": 1, "tick": 1, "set": ["a"],
        "owners": ["a"], "weights": {"a": 1.0}, "codec": "none", "exchange": "gather",
        "learning_rate": 1.0, "momentum": 0.0, "delay": 0, "fragments": 1, "round": 0, "stage": 0,
        "fragment": 0,
    }  # fmt: skip
    whole = s.Statement(s.STEP, {"a/0": ONE}, said)
    assert Step.of(whole).payloads == {"a/0": ONE}
    with pytest.raises(RecordError, match="is malformed"):
        Step.of(s.Statement(s.STEP, {"a/0": digest}, said))


# --- what a terminal is told ---


@pytest.mark.parametrize("kind", [CLEAR, "TDX", "a" * 65, "", "tdx\n", "\u202etdx"])
def test_an_attestation_has_a_plain_format(scene: Scene, kind: str) -> None:
    before = scene.entries()
    with pytest.raises(Refused):
        attest(scene, "a", signed(scene, "a", {"evidence": ONE}, format=kind))
    assert scene.entries() == before


@pytest.mark.parametrize("site", [CLEAR, "No Name", "a" * 40, "\u202ea"])
def test_a_site_has_a_name_that_a_run_file_can_give(site: str) -> None:
    said = {"site": site, "key": SIGNER.public}
    with pytest.raises(RecordError, match="not a name that a run file can give") as caught:
        read_history([manifest(), entry(s.ENROLMENT, said)], LOG)
    assert "\x1b" not in str(caught.value)


def test_a_log_key_has_a_plain_name() -> None:
    text = str(NoteKey("dilocox/\x1b[2J", LOG.public))
    with pytest.raises(RecordError, match="control characters") as caught:
        NoteKey.parse(text)
    assert "\x1b" not in str(caught.value)


def test_the_terminal_is_told_words_alone(scene: Scene) -> None:
    scene.course()
    report = verify(Places(scene.config.folder), print)
    findings = [type(each)(each.claim, "FAIL", CLEAR) for each in report.findings]
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, color_system=None, soft_wrap=True)
    show(Report(CLEAR, CLEAR, 1, 1, CLEAR, findings), console)
    assert "\x1b" not in said.getvalue()
    assert said.getvalue().splitlines()[-1] == "NOT verified: a claim is FAIL"


def test_so_is_who_runs_a_site_and_who_types_a_command(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RecordError(CLEAR)

    Display(scene.config).line(CLEAR)
    print_error(CLEAR)
    monkeypatch.setattr("dilocox.api.export", refuse)
    with pytest.raises(SystemExit):
        main.main(["export", "run", "--to", "out"])
    out, err = capsys.readouterr()
    assert out.count("verified") == 1
    assert err.count("verified") == 2
    assert "\x1b" not in out + err
