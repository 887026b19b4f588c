"""Rows from records, a benchmark that is cut and goes on, and a real run of a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.quality import command as quality
from benchmarks.quality import data as quality_data
from benchmarks.quality import run as quality_run
from benchmarks.quality.jobs import Job

from dilocox.errors import DilocoxError

pytestmark = pytest.mark.runs


def test_a_row_counts_bytes_and_rounds_as_they_were() -> None:
    def site(name: str, number: int, payload: int, ratio: float, steps: int) -> dict[str, Any]:
        return {
            "kind": "round",
            "site": name,
            "round": number,
            "payload_bytes": payload,
            "ratio_per_transfer": ratio,
            "steps": steps,
        }

    records = [
        {"kind": "plan", "round": 0, "codec": "int4", "inner_steps": 20},
        site("a", 0, 100, 8.0, 20),
        site("b", 0, 100, 8.0, 20),
        {"kind": "round", "round": 0, "payload_bytes": 200},
        {"kind": "plan", "round": 1, "codec": "int2", "inner_steps": 10},
        site("a", 1, 300, 16.0, 10),
        {**site("b", 1, 0, 0.0, 10), "dropped": "stage 0: loss"},
        {"kind": "round", "round": 1, "payload_bytes": 300},
        {"kind": "flush", "site": "a", "payload_bytes": 500},
    ]
    summary = {
        "val_loss_last": 2.5,
        "payload_bytes": 1000,
        "ratio_per_token": 77.0,
        "tokens": 30,
    }
    made = quality_run.measures(summary, records)
    # 500 bytes of payloads in the rounds stood for 100·8 + 100·8 + 300·16 bytes.
    assert made["reduction_per_transfer"] == pytest.approx(6400 / 500)
    assert made["reduction_total"] == 77.0
    assert made["flush_share"] == 0.5
    assert (made["rounds"], made["inner_steps"]) == (2, 15.0)
    assert made["dropped"] == 1
    assert made["plans"] == "int4 H=20 x1, int2 H=10 x1"


def test_a_run_that_a_site_was_missing_from_is_no_row() -> None:
    def whole(number: int, sites: int) -> dict[str, Any]:
        return {"kind": "round", "round": number, "sites": sites}

    one = {"kind": "round", "site": "site-0", "round": 1}
    quality_run.check_attendance([whole(0, 4), one, {"kind": "message"}, whole(1, 4)], 4)
    with pytest.raises(DilocoxError, match="round 1 had 3 of 4 sites"):
        quality_run.check_attendance([whole(0, 4), whole(1, 3)], 4)


def test_a_row_has_the_outer_rates_and_fragments_of_most_rounds() -> None:
    def plan(number: int, rate: float) -> dict[str, Any]:
        rates = {"learning_rate": rate, "momentum": 0.5}
        return {"kind": "plan", "round": number, "fragments": 4 if rate < 1 else 2, **rates}

    whole: list[dict[str, Any]] = [{"kind": "round", "round": number} for number in range(6)]
    told = quality_run.most_rounds([plan(0, 0.8), *whole, plan(1, 1.9), plan(4, 0.8), plan(5, 1.9)])
    assert told == {"outer_learning_rate": 1.9, "outer_momentum": 0.5, "fragments": 2}
    assert set(quality_run.most_rounds([]).values()) == {None}


def test_plans_hold_until_the_next_one() -> None:
    changes = [
        {"round": 0, "codec": "int4", "inner_steps": 5},
        {"round": 3, "codec": "int2", "inner_steps": 5},
        {"round": 4, "codec": "int4", "inner_steps": 5},
    ]
    assert quality_run.plans(changes, 10) == "int4 H=5 x9, int2 H=5 x1"
    assert quality_run.plans([], 10) is None


class Trained:
    """Stands in for real training: counts what is asked for, and can be cut."""

    def __init__(self, cut_after: int) -> None:
        self.jobs: list[Job] = []
        self.steps: list[int] = []
        self._cut_after = cut_after

    def __call__(self, job: Job, config: Any, log: Path, keep: bool) -> dict[str, Any] | None:
        if len(self.jobs) == self._cut_after:
            return None
        self.jobs.append(job)
        self.steps.append(config.total_steps)
        summary = {
            "val_loss_last": 2.0 + 0.01 * len(self.jobs),
            "payload_bytes": 100,
            "ratio_per_token": 50.0,
            "tokens": 10,
        }
        row = {**job.key, **quality_run.described(job, config)}
        row |= quality_run.measures(summary, [])
        return {**row, "seconds": 1.0, "commit": None, "failed": None}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the benchmark with stand-ins for training and text; its rows and what was trained."""

    def call(trained: Trained, *words: str) -> int:
        monkeypatch.setattr(quality, "train", trained)
        monkeypatch.setattr(quality.common, "machine", dict)
        monkeypatch.setattr(quality.common, "end_on_signals", lambda: None)
        monkeypatch.setattr(quality.Text, "write", lambda *_: quality_data.Text(tmp_path))
        monkeypatch.setattr(quality.Text, "tokenise", lambda *_: None)
        monkeypatch.setattr(quality.TokenFiles, "open", lambda _: None)
        monkeypatch.setattr(quality.quality_data, "describe", lambda _: {"digest": "d"})
        monkeypatch.setattr(sys, "argv", ["quality.py", *words])
        return quality.main()

    return call


def test_a_cut_benchmark_goes_on_where_it_was(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    words = ("--quick", "--json", str(file), "--tuning", str(tmp_path / "none.json"))
    first = Trained(cut_after=3)
    with pytest.raises(SystemExit) as end:
        bench(first, *words)
    assert end.value.code == 130
    assert len(json.loads(file.read_text())["rows"]) == 3
    second = Trained(cut_after=100)
    assert bench(second, *words) == 0
    labels = [job.entry.label for job in first.jobs + second.jobs]
    assert labels == list(quality.quality_rows.QUICK)
    rows = json.loads(file.read_text())["rows"]
    assert [row["label"] for row in rows] == labels
    assert all(row["gap"] is not None for row in rows)
    assert file.with_suffix(".svg").exists()
    assert "dilocox-paper" in capsys.readouterr().out
    third = Trained(cut_after=0)
    assert bench(third, *words) == 0


def test_a_row_of_other_settings_is_made_anew(bench: Any, tmp_path: Path) -> None:
    file, tuning = tmp_path / "rows.json", tmp_path / "tuning.json"
    words = ("--quick", "--only", "allreduce", "--json", str(file), "--tuning", str(tuning))
    assert bench(Trained(100), *words) == 0
    trial = {"tuned_as": "allreduce", "learning_rate": 0.009, "val_loss": 1.0}
    trial |= {"outer_learning_rate": None, "outer_momentum": None}
    tuning.write_text(json.dumps({"rows": [trial]}))
    again = Trained(100)
    assert bench(again, *words) == 0
    assert len(again.jobs) == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert row["learning_rate"] == 0.009


def test_texts_of_earlier_seeds_stay_described(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ("--quick", "--only", "allreduce", "--json", str(file))
    for seed in ("0", "1"):
        assert bench(Trained(100), *words, "--seeds", seed) == 0
    assert json.loads(file.read_text())["settings"]["text"] == {
        "0": {"digest": "d"},
        "1": {"digest": "d"},
    }


def test_the_picture_has_all_rows_whichever_are_asked_for(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ("--quick", "--json", str(file), "--tuning", str(tmp_path / "none.json"))
    assert bench(Trained(100), *words, "--only", "allreduce", "cocktailsgd") == 0
    assert bench(Trained(100), *words, "--only", "sparseloco") == 0
    picture = file.with_suffix(".svg")
    drawn = picture.read_text()
    assert "sparseloco" in drawn.lower()
    assert "cocktailsgd" in drawn.lower()
    # What trains nothing changes nothing.
    assert bench(Trained(0), *words, "--only", "cocktailsgd") == 0
    assert picture.read_text() == drawn


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (("--loss-table", "--quick"), "leave out --quick"),
        (("--loss-table", "--steps", "9"), "as long as those of the table"),
        (("--tune", "--steps", "9"), "--steps"),
        (("--tune", "--loss-table"), "leave out --only, --try, --tune"),
        (("--loss-table", "--only", "dilocox"), "leave out --only"),
        (("--tune", "--json", "x.json"), "to the file of --tuning"),
        (("--docs", "--quick"), "--docs"),
        (("--docs", "--try", "target=500"), "--docs"),
        (("--keep",), "--folder"),
        (("--quick", "--steps", "0"), "0: give a whole number of 1 or more"),
        (("--try", "inner_steps"), "write it as section.key=value"),
        (("--try", "target=far"), "target=far: write a whole number"),
    ],
)
def test_options_that_would_lose_what_is_trained_are_refused(
    bench: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], mend: str
) -> None:
    with pytest.raises(SystemExit) as end:
        bench(Trained(0), *words)
    assert end.value.code == 2
    assert mend in capsys.readouterr().err


def test_tuning_makes_all_trials_and_goes_on_after_a_cut(bench: Any, tmp_path: Path) -> None:
    tuning = tmp_path / "tuning.json"
    words = ("--tune", "--regime", "paper", "--only", "diloco", "--tuning", str(tuning))
    with pytest.raises(SystemExit):
        bench(Trained(cut_after=2), *words)
    rest = Trained(100)
    assert bench(rest, *words) == 0
    assert len(rest.jobs) == quality.quality_tuning.TRIALS - 2
    trials = quality.quality_tuning.read(tuning)["diloco"]
    assert len(trials) == quality.quality_tuning.TRIALS
    assert {job.seed for job in rest.jobs} == {quality.quality_tuning.SEED}
    long = Trained(100)
    assert bench(long, *words[:1], "--regime", "long", *words[3:]) == 0
    told = [(job.regime, job.seed, job.rates["inner.learning_rate"]) for job in long.jobs]
    best = quality.quality_tuning.chosen(long.jobs[0].entry, trials).inner
    assert told == [("long", 0, factor * best) for factor in (1, 2, 0.5)]
    assert (set(rest.steps), set(long.steps)) == ({320}, {3300})


@pytest.mark.slow
def test_a_run_is_trained_and_one_that_diverges_is_a_row_without_loss(tmp_path: Path) -> None:
    # In a process of its own: ranks are forked, and a test's process has threads and handlers.
    script = Path(__file__).with_name("quality_in_a_process.py")
    said = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "1e-3", "1e30"],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    good, bad = (json.loads(line) for line in said.stdout.splitlines())
    assert good["failed"] is None
    assert 3.0 < good["val_loss"] < 6.0
    assert good["tokens"] == 3 * 32 * 128
    assert (good["rounds"], good["inner_steps"], good["dropped"]) == (3, 1.0, 0)
    # At two sites a gather sends one fp32 vector a round, a synchronous step as many bytes.
    assert good["reduction_per_transfer"] == pytest.approx(1.0, rel=0.01)
    assert bad["val_loss"] is None
    assert bad["dropped"] == 2
    assert "not finite" in bad["failed"]
    assert not (tmp_path / "run").exists()


def test_no_table_of_the_documents_is_emptied_for_want_of_results(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "docs" / "methods.md"
    document.parent.mkdir()
    table = "<!-- quality: begin paper 4 non-iid core -->\nrow\n<!-- quality: end -->\n"
    document.write_text(table)
    monkeypatch.setattr(quality.common, "ROOT", tmp_path)
    for results in ("none.json", "other.json"):
        if results == "other.json":
            (tmp_path / results).write_text('{"benchmark": "wan", "rows": []}')
        with pytest.raises(SystemExit, match=f"{results}: "):
            bench(Trained(0), "--docs", "--json", str(tmp_path / results))
        assert document.read_text() == table


def test_rows_of_another_length_text_or_model_are_not_gone_on_with(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half as many steps lose a fifth more: no gap to such a row says anything."""
    file = tmp_path / "rows.json"
    words = ("--json", str(file), "--regime", "paper", "--sites", "4", "--iid", "no")
    words += ("--seeds", "0", "--only")
    assert bench(Trained(100), "--quick", *words, "allreduce") == 0
    with pytest.raises(SystemExit, match="holds rows of 320 steps, these options ask for 640"):
        bench(Trained(0), *words, "dilocox 500x")
    quick = ("--quick", *words)
    with monkeypatch.context() as patched:
        patched.setattr(quality.quality_rows, "BATCH", 64)
        with pytest.raises(SystemExit, match=r"other settings \(batch is 32 there, 64 here\)"):
            bench(Trained(0), *quick, "dilocox 500x")
    # The stand-in for the text has the digest "d".
    content = json.loads(file.read_text())
    content["rows"][0]["text"] = "another"
    file.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"rows of seed 0 are of another text \(another\)"):
        bench(Trained(0), *quick, "dilocox 500x")
    # A row of another seed has another text anyway.
    assert bench(Trained(100), *quick, "dilocox 500x", "--seeds", "1") == 0


def test_a_row_that_failed_is_not_shown_as_it_was_before(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tuning = tmp_path / "rows.json", tmp_path / "tuning.json"
    words = ("--quick", "--only", "allreduce", "--json", str(file), "--tuning", str(tuning))
    assert bench(Trained(100), *words) == 0
    shown = capsys.readouterr()
    assert "2.0100" in shown.out
    assert "no trials of allreduce" in shown.err
    trial = {"tuned_as": "allreduce", "learning_rate": 0.009, "val_loss": 1.0}
    trial |= {"outer_learning_rate": None, "outer_momentum": None}
    tuning.write_text(json.dumps({"rows": [trial]}))

    class Busy(Trained):
        def __call__(self, job: Job, config: Any, log: Path, keep: bool) -> dict[str, Any] | None:
            raise DilocoxError("round 1 had 3 of 4 sites")

    assert bench(Busy(0), *words) == 1
    shown = capsys.readouterr()
    assert "2.0100" not in shown.out
    assert "no trials" not in shown.err


def test_a_loss_table_is_of_one_seed_and_needs_its_whole_grid(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, made = tmp_path / "grid.json", tmp_path / "table.json"
    monkeypatch.setattr(quality, "LOSS_TABLE", made)
    words = ("--loss-table", "--json", str(file))
    assert bench(Trained(100), *words, "--seeds", "3") == 0
    first = json.loads(made.read_text())
    assert "seed 3," in first["about"]
    assert bench(Trained(100), *words, "--seeds", "4") == 0
    assert bench(Trained(0), *words, "--seeds", "3") == 0
    assert json.loads(made.read_text()) == first
    capsys.readouterr()
    rows = json.loads(file.read_text())
    rows["rows"] = [{**row, "val_loss": None, "failed": "not finite"} for row in rows["rows"]]
    file.write_text(json.dumps(rows))
    assert bench(Trained(0), *words, "--seeds", "3") == 1
    assert "has diverged" in capsys.readouterr().err
    assert json.loads(made.read_text()) == first
