"""Builds the charts of a run's page from its history. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from dilocox.config.preference import ACCURACY, MARGIN
from dilocox.tools.report.charts import Chart, Heading, Series, Wording, bar_chart, line_chart
from dilocox.tools.report.history import History, SiteRound
from dilocox.utils.formatting import number, size

LOOKS = 6
"""Number of colours for sites; further sites use them again from the first one."""
SHOWN_SOURCES = 6
"""Most sources of held-out text that get a line each."""
SHOWN_SITES = 8
"""Most sites that get a line each. With more sites, only the whole run is drawn."""


def learning(history: History, sites: Sequence[str]) -> list[Chart]:
    """Return the charts of loss and learning rate. `sites`: names in the order of their colours."""
    rows = history.rounds
    steps = [float(row.step) for row in rows]
    charts = [
        _loss(history, sites),
        _by_source(history),
        _pairs(history, ACCURACY, Heading(
            "pairs", "Held-out pairs ranked right", "step",
            "Share of the held-out pairs whose better answer the anchor favours more than the "
            "model that the run starts from does.",
        ), Wording(lambda v: f"{v:.1%}", lambda v: f"{v:.0%}", _count)),
        _pairs(history, MARGIN, Heading(
            "margin", "Mean margin of held-out pairs", "step",
            "By how much the anchor favours the better answer more than the model that the run "
            "starts from does: nats, times preference.beta.",
        ), Wording(lambda v: f"{v:.4f}", lambda v: f"{v:.3g}", _count)),
        line_chart(
            Heading("learning-rate", "Learning rate of the inner steps", "step",
                    "At the round's end, mean over the sites."),
            steps,
            [Series("learning rate", "look-all", _mean(history, lambda r: r.learning_rate))],
            Wording(lambda v: f"{v:.3g}", x_label=_count),
            from_zero=True,
        ),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def _loss(history: History, sites: Sequence[str]) -> Chart | None:
    """Return the chart of the training loss, by site and of all sites, and the held-out loss."""
    rounds = {row.step: row for row in history.rounds}
    held_out = {each.step: each.loss for each in history.evaluations}
    steps = sorted(rounds.keys() | held_out.keys())
    series = []
    for order, site in enumerate(sites if 1 < len(sites) <= SHOWN_SITES else []):
        values = [
            next((r.loss for r in rounds[step].sites if r.site == site), None)
            if step in rounds
            else None
            for step in steps
        ]
        series.append(Series(site, f"look-{order % LOOKS}", values))
    whole = [rounds[step].loss if step in rounds else None for step in steps]
    series.append(Series("all sites", "look-all", whole))
    if held_out:
        values = [held_out.get(step) for step in steps]
        series.append(Series("held-out", "look-other", values, sparse=True))
    return line_chart(
        Heading(
            "loss", "Loss", "step",
            "Nats per token. Sites: mean over a round's inner steps. Held-out: of the anchor, the "
            "model that the sites share, on text that no site trains on.",
        ),
        [float(step) for step in steps], series,
        Wording(lambda v: f"{v:.3f}", lambda v: f"{v:.4g}", _count),
    )  # fmt: skip


def _by_source(history: History) -> Chart | None:
    """Return the chart of the held-out loss of each of several sources; None without any."""
    # The evaluation of the finished model may follow another one at the same step.
    rows = list({each.step: each for each in history.evaluations}.values())
    names = list(dict.fromkeys(name for row in rows for name in row.by_source))[:SHOWN_SOURCES]
    if not names:
        return None
    series = [
        Series(
            name, f"look-{order % LOOKS}", [row.by_source.get(name) for row in rows], sparse=True
        )
        for order, name in enumerate(names)
    ]
    series.append(Series("all held-out text", "look-all", [row.loss for row in rows], sparse=True))
    return line_chart(
        Heading(
            "held-out", "Held-out loss by source", "step",
            "Nats per counted token, of the anchor, on the held-out text of each source.",
        ),
        [float(row.step) for row in rows], series,
        Wording(lambda v: f"{v:.3f}", lambda v: f"{v:.4g}", _count),
    )  # fmt: skip


def _pairs(history: History, field: str, heading: Heading, wording: Wording) -> Chart | None:
    """Return the chart of one figure of held-out pairs; None if there are no such figures."""
    rows = list({each.step: each for each in history.evaluations if field in each.pairs}.values())
    if not rows:
        return None
    values = Series("held-out pairs", "look-all", [row.pairs[field] for row in rows])
    return line_chart(heading, [float(row.step) for row in rows], [values], wording)


def traffic(history: History) -> list[Chart]:
    """Return the charts of bytes between the sites and of tokens."""
    rows = history.rounds
    steps = [float(row.step) for row in rows]
    sent = list(accumulate(row.payload_bytes for row in rows))
    dense = list(accumulate(row.allreduce_bytes for row in rows))
    charts = [
        line_chart(
            Heading(
                "bytes", "Bytes between the sites, so far", "step",
                "Synchronous training: an all-reduce of fp32 gradients in every inner step. The "
                "scale is logarithmic; the final flush is not included.",
            ),
            steps,
            [Series("sent", "look-all", sent), Series("synchronous training", "look-other", dense)],
            Wording(size, _short_size, _count),
            logarithmic=True,
        ),
        line_chart(
            Heading("tokens", "Tokens trained on, so far", "step"),
            steps,
            [Series("tokens", "look-all", list(accumulate(row.tokens for row in rows)))],
            Wording(lambda v: f"{v:,.0f}", _count, _count),
            from_zero=True,
        ),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def times(history: History) -> list[Chart]:
    """Return the charts of the time per round, the speed and the MFU."""
    rows = history.rounds
    rounds = [float(row.number) for row in rows]
    unit, name = _unit(max((row.seconds for row in rows), default=0.0))
    trained = _mean(history, lambda r: max(0.0, r.seconds - r.wait_seconds) / unit)
    waited = _mean(history, lambda r: r.wait_seconds / unit)
    charts = [
        bar_chart(
            "phases", "Time per round", "round", rounds,
            [Series("training", "look-all", trained),
             Series("waiting for the network", "look-wait", waited)],
            note="Mean over the sites. Exchanges that overlap with training add no time here.",
            say=lambda v: seconds(v * unit), axis=lambda v: f"{v:g} {name}",
        ),
        line_chart(
            Heading("speed", "Speed", "round", "All sites together."),
            rounds,
            [Series("tokens per second", "look-all", [row.tokens_per_second for row in rows])],
            Wording(lambda v: f"{v:,.0f}", _count),
            from_zero=True,
        ),
        line_chart(
            Heading(
                "mfu", "Model FLOPs utilisation", "round",
                "The model's own operations over the GPUs' peak, waiting included. Operations "
                "that are computed again for the backward pass do not count.",
            ),
            rounds,
            [Series("MFU", "look-all", [row.mfu for row in rows])],
            Wording(lambda v: f"{v:.1%}", lambda v: f"{v:.0%}"),
            from_zero=True,
        ),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def _mean(history: History, value: Callable[[SiteRound], float | None]) -> Sequence[float | None]:
    """Return the mean of `value` over the sites that have one, for each round."""
    means: list[float | None] = []
    for row in history.rounds:
        found = [v for each in row.sites if (v := value(each)) is not None]
        means.append(sum(found) / len(found) if found else None)
    return means


def seconds(value: float) -> str:
    """Return a duration as text: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 05 min`."""
    if value < 10:
        return f"{value:.1f} s" if value >= 0.05 else "0 s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _unit(longest: float) -> tuple[float, str]:
    """Return (seconds, symbol) of the unit for an axis up to `longest` seconds."""
    if longest >= 7200:
        return 3600.0, "h"
    return (60.0, "min") if longest >= 120 else (1.0, "s")


def _count(value: float) -> str:
    return number(value).replace(".0", "") if value >= 10_000 else f"{value:g}"


def _short_size(value: float) -> str:
    return size(value).replace(".0 ", " ")
