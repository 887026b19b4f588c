"""The evidence benchmark: which runs are made at which rates, and what is called equal."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.evidence import cells, command, growth, rates, report, texts
from benchmarks.evidence.cells import BASELINE, Cell, Group
from benchmarks.evidence.growth import Growth
from benchmarks.evidence.report import Result
from benchmarks.evidence.run import Run, configuration
from benchmarks.evidence.work_texts import WorkTexts
from benchmarks.quality.data import Text
from benchmarks.quality.run import parameters

from benchmarks import common
from dilocox.errors import DilocoxError

MIDDLE = Cell("tokens", "mixed", "0.18M", per_parameter=20)


def tried(cell: Cell, label: str, start: float, best: float) -> list[float]:
    """Make all trials of a method whose loss rises by the distance of the rate from `best`."""
    done: dict[float, float] = {}
    while (rate := rates.next_trial(cell, label, start, done)) is not None:
        assert rate not in done
        done[rate] = abs(math.log(rate / best))
    return list(done)


def test_trials_go_on_until_the_best_rate_lies_within() -> None:
    assert tried(MIDDLE, "diloco", 3e-3, 3e-3) == [3e-3, 1.5e-3, 6e-3]
    assert tried(MIDDLE, "diloco", 3e-3, 1.2e-2) == [3e-3, 1.5e-3, 6e-3, 1.2e-2, 2.4e-2]
    assert tried(MIDDLE, "diloco", 3e-3, 1e-9)[-1] >= rates.LIMITS[0]


def test_long_runs_are_tried_at_the_start_and_below() -> None:
    long = Cell("tokens", "mixed", "0.18M", per_parameter=100, rule="down")
    assert tried(long, "diloco", 3e-3, 1.0) == [3e-3, 1.5e-3]
    assert tried(long, "diloco", 3e-3, 8e-4) == [3e-3, 1.5e-3, 7.5e-4, 3.8e-4]


def test_frozen_rates_are_tried_for_synchronous_training_alone() -> None:
    unseen = Cell("unseen", "mixed", "0.67M", rule="frozen")
    assert tried(unseen, BASELINE, 1.5e-3, 1e-9) == [1.5e-3, 7.5e-4, 3e-3]
    assert tried(unseen, "dilocox 100x", 6e-3, 1e-9) == []
    assert tried(Cell("ladder", "source", "1.5M", rule="same"), BASELINE, 1e-3, 1.0) == []


def test_rates_that_diverged_are_never_the_best() -> None:
    done = {3e-3: math.inf, 1.5e-3: math.inf, 6e-3: math.inf}
    assert rates.next_trial(MIDDLE, "diloco", 3e-3, done) is None
    assert rates.best_rate(3e-3, {3e-3: math.inf, 1.5e-3: 2.0}) == 1.5e-3


def result(*gaps: float) -> Result:
    by_seed = dict(enumerate(gaps))
    return Result(MIDDLE, "dilocox 100x", 3e-3, dict(by_seed), by_seed, 100.0, at_end=False)


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ((0.001, -0.001, 0.002), "equal"),
        ((0.03, 0.031, 0.029), "worse"),
        ((-0.03, -0.031, -0.029), "better"),
        ((0.02, -0.02, 0.0), "undecided"),
        # Above 0 in every seed and still within the margin.
        ((0.003, 0.0031, 0.0032), "equal"),
        ((0.001, 0.001), ""),
    ],
)
def test_what_is_called_equal(gaps: tuple[float, ...], verdict: str) -> None:
    found = result(*gaps)
    assert found.verdict == verdict
    # The protocol: with fewer than three seeds a table has the gaps alone.
    assert (found.interval is None) == (len(gaps) < 3)


def test_the_interval_is_that_of_student_s_t() -> None:
    found = result(0.01, 0.02, 0.03).interval
    # By hand: the mean of logarithms is 0.019771 and their deviation 0.009804;
    # 2.920 x 0.009804 / sqrt(3) is 0.016528.
    assert found == pytest.approx((0.003247, 0.036966), abs=2e-6)


def test_results_take_the_best_trial_and_compare_by_seed() -> None:
    def row(label: str, seed: int, rate: float, loss: float | None) -> dict[str, Any]:
        named = {"label": label, "seed": seed, "learning_rate": rate, "val_loss": loss}
        return {**MIDDLE.key, **named, "reduction_total": 2.0}

    rows = [
        row(BASELINE, 1000, 3e-3, 2.0),
        row(BASELINE, 1000, 1.5e-3, 1.9),
        row(BASELINE, 0, 3e-3, 1.0),
        row(BASELINE, 0, 1.5e-3, 2.0),
        row(BASELINE, 1, 1.5e-3, 4.0),
        row("dilocox 100x", 1000, 3e-3, 2.0),
        row("dilocox 100x", 0, 3e-3, 2.1),
        row("dilocox 100x", 1, 3e-3, None),
    ]
    group = Group(MIDDLE, (BASELINE, "dilocox 100x"), (0, 1))
    base, ours = report.results(rows, group, dict.fromkeys(group.labels, 3e-3))
    assert (base.rate, base.at_end, dict(base.losses)) == (1.5e-3, True, {0: 2.0, 1: 4.0})
    assert dict(ours.gaps) == pytest.approx({0: 0.05})
    assert ours.gap is None
    assert "+5.0%" in report.table([base, ours])


def test_a_gap_is_to_a_synchronous_run_of_the_same_text() -> None:
    def row(label: str, loss: float, text: str) -> dict[str, Any]:
        named = {"label": label, "seed": 0, "learning_rate": 3e-3, "val_loss": loss, "text": text}
        return {**MIDDLE.key, **named, "reduction_total": 2.0}

    group = Group(MIDDLE, (BASELINE, "dilocox 100x"), (0,))
    starts = dict.fromkeys(group.labels, 3e-3)
    for text, gaps in (("a", {0: 0.5}), ("b", {})):
        rows = [row(BASELINE, 2.0, "a"), row("dilocox 100x", 3.0, text)]
        _, ours = report.results(rows, group, starts)
        assert dict(ours.gaps) == gaps


def test_rows_of_several_commits_are_named_beside_their_table() -> None:
    """The protocol: runs of one cell and seed are made at one commit where possible."""
    group = Group(MIDDLE, (BASELINE, "dilocox 100x"), (0, 1))
    rows = [
        {**MIDDLE.key, "label": label, "seed": seed, "learning_rate": 3e-3, "commit": commit}
        for label, seed, commit in (
            (BASELINE, 0, "aa"), (BASELINE, 1, "aa"), ("dilocox 100x", 0, "aa"),
            ("dilocox 100x", 1, "bb+"), ("dilocox 100x", 1000, "cc"), ("diloco", 0, "dd"),
        )
    ]  # fmt: skip
    assert report.mixed_commits(rows, group) == ["rows of seed 1 are of several commits: aa, bb+"]


def test_slopes_are_per_tenfold_length() -> None:
    found = Growth("mixed", "diloco", {0: {4: 0.01, 40: 0.03, 400: 0.05}, 1: {4: 0.0, 40: 0.03}})
    assert found.slopes == pytest.approx({0: 0.02, 1: 0.03})
    assert found.change == pytest.approx((0.04 + 0.03) / 2)
    assert found.grows


@pytest.mark.parametrize(
    ("gaps", "grows"),
    [
        ({0: {4: 0.01, 100: 0.03}, 1: {4: 0.03, 100: 0.02}}, False),  # the seeds disagree
        ({0: {4: 0.01, 100: 0.018}, 1: {4: 0.01, 100: 0.017}}, False),  # by less than 1 %
        ({0: {4: 0.01, 100: 0.025}}, True),
        ({0: {4: 0.05, 100: 0.01}}, False),
    ],
)
def test_a_gap_grows_if_all_seeds_say_so(gaps: dict[int, dict[float, float]], grows: bool) -> None:
    found = Growth("mixed", "diloco", gaps)
    assert found.grows is grows
    assert ("growth not shown" in growth.table([found])) is not grows


def test_growth_is_found_by_method_and_text() -> None:
    def of(cell: Cell, label: str, *gaps: float) -> Result:
        by_seed = dict(enumerate(gaps))
        return Result(cell, label, 3e-3, dict(by_seed), by_seed, 100.0, at_end=False)

    first = Cell("tokens", "source", "0.18M", per_parameter=20)
    known = [
        of(MIDDLE, BASELINE, 0.0), of(MIDDLE, "diloco", 0.02, 0.03), of(first, "diloco", 0.01),
        of(Cell("tokens", "mixed", "0.18M", per_parameter=100), "diloco", 0.04),
        of(Cell("ladder", "source", "1.5M", per_parameter=20), "diloco", 0.03),
        of(Cell("unseen", "mixed", "0.67M"), "diloco", 0.5),
    ]  # fmt: skip
    sizes = {"0.18M": 178_000, "1.5M": 1_490_000}
    lengths = growth.growths(known, "tokens", sizes)
    assert [(each.source, each.gaps) for each in lengths] == [("mixed", {0: {20: 0.02, 100: 0.04}})]
    # The ladder begins with the shortest size, which the question of tokens has.
    by_size = growth.growths(known, "ladder", sizes)
    assert [each.gaps for each in by_size] == [{0: {178_000: 0.01, 1_490_000: 0.03}}]


def test_the_tables_end_with_growth(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--texts", "x", "--json", str(tmp_path / "rows.json"), "--question", "tokens")
    assert bench([], never, *words, "--only", BASELINE, "diloco") == 0
    found = capsys.readouterr().out
    assert found.count("Does the gap grow") == 1
    assert "Does the gap grow with tokens per parameter?" in found
    assert found.count("growth not shown") == 2  # DiLoCo, on two texts


def test_no_run_begins_after_the_budget(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, trained = tmp_path / "rows.json", list[Run]()
    words = ("--texts", "x", "--json", str(file), "--cells", "1", "--only", BASELINE)
    assert bench([], lambda run: run.seed > 0, *words) == 1
    content = json.loads(file.read_text())
    content["rows"][0]["cpu_seconds"] = 18 * 2 * 3600.0
    file.write_text(json.dumps(content))
    capsys.readouterr()
    assert bench(trained, never, *words) == 1
    assert trained == []
    found = capsys.readouterr()
    assert "18 hours of both cores are used; " in found.err
    assert "18.0 of 18 hours" in found.out


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call the benchmark with stand-ins for training and text; `trained` has the runs in order."""
    monkeypatch.setattr(command.common, "machine", dict)
    monkeypatch.setattr(command.common, "end_on_signals", lambda: None)
    monkeypatch.setattr(command.WorkTexts, "tokenised", lambda *_: Text(tmp_path))
    monkeypatch.setattr(command.WorkTexts, "digest", lambda *_: "d")

    def call(trained: list[Run], fail: Any, *words: str) -> int:
        def train(run: Run, _config: Any, _log: Path) -> dict[str, Any]:
            trained.append(run)
            if fail(run):
                raise DilocoxError("round 1 had 3 of 4 sites")
            more = {"val_loss": 2.0, "reduction_total": 2.0, "failed": None, "seconds": 1.0}
            return {**run.key, **more, "cpu_seconds": 1.0, "parameters": 178_000}

        monkeypatch.setattr(command, "train", train)
        monkeypatch.setattr(sys, "argv", ["evidence", *words])
        return command.main()

    return call


def never(_run: Run) -> bool:
    return False


def test_the_protocol_ends_after_the_cells_of_the_decision(bench: Any, tmp_path: Path) -> None:
    trained: list[Run] = []
    words = ("--texts", "x", "--json", str(tmp_path / "rows.json"), "--only", BASELINE)
    assert bench(trained, never, *words) == 0
    asked = {(run.cell.source, run.cell.same_text) for run in trained}
    assert asked == {("mixed", False), ("mixed", True), ("perl", False)}
    assert {(run.cell.question, run.cell.shape, run.cell.sites) for run in trained} == {
        ("unseen", "qwen3", 4)
    }


def test_no_run_starts_at_a_rate_whose_trials_are_not_complete(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, trained = tmp_path / "rows.json", list[Run]()
    words = ("--texts", "x", "--json", str(file), "--only", BASELINE)
    # The ladder starts at the best rate of a cell of the question of tokens.
    assert bench(trained, never, *words, "--question", "ladder") == 1
    assert trained == []
    assert "wait for trials of earlier cells" in capsys.readouterr().err

    def busy(run: Run) -> bool:
        return (run.cell.per_parameter, run.rate, run.cell.source) == (4, 6e-3, "mixed")

    words += ("--question", "tokens")
    assert bench(trained, busy, *words) == 1
    later = {run.cell.per_parameter for run in trained if run.cell.source == "mixed"}
    assert later == {4}
    assert "2.0000" in capsys.readouterr().out  # the tables, though a row failed
    del trained[:]
    assert bench(trained, never, *words) == 0
    assert [run.rate for run in trained[:1]] == [6e-3]
    assert {run.cell.per_parameter for run in trained} == {4, 20, 100, 400}
    # Synchronous training has no gap to itself.
    assert "Does the gap grow" not in capsys.readouterr().out


def test_a_text_is_read_and_tokenised_once_in_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    def written(folder: Path, _parts: object) -> Text:
        done.append(folder.name)
        return Text(folder)

    monkeypatch.setattr(Text, "write_parts", written)
    monkeypatch.setattr(Text, "tokenise", lambda _, seed, counts: done.append((seed, counts)))
    texts_here = WorkTexts(tmp_path, tmp_path)
    for seed in (0, 0, 1):
        texts_here.tokenised("perl", seed, [2])
    texts_here.tokenised("perl", 0, [])
    assert done == ["perl", (0, [2]), (1, [2]), (0, [])]


def test_rows_of_another_text_are_not_gone_on_with(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of Python has another `source`."""
    file = tmp_path / "rows.json"
    words = ("--texts", "x", "--json", str(file), "--cells", "1", "--only", BASELINE)
    assert bench([], lambda run: run.seed > 0, *words) == 1
    monkeypatch.setattr(command.WorkTexts, "digest", lambda *_: "e")
    trained = list[Run]()
    assert bench(trained, lambda run: run.seed != 1, *words) == 1  # other seeds have other text
    assert {run.seed for run in trained} == {1, 2}
    with pytest.raises(SystemExit, match=r"rows of source mixed, seed 0 are of another text"):
        bench([], never, *words[:-1], "diloco")


def test_rows_of_other_lengths_or_outer_rates_are_not_gone_on_with(
    bench: Any, tmp_path: Path
) -> None:
    """The file names neither, and both may change between two calls."""
    file = tmp_path / "rows.json"
    words = ("--texts", "x", "--json", str(file), "--cells", "1", "--only", "diloco")
    for field, mend in (
        ({"steps": 320}, "has rows of 320 steps, and this call would train 640"),
        (
            {"steps": 640, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
            "outer rates 0.7/0.9, and this call has 0.8/0.5",
        ),
        ({"steps": 640, "outer_learning_rate": 0.8, "outer_momentum": 0.5}, None),
    ):
        file.unlink(missing_ok=True)
        assert bench([], lambda run: run.seed > 0, *words) == 1
        content = json.loads(file.read_text())
        content["rows"] = [{**row, **field} for row in content["rows"]]
        file.write_text(json.dumps(content))
        if mend is None:
            assert bench([], never, *words) == 0
        else:
            with pytest.raises(SystemExit, match=mend):
                bench([], never, *words)


def test_results_are_listed_without_their_texts(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = ("--list", "--json", str(common.RESULTS / "evidence-cpu.json"))
    assert bench([], never, *listed) == 0
    assert "+1.05%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (("--json", "x.json"), "--texts"),
        (("--list",), "name the results by --json"),
        (("--quick", "--texts", "x", "--json", "x.json"), "leave out --json"),
        (("--texts", "x", "--cells", "-1"), "-1: give a whole number of 1 or more"),
    ],
)
def test_options_without_effect_are_refused(
    bench: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], mend: str
) -> None:
    with pytest.raises(SystemExit) as end:
        bench([], never, *words)
    assert end.value.code == 2
    assert mend in capsys.readouterr().err


def test_a_folder_without_wikitext_is_no_wikitext(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no wikitext2-"):
        bench([], never, "--quick", "--texts", "x", "--wikitext", str(tmp_path))


def test_cells_have_the_sizes_and_lengths_of_the_protocol(tmp_path: Path) -> None:
    entry = cells.entries()["dilocox 100x"]
    sizes = {}
    for size in cells.SIZES:
        cell = Cell("ladder", "source", size, per_parameter=20)
        config = configuration(Run(cell, entry, 0, 1e-3, {}), Text(tmp_path), tmp_path / "run")
        sizes[size] = parameters(config)
        assert config.total_steps == round(20 * sizes[size] / 4096)
    assert {size: f"{count / 1e6:.2g}M" for size, count in sizes.items()} == {
        size: size for size in sizes
    }
    for shape in cells.SHAPES:
        cell = Cell("unseen", "mixed", "0.67M", shape=shape, sites=2, rule="frozen")
        config = configuration(Run(cell, entry, 0, 1e-3, {}), Text(tmp_path), tmp_path / "run")
        assert parameters(config) == pytest.approx(673_280, rel=0.01)
        assert config.total_steps == 640


def test_every_group_has_synchronous_training_and_a_known_start() -> None:
    known = cells.groups()
    assert len({str(group.cell) + group.cell.question for group in known}) == len(known)
    for number, group in enumerate(known):
        assert group.labels[0] == BASELINE
        before = [each.cell for each in known[:number]]
        assert group.cell.starts_at is None or group.cell.starts_at in before


def test_the_settings_of_results_name_the_protocol() -> None:
    options = command.arguments().parse_args(["--texts", "x"])
    bench = command.Bench(options, Path("x"))
    digest = hashlib.sha256(command.PROTOCOL.read_bytes()).hexdigest()
    assert bench._settings["protocol"] == digest
    first = next(bench._missing())
    assert (first.entry.label, first.rate, first.seed) == (BASELINE, 1.5e-3, 0)


def test_a_book_s_pages_become_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<head><title>no</title></head><body><script>no()</script>"
        "<p>Fa&ccedil;ade <em>et</em> cour</p>\n\n\n<div>Fin</div></body>"
    )
    assert texts._without_tags(page) == "Façade et cour\n\nFin"


def test_a_domain_is_taken_evenly_from_its_package() -> None:
    made = list(texts._spread([str(number) * 98 for number in range(10)], 500))
    assert [text[0] for text in made] == ["0", "2", "4", "6", "8"]
    assert list(texts._spread(["ab", "cd"], None)) == ["ab", "cd"]


def test_texts_need_the_tools_of_debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"perl-doc=.*: apt-get was not found; .* on Debian 12"):
        texts.write(texts.PERL, tmp_path, None)
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    (tmp_path / "sh").symlink_to("/bin/sh")
    with pytest.raises(SystemExit, match=r"perl-doc=.* failed: exit code 100; run apt-get update"):
        texts.write(texts.PERL, tmp_path, None)
    assert not (tmp_path / "perl.txt").exists()
