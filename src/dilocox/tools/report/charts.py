"""Computes charts as geometry, for a template to draw, and as text, for keyboard users. Pure.

All coordinates are in a view box of `WIDTH` x `HEIGHT`. A chart has places along x. At each place
every series has a value or None, and one line of text (a *reading*) gives all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 26
MOST = 400
"""Most places of a chart. With more values, every n-th one is shown, and the last one."""

Say = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One line of a line chart, or one layer of a bar chart. `look`: CSS class of its colour."""

    name: str
    look: str
    values: Sequence[float | None]
    sparse: bool = False
    """Whether values are rare. Each value then gets a dot, and the line connects across gaps."""


@dataclass(frozen=True)
class Tick:
    """A mark of an axis: its coordinate and its label."""

    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """A drawn series: an SVG path, and the coordinates of its dots."""

    name: str
    look: str
    path: str
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Bar:
    """A rectangle: the part of a bar that one series fills."""

    look: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Chart:
    """A chart, ready for the template."""

    id: str
    title: str
    note: str
    x_name: str
    names: tuple[tuple[str, str], ...]
    """(name, CSS class) of the series, for the legend and the heading of the table."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    bars: tuple[Bar, ...]
    places: tuple[float, ...]
    """x coordinate of each place."""
    marks: tuple[tuple[float | None, ...], ...]
    """y coordinate of every line at each place."""
    readings: tuple[str, ...]
    """Values of each place as text."""
    rows: tuple[tuple[str, ...], ...]
    """Rows of the table of values: the name of the place, then one cell per series."""


@dataclass(frozen=True)
class Heading:
    """The names of a chart."""

    id: str
    """HTML id."""
    title: str
    """Heading of the chart."""
    x_name: str
    """Name of the x axis."""
    note: str = ""
    """Text below the chart."""


@dataclass(frozen=True)
class Wording:
    """How a chart writes its values."""

    say: Say
    """Formats a value in a reading."""
    axis: Say | None = None
    """Formats a value at the y axis. None: `say`."""
    x_label: Callable[[float], str] = lambda value: f"{value:g}"
    """Formats a value of `x`."""


def line_chart(
    heading: Heading,
    x: Sequence[float],
    series: Sequence[Series],
    wording: Wording,
    *,
    logarithmic: bool = False,
    from_zero: bool = False,
) -> Chart | None:
    """Return a line chart. None if there is no value to draw.

    Args:
        heading: The chart's names.
        x: Value of each place, in rising order.
        series: Lines, each with one value per place.
        wording: How the chart writes its values.
        logarithmic: Whether the y axis is logarithmic. Values of 0 or less are then left out.
        from_zero: Whether the y axis includes 0.
    """
    say, x_label = wording.say, wording.x_label
    keep = thinned(len(x))
    x = [x[index] for index in keep]
    drawn = [
        Series(each.name, each.look, [each.values[index] for index in keep], each.sparse)
        for each in series
    ]
    values = [value for each in drawn for value in each.values if value is not None]
    if logarithmic:
        values = [value for value in values if value > 0]
    if not values:
        return None
    low, high = min(values), max(values)
    if from_zero:
        low = min(0.0, low)
    ticks = log_ticks(low, high) if logarithmic else nice_ticks(low, high)
    scale = _scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, logarithmic)
    first, last = min(x), max(x)
    along = _scale(first, last, LEFT, WIDTH - RIGHT) if last > first else _middle
    places = tuple(round(along(value), 1) for value in x)
    heights = [
        [None if value is None or (logarithmic and value <= 0) else round(scale(value), 1)
         for value in each.values]
        for each in drawn
    ]  # fmt: skip
    lines = tuple(
        Line(each.name, each.look, _path(places, ys, bridge=each.sparse),
             _dots(places, ys) if each.sparse or len(x) == 1 else ())
        for each, ys in zip(drawn, heights, strict=True)
    )  # fmt: skip
    x_ticks = [t for t in nice_ticks(first, last) if first <= t <= last] or [first]
    return Chart(
        id=heading.id, title=heading.title, note=heading.note, x_name=heading.x_name,
        names=tuple((each.name, each.look) for each in drawn),
        x_ticks=tuple(Tick(round(along(t), 1), x_label(t)) for t in x_ticks),
        y_ticks=tuple(Tick(round(scale(t), 1), (wording.axis or say)(t)) for t in ticks),
        lines=lines, bars=(), places=places,
        marks=tuple(tuple(ys[n] for ys in heights) for n in range(len(x))),
        readings=_readings(heading.x_name, x, drawn, say, x_label),
        rows=_rows(x, drawn, say, x_label),
    )  # fmt: skip


def bar_chart(
    id_: str,
    title: str,
    x_name: str,
    x: Sequence[float],
    series: Sequence[Series],
    *,
    note: str = "",
    say: Say,
    axis: Say | None = None,
) -> Chart | None:
    """Return a stacked bar chart with one bar per place. None if no value is above 0.

    Values must not be negative. Arguments are those of `line_chart`.
    """
    keep = thinned(len(x))
    x = [x[index] for index in keep]
    drawn = [Series(s.name, s.look, [s.values[index] for index in keep]) for s in series]
    highest = max(
        (sum(s.values[n] or 0.0 for s in drawn) for n in range(len(x))), default=0.0
    )  # fmt: skip
    if highest <= 0:
        return None
    ticks = nice_ticks(0.0, highest)
    scale = _scale(0.0, ticks[-1], HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / len(x)
    wide = min(36.0, room * 0.72)
    places = tuple(round(LEFT + room * (n + 0.5), 1) for n in range(len(x)))
    bars = []
    for n, at in enumerate(places):
        done = 0.0
        for each in drawn:
            value = each.values[n] or 0.0
            top, bottom = scale(done + value), scale(done)
            done += value
            if value > 0:
                bars.append(
                    Bar(each.look, round(at - wide / 2, 1), round(top, 1), round(wide, 1),
                        round(bottom - top, 1))
                )  # fmt: skip
    every = max(1, math.ceil(len(x) / 8))
    return Chart(
        id=id_, title=title, note=note, x_name=x_name,
        names=tuple((each.name, each.look) for each in drawn),
        x_ticks=tuple(Tick(places[n], f"{x[n]:g}") for n in range(0, len(x), every)),
        y_ticks=tuple(Tick(round(scale(t), 1), (axis or say)(t)) for t in ticks),
        lines=(), bars=tuple(bars), places=places, marks=tuple(() for _ in x),
        readings=_readings(x_name, x, drawn, say, lambda value: f"{value:g}"),
        rows=_rows(x, drawn, say, lambda value: f"{value:g}"),
    )  # fmt: skip


def thinned(count: int, most: int = MOST) -> list[int]:
    """Return the indices of the places that are shown: all, or every n-th and the last."""
    every = max(1, math.ceil(count / most))
    kept = list(range(0, count, every))
    if count and kept[-1] != count - 1:
        kept.append(count - 1)
    return kept


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return at least two evenly spaced round numbers that enclose `low` and `high`."""
    # Ticks are rounded to twelve decimals, so values closer together count as one value.
    if high - low <= 1e-11 + 1e-12 * abs(low):
        spread = abs(low) * 0.1 if abs(low) > 1e-10 else 1.0
        low, high = low - spread / 2, high + spread / 2
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return at least two powers of ten that enclose `low` and `high`; both must be above 0."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = max(1, math.ceil((last - first) / 6))
    last = first + math.ceil((last - first) / every) * every
    return [10.0**n for n in range(first, last + 1, every)]


def _middle(value: float) -> float:
    return (LEFT + WIDTH - RIGHT) / 2


def _scale(
    low: float, high: float, start: float, end: float, logarithmic: bool = False
) -> Callable[[float], float]:
    def place(value: float) -> float:
        if logarithmic:
            share = (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low))
        else:
            share = (value - low) / (high - low)
        return start + share * (end - start)

    return place


def _path(xs: Sequence[float], ys: Sequence[float | None], bridge: bool) -> str:
    """Return an SVG path that connects neighbouring values; with `bridge`, also across gaps."""
    parts: list[str] = []
    pen = "M"
    for x, y in zip(xs, ys, strict=True):
        if y is None:
            pen = pen if bridge and parts else "M"
            continue
        parts.append(f"{pen}{x:g} {y:g}")
        pen = "L"
    return "".join(parts)


def _dots(xs: Sequence[float], ys: Sequence[float | None]) -> tuple[tuple[float, float], ...]:
    return tuple((x, y) for x, y in zip(xs, ys, strict=True) if y is not None)


def _readings(
    x_name: str, x: Sequence[float], series: Sequence[Series], say: Say,
    x_label: Callable[[float], str],
) -> tuple[str, ...]:  # fmt: skip
    texts = []
    for n, value in enumerate(x):
        said = [f"{each.name} {say(v)}" for each in series if (v := each.values[n]) is not None]
        texts.append(f"{x_name} {x_label(value)}: {', '.join(said) or 'no value'}")
    return tuple(texts)


def _rows(
    x: Sequence[float], series: Sequence[Series], say: Say, x_label: Callable[[float], str]
) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (x_label(value),
         *("" if (v := each.values[n]) is None else say(v) for each in series))
        for n, value in enumerate(x)
    )  # fmt: skip
