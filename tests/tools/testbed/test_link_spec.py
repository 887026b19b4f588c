"""Links as they are written: rates, lines, pairs, names."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.link_spec import (
    FREE,
    Line,
    Links,
    parse_line,
    parse_rate,
    parse_setting,
    show_rate,
)

pytestmark = pytest.mark.alone

SITES = ["paris", "lyon", "new-york", "york"]
rates = st.one_of(st.none(), st.integers(50_000, 10**11).map(float))


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200kbit", 2e5), ("1.5mbit", 1.5e6), ("1Gbit", 1e9), ("none", None)],
)
def test_rates(text: str, rate: float | None) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "1", "1mb", "-1mbit", "1 mbit", "1e3mbit", "49kbit", "0mbit", "101gbit"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(LabError, match=f'rate "{text}"'):
        parse_rate(text)


def test_lines() -> None:
    assert parse_line("20mbit") == Line(20e6, 20e6)
    assert parse_line("20mbit/100mbit") == Line(20e6, 100e6)
    assert parse_line("none/1mbit") == Line(None, 1e6)
    assert parse_line("none") == FREE
    with pytest.raises(LabError):
        parse_line("20mbit/")
    assert str(parse_line("20mbit/100mbit")) == "20 Mbit/s up, 100 Mbit/s down"
    assert str(FREE) == "unshaped"


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "unshaped"), (1e9, "1 Gbit/s"), (2.5e6, "2.5 Mbit/s"), (99_960.0, "99.96 kbit/s")],
)
def test_rates_for_people(rate: float | None, text: str) -> None:
    assert show_rate(rate) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("paris=1mbit", (["paris"], "1mbit")),
        ("paris-lyon=1mbit", (["paris", "lyon"], "1mbit")),
        ("new-york=1mbit", (["new-york"], "1mbit")),
        ("paris-new-york=none", (["paris", "new-york"], "none")),
        ("new-york-york=1mbit/2mbit", (["new-york", "york"], "1mbit/2mbit")),
    ],
)
def test_settings(text: str, expected: tuple[list[str], str]) -> None:
    assert parse_setting(text, SITES) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("paris", "write it as SITE=RATE or SITE-SITE=RATE"),
        ("oslo=1mbit", "names no site and no two sites; the lab has paris, lyon"),
        ("paris-oslo=1mbit", "names no site"),
        ("paris-paris=1mbit", "names no site"),
    ],
)
def test_what_names_no_link_is_refused(text: str, said: str) -> None:
    with pytest.raises(LabError, match=said):
        parse_setting(text, SITES)


def test_names_that_can_be_read_in_two_ways_are_refused() -> None:
    with pytest.raises(LabError, match="two ways"):
        parse_setting("a-b=1mbit", ["a", "b", "a-b"])


def test_a_path_is_as_fast_as_its_slowest_part() -> None:
    links = Links().with_all(Line(20e6, 100e6), SITES).changed(["paris-lyon=5mbit"], SITES)
    assert links.path("paris", "york") == 20e6
    assert links.path("paris", "lyon") == links.path("lyon", "paris") == 5e6
    assert Links().path("paris", "lyon") is None
    assert links.partners("lyon") == {"paris": 5e6}
    assert links.shaped
    assert not Links().shaped


def test_settings_follow_one_another() -> None:
    links = Links().changed(["lyon-paris=5mbit", "york=1mbit", "york=2mbit"], SITES)
    assert links.pair("paris", "lyon") == 5e6
    assert links.line("york") == Line(2e6, 2e6)
    assert links.changed(["paris-lyon=none", "york=none"], SITES).shaped is False
    with pytest.raises(LabError, match='rate "1mbit/2mbit"'):
        links.changed(["paris-lyon=1mbit/2mbit"], SITES)


@given(
    st.dictionaries(st.sampled_from(SITES), st.builds(Line, rates, rates)),
    st.dictionaries(st.just(("lyon", "paris")), st.integers(50_000, 10**10).map(float)),
)
def test_links_survive_being_written_down(
    lines: dict[str, Line], pairs: dict[tuple[str, str], float]
) -> None:
    links = Links(lines, pairs)
    assert Links.from_json(json.loads(json.dumps(links.to_json()))) == links
