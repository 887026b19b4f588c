"""What `dilocox report --compliance` says of a run: every figure is the record's, or is absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.support.older_record import unpacked
from tests.support.record_scene import Scene
from tests.support.report_runs import BAD, usual, write_run

from dilocox.cli.main import main
from dilocox.cli.verify import judged
from dilocox.record.log.audit_verdicts import (
    AuditVerdict,
    Selection,
    Signed,
    Verdict,
    digest_of,
    write,
)
from dilocox.record.log.statements import Signer
from dilocox.record.log.transparency_log import read_text
from dilocox.record.log.verdict_statements import of_file
from dilocox.record.verify.claims import CLAIMS
from dilocox.record.verify.verdict_validity import prefixes_of
from dilocox.tools.report.compliance import TITLES, compliance_text, standing, without_paths
from dilocox.tools.report.compliance_facts import GROUPS, Fact, collect
from dilocox.tools.report.compliance_items import RULES
from dilocox.tools.report.folder import RunFiles, read_run
from dilocox.tools.report.history import read_history
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE

ROOT = Path(__file__).parents[3]


def values(folder: Path, data: Path | None = None) -> dict[str, str]:
    """The value of each fact, by its name."""
    files = read_run(folder, None, data)
    groups = collect(files, read_history(files.metrics)).values()
    return {fact.name: fact.value for group in groups for fact in group}


def cells(text: str) -> dict[str, list[str]]:
    """The cells of each row of each table, without escapes, by their first cell."""
    rows = [line.replace("\\", "").strip("| ").split(" | ") for line in text.splitlines()
            if line.startswith("|")]  # fmt: skip
    return {row[0]: row[1:] for row in rows}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("old"))


def test_figures_are_those_of_the_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "toy", usual())
    index = {"metadata": {"total_parameters": 6, "total_size": 24}, "weight_map": {}}
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    found = values(folder)
    # Three rounds of 400 tokens by two sites; 6 parameters.
    assert found["tokens trained on"] == "1,200"
    assert (found["rounds"], found["sites that trained"]) == ("3", "2")
    assert found["computation, estimated as 6 x parameters x tokens"] == "4.32e+04 FLOP"
    assert found["training time, sum over rounds"] == "30 s"
    assert found["held-out loss, first"] == "6.0000"
    assert found["held-out loss, last"] == "3.5000"
    assert found["how the run ended"] == "finished"
    assert found["outer.method"] == "dilocox"
    assert found["sites with text of their own"] == "none"
    assert found["energy"] == found["record"] == found["audits"] == found["training data"] == ""


def test_facts_of_the_record_have_the_verdicts_of_verify(old: Path) -> None:
    data = old.parent / "data"
    files = read_run(old, None, data)
    assert files.record is not None
    assert files.data is not None
    claims = judged(old, data=data)
    text = compliance_text(files, 0.0, claims)
    rows = cells(text)
    course, content = files.record.course, files.data["content"]
    assert rows["run"] == [course.run, "record", "log, signatures PASS"]
    assert rows["digest of dilocox's code"][0] == course.manifest["code"]
    assert rows["parameters"] == [f"{files.parameters:,}", "model/", "model PASS"]
    assert rows["outer.method"][-1] == "not verified: run-file NOT_RUN"
    assert rows["train"][0].startswith(f"{content['splits']['train']['tokens']:,} tokens in ")
    assert rows["signed outer steps"][0] == f"{len(course.steps)}"
    assert rows["digest"] == [files.data["digest"], "token files' manifest",
                              "not verified: data NOT_RUN"]  # fmt: skip
    for each in claims["claims"]:
        # The verdict stands with its limits.
        assert rows[each["name"]][0] == each["verdict"]
        assert rows[each["name"]][2:] == [" ".join(each["proves"].split()), each["not_proved"]]
    assert "- Absent: energy (dilocox measures no energy)." in text
    assert "- Absent: source 1, licence (nobody has stated one)." in text
    # The digest that the sites signed does not cover the name.
    assert rows["source 1, name as whoever prepared it states"] == [
        "text", "token files' manifest", "no claim covers it",
    ]  # fmt: skip


def test_nothing_is_verified_without_verify(old: Path) -> None:
    text = compliance_text(read_run(old), 0.0, None)
    assert "**nothing below is verified.**" in text
    marks = [row[-1] for name, row in cells(text).items() if name in values(old)]
    assert len(marks) > 20
    assert set(marks) == {"not verified: dilocox verify was not run"}


def test_a_changed_weight_takes_the_mark_from_the_model(tmp_path: Path) -> None:
    folder = unpacked(tmp_path)
    weights = folder / "model" / "model-00001-of-00001.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    rows = cells(compliance_text(read_run(folder), 0.0, judged(folder)))
    assert rows["parameters"][-1] == "NOT VERIFIED: model FAIL"
    assert rows["run"][-1] == "log, signatures PASS"
    assert rows["signed final states"][-1] == "NOT VERIFIED: model FAIL"


@given(st.lists(st.sampled_from(["PASS", "FAIL", "NOT_RUN", "absent"]), min_size=1, max_size=4))
def test_only_passes_make_a_pass(given_: list[str]) -> None:
    names = tuple(f"claim{n}" for n in range(len(given_)))
    verdicts = {n: v for n, v in zip(names, given_, strict=True) if v != "absent"}
    said = standing(Fact("a", "1", "file", names), verdicts)
    assert (said == f"{', '.join(names)} PASS") == (set(given_) == {"PASS"})
    assert said.startswith("NOT VERIFIED") == ("FAIL" in given_)
    assert standing(Fact("a", "1", "file"), verdicts) == "no claim covers it"


def test_audits_and_own_text_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "toy", usual())
    text = (folder / "run.toml").read_text()
    own = f'[privacy]\nclip = 1.5\n[sites.lyon.data]\nsource = "{tmp_path}/secret"'
    private = text.replace("[sites.lyon]", own)
    (folder / "run.toml").write_text(private)
    summary = json.loads((folder / "summary.json").read_text())
    summary["privacy"] = {"lyon": {"contributions": 4, "epsilon": 2.5, "delta": 1e-6}}
    (folder / "summary.json").write_text(json.dumps(summary))
    signer = Signer.from_hex("22" * 32)
    for round_, verdict in enumerate(("EXACT", "EXACT", "NOT_RUN")):
        given_ = Verdict("lyon", round_, verdict, "reason")  # type: ignore[arg-type]
        write(folder, Signed(given_, Selection("request"), signer.public, "r"), signer, "00")
    found = values(folder)
    assert found["audited rounds of sites with verdict EXACT"] == "2"
    assert found["audited rounds of sites with verdict NOT_RUN"] == "1"
    assert found["auditors' keys"] == "1"
    assert found["sites with text of their own"] == "lyon"
    assert found["privacy.clip"] == "1.5"
    assert found["privacy of the text of lyon"].startswith("epsilon 2.5 at delta 1e-06 after 4")


def test_a_round_counts_once_and_only_if_no_resume_abandoned_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.enrol()
    before = len(scene.entries())
    scene.notary.resumed(0, 0)
    scene.notary.close()
    folder = scene.config.folder
    (folder / "run.toml").write_text(scene.config.to_toml())
    after = len(scene.entries())
    seen = prefixes_of(scene.entries(), {before, after})
    judged_: list[tuple[int, int, AuditVerdict]] = [
        (before, 0, "EXACT"), (after, 1, "EXACT"), (after, 1, "EXACT"), (after, 2, "NOT_RUN"),
    ]  # fmt: skip
    for number, (read, round_, verdict) in enumerate(judged_, 10):
        signer = Signer.from_hex(f"{number}" * 32)
        given_ = Verdict("a", round_, verdict, "reason")
        signed = Signed(given_, Selection("request"), signer.public, scene.notary.run, seen[read])
        write(folder, signed, signer, "00")
    files, found = read_run(folder), values(folder)
    assert (len(files.audits), len(files.standing)) == (4, 3)
    assert found["audited rounds of sites with verdict EXACT"] == "1"
    assert found["audited rounds of sites with verdict NOT_RUN"] == "1"
    assert found["auditors' keys"] == "3"


def test_a_verdict_that_its_auditor_has_replaced_does_not_count(tmp_path: Path) -> None:
    """By the log, which names both. The earlier file is still in the folder."""
    scene = Scene(tmp_path)
    scene.enrol()
    folder, run, signer = scene.config.folder, scene.notary.run, Signer.from_hex("22" * 32)
    (folder / "run.toml").write_text(scene.config.to_toml())
    named: set[str] = set()
    for verdict in ("NOT_RUN", "EXACT"):
        size = len(scene.entries())
        seen = prefixes_of(scene.entries(), {size})[size]
        judged_ = Verdict("a", 0, verdict, "reason")  # type: ignore[arg-type]
        signed = Signed(judged_, Selection("request"), signer.public, run, seen)
        line = read_text(write(folder, signed, signer, "00", named))
        named.add(digest_of(line))
        scene.notary.writer.append(signer.sign(of_file(signed, line, "").statement(run)))
    scene.notary.close()
    files, found = read_run(folder), values(folder)
    assert (len(files.audits), len(files.standing)) == (2, 1)
    assert found["audited rounds of sites with verdict EXACT"] == "1"
    assert "audited rounds of sites with verdict NOT_RUN" not in found


def test_adapters_are_not_called_the_model_s_parameters(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "toy", usual())
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(f'{text}[adapter]\nrank = 4\nhandover = "{tmp_path}/one"\n')
    (folder / "model").mkdir()
    save_file({"a": np.zeros((3, 4), np.float32)}, folder / "model" / ADAPTER_FILE)
    (folder / "model" / ADAPTER_CONFIG).write_text("{}")
    found = values(folder)
    assert found["parameters of the adapters"] == "12"
    assert found["parameters of the base model"] == found["computation"] == ""
    assert "parameters" not in found
    assert found["what training went on from"] == (
        "adapters and outer momentum of an earlier run, from its handover"
    )
    assert found["the earlier run"] == ""
    assert str(tmp_path) not in compliance_text(read_run(folder), 0.0, None)


def test_adapters_that_training_started_from_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "toy", usual())
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(f'{text}[adapter]\nrank = 4\npath = "{tmp_path}/one"\n')
    found = values(folder)
    assert found["adapters that training started from"] == "trained before, named in adapter.path"
    assert found["where these adapters come from"] == ""
    assert "what training went on from" not in found
    assert str(tmp_path) not in compliance_text(read_run(folder), 0.0, None)


STARTS = {
    'path = "some/model"': ("model that training started from", "some/model"),
    'path = "some/model"\npretrained = false': (
        "start of training", "initial weights made by the run's seed, no other model",
    ),
    "own = true": ("start of training", "weights of the site that began the run (model.own)"),
    'path = "some/model"\nhandover = true': (
        "what training went on from",
        "weights and outer momentum of an earlier run, from its handover",
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", STARTS)
def test_where_training_began(tmp_path: Path, model: str) -> None:
    """Also by a run file that leaves out what is the default."""
    folder = write_run(tmp_path / "toy", usual())
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace('path = "some/model"', model))
    name, value = STARTS[model]
    assert values(folder)[name] == value


def test_how_a_run_ended_is_covered_by_no_claim(tmp_path: Path) -> None:
    """It is the text of a file that no site has signed."""
    folder = write_run(tmp_path / "toy", usual(), "finished with great success")
    claims = {"claims": [{"name": claim.name, "verdict": "PASS", "reason": "", "proves": "",
                          "not_proved": ""} for claim in CLAIMS]}  # fmt: skip
    rows = cells(compliance_text(read_run(folder), 0.0, claims))
    assert rows["how the run ended"] == [
        "finished with great success", "summary.json", "no claim covers it",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "path",
    ["/home/anna/m", "file:///home/anna/m", "file:/home/anna/m", "FILE://localhost/home/anna/m",
     "~anna/x/m", "file://~/anna/m", "../anna/m"],
)  # fmt: skip
@pytest.mark.parametrize("line", ["{}", "'{}': not there", "at:{}, and {}.", "({})"])
def test_paths_are_replaced_by_their_last_part(tmp_path: Path, path: str, line: str) -> None:
    said = without_paths(line.replace("{}", path), RunFiles(tmp_path / "toy"))
    assert said == line.replace("{}", "m")


@pytest.mark.parametrize(
    "text", ["s3://bucket/anna/m", "https://host:80/anna/m", "zerog://ab@host:1/x", "and/or a/b/c"]
)
def test_other_urls_are_no_paths(tmp_path: Path, text: str) -> None:
    assert without_paths(text, RunFiles(tmp_path / "toy")) == text


def test_no_path_no_markup_and_no_secret_comes_in(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "with space" / "toy", usual())
    text = (folder / "run.toml").read_text()
    text = text.replace('path = "some/model"', f'path = "{tmp_path}/models/base"')
    text = text.replace('name = "toy"', f"name = '''{BAD}'''")
    text += f'[sites.oslo]\n[sites.oslo.data]\nsource = "{tmp_path}/patients"\n'
    (folder / "run.toml").write_text(text)
    (folder / "coordinator").mkdir()
    (folder / "coordinator" / "record-key").write_text("5ec3e7" * 10)
    reason = f"2 files of {folder.resolve()}/model, {tmp_path}/keys/own.pub and ~/x/y and ../up/z"
    claim = {"name": "model", "verdict": "PASS", "reason": reason, "proves": "a",
             "not_proved": "b"}  # fmt: skip
    said = compliance_text(read_run(folder), 0.0, {"claims": [claim]})
    assert "2 files of toy/model, own.pub and y and z" in said
    for secret in (str(tmp_path), "patients", "5ec3e7", "<script>", "with space"):
        assert secret not in said
    assert "/models/base" not in said
    assert cells(said)["architecture"][0] == "base"


def test_the_command_writes_the_report_and_refuses_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "toy", usual())
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder), "--compliance"])
    assert end.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder / "compliance.md")
    assert "This is not legal advice" in (folder / "compliance.md").read_text()
    assert not (folder / "report.html").exists()
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder), "--compliance", "--live"])
    assert end.value.code == 1
    assert "--compliance cannot be given with it" in capsys.readouterr().err


def test_items_groups_claims_and_the_page_agree(tmp_path: Path) -> None:
    assert list(TITLES) == list(GROUPS)
    items: list[Any] = [item for rule in RULES for item in rule.items]
    assert {group for item in items for group in item.facts} == set(GROUPS)
    assert all(item.facts or item.missing for item in items)
    page = (ROOT / "docs" / "compliance.md").read_text()
    for rule in RULES:
        assert page.count(f"| {rule.items[0].place} |") == 1
        assert all(f"| {item.place} |" in page for item in rule.items), rule.title
    folder = unpacked(tmp_path)
    groups = collect(read_run(folder), read_history([])).values()
    used = {claim for group in groups for fact in group for claim in fact.claims}
    assert used <= {claim.name for claim in CLAIMS}
