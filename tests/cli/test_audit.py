"""The commands: what is selected, what is said, signed and kept; and what verify makes of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.cli import audit
from dilocox.cli.main import _parser
from dilocox.coordinator.protocol.audit_messages import HandInReply
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.generations import MARKER, Generations
from dilocox.errors import ConfigError, RecordError, TrainingError
from dilocox.record.log import statements as s
from dilocox.record.log.audit_verdicts import (
    AuditVerdict,
    Selection,
    Signed,
    Verdict,
    paths_of,
    read_all,
    write,
)
from dilocox.record.log.digests import TensorDigest
from dilocox.record.log.round_document import Document
from dilocox.record.verify.audit_claims import Audits
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.record.writer.one_writer import held
from dilocox.tools.audit.audited_run import AuditedRun
from dilocox.tools.audit.start_state import under_way, wrong_start
from dilocox.training.builder import RankPlace
from dilocox.training.launch import verdict_hand_in
from dilocox.training.launch.verdict_hand_in import HandIn
from tests.support.neighbours import trained_in
from tests.tools.audit.test_cheats import poison

SIGNER = s.Signer.from_hex("0a" * 32)
ROUNDS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds, in the second of which lyon sends poison."""
    folder = trained_in(tmp_path_factory.mktemp("audited"), ROUNDS, {1: poison})
    (folder / "summary.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    shutil.copytree(recorded, tmp_path / "run")
    return tmp_path / "run"


def ended(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    options = _parser().parse_args(list(arguments))
    code = options.call(options)
    return code, capsys.readouterr().out


def audits(folder: Path, *auditors: str) -> Audits:
    run = AuditedRun(folder, (), None)
    return Audits(run.course, run.entries, folder, auditors)


# --- dilocox audit -----------------------------------------------------------------------------


def test_an_audit_in_fresh_processes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = folder.parent / "auditor-key"
    code, text = ended("audit", str(folder), "--round", "0", "--key", str(key), capsys=capsys)
    assert code == 0, text
    assert text.count("EXACT") == 2
    assert key.stat().st_mode & 0o777 == 0o600
    said = read_all(folder, AuditedRun(folder, (), None).course.run)
    assert [(each.verdict.round, each.verdict.site) for each in said] == [(0, "lyon"), (0, "paris")]
    assert {each.auditor for each in said} == {s.Signer.from_hex(key.read_text().strip()).public}
    assert audits(folder).verdicts().startswith("2 of 6 rounds of sites that keep states: 2 EXACT")
    with pytest.raises(NotRunError, match="no audit was selected by the log"):
        audits(folder).beacon()
    code, text = ended(
        "audit", str(folder), "--site", "lyon", "--round", "1", "--key", str(key), "--json",
        capsys=capsys,
    )  # fmt: skip
    found = json.loads(text)
    assert (code, found["exit_code"]) == (1, 1)
    assert found["verdicts"][0]["verdict"] == "MISMATCH"
    assert found["verdicts"][0]["first_bad_step"] == 1
    with pytest.raises(RecordError, match="round 1 of lyon: MISMATCH, lyon stage 0 shard 0"):
        audits(folder).verdicts()


@pytest.mark.parametrize(
    ("round_", "reason"),
    [("7", "does not decide"), ("-1", "does not decide")],
)
def test_what_cannot_be_judged(
    folder: Path, round_: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = ended("audit", str(folder), "--site", "lyon", f"--round={round_}", capsys=capsys)
    assert code == 3
    assert text.startswith("NOT_RUN")
    assert reason in text


def test_token_files_that_are_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ended(
        "audit", str(folder), "--site", "lyon", "--round", "0", "--data", str(folder / "none"),
        capsys=capsys,
    )  # fmt: skip
    assert code == 3
    assert "say with --data where they are" in text


def test_an_auditor_does_not_start_cuda_before_it_forks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks, which are forked from it, could not use a GPU."""
    for command in (["audit", str(folder)], ["auditor", str(folder)]):
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
        options = _parser().parse_args([*command, "--key", str(folder)])
        with pytest.raises(RecordError, match="cannot be used"):
            options.call(options)
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_wrong_arguments(folder: Path, tmp_path: Path) -> None:
    def call(*more: str) -> Any:
        options = _parser().parse_args(["audit", *more])
        return options.call(options)

    with pytest.raises(ConfigError, match="--site rome: not in the run, which names: lyon, paris"):
        call(str(folder), "--site", "rome")
    with pytest.raises(ConfigError, match="leave out --site and --round"):
        call(str(folder), "--site", "lyon", "--sample", "5%")
    with pytest.raises(ConfigError, match="add --sample"):
        call(str(folder), "--randomness", "file")
    with pytest.raises(RecordError, match="was this run recorded"):
        call(str(tmp_path / "nothing"))
    with pytest.raises(RecordError, match="copy the run here"):
        call("s3://bucket/run")
    (tmp_path / "key").write_text("no key")
    with pytest.raises(RecordError, match="not a key"):
        call(str(folder), "--key", str(tmp_path / "key"))


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), ("100%", 1.0)])
def test_shares(text: str, value: float) -> None:
    assert audit.share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["0", "5", "-1%", "many", "101%"])
def test_no_shares(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"give 5% or 0\.05"):
        audit.share(text)


# --- verdicts that the log names ----------------------------------------------------------------


def given(folder: Path, kind: AuditVerdict, round_: int = 0, signer: s.Signer = SIGNER) -> Path:
    """A verdict on a round of lyon, as an audit writes it."""
    run = AuditedRun(folder, (), None)
    states = {"0/0": run.course.rounds[(round_, "lyon", 0, 0)].document}
    verdict = Verdict("lyon", round_, kind, "for a test", states=states)
    chosen = Selection("request")
    signed = Signed(verdict, chosen, signer.public, run.course.run, run.seen())
    return write(folder, signed, signer, "00")


def handed_in(folder: Path, *paths: Path, signer: s.Signer = SIGNER) -> HandIn:
    run = AuditedRun(folder, (), None)
    found = HandIn.open(verdict_hand_in._own(folder), signer, run.course.run)
    for path in paths:
        found.file(path)
    assert found.failed == []
    return found


def test_a_bad_verdict_cannot_be_taken_away(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Handed in by the command, where no coordinator runs any more."""
    key = tmp_path / "key"
    good = given(folder, "EXACT", 0)
    more = ("--site", "lyon", "--round", "1", "--key", str(key), "--hand-in")
    code, text = ended("audit", str(folder), *more, capsys=capsys)
    assert code == 1
    assert "named in the run's log: 1" in text
    public = s.Signer.from_hex(key.read_text().strip()).public
    (bad,) = (path for path in paths_of(folder) if public[:16] in path.name)
    report = verify(Places(folder), lambda *_: None)
    found = {each.claim.name: each for each in report.findings}
    assert found["log"].verdict == found["signatures"].verdict == "PASS"
    assert found["audits"].verdict == "FAIL"
    bad.unlink()
    with pytest.raises(RecordError) as refused:
        audits(folder).verdicts()
    said = f"round 1 of lyon: MISMATCH, signed by {public[:12]}… and handed in by the operator"
    assert str(refused.value).startswith(f"{said}, by the log (statement ")
    assert str(refused.value).endswith("; this verdict is not in record/audits")
    # The same with nothing there that was audited, and with the auditor's file written anew.
    good.unlink()
    with pytest.raises(RecordError, match="this verdict is not in record/audits"):
        audits(folder).verdicts()
    given(folder, "EXACT", 1, s.Signer.from_hex(key.read_text().strip()))
    with pytest.raises(RecordError, match="this verdict is not in record/audits"):
        audits(folder).verdicts()
    # Nobody whose verdicts count has handed it in.
    with pytest.raises(NotRunError, match="none of 6"):
        audits(folder, SIGNER.public).verdicts()


def test_other_verdicts_that_are_missing_are_named(folder: Path) -> None:
    first, second = given(folder, "EXACT", 0), given(folder, "NOT_RUN", 2)
    handed_in(folder, first, second)
    with pytest.raises(NotRunError, match="no round of paris was found good"):
        audits(folder).verdicts()
    second.unlink()
    with pytest.raises(NotRunError, match="the log names 1 verdict that is not here, the first: "
                                          "round 2 of lyon: NOT_RUN, signed by "):  # fmt: skip
        audits(folder).verdicts()
    # The auditor's later word takes the place of the earlier one, in the folder and in the log.
    later = given(folder, "EXACT", 2)
    with pytest.raises(NotRunError, match="the log names 1 verdict "):
        audits(folder).verdicts()
    again = handed_in(folder)
    again.earlier(folder, AuditedRun(folder, (), None).course)
    assert again.done == 1, "what the log names already is not handed in again"
    with pytest.raises(NotRunError, match="no round of paris was found good"):
        audits(folder).verdicts()
    # Another file under the same name is not the one that the log names.
    later.write_text(first.read_text())
    with pytest.raises(NotRunError, match="the log names 1 verdict "):
        audits(folder).verdicts()


def test_auditing_again_keeps_what_the_log_names(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Readers look for the file until the log names a newer verdict of the auditor."""
    key = tmp_path / "key"
    key.write_text("0a" * 32)
    wrong = given(folder, "MISMATCH", 0)
    handed_in(folder, wrong)
    line = wrong.read_text()
    more = ("--site", "lyon", "--round", "0", "--key", str(key))
    code, text = ended("audit", str(folder), *more, capsys=capsys)
    assert code == 0, text
    assert "the log names an earlier verdict of this key: --hand-in names this one, too" in text
    assert sorted(each.verdict.verdict for each in read_all(folder, audits(folder).course.run)) == [
        "EXACT", "MISMATCH",
    ]  # fmt: skip
    with pytest.raises(RecordError, match="round 0 of lyon: MISMATCH, for a test"):
        audits(folder).verdicts()
    # Again: there is one file for each that the log names, and one that it does not name.
    ended("audit", str(folder), *more, capsys=capsys)
    (kept,) = (path for path in paths_of(folder) if path.read_text() == line)
    assert len(paths_of(folder)) == 2
    code, text = ended("audit", str(folder), *more, "--hand-in", capsys=capsys)
    assert code == 0, text
    with pytest.raises(NotRunError, match="no round of paris was found good"):
        audits(folder).verdicts()
    kept.unlink()
    with pytest.raises(NotRunError, match="no round of paris was found good"):
        audits(folder).verdicts()


def test_the_line_says_what_the_log_names(folder: Path) -> None:
    first = given(folder, "EXACT", 0)
    run = AuditedRun(folder, (), None)
    states = {"0/0": run.course.rounds[(0, "paris", 0, 0)].document}
    chosen, good = Selection("request"), Verdict("paris", 0, "EXACT", "", states=states)
    write(folder, Signed(good, chosen, SIGNER.public, run.course.run), SIGNER, "00")
    handed_in(folder, first)
    assert audits(folder).verdicts().endswith("paris 1 of 3; 1 by the log, and here")


def test_a_coordinator_that_runs_is_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is held by its process: nobody else writes its log."""
    path, place = given(folder, "EXACT", 0), folder / "coordinator"
    asked: list[str | None] = []
    run = AuditedRun(folder, (), None).course.run

    def answer(config: object, place: Path, statement: str | None) -> HandInReply:
        asked.append(statement)
        return HandInReply(run=run, by="")

    monkeypatch.setattr(verdict_hand_in, "_asked", answer)
    with held(place) as own:
        assert own
        handed_in(folder, path)
    with contextlib.closing(EventLog(place)):  # a coordinator of an older dilocox
        handed_in(folder)
    assert asked[2:] == [None]
    assert asked[0] is None
    said = s.opened(asked[1] or "")[0]
    assert (said.kind, said.predicate["verdict"]) == (s.VERDICT, "EXACT")
    monkeypatch.undo()
    with held(place), pytest.raises(RecordError, match="its coordinator cannot be asked"):
        handed_in(folder, path)


@pytest.mark.parametrize("fenced", [True, False])
def test_the_log_that_another_machine_writes_is_not_continued_here(
    folder: Path, fenced: bool
) -> None:
    """The run's key would sign two logs: this machine is out of date, or a standby's."""
    path, place = given(folder, "EXACT", 0), folder / "coordinator"
    if fenced:
        Generations(place).end()
    else:
        (place / MARKER).write_text("{}")
    before = {each.name: each.read_bytes() for each in (folder / "record").glob("*") if
              each.is_file()}  # fmt: skip
    why = "a standby has taken over" if fenced else "is the folder of a standby"
    with pytest.raises(TrainingError, match=why):
        handed_in(folder, path)
    assert all((folder / "record" / name).read_bytes() == data for name, data in before.items())


def test_what_cannot_be_handed_in_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*more: str) -> Any:
        options = _parser().parse_args(["audit", str(folder), "--site", "lyon", *more])
        return options.call(options)

    with pytest.raises(ConfigError, match="--coordinator needs --hand-in"):
        call("--coordinator", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="--token-file needs --coordinator HOST:PORT"):
        call("--hand-in", "--token-file", "x")
    (tmp_path / "token").write_text(f"dilocox1-{'0' * 64}-{'0' * 32}")
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        call("--hand-in", "--coordinator", "here", "--token-file", str(tmp_path / "token"))
    (folder / "coordinator" / "record-key").unlink()
    with pytest.raises(RecordError, match=r"not the folder of the run's coordinator .*; give its "
                                          "address with --coordinator"):  # fmt: skip
        call("--hand-in")
    # Of what is lost on the way the file stays, and the exit code says so.
    run = AuditedRun(folder, (), None).course.run

    def lost(statement: str | None) -> HandInReply:
        if statement is not None:
            raise RecordError("the coordinator is gone")
        return HandInReply(run=run, by="lyon")

    log = HandIn.open(lost, SIGNER, run)
    path = given(folder, "EXACT", 0)
    log.file(path)
    assert (log.done, log.failed) == (0, [f"{path.name}: the coordinator is gone"])
    good = Verdict("lyon", 0, "EXACT", "")
    assert [audit.exit_code([good], each) for each in (None, log)] == [0, 3]
    with pytest.raises(RecordError, match="this coordinator's run is 1111"):
        HandIn.open(lambda _: HandInReply(run="1" * 32, by=""), SIGNER, run)


# --- selection ---------------------------------------------------------------------------------


def test_samples_can_be_worked_out_by_all(folder: Path) -> None:
    run, again = AuditedRun(folder, (), None), AuditedRun(folder, (), None)
    everything = run.sampled(1.0)
    assert [(each.round, each.site) for each in everything] == [
        (round_, site) for round_ in range(ROUNDS) for site in ("lyon", "paris")
    ]
    assert run.sampled(0.5) == again.sampled(0.5)
    (one,) = run.sampled(1e-9)
    assert one.selection.size > 0
    other = {round_: bytes([round_]) for round_ in range(ROUNDS)}
    assert len(run.sampled(1.0, other)) == len(everything)
    with pytest.raises(RecordError, match="has no value of round 0 and 1 more: add the values"):
        run.sampled(1.0, {1: b"1"})
    draws = [run.drawn(0, 1.0, value)[0][0] for value in (b"", other[0], other[1])]
    assert len(set(draws)) == 3
    assert all(0.0 <= draw < 1.0 for draw in draws)


def test_the_point_covers_states_and_payloads(folder: Path) -> None:
    """Whoever knows the selection of a round finds all in the log that it is judged by."""
    run = AuditedRun(folder, (), None)
    for round_ in range(ROUNDS):
        (_, chosen), _ = run.drawn(round_, 1.0, b"")
        kinds = [s.opened(entry)[0] for entry in run.entries[: chosen.selection.size]]
        mine = [each for each in kinds if each.predicate.get("round") == round_]
        assert [each.kind for each in mine].count(s.ROUND) >= 2
        assert [each.kind for each in mine].count(s.STEP) == 2
        assert kinds[-1].kind == s.STEP


# --- dilocox auditor ---------------------------------------------------------------------------


def test_an_auditor_shows_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    code, text = ended("auditor", "--show-key", "--key", str(key), capsys=capsys)
    assert (code, text.strip()) == (0, s.Signer.from_hex(key.read_text().strip()).public)
    assert key.stat().st_mode & 0o077 == 0
    assert ended("auditor", "--show-key", "--key", str(key), capsys=capsys)[1] == text
    with pytest.raises(RecordError, match=r": cannot be used \(Is a directory\); name another"):
        ended("auditor", "--show-key", "--key", str(tmp_path), capsys=capsys)
    for words in (["--show-key"], ["--show-key", "--key", str(key), str(tmp_path)], []):
        with pytest.raises(ConfigError):
            ended("auditor", *words, capsys=capsys)


def test_an_auditor_of_a_run_that_has_ended(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It audits what public randomness selects, and not twice."""
    values = tmp_path / "randomness"
    values.write_text("# round, value\n" + "".join(f"{n} {n:064x}\n" for n in range(ROUNDS)))
    run = AuditedRun(folder, (), None)
    expected = [
        (chosen.round, chosen.site)
        for round_ in range(ROUNDS)
        for draw, chosen in run.drawn(round_, 0.5, round_.to_bytes(32, "big"))
        if draw < 0.5
    ]
    more = ("--key", str(tmp_path / "key"), "--randomness", str(values), "--sample", "50%")
    code, text = ended("auditor", str(folder), *more, capsys=capsys)
    # What was poisoned in round 1 is still under way when round 2 begins.
    bad = len({(1, "lyon"), (2, "lyon")} & set(expected))
    said = [(each.verdict.round, each.verdict.site) for each in read_all(folder, run.course.run)]
    assert said == expected
    assert text.count("EXACT") == len(expected) - bad, text
    # It may be that nothing was selected: then nothing is wrong.
    assert code == (1 if bad else 0)
    code, text = ended("auditor", str(folder), *more, capsys=capsys)
    assert (code, text.count("EXACT")) == (0, 0)


def test_rounds_that_wait_for_a_value_when_the_run_has_ended_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tmp_path / "randomness"
    values.write_text("0 00\n")
    more = ("--key", str(tmp_path / "key"), "--randomness", str(values), "--sample", "0.000001")
    code, text = ended("auditor", str(folder), *more, capsys=capsys)
    assert code == 3
    assert f"not audited: round 1 and 1 more, of which {values} has no value: add the " in text
    assert "call the same command again, which then audits these rounds" in text
    assert (
        "with --key FILE; this key was not kept"
        in ended("auditor", str(folder), *more[2:], capsys=capsys)[1]
    )
    values.write_text("0 00\n1 01\n2 02\n")
    code, text = ended("auditor", str(folder), *more, capsys=capsys)
    assert (code, "not audited" in text) == (0, False)
    values.write_text("0 00\n1 01\n")
    with pytest.raises(RecordError, match="has no value of round 2: add the values"):
        ended("audit", str(folder), *more, capsys=capsys)


def test_the_beacon_claim(folder: Path) -> None:
    run = AuditedRun(folder, (), None)

    def judged(value: bytes, *left_out: tuple[int, str]) -> None:
        for round_ in range(ROUNDS):
            for _, chosen in run.drawn(round_, 1.0, value):
                if (round_, chosen.site) not in left_out:
                    states = {"0/0": run.course.rounds[(round_, chosen.site, 0, 0)].document}
                    verdict = Verdict(chosen.site, round_, "EXACT", "", states=states)
                    signed = Signed(verdict, chosen.selection, SIGNER.public, run.course.run)
                    write(folder, signed, SIGNER, "00")

    rate = float(run.course.config["record"]["audit_rate"])
    judged(b"")
    with pytest.raises(NotRunError, match="the log alone has selected"):
        audits(folder).beacon()
    judged(b"public")
    assert audits(folder).beacon().startswith("6 rounds of sites")
    told = replace(audits(folder), randomness=dict.fromkeys(range(ROUNDS), b"public"))
    assert told.beacon().endswith("--randomness confirms 3 of 3 rounds")
    for values in ({1: b"public"}, {99: b"public"}):
        with pytest.raises(NotRunError, match="--randomness has no public randomness of round 0"):
            replace(told, randomness=values).beacon()
    with pytest.raises(RecordError, match="round 1 was selected with other randomness"):
        replace(told, randomness={1: b"other"}).beacon()
    assert audits(folder).verdicts().startswith("6 of 6")
    with pytest.raises(NotRunError, match="none of 6"):
        audits(folder, "ff" * 32).verdicts()
    # What was selected and has no verdict is seen.
    seed = next(
        bytes([number]) for number in range(256) if run.drawn(1, rate, bytes([number]))[0][0] < rate
    )
    shutil.rmtree(folder / "record" / "audits")
    judged(seed, (1, "lyon"))
    with pytest.raises(NotRunError, match="round 1 of lyon is selected and was not audited"):
        audits(folder).beacon()


def selecting(run: AuditedRun, rate: float, *sites: str) -> dict[int, bytes]:
    """Public randomness that selects these sites of every round at `rate`, and no others."""
    found = {}
    for round_ in range(ROUNDS):
        found[round_] = next(
            value
            for value in (number.to_bytes(2, "big") for number in range(2**16))
            if {c.site for draw, c in run.drawn(round_, 1.0, value) if draw < rate} == {*sites}
        )
    return found


def test_rounds_from_which_nobody_is_selected_need_no_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the reader's own values. Verdicts have none of such a round."""
    run = AuditedRun(folder, (), None)
    rate = float(run.course.config["record"]["audit_rate"])
    quiet = replace(audits(folder), randomness=selecting(run, rate))
    said = "0 rounds of sites are good, among them 0 of the 0 selected at a rate of 5%"
    assert quiet.beacon() == f"{said}; --randomness confirms 3 of 3 rounds"
    both = selecting(run, rate, "lyon", "paris")
    loud = replace(quiet, randomness={**quiet.randomness, 1: both[1]})
    with pytest.raises(NotRunError, match="round 1 of lyon is selected and was not audited"):
        loud.beacon()
    # On request, too: the audit was made, and the site could not know of it.
    given(folder, "EXACT", 1)
    with pytest.raises(NotRunError, match="round 1 of paris is selected and was not audited"):
        loud.beacon()
    # A site that nobody can audit is named, and asked for nothing.
    loud.course.config["sites"]["paris"]["data"] = "own"
    assert loud.beacon().startswith(
        "1 rounds of sites are good, among them 1 of the 2 selected at a rate of 5%; not audited: "
        "paris (text of its own); "
    )
    loud.course.config["record"]["audit_rate"] = 0.0
    with pytest.raises(NotRunError, match=r"record\.audit_rate is 0: nothing can be selected"):
        loud.beacon()
    (folder / "none").write_text("# round, value\n")
    with pytest.raises(RecordError, match="none: holds no value of public randomness"):
        ended("verify", str(folder), "--randomness", str(folder / "none"), capsys=capsys)


def test_verdicts_that_are_not_about_this_log(folder: Path) -> None:
    run = AuditedRun(folder, (), None)
    state = run.course.rounds[(0, "paris", 0, 0)].document
    good = Verdict("paris", 0, "EXACT", "", states={"0/0": state})

    def kept(signed: Signed, signer: s.Signer = SIGNER) -> Path:
        shutil.rmtree(folder / "record" / "audits", ignore_errors=True)
        return write(folder, signed, signer, "00")

    request = Selection("request")
    kept(Signed(good, request, SIGNER.public, run.course.run))
    with pytest.raises(NotRunError, match="no round of lyon was found good; good, of the verdicts "
                                          "in this folder: lyon 0 of 3, paris 1 of 3"):  # fmt: skip
        audits(folder).verdicts()
    other = Verdict("paris", 0, "EXACT", "", states={"0/0": "00" * 32})
    kept(Signed(other, request, SIGNER.public, run.course.run))
    with pytest.raises(RecordError, match="another state than the one in this log"):
        audits(folder).verdicts()
    kept(Signed(good, request, SIGNER.public, "ab" * 16))
    with pytest.raises(RecordError, match="is of run 'abab"):
        audits(folder).verdicts()
    kept(Signed(good, request, SIGNER.public, run.course.run), s.Signer.from_hex("0b" * 32))
    with pytest.raises(RecordError, match="signature is not one of key"):
        audits(folder).verdicts()
    elsewhere = Selection("beacon", 0.5, 3, "00" * 32, "ab")
    kept(Signed(good, elsewhere, SIGNER.public, run.course.run))
    with pytest.raises(RecordError, match="was selected by another log"):
        audits(folder).beacon()


# --- the state at the beginning ------------------------------------------------------------------


def changed(document: Document, name: str) -> Document:
    tensors = tuple(
        TensorDigest(each.name, each.dtype, each.shape, "00" * 32) if each.name == name else each
        for each in document.tensors
    )
    return Document(document.state, tensors, document.facts)


@pytest.mark.parametrize(
    ("round_", "name", "found"),
    [
        (2, "outer/0/anchor", "the anchor of piece 0 is not what the payloads lead to"),
        (2, "outer/1/momentum", "the momentum of piece 1 is not what the payloads lead to"),
        (0, "outer/1/residual", "outer/1/residual is not zero"),
        (0, "live/model.norm.weight", "model.norm.weight is not theta_0's"),
    ],
)
def test_a_state_that_does_not_follow(folder: Path, round_: int, name: str, found: str) -> None:
    case = AuditedRun(folder, (), None).case().of_round(round_)
    place = RankPlace("paris", 0, 0)
    state = case.course.rounds[(round_, "paris", 0, 0)]
    document = Document.from_bytes(case.get(state.document))
    assert wrong_start(case.course, place, state, document, case.get) is None
    bad = changed(document, name)
    assert wrong_start(case.course, place, state, bad, case.get) == found
    if round_:
        less = Document({**document.state, "pending": []}, document.tensors, document.facts)
        said = wrong_start(case.course, place, state, less, case.get)
        assert said == "other exchanges are under way than the log says"


def test_what_is_under_way(folder: Path) -> None:
    """Boundaries at slots 2 and 4 of 4, delay 1: the second fragment's lands in the next round."""
    course = AuditedRun(folder, (), None).course
    assert [step.key.text for step in under_way(course, 0, 2, 8)] == ["outer/1/0/1"]
    assert under_way(course, 0, 0, 0) == []
