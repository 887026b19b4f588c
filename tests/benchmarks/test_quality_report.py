"""What is made of rows: gaps, means, verdicts in words, the picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from benchmarks.quality import docs as quality_docs
from benchmarks.quality import plot as quality_plot
from benchmarks.quality import report as quality_report


def row(label: str, loss: float | None, reduction: float, **more: Any) -> dict[str, Any]:
    method = "dilocox" if label.startswith("dilocox ") else label.removesuffix(" published")
    method = "dilocox-paper" if label.startswith("dilocox-paper") else method
    return {
        "label": label,
        "method": method,
        "group": "core",
        "regime": "paper",
        "sites": 4,
        "iid": False,
        "seed": 0,
        "optimizer": "adamw",
        "val_loss": loss,
        "reduction_total": reduction,
        "reduction_per_transfer": 2.0,
        "inner_steps": 20.0,
        "failed": None if loss is not None else "not finite",
        **more,
    }


def said(*rows: dict[str, Any]) -> list[str]:
    return quality_report.verdicts(quality_report.points(quality_report.with_gaps(rows)))


def test_gap_is_against_the_same_optimizer_text_and_seed() -> None:
    rows = [
        row("allreduce", 2.0, 1.0),
        row("allreduce", 4.0, 1.0, seed=1),
        row("allreduce muon", 1.0, 1.0, optimizer="muon"),
        row("sparseloco", 2.2, 100.0),
        row("sparseloco", 4.2, 100.0, seed=1),
        row("dilocox muon", 1.5, 100.0, optimizer="muon"),
        row("sparseloco", 2.2, 100.0, iid=True),
        row("diloco", None, 20.0),
    ]
    gaps = [made["gap"] for made in quality_report.with_gaps(rows)]
    assert gaps[:6] == pytest.approx([0.0, 0.0, 0.0, 0.1, 0.05, 0.5])
    assert gaps[6:] == [None, None]
    named = [
        {**row("allreduce", 2.0, 1.0), "text": "ab"},
        {**row("diloco", 2.2, 20.0), "text": "ab"},
    ]
    assert quality_report.with_gaps(named)[1]["gap"] == pytest.approx(0.1)
    # The same seed of another text, or in another order, is no baseline.
    assert quality_report.with_gaps([{**named[0], "text": "cd"}, named[1]])[1]["gap"] is None
    # Nor is a run of another length.
    long = [{**row("allreduce", 2.0, 1.0), "steps": 320}, {**row("diloco", 1.9, 9.0), "steps": 640}]
    assert quality_report.with_gaps(long)[1]["gap"] is None
    # Nor is one that does not say, of an earlier version.
    assert quality_report.with_gaps([rows[0], named[1]])[1]["gap"] is None


def test_points_are_means_over_seeds_and_a_diverged_run_is_not_left_out() -> None:
    rows = quality_report.with_gaps(
        [
            row("allreduce", 2.0, 1.0),
            row("allreduce", 2.1, 1.0, seed=1),
            row("diloco", 2.2, 20.0),
            row("diloco", None, 20.0, seed=1),
        ]
    )
    sync, diloco = quality_report.points(rows)
    assert (sync.loss, sync.loss_range, sync.gap) == pytest.approx((2.05, 0.1, 0.0))
    assert (diloco.loss, diloco.gap, diloco.failed, diloco.seeds) == (None, None, 1, 2)
    assert "diverged" in quality_report.table([sync, diloco])


def test_a_quarter_of_the_paper_s_gap_is_reached_or_missed() -> None:
    base = [row("allreduce", 2.0, 1.0), row("dilocox-paper", 2.4, 300.0)]
    near = row("dilocox 100x", 2.01, 120.0)
    assert said(*base, near, row("dilocox 500x", 2.08, 510.0))[0] == (
        "dilocox 500x: gap +4.00% at 510x; dilocox-paper at 300x has +20.00%, a quarter of that "
        "is +5.00%: reached (0.20 of its gap)"
    )
    missed = said(*base, near, row("dilocox 500x", 2.12, 510.0))[0]
    assert missed.endswith("MISSED (0.30 of its gap)")
    assert "nothing to compare" in said(*base, near)[0]
    diverged = said(base[0], row("dilocox-paper", None, 300.0), row("dilocox 500x", 2.1, 510.0))
    assert diverged[0].endswith("diverged (1 of 1 runs)")


def test_domination_needs_the_reduction_and_the_loss() -> None:
    base = row("allreduce", 2.0, 1.0)
    rival = row("sparseloco", 2.2, 400.0)
    worse = row("dilocox 500x", 2.3, 500.0)
    better_but_short = row("dilocox 100x", 2.1, 120.0)
    assert said(base, rival, worse, better_but_short) == [
        "sparseloco (2.2000 at 400x): NOT dominated, the best at its reduction is "
        "dilocox 500x (2.3000 at 500x)"
    ]
    far = row("dilocox 1000x", 2.2, 1000.0)
    assert said(base, rival, worse, far) == [
        "sparseloco (2.2000 at 400x): dominated by dilocox 1000x (2.2000 at 1,000x)"
    ]
    assert said(base, rival, better_but_short)[0].endswith("no dilocox point has its reduction")


def test_domination_is_over_the_seeds_that_both_have() -> None:
    """The text of a seed moves a loss by more than methods differ."""
    base = row("allreduce", 2.0, 1.0)
    rival = [row("sparseloco", 2.2, 400.0), row("sparseloco", 3.2, 400.0, seed=1)]
    worse = row("dilocox 500x", 2.3, 500.0)  # below the rival's mean of 2.7
    assert said(base, *rival, worse) == [
        "sparseloco (2.7000 at 400x): NOT dominated, the best at its reduction is "
        "dilocox 500x (2.3000 at 500x) against 2.2000, over seed 0"
    ]
    other = row("dilocox 500x", 3.0, 500.0, seed=1)
    assert said(base, *rival, worse, other) == [
        "sparseloco (2.7000 at 400x): dominated by dilocox 500x (2.6500 at 500x)"
    ]
    # What is better over more seeds is told, not what is better by more over one.
    once = row("dilocox 600x", 1.5, 600.0)
    assert "dilocox 500x" in said(base, *rival, worse, other, once)[0]
    assert "dilocox 600x" in said(base, *rival, worse, once)[0]
    elsewhere = row("dilocox 500x", 2.1, 500.0, seed=2)
    assert said(base, *rival, elsewhere)[0].endswith("no dilocox point has its reduction")


def test_ablations_are_no_points_of_the_curve() -> None:
    better = row("dilocox fixed", 1.9, 900.0, group="ablations")
    lines = said(row("allreduce", 2.0, 1.0), row("sparseloco", 2.2, 400.0), better)
    assert lines == ["sparseloco (2.2000 at 400x): NOT dominated, no dilocox point has its "
                     "reduction"]  # fmt: skip


def test_the_picture_has_every_point_in_order() -> None:
    rows = [
        row("allreduce", 2.0, 1.0),
        row("dilocox 100x", 2.02, 120.0),
        row("dilocox 500x", 2.1, 510.0),
        row("sparseloco", 2.2, 400.0),
        row("dilocox-paper", 5.0, 300.0),
        row("diloco published", None, 20.0),
        row("allreduce", 2.0, 1.0, iid=True),
        row("dilocox fixed", 1.9, 900.0, group="ablations"),
        row("dilocox muon 100x", 1.8, 110.0, group="muon", optimizer="muon"),
        row("dilocox muon 500x", 1.9, 500.0, group="muon", optimizer="muon"),
    ]
    text = quality_plot.picture(quality_report.points(quality_report.with_gaps(rows)))
    root = ET.fromstring(text)
    spaces = {"s": "http://www.w3.org/2000/svg"}
    panels = root.findall("s:g", spaces)
    assert len(panels) == 2
    names = [element.text or "" for element in panels[0].findall("s:text", spaces)]
    for name in ("allreduce", "sparseloco", "dilocox-paper 5.00", "diloco published diverged"):
        assert name in names
    assert "dilocox fixed" not in names
    lines = panels[0].findall("s:polyline", spaces)
    assert len(lines) == 2  # AdamW inside, and Muon
    for line in lines:
        places = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        (x1, y1), (x2, y2) = places
        assert x1 < x2  # more reduction to the right
        assert y1 > y2  # more loss above
    for circle in panels[0].findall("s:circle", spaces):
        assert 0 < float(circle.attrib["cx"]) < quality_plot.WIDTH
        assert 0 < float(circle.attrib["cy"]) < quality_plot.HEIGHT


def test_documents_are_filled_between_their_marks() -> None:
    rows = [
        row("allreduce", 2.0, 1.0),
        row("sparseloco", 2.2, 4567.0),
        row("sparseloco", 2.3, 4567.0, seed=1),
        row("dilocox 100x", 1.9991, 110.0),
        row("dilocox fixed", 1.9, 900.0, group="ablations"),
        row("dilocox naive", None, 900.0, group="ablations"),
        row("diloco", 9.0, 20.0, iid=True),
    ]
    blocks = ("paper 4 non-iid core", "paper 4 non-iid ablations", "long 4 non-iid core")
    text = "Words.\n" + "".join(
        f"<!-- quality: begin {block} -->\nold\n<!-- quality: end -->\nMore.\n" for block in blocks
    )
    known = quality_report.points(quality_report.with_gaps(rows))
    once = quality_docs.filled(text, known)
    assert "| allreduce | 1 | 2x | 1x | 1 | 2.000 |  | +0.0% |\n| dilocox 100x" in once
    assert "| dilocox 100x | 20 | 2x | 110x | 1 | 1.999 |  | +0.0% |" in once
    assert "| sparseloco | 20 | 2x | 4,567x | 2 | 2.250 | 0.100 |  |\n" in once
    assert "| dilocox naive | 20 | 2x | 900x | 1 | diverged |  |  |\n<!-- quality: end" in once
    assert once.index("dilocox fixed") > once.index(blocks[1])
    assert "diloco |" not in once
    assert "old" not in once
    assert once.count("More.") == 3
    assert f"<!-- quality: begin {blocks[2]} -->\n{quality_docs.NOTHING}" in once
    assert quality_docs.filled(once, known) == once
