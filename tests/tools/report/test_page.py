"""What a page says of a run with hand-made metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support.report_runs import BAD, message, rounds, site, usual, whole, write_run

from dilocox.cli.main import main
from dilocox.errors import ConfigError
from dilocox.record.log.audit_verdicts import Selection, Signed, Verdict, write
from dilocox.record.log.statements import Signer, Statement
from dilocox.tools.report.folder import RunFiles, read_run
from dilocox.tools.report.page import Page, after, build, when
from dilocox.tools.report.render import render

pytestmark = pytest.mark.waits


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return build(read_run(write_run(tmp_path / "toy", usual())), now=0.0)


def test_figures(page: Page) -> None:
    assert (page.name, page.phase, page.tone, page.done) == ("toy", "finished", "good", None)
    assert page.lead.startswith("some/model on 2 sites, 2 stages each. Method dilocox, codec int4")
    assert {tile.label: tile.value for tile in page.tiles} == {
        "Held-out loss": "3.5000",
        "Tokens": "1.2k",
        "Tokens per second": "40",
        "Waited": "10.0%",
        "Sent": "4.0 kB",
        "Synchronous": "75x",
    }
    # 3 rounds of 1000 bytes and a flush of 1000, against 3 x 100 000.
    assert page.tiles[-1].note == "as much traffic: 300.0 kB"
    assert dict(page.totals)["sequences trained on"] == "12"


def test_rounds_that_the_controller_chose_are_not_the_run_files(tmp_path: Path) -> None:
    plan = {"kind": "plan", "round": 0, "codec": "int4", "inner_steps": 20, "slots": 20}
    later = plan | {"round": 2, "codec": "topk:64", "inner_steps": 5}
    flush = plan | {"round": 3, "codec": "int8", "inner_steps": 0, "slots": 0}
    folder = write_run(tmp_path / "toy", [plan, later, flush, *usual()])
    text = (folder / "run.toml").read_text(encoding="utf-8")
    (folder / "run.toml").write_text(text + '[control]\nadapt = "link"\n', encoding="utf-8")
    lead = build(read_run(folder), now=0.0).lead
    assert lead.endswith("chosen for the link: first int4 and 20, last topk:64 and 5.")


def test_charts_of_a_run(page: Page) -> None:
    charts = [chart.id for chart in (*page.learning, *page.traffic, *page.times)]
    assert charts == ["loss", "learning-rate", "bytes", "tokens", "phases", "speed"]
    loss = page.learning[0]
    assert [name for name, _ in loss.names] == ["paris", "lyon", "all sites", "held-out"]
    assert loss.readings[0] == "step 0: held-out 6.000"
    assert loss.readings[-1] == "step 60: paris 3.000, lyon 3.000, all sites 3.000, held-out 3.500"
    assert page.traffic[0].readings[-1] == "step 60: sent 3.0 kB, synchronous training 300.0 kB"
    assert page.times[0].readings[0] == "round 0: training 9.0 s, waiting for the network 1.0 s"


def test_gpus_have_a_utilisation_and_a_peak(tmp_path: Path) -> None:
    records = [
        site(0, "paris", mfu=0.5, peak_memory_bytes=3e9, peak_reserved_bytes=4e9),
        site(0, "lyon", mfu=0.3, peak_memory_bytes=2e9, allocation_retries=2),
        whole(0, mfu=0.4),
        site(1, "paris", mfu=0.3, seconds=30.0, peak_memory_bytes=1e9),
        whole(1, mfu=0.2, seconds=30.0),
    ]
    page = build(read_run(write_run(tmp_path / "toy", records)), now=0.0)
    assert {tile.label: tile.value for tile in page.tiles}["MFU"] == "25.0%"
    chart = next(chart for chart in page.times if chart.id == "mfu")
    assert chart.readings == ("round 0: MFU 40.0%", "round 1: MFU 20.0%")
    paris, lyon = (dict(row.cells) for row in page.sites)
    assert (paris["MFU"], paris["peak memory of a rank"]) == ("35.0%", "3.0 GB")
    assert paris["peak held by the allocator"] == "4.0 GB"
    assert "allocator retries" not in paris
    assert lyon["allocator retries"] == "2"


def test_sites_and_their_share(page: Page) -> None:
    assert [(row.name, row.share) for row in page.sites] == [("paris", 0.75), ("lyon", 0.25)]
    assert dict(page.sites[0].cells)["waited"] == "10.0% (3.0 s)"
    assert [event.text for event in page.membership] == [
        "paris enrolled", "lyon enrolled", "finished",
    ]  # fmt: skip
    assert page.anomalies.rows == ()


def test_anomalies_are_named(tmp_path: Path) -> None:
    records = [
        site(0, "paris", contributors=1, repeated_exchanges=2),
        site(0, "lyon", dropped="stage 1 layer.0", loss=None),
        whole(0, loss=None),
        {"kind": "resumed", "round": 1},
    ]
    found = build(read_run(write_run(tmp_path / "toy", records)), now=0.0).anomalies.rows
    assert [row[1:] for row in found] == [
        ("lyon", "stage 1 layer.0 was not finite; its contribution was dropped"),
        ("paris", "2 exchanges repeated"),
        ("paris", "only 1 of 2 sites counted in a contribution set"),
        ("all", "no finite training loss"),
        ("all", "the run was resumed here"),
    ]
    assert [row[0] for row in found] == ["round 0"] * 4 + ["round 1"]


def test_a_run_that_has_not_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "toy", rounds(0), phase="")
    (folder / "metrics.jsonl").open("a").write('{"kind": "round", "torn')
    files = read_run(folder)
    page = build(files, now=0.0)
    assert (page.phase, page.done) == ("not finished", pytest.approx(20 / 60))
    going_on = build(files, now=0.0, live=True)
    assert going_on.phase == "running"
    assert not any("model" in line or "summary" in line for line in going_on.missing)
    text = "\n".join(page.missing)
    for part in ("summary.json: not there", "record: off in the run file", "model: not published",
                 "token files: no manifest", "metrics.jsonl: 1 lines cannot be read"):  # fmt: skip
        assert part in text
    assert render(page)


def test_nothing_but_a_run_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "toy", [], phase="")
    page = build(read_run(folder), now=0.0)
    assert "curves: no round has ended yet" in page.missing
    assert "No round has ended yet." in render(page)


def test_a_damaged_record_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "toy", usual())
    (folder / "record").mkdir()
    (folder / "record" / "statements.jsonl").write_text("nonsense\n")
    found = build(read_run(folder), now=0.0)
    assert any(line.startswith("record: not shown, it is damaged") for line in found.missing)
    assert "nobody can verify" in render(found)


def test_the_page_needs_nothing_else_and_keeps_text_text(tmp_path: Path) -> None:
    records = [message(BAD, "members"), site(0, BAD), whole(0), message("</script>" + BAD)]
    folder = write_run(tmp_path / "toy", records)
    run_file = folder / "run.toml"
    run_file.write_text(run_file.read_text().replace("some/model", BAD))
    html = render(build(read_run(folder), now=0.0))
    links = re.findall(r' (?:src|href)="([^"]*)"', html)
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    assert "http://" not in html
    assert "https://" not in html
    assert html.count("<script") == 2 + html.count('type="application/json"') - 1
    assert "<img" not in html
    assert "&lt;img src=x" in html
    assert "script-src &#39;sha256-" in html
    assert "connect-src" not in html


def test_verdicts_of_admission_and_audits(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    found = Verdict("lyon", 11, "MISMATCH", "another payload", 7)
    files.audits = [Signed(found, Selection("request"), "ab", "r")]
    judged = {"kind": "admission", "round": 2, "site": "lyon", "flags": [], "code": "admitted"}
    files.metrics = [
        judged | {"norm": 1500, "cosine": -200, "gain": 1000},
        judged | {"norm": 500, "code": "loss", "flags": ["against"]},
        {"kind": "resumed", "round": 3},
        judged | {"round": 3, "code": "stale"},
        {"kind": "resumed", "round": 3},
    ]
    page = build(files, now=0.0)
    assert page.audits.rows == (("lyon", "11", "MISMATCH", "7", "another payload", "ab"),)
    assert page.anomalies.rows[0] == (
        "round 2", "lyon", "not admitted: loss (1 exchange), flagged: against (1 exchange)"
    )  # fmt: skip
    assert page.scores.rows == (("lyon", "2", "1", "1.00", "-0.20", "0.0010"),)


def test_an_audit_is_shown_if_its_key_has_signed_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "toy", usual())
    signer, other = (Signer.from_hex(letter * 64) for letter in "ab")
    for name, key in (("lyon", signer), ("oslo", other)):
        signed = Signed(Verdict(name, 0, "EXACT", ""), Selection("request"), signer.public, "r")
        write(folder, signed, key, "00")
    step = signer.sign(Statement("outer-step", {}, {"run": "r", "auditor": signer.public}))
    (folder / "record" / "audits" / "step.json").write_text(step + "\n")
    files = read_run(folder)
    assert [each.verdict.site for each in files.audits] == ["lyon"]
    refused = [line for line in files.missing if "not shown" in line and "audits" in line]
    assert ["oslo" in line for line in refused] == [True, False]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "toy", usual())
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder)])
    assert end.value.code == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == str(folder / "report.html")
    assert all(line.startswith("not shown: ") for line in said[:-1])
    assert "<title>toy: training run</title>" in (folder / "report.html").read_text()
    with pytest.raises(SystemExit) as end:
        main(["report", str(tmp_path / "nowhere")])
    assert end.value.code == 1
    assert "no run is here" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no run is here"):
        read_run(tmp_path)


def test_claims_are_shown_as_they_were_found(tmp_path: Path) -> None:
    claim = {"name": "replay", "verdict": "FAIL", "reason": "another state", "required": True,
             "proves": "much", "not_proved": "more"}  # fmt: skip
    files = read_run(write_run(tmp_path / "toy", usual()))
    html = render(build(files, 0.0, json.loads(json.dumps({"claims": [claim]}))))
    assert '<span class="chip bad">FAIL</span>' in html
    assert "Does not prove: more." in html


def test_times() -> None:
    assert when(0) == "1970-01-01 00:00 UTC"
    assert when(1e300) == "at an unknown time"
    assert after(3725.0, 100.0) == "+1:00:25"
    assert after(5.0, 0.0) == "+0:00:00"


def test_the_held_out_loss_of_several_sources_has_a_chart(tmp_path: Path) -> None:
    records = usual()
    for record in records:
        if record["kind"] == "evaluation":
            record["val_loss_by_source"] = {"web": record["val_loss"] + 1, "<b>": 1.0, "bad": "x"}
            record |= {"val_accuracy": record["val_loss"] / 8, "val_margin": 0.25}
    page = build(read_run(write_run(tmp_path / "toy", records)), now=0.0)
    assert [chart.id for chart in page.learning] == [
        "loss", "held-out", "pairs", "margin", "learning-rate"
    ]  # fmt: skip
    chart = page.learning[1]
    assert [name for name, _ in chart.names] == ["web", "<b>", "all held-out text"]
    assert chart.readings[0] == "step 0: web 7.000, <b> 1.000, all held-out text 6.000"
    accuracy, margin = page.learning[2:4]
    assert accuracy.readings[0] == "step 0: held-out pairs 75.0%"
    assert margin.readings[0] == "step 0: held-out pairs 0.2500"
    assert "<b>" not in render(page)
