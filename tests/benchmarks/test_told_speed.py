"""What the pages say of speed, bytes and cost are the figures of committed results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.wan import beside as wan_beside

from benchmarks import common, plan_check
from tests.benchmarks.test_committed import committed

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]


def page(name: str) -> str:
    """A page without bold type, and with one space for each line end."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8").replace("**", "")
    return re.sub(r"\s+", " ", re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text))


def rows_of(name: str) -> list[Row]:
    found: list[Row] = committed(name)["rows"]
    return found


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def spread(values: Iterable[float], digits: int = 0) -> str:
    """The least and the most. Rows are rounded to 0.01 %, so halves are rounded up."""
    known = sorted(100 * value + 1e-9 for value in values)
    return f"{known[0]:.{digits}f} to {known[-1]:.{digits}f} %"


def test_shares_of_a_link() -> None:
    rows, text, short = rows_of("exchange-cpu"), page("notes/exchange.md"), page("measured.md")
    cubic = [row["efficiency"] for row in rows if row["congestion"] == "cubic"]
    full = [share for share in cubic if share >= 0.9]
    assert f"use {spread(full, 1)} of the link in {len(full)} cases of {len(cubic)}" in text
    assert f"| {spread(cubic)} in {len(cubic)} cases, 90 % or more in {len(full)} |" in short
    rest = sorted(share for share in cubic if share < 0.9)
    assert f"below are {percent(rest[0])} (four sites, four fragments)" in text
    assert f"and {percent(rest[1])} (two sites, four fragments)" in text
    bbr = [row for row in rows if row["congestion"] == "machine"]
    two = [row["efficiency"] for row in bbr if row["sites"] == 2]
    more = [row["efficiency"] for row in bbr if row["sites"] > 2]
    assert f"`bbr`: {spread(two, 1)} between two sites, {spread(more)} between" in text
    assert line("TCP with `bbr`, two sites", spread(two)) in short
    assert line("TCP with `bbr`, four and eight sites", spread(more)) in short
    whole = spread(row["whole"] for row in rows)
    assert f"codecs included: {whole}." in text
    assert line("votes and codecs included", whole) in short
    first = {n: spread(row["first_stage"] for row in rows if row["stages"] == n) for n in (2, 4)}
    assert f"first of two stages has its average after {first[2].removesuffix(' %')} %" in text
    assert f"the first of four after {first[4]}" in text
    assert f"first has its average after {first[4]} of the time" in short


def test_links_on_loopback() -> None:
    rows = {(row["over"], row["way"]): row for row in rows_of("links-cpu")}
    one, both = rows["links", "one"], rows["links", "both"]
    bare, bare_both = rows["gloo", "one"], rows["gloo", "both"]
    text = page("notes/transport.md")
    assert (
        f"links have {one['gbit_per_s']:.1f} Gbit/s and take {one['cpu_s_per_gb']:.2f} s of "
        f"processor time per GB. Both ways at once they have {both['gbit_per_s']:.1f} Gbit/s each "
        f"and take {both['cpu_s_per_gb']:.2f} s per GB."
    ) in text
    assert (
        f"has {bare['gbit_per_s']:.1f} Gbit/s and {bare['cpu_s_per_gb']:.2f} s one way, "
        f"{bare_both['gbit_per_s']:.1f} Gbit/s and {bare_both['cpu_s_per_gb']:.2f} s both ways."
    ) in text


def test_overlap_rules() -> None:
    rows = {(row["overlap"], row["delay_slots"]): row for row in rows_of("overlap-cpu")}
    text = page("measured.md")
    none = rows["none", 0]
    assert f"it takes {100 * none['wait_share']:.0f} % of the time" in text
    assert line("at once", "", f"{none['ratio']:.2f}x").replace("|  |", "| |") in text
    for name, key in (("a quarter of a round later", 5), ("a whole round later", 20)):
        row = rows["keep", key]
        assert line(name, percent(row["hidden_share"], 0), f"{row['ratio']:.2f}x") in text


@pytest.mark.parametrize("asked", [0, 30, 100])
def test_round_trips(asked: int) -> None:
    rows = {
        row["method"]: row for row in rows_of("latency-cpu") if row["round_trip_asked_ms"] == asked
    }
    ours, sync = rows["dilocox"], rows["allreduce"]
    digits = 1 if asked == 30 else 0
    trip = f"{ours['round_trip_ms']:.{digits}f} ms"
    assert line(
        trip,
        f"{rows['none']['tokens_per_second']:,.0f}",
        percent(ours["share_of_no_network"]),
        f"{ours['inner_steps']:.0f} steps of `{ours['plan'].partition('+')[0]}`",
        percent(ours["wait_share"]),
        percent(rows["diloco"]["share_of_no_network"]),
        percent(sync["share_of_no_network"]),
    ) in page("notes/wan.md")
    over = ours["tokens_per_second"] / sync["tokens_per_second"]
    short = f"| {ours['round_trip_ms']:.0f} ms | {percent(ours['share_of_no_network'])} "
    assert f"{short}| {over:.0f}x |" in page("measured.md")


@pytest.mark.parametrize("name", ["wan-beside-cpu", "wan-beside-wide-cpu"])
def test_blocks_beside_sites_without_a_network(name: str) -> None:
    text = page("notes/wan.md")
    for row in wan_beside.blocks_of(rows_of(name)):
        ours, none = (f"{row[key]:,.0f}" for key in
                      ("tokens_per_second", "no_network_tokens_per_second"))  # fmt: skip
        shares = [percent(row[key]) for key in ("share", "wait_share", "work_share")]
        hosts = [] if "wide" in name else [row["hosts"].replace(" ", ", ")]
        told = line(str(row["block"]), *hosts, none, ours, *shares)
        assert told.removesuffix(" |") in text, told


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("wan-beside-wide-cpu", "1: default settings, 3.4M parameters"),
        ("wan-beside-speedup-cpu", "2: half a per cent of work, slow cores, `int4`"),
        ("wan-beside-cpu", "3: half a per cent of work"),
    ],
)
def test_runs_beside_sites_without_a_network(name: str, run: str) -> None:
    rows, text = rows_of(name), page("measured.md")
    found = common.median_interval([row["share"] for row in wan_beside.blocks_of(rows)])
    kept = f"{percent(found.median)} ({100 * found.low:.1f} to {100 * found.high:.1f})"
    faster = wan_beside.speed_up(rows)
    over = ""
    if faster is not None:
        factor = re.search(r"dilocox is (\d+) times as fast \((\d+) to (\d+)\)", faster)
        assert factor is not None
        over = "{}x ({} to {}) ".format(*factor.groups())
    assert f"| {run} | {kept} | {over}|" in text


def test_what_exchanges_compute() -> None:
    text = page("notes/wan.md")
    for row in rows_of("outer_cost-cpu"):
        link = row["link"].replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
        codec = row["codec"].partition("+")[0]
        plan = f"{row['inner_steps']} steps, " + ("dense" if codec == "none" else f"`{codec}`")
        parts = (f"{row[f'{name}_ms']:,.0f} ms" for name in
                 ("inner", "encode", "decode", "boundaries", "transfer", "rest"))  # fmt: skip
        assert line(link, plan, *parts, percent(row["share"])).removesuffix(" |") in text
        assert f"{percent(row['share_worst'])})" in text
    wide = [row["share"] for row in rows_of("outer_cost-cpu") if row["link"] != "5mbit"]
    assert f"| {spread(wide, 1)} of inner steps |" in page("measured.md")


@pytest.mark.parametrize(
    ("codec", "name"),
    [("int4", "`int4`"), ("topk:16", "top-k of 0.4 %"), ("top1:512", "`top1:512`")],
)
def test_codecs(codec: str, name: str) -> None:
    rows = [row for row in rows_of("codecs-cpu") if row["codec"] == codec]
    (row,) = [row for row in rows if row["values"] == 1 << 24]
    bits = f"{row['bits_per_value']:.1f}" if codec == "int4" else f"{row['bits_per_value']:.3f}"
    times = (f"{row[key]:.1f}x" for key in ("encode_ratio", "decode_ratio"))
    assert line(name, bits, *times) in page("measured.md")


def test_what_a_record_costs() -> None:
    text = page("notes/record.md")
    names = {"off": "`off`", "on": "on, the default",
             "states": "states of every round (`states_every = 1`)"}  # fmt: skip
    for row in rows_of("record-cpu"):
        ratio = f"{row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"
        digits = 1 if row["record"] == "states" else 2
        low = f"{100 * row['work_low']:.{digits}f}"
        work = f"+{100 * row['work']:.{digits}f} % ({low} to "
        assert f"| {names[row['record']]} | {ratio} | {work}" in text
    (on,) = [row for row in rows_of("record-cpu") if row["record"] == "on"]
    short = page("measured.md")
    work = f"{percent(on['work'])} of the run ({100 * on['work_low']:.2f} to "
    assert f"{work}{100 * on['work_high']:.2f}; three pairs)" in short
    assert line("log, per round", f"{on['log_bytes_per_round'] / 1e3:.0f} kB") in short
    assert line("payloads, per round", f"{on['payload_bytes_per_round'] / 1e6:.1f} MB") in short


def test_a_long_run() -> None:
    run, restart, verify = rows_of("long_run-cpu")[-3:]
    text = page("measured.md")
    assert f"all sites in its process | {run['memory_mb']:.0f} MB |" in text
    assert line("restart of the coordinator", f"{restart['seconds']:.1f} s") in text
    rates = (f"{round(verify[key], -2):,d}" for key in
             ("statements_per_second", "statements_per_processor_second"))  # fmt: skip
    assert "{} statements/s ({} per processor second".format(*rates) in text
    assert line("memory of `verify`", f"{verify['peak_memory_mb'] / 1e3:.2f} GB") in text


def test_going_on_with_other_sites() -> None:
    rows = {(row["goes_on_with"], row["codec"]): row for row in rows_of("handover-cpu")}
    text = page("notes/handover.md")
    for told, name in (
        ("the same sites and stages", "the same"),
        ("2 sites, 1 stage x 2 shards", "1 stage x 2 shards"),
        ("1 site (three quarters of the text in all)", "1 site"),
        ("3 sites (a quarter more)", "3 sites"),
    ):
        cells = (f"{100 * (rows[name, codec]['ratio'] - 1):+.1f} %" for codec in
                 ("int4", "topk:64"))  # fmt: skip
        assert line(told, *(re.sub(r"[+-]0\.0 ", "0.0 ", cell) for cell in cells)) in text


def test_pieces_of_payloads() -> None:
    for row in rows_of("availability-cpu"):
        speeds = (f"{row[f'{name}_mb_per_second']:,.0f}" for name in
                  ("cut", "encode", "rebuild", "decode"))  # fmt: skip
        assert line(f"{row['k']} of {row['n']}", *speeds) in page("availability.md")


def test_publishing_beside_training() -> None:
    content, text = committed("storage-cpu"), page("storage.md")
    found, ratio = content["settings"]["found"], content["settings"]["found"]["ratio"]
    assert f"{percent(found['publisher_cpu_share'], 2)} of the site's processor time" in text
    assert (
        f"had {ratio['mean']:.3f} of its speed beside the publisher, with a standard error of "
        f"{ratio['standard_error']:.3f} (median {ratio['median']:.3f})"
    ) in text
    ratios = [row["ratio"] for row in content["rows"]]
    assert f"lay between {min(ratios):.2f} and {max(ratios):.2f}" in text
    apart = committed("storage-apart-cpu")["settings"]["found"]["ratio"]
    assert (
        f"had {apart['mean']:.3f} of its speed then, with a standard error of "
        f"{apart['standard_error']:.3f}"
    ) in text


def test_predictions_of_the_planner() -> None:
    text = page("planner.md")
    rows = rows_of("plan_check-cpu")
    rules = [row for row in rows if "predicted_plan" not in row]
    grid = [row for row in rows if "predicted_plan" in row]
    median, worst = plan_check.errors(rules)
    assert f"a median error of {percent(median)}, {percent(worst)} at worst" in text
    median, worst = plan_check.errors(grid)
    told = f"All {len(grid)} rows have a median error of {percent(median)}, at worst"
    assert f"{told} {percent(worst)}" in text
    places = ("2 sites, 453x", "2 sites, 43x", "4 sites, 388x", "2 sites, 3,654x")
    ratios = {row["run"]: f"{row['ratio']:.3f}" for row in grid}
    for method in dict.fromkeys(name.partition(",")[0] for name in ratios):
        name = {"dilocox-work-0.005": "`dilocox`, `control.work = 0.005`"}.get(
            method, f"`{method}`"
        )
        cells = (ratios.get(f"{method}, {place}", "") for place in places)
        assert line(name, *cells).replace("|  |", "| |") in text
    checked = rows_of("scaling_check-cpu")
    median, worst = plan_check.errors(checked)
    assert f"The median error is {percent(median)}, the worst {percent(worst)}" in text


def test_the_published_run() -> None:
    rows, text = rows_of("published_107b"), page("planner.md")
    names = {"DiLoCoX without compression": "without compression",
             "DiLoCoX without overlap": "without overlap"}  # fmt: skip
    for row in rows:
        if row["part"] == "published":
            form = ",.1f" if row["published"] < 100 else ",.0f"
            speeds = (format(row[key], form) for key in ("published", "predicted", "engine"))
            assert line(names.get(row["run"], row["run"]), *speeds) in text
    (overlap,) = [row for row in rows if row.get("run") == "DiLoCoX without overlap"]
    assert f"loses {overlap['missing_seconds']:.0f} s a round more" in text
    batch, example = (row for row in rows if row["part"] == "today")
    assert f"({batch['needed_gib']:.1f} GiB of {batch['available_gib']:.1f})" in text
    assert f"{round(batch['tokens_per_second'], -2):,.0f} against 3,728 tokens/s" in text
    assert f"about {round(example['tokens_per_second'], -2):,.0f} tokens/s" in text
    assert f"fits with {example['needed_gib']:.1f} GiB" in text
