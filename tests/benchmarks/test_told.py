"""What README, pages and notes say of losses are the figures of committed results."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from benchmarks.finetune import report as finetune_report
from benchmarks.finetune.rows import STUDY_SEED, TRIAL_SEED, UNQUOTED
from benchmarks.loss_length import command as loss_length
from benchmarks.quality import report as quality_report
from benchmarks.quality.rows import LEAD

from tests.benchmarks.test_committed import committed

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """Without what makes words bold."""
    return (ROOT / name).read_text(encoding="utf-8").replace("**", "")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return quality_report.with_gaps(committed("quality-cpu")["rows"])


def of(
    rows: list[dict[str, Any]], label: str, cell: quality_report.Cell = LEAD
) -> tuple[list[float], str]:
    """Gaps by seed, and the mean reduction in all as it is written."""
    own = [row for row in rows if (row["label"], quality_report.cell(row)) == (label, cell)]
    reduction = statistics.fmean(row["reduction_total"] for row in own)
    return [row["gap"] for row in own], f"{reduction:,.0f}x"


def percent(value: float, digits: int, sign: str = "+") -> str:
    return format(round(100 * value, digits) + 0.0, f"{sign}.{digits}f").replace(
        "-", "\N{MINUS SIGN}"
    )


def spread(gaps: list[float]) -> str:
    """`+7.2 % (6.4, 8.0)`; the range with signs where it begins below one."""
    digits = 1 if abs(statistics.fmean(gaps)) < 0.1 else 0
    sign = "+" if min(gaps) < 0.01 else ""
    least, most = (percent(value, digits, sign) for value in (min(gaps), max(gaps)))
    return f"{percent(statistics.fmean(gaps), digits)} % ({least}, {most})"


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("dilocox 500x", "`dilocox`, link for 500x"),
        ("dilocox 1000x", "`dilocox`, link for 1,000x"),
        ("dilocox 2750x", "`dilocox`, link for 2,750x"),
        ("dilocox 4000x", "`dilocox`, link for 4,000x"),
        ("diloco", "DiLoCo"), ("sparseloco", "SparseLoCo"), ("dilocox-paper", "DiLoCoX"),
    ],
)  # fmt: skip
def test_results_have_the_losses_of_short_runs(
    rows: list[dict[str, Any]], label: str, name: str
) -> None:
    gaps, reduction = of(rows, label)
    assert len(gaps) == 3
    told = re.escape(f"| {name} | {spread(gaps)} with {reduction} | ")
    steps = re.search(rf"^{told}(\d+)", page("docs/results.md"), re.MULTILINE)
    assert steps is not None
    taken = {each for row in rows if row["label"] == label and quality_report.cell(row) == LEAD
             for each in re.findall(r"H=(\d+)", row["plans"])}  # fmt: skip
    assert int(steps[1]) == max(map(int, taken))


def test_the_readme_has_the_loss_of_a_short_and_of_a_long_run(rows: list[dict[str, Any]]) -> None:
    text = page("README.md")
    gaps, reduction = of(rows, "dilocox 1000x")
    assert f"{spread(gaps)} with {reduction} fewer bytes" in text
    told = []
    for label in ("dilocox 1000x", "diloco"):
        gaps, reduction = of(rows, label, ("long", 4, False))
        mean, least, most = (
            percent(value, 1, "") for value in (statistics.fmean(gaps), min(gaps), max(gaps))
        )
        told.append(f"{mean} % ({least}, {most}) at {reduction}")
    assert f"{told[0]}; DiLoCo {told[1]}" in text


def test_readme_and_results_have_the_losses_on_other_text() -> None:
    rows = committed("evidence-cpu")["rows"]

    def losses(label: str) -> tuple[list[float], str]:
        """Gaps to the best synchronous run of the same seed, and the reduction."""
        own = [row for row in rows if row["label"] == label]
        best = [
            min(row["val_loss"] for row in rows
                if (row["label"], row["seed"]) == ("allreduce", each["seed"]))
            for each in own
        ]  # fmt: skip
        gaps = [row["val_loss"] / least - 1 for row, least in zip(own, best, strict=True)]
        return gaps, f"{own[0]['reduction_total']:,.0f}x"

    gaps, reduction = losses("dilocox 100x")
    wide, far = losses("dilocox 1000x")
    readme = f"{spread(gaps)} with {reduction} fewer bytes; {spread(wide)} with {far}"
    assert readme in page("README.md")
    results = page("docs/results.md")
    for name, label in (
        ("dilocox, link for 100x", "dilocox 100x"),
        ("dilocox, link for 1,000x", "dilocox 1000x"),
        ("DiLoCo", "diloco"),
    ):
        gaps, reduction = losses(label)
        each = ", ".join(percent(gap, 1) for gap in gaps)
        assert f"| {name} | {reduction} | {each} % | 0, 1, 2 |" in results


@pytest.mark.parametrize(
    "label",
    ["dilocox 100x", "dilocox 500x", "dilocox 1000x", "dilocox 2750x", "dilocox 4000x", "diloco",
     "intellect1", "dilocox-paper", "dilocox-paper published", "sparseloco", "cocktailsgd"],
)  # fmt: skip
def test_measured_has_the_losses_of_short_runs(rows: list[dict[str, Any]], label: str) -> None:
    gaps, reduction = of(rows, label)
    text = page("docs/measured.md")
    told = [line for line in text.splitlines() if line.startswith("| ") and reduction in line]
    assert any(spread(gaps) in line for line in told), (reduction, spread(gaps))


OTHER_SITES = [
    ("two, texts of their own", ("paper", 2, False), (1000, 2750, 4000)),
    ("two, the same text", ("paper", 2, True), (1000, 2750, 4000)),
    ("four, the same text", ("paper", 4, True), (500, 1000)),
]
"""The first cell of a group of rows in measured.md, the sites, and the links of its rows."""


@pytest.mark.parametrize(("name", "cell", "links"), OTHER_SITES)
def test_measured_has_the_losses_of_other_sites(
    rows: list[dict[str, Any]], name: str, cell: quality_report.Cell, links: tuple[int, ...]
) -> None:
    """A loss of one seed stands alone, one of three seeds has the least and the most."""
    wanted = []
    for number, link in enumerate(links):
        gaps, reduction = of(rows, f"dilocox {link}x", cell)
        assert len(gaps) in (1, 3)
        loss = spread(gaps) if len(gaps) == 3 else f"{percent(gaps[0], 1)} %"
        first = "" if number else name
        wanted.append(f"| {first} | {link:,}x | {reduction} | {loss} |".replace("|  |", "| |"))
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", page("docs/measured.md"))
    assert "\n".join(wanted) in text


def long_runs(rows: list[dict[str, Any]], *labels: str) -> dict[str, tuple[list[float], str]]:
    return {label: of(rows, label, ("long", 4, False)) for label in labels}


def test_measured_has_the_losses_of_long_runs(rows: list[dict[str, Any]]) -> None:
    """With the number of seeds, and with the least and the most of three."""
    names = {
        "dilocox 500x": "`dilocox`, link for 500x", "dilocox 1000x": "link for 1,000x",
        "dilocox 3000x": "link for 3,000x", "diloco": "DiLoCo", "opendiloco": "OpenDiLoCo",
        "intellect1": "INTELLECT-1", "sparseloco": "SparseLoCo", "dilocox-paper": "DiLoCoX",
        "cocktailsgd": "CocktailSGD",
    }  # fmt: skip
    lines = page("docs/measured.md").splitlines()
    for label, (gaps, reduction) in long_runs(rows, *names).items():
        digits = 1 if statistics.fmean(gaps) < 0.2 else 0
        loss = f"{percent(statistics.fmean(gaps), digits)} %"
        if len(gaps) == 3:
            least, most = (percent(value, digits, "") for value in (min(gaps), max(gaps)))
            loss += f" ({least}, {most})"
        seeds = {1: "one", 3: "three"}[len(gaps)]
        assert f"| {names[label]} | {reduction} | {loss} | {seeds} |" in lines


def test_results_have_the_losses_of_long_runs(rows: list[dict[str, Any]]) -> None:
    text = page("docs/results.md")
    labels = "dilocox 1000x", "dilocox 3000x", "diloco", "sparseloco"
    for gaps, reduction in long_runs(rows, *labels).values():
        assert len(gaps) == 3
        mean, least, most = (
            percent(value, 1, "") for value in (statistics.fmean(gaps), min(gaps), max(gaps))
        )
        assert f"{mean} % ({least}, {most}) at {reduction}" in text


def test_readme_results_and_notes_have_the_losses_of_fine_tuning() -> None:
    content = committed("finetune-cpu")
    known = [row for row in content["rows"] if row["precision"] == "bf16"]
    settings = content["settings"]
    parameters = {"full": settings["parameters"], "lora": settings["adapter_parameters"]}
    lines = finetune_report.summarised(known, parameters)
    assert {(line["mode"], line["steps"], line["seeds"]) for line in lines} == {
        ("lora", 64, 3), ("full", 64, 3),
    }  # fmt: skip
    notes, results, told = page("docs/notes/finetune.md"), page("docs/results.md"), []
    for line in lines:
        of_mode = [row for row in known if (row["mode"], row["steps"]) == (line["mode"], 64)]
        own = [row for row in of_mode
               if (row["sites"], row["label"]) == (line["sites"], line["label"])
               and row["seed"] not in UNQUOTED]  # fmt: skip
        for row in own:
            assert f"{row['val_loss']:.4f} |" in notes
            assert f"{round(64 * row['accuracy'])} of 64 |" in notes
        if line["label"] == "allreduce":
            continue
        base = {row["seed"]: row["val_loss"] for row in of_mode
                if (row["sites"], row["label"]) == (line["sites"], "allreduce")}  # fmt: skip
        gaps = [row["val_loss"] / base[row["seed"]] - 1 for row in own]
        least, most = (percent(gap, 1) for gap in (min(gaps), max(gaps)))
        mean, fewer = percent(line["gap"], 1), f"{line['of_full']:,.0f}x"
        if line["mode"] == "full":
            assert f"{mean} % ({least}, {most}) with {fewer} fewer bytes" in results
            assert f"(all parameters: {mean} % at {fewer})" in page("README.md")
            continue
        cells = f"{mean} % ({least}, {most}) | {line['reduction']:.0f}x | {fewer}"
        assert f"| {line['sites']} | {cells} |" in results
        told.append((mean, fewer.removesuffix("x")))
    (two, fewer), (four, less) = told
    readme = f"{two} % loss at two sites, {four} % at four; {fewer}x and {less}x fewer bytes"
    assert readme in page("README.md")


def test_results_and_notes_have_other_methods_of_fine_tuning() -> None:
    """These rows were computed in fp32, and the trials that chose their rates in bf16."""
    content = committed("finetune-cpu")
    settings = content["settings"]
    parameters = {"full": settings["parameters"], "lora": settings["adapter_parameters"]}
    lines = finetune_report.summarised(
        [row for row in content["rows"] if row["precision"] == "fp32"], parameters
    )
    notes, results = page("docs/notes/finetune.md"), page("docs/results.md")
    for line in lines:
        gap = "" if line["label"] == "allreduce" else f"{line['gap']:+.1%}".replace("%", " %")
        fewer = "1x" if line["label"] == "allreduce" else f"{line['reduction']:.1f}x"
        cells = (f"{line['val_loss']:.4f}", gap, fewer, f"{line['of_full']:.0f}x",
                 f"{round(64 * line['accuracy'])} of 64")  # fmt: skip
        assert f"seed 0 |{'|'.join(f' {each} ' if each else ' ' for each in cells)}|" in notes
    gaps = {line["label"]: f"{percent(line['gap'], 1)} %" for line in lines}
    assert f"{gaps['diloco, no momentum']} without outer momentum, at 15x" in results
    assert f"{gaps['diloco, Nesterov .9']} with Nesterov momentum 0.9" in results
    reference = next(
        row for row in content["rows"]
        if (row["label"], row["mode"], row["sites"], row["seed"], row["steps"], row["precision"])
        == ("allreduce", "lora", 2, 0, 64, "bf16")
    )  # fmt: skip
    (own,) = (line["val_loss"] for line in lines if line["label"] == "allreduce")
    assert f"ends {100 * (1 - own / reference['val_loss']):.2f} % lower in fp32" in notes


def test_notes_have_the_study_of_plans_with_fine_tuning() -> None:
    known = committed("finetune-cpu")["rows"]
    notes = page("docs/notes/finetune.md")
    for seed, mode in ((STUDY_SEED, "lora"), (TRIAL_SEED, "full")):
        mine = [row for row in known if (row["seed"], row["mode"]) == (seed, mode)]
        best = max(row["learning_rate"] for row in mine)
        mine = [row for row in mine if row["learning_rate"] == best]
        (base,) = (row for row in mine if row["label"] == "allreduce")
        assert len(mine) > 3
        for row in mine:
            loss = f"{row['val_loss']:.4f}"
            gap = f"{row['val_loss'] / base['val_loss'] - 1:+.1%}".removesuffix("%")
            told = re.search(rf"\| {loss} \|\s*([^|]*?)\s*\| ([\d.,]+)x \|", notes)
            assert told, row["label"]
            assert told[1] in ("", f"{gap} %", f"{gap.partition('.')[0]} %")
            fewer = base["payload_bytes"] / row["payload_bytes"]
            assert float(told[2].replace(",", "")) == pytest.approx(fewer, 0.02)


def plan_of(words: str) -> str:
    """The name of a simulated plan that the notes write as `2 of topk:8` or `20 dense steps`."""
    steps, codec = words.replace("dense steps", "of none").replace("`", "").split(" of ")
    return f"H={steps} {codec}"


def test_notes_have_the_losses_of_simulated_plans() -> None:
    """Each figure is of one row, at its best inner rate, of one setting of the outer values."""
    lines = loss_length.best(committed("loss_length-cpu")["rows"])
    known = {
        (line["plan"], line["steps"], f"{percent(line['gap'], 1)} %", line["rate"])
        for line in lines
        if line["seed"] == 0 and not line["iid"]
    }
    text = page("docs/notes/quality.md")
    head = "| plan | in all | 640 steps | 3,300 steps |\n|---|---|---|---|\n"
    (table,) = (part.split("\n\n")[0] for part in text.split(head)[1:])
    told = 0
    for line in table.splitlines()[1:]:
        words, fewer, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        plan = plan_of(words)
        assert fewer == f"{next(each['reduction'] for each in lines if each['plan'] == plan):,.0f}x"
        for steps, cell in zip((640, 3300), cells, strict=True):
            if cell:
                gap, rate = re.findall(r"^(\S+ %) \(([\de.-]+)", cell)[0]
                assert (plan, steps, gap, float(rate)) in known
                told += 1
    assert told > 25


def test_notes_have_the_losses_of_text_that_differs_by_site() -> None:
    rows = committed("loss_length_mixed-cpu")["rows"]
    text = page("docs/notes/quality.md")
    ways = {row["moments"]: math.inf for row in rows}
    for row in rows:
        if row["plan"] != "synchronous":
            ways[row["moments"]] = min(ways[row["moments"]], row["loss"])
    base = min(row["loss"] for row in rows if row["plan"] == "synchronous")
    assert f"synchronous training has {base:.3f} at the best of three rates" in text
    for loss in ways.values():
        assert f" | {loss:.3f} | {percent(loss / base - 1, 1)} % |" in text


def test_notes_have_the_loss_of_a_momentum_in_bf16() -> None:
    text = " ".join(page("docs/notes/wan.md").split())
    for row in committed("momentum_dtype-cpu")["rows"]:
        middle, low = (100 * row[key] for key in ("difference", "difference_low"))
        rates = f"{row['outer_learning_rate']} and {row['outer_momentum']}"
        told = re.search(rf"{rates}[^%]*?by ({middle:.3f}) % \(({low:.2f}) to \+(\S+) %\)", text)
        assert told is not None, rates
        digits = len(told[3].partition(".")[2])
        assert told[3] == f"{100 * row['difference_high']:.{digits}f}"
