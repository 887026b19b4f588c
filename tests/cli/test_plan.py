"""`dilocox plan` as a user runs it."""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from dilocox.cli import main
from dilocox.cli import plan as command
from dilocox.tools.planner import calibrate, host_benchmark, link_probe
from tests.support.planned_runs import ARCHITECTURE

Command = Callable[..., tuple[int, str, str]]
FIXED = ("--set", "control.adapt=off")
"""Rounds of the run file: nothing is searched for, which takes most of a plan's time."""


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main.main(["plan", *(str(argument) for argument in arguments)])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    content = {
        "model": {"architecture": ARCHITECTURE},
        "data": {"sequence_length": 16, "tokenizer": "given"},
        "site": {"batch_size": 8, "micro_batch_size": 2},
        "outer": {"steps": 4000},
        "sites": {"lyon": {}, "paris": {}},
    }
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    return path


def test_a_plan_in_one_page(plan: Command, file: Path) -> None:
    code, out, err = plan(file, "--gpu", "l40s:2x1", "--link", "100mbit", "--tokens", "1e8")
    assert code == 0
    assert err == ""  # quiet off a terminal
    assert "$0.00 egress for" in out
    assert "(--egress USD sets a price per GB; so does --link with the name of a cloud)" in out
    assert re.search(r"  record: [\d.]+ [GMk]?B at each site for the whole run, .* a day", out)
    assert "lyon, paris: l40s:2x1, 1 of 2 GPUs used; link 100mbit, round trip 30 ms" in out
    assert "100.0M tokens:" in out
    assert "allreduce" in out
    assert "outer state (16 bytes per parameter) in the host's memory" in out
    assert "GiB per rank of stage 0" in out
    for part in ("weights", "outer state", "copy that a checkpoint is written from", "total"):
        assert any(line.startswith(part) for line in out.splitlines()), part


def test_the_outer_state_is_smaller_with_momentum_in_bf16(plan: Command, file: Path) -> None:
    wanted = ("--gpu", "l40s", "--link", "100mbit", "--json", "--set", "outer.momentum_dtype=bf16")
    wanted += FIXED
    code, out, _ = plan(file, *wanted)
    assert code == 0
    memory = json.loads(out)["memory"]
    assert memory["outer_bytes_per_parameter"] == 14
    stage = memory["stages"][0]
    # Anchor, momentum, reference, residual; and a quarter of the model lands.
    assert stage["outer"] == (14 + 8 / 4) * stage["parameters"]
    by_name = {part["part"]: part["host"] for part in stage["parts"]}
    # Of what comes one after another, the end of the run needs most here.
    passing = {name for name in by_name if name.startswith("or: ")}
    at_the_end = {"or: more exchanges at the end of the run"} & passing
    assert stage["host"] == sum(by_name[name] for name in {*by_name} - passing | at_the_end)
    assert by_name["outer state"] == stage["outer"]
    assert by_name["exchanges"] == stage["under_way"]


def test_the_outer_state_is_checked_against_the_hosts_memory(plan: Command, file: Path) -> None:
    wanted = (file, "--gpu", "l40s:4x2", "--link", "100mbit", "--set", "site.stages=4", *FIXED)
    code, out, _ = plan(*wanted)
    assert code == 0
    assert "per machine for 4 ranks (give --host-memory GIB to check that it fits)" in out
    code, out, _ = plan(*wanted, "--host-memory", 1)
    assert "host memory fits: 0.0 GiB per machine for 4 ranks, of 1.0 GiB" in out
    code, out, _ = plan(*wanted, "--host-memory", 1e-4, "--json")
    assert code == 0
    memory = json.loads(out)["memory"]
    assert not memory["fits"]
    assert memory["needed_bytes"] <= memory["available_bytes"]
    # What the largest stage keeps there, four ranks to a machine.
    assert memory["host_needed_bytes"] == 4 * max(each["host"] for each in memory["stages"])
    assert memory["host_available_bytes"] == int(1e-4 * 2**30)
    code, out, _ = plan(*wanted, "--host-memory", 1e-4)
    assert "host memory DOES NOT FIT: 0.0 GiB" in out
    assert "try --set outer.momentum_dtype=bf16, or spread the site over more nodes" in out
    assert out.splitlines()[-1].startswith("Memory: 4 ranks on one machine need")
    # With the outer state on the GPUs copies, buffers and payloads are in the machine's memory.
    inside = ("--host-memory", 1e-2, "--set", "outer.device=model", "--json")
    code, out, _ = plan(*wanted, *inside)
    memory = json.loads(out)["memory"]
    assert memory["fits"]
    assert memory["host_needed_bytes"] == 4 * max(each["host"] for each in memory["stages"])
    there = {part["part"] for each in memory["stages"] for part in each["parts"] if part["host"]}
    assert "outer state" not in there
    assert "copy that a checkpoint is written from" in there


def test_json_alone_on_standard_output(plan: Command, file: Path) -> None:
    code, out, _ = plan(
        file, "--gpu", "l40s", "--link", "1gbit/100mbit", "--sites", 3, "--rtt", 5, "--egress", 0,
        "--utilisation", 0.5, "--json", *FIXED,
    )  # fmt: skip
    assert code == 0
    content = json.loads(out)
    assert [site["name"] for site in content["sites"]] == ["lyon", "paris", "site3"]
    assert content["sites"][0]["rtt_seconds"] == 0.005
    assert content["sites"][0]["up_bytes_per_second"] == 125e6
    assert content["budget"]["egress_usd"] == 0.0
    assert not any("egress" in source for source in content["sources"]), "nobody is paid for it"


def test_every_site_may_have_its_own(plan: Command, file: Path) -> None:
    code, out, _ = plan(
        file, "--gpu", "l40s:8x2", "--gpu", "rtx4090:4", "--link", "1gbit", "--link", "ec2-flow",
        "--json",
    )  # fmt: skip
    assert code == 0
    sites = json.loads(out)["sites"]
    assert [(site["device"], site["gpus"]) for site in sites] == [("l40s", 16), ("rtx4090", 4)]
    assert sites[1]["up_bytes_per_second"] == 625e6
    # A cloud is paid by the byte, an office's line is not.
    content = json.loads(out)
    assert 0 < content["budget"]["egress_usd"] < 0.09e-9 * content["budget"]["egress_bytes"]
    assert "options" in content


def test_settings_of_the_run_can_be_overridden(plan: Command, file: Path) -> None:
    base = (file, "--gpu", "l40s", "--link", "1gbit", "--json")
    code, out, _ = plan(*base, "--set", "outer.method=diloco")
    assert code == 0
    assert json.loads(out)["prediction"]["codec"] == "none"


def test_a_table_of_ones_own(plan: Command, file: Path, tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text(
        "[gpu.mine]\nbf16_tflops = 1.0\nfp32_tflops = 1.0\nmemory_gib = 8.0\n"
        'memory_gb_s = 100.0\npeer_gb_s = 1.0\nsource = "a guess"\n',
        encoding="utf-8",
    )
    code, out, _ = plan(file, "--gpu", "mine", "--link", "1gbit", "--table", table, *FIXED)
    assert code == 0
    assert "mine:1x1" in out
    assert "rent unknown" in out


def test_prices_are_compared_with_one_cluster(plan: Command, file: Path) -> None:
    base = (file, "--gpu", "l40s", "--link", "1gbit", "--compare", "4", "--rent", "1", *FIXED)
    code, out, _ = plan(*base)
    assert code == 0
    assert "one cluster: 2 such GPUs at $4 an hour" in out
    code, out, _ = plan(*base, "--json")
    assert json.loads(out)["comparison"]["gpus"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--gpu: name the GPUs of each site, as NAME:GPUSxNODES; known: a100-40g"),
        (["--gpu", "h99", "--link", "1gbit"], 'no GPU "h99" in the planner\'s table'),
        (["--gpu", "l40s"], "--link: say how fast the sites' links are"),
        (["--gpu", "l40s:2y3", "--link", "1gbit"], "write NAME:GPUSxNODES for each site"),
        (["--gpu", "l40s", "--link", "fast"], '--link "fast": give a rate'),
        (["--gpu", "l40s", "--link", "1gbit", "--sites", "0"], "--sites 0"),
        (["--gpu", "l40s"] * 2 + ["--link", "1gbit", "--sites", "3"], "--gpu is given 2 times"),
        (["--gpu", "l40s", "--link", "1gbit", "--utilisation", "2"], "--utilisation 2"),
        (["--gpu", "l40s", "--link", "1gbit", "--rtt", "-1"], "--rtt -1"),
        (["--gpu", "l40s", "--link", "1gbit", "--tokens", "0"], "--tokens 0"),
        (["--gpu", "l40s", "--link", "1gbit", "--compare", "nan"], "--compare nan"),
        (["--gpu", "l40s", "--link", "1gbit", "--rent", "-1"], "--rent -1"),
        (["--gpu", "l40s", "--link", "1gbit", *["--rent", "1"] * 3], "--rent is given 3 times"),
        (["--gpu", "l40s", "--link", "1gbit", "--fabric", "x"], '--fabric: "x" is not a rate'),
        (["--gpu", "local", "--link", "1gbit"], "`dilocox plan --calibrate` measures"),
        (["--gpu", "l40s", "--link", "measured"], "`dilocox plan --calibrate --peer HOST:PORT`"),
        (["--gpu", "l40s", "--link", "1gbit", "--host-memory", "0"], "--host-memory 0"),
        (["--gpu", "l40s", "--link", "1gbit", "--host-memory", "1e300"], "--host-memory 1e+300"),
        (["--gpu", "l40s", "--link", "1gbit", "--rtt", "1e300"], "--rtt 1e+300: a round trip is"),
        (["--gpu", "l40s", "--link", "0mbit"], '--link "0mbit": the rate "0mbit" carries nothing'),
        (["--gpu", "l40s", "--link", "0.0kbit/1gbit"], 'the rate "0.0kbit" carries nothing'),
        (["--gpu", "l40s", "--link", "1gbit/0gbit"], 'the rate "0gbit" carries nothing'),
        (
            ["--gpu", "l40s", "--link", "1gbit", "--fabric", "0gbit"],
            '--fabric: the rate "0gbit" carries nothing',
        ),
        (["--gpu", "l40s", "--link", "1gbit", "--peer", "lyon:1"], "--peer needs --calibrate"),
        (["--calibrate", "--peer", "lyon"], '--peer "lyon": write HOST:PORT'),
        (["--answer", "29600"], "--answer neither plans nor calibrates"),
        (
            ["--gpu", "l40s", "--link", "1gbit", "--set", "site.stages=2"],
            "1 GPUs for site.stages x site.shards = 2",
        ),
    ],
)
def test_mistakes_are_answered_in_one_line(
    plan: Command, file: Path, arguments: list[str], said: str
) -> None:
    code, out, err = plan(file, *arguments)
    assert (code, out) == (1, "")
    assert said in err
    assert err.startswith("dilocox: ")
    assert err.count("\n") == 1


def test_without_a_run_file_there_is_nothing_to_plan(plan: Command) -> None:
    code, _, err = plan()
    assert code == 1
    assert "give a run file, or --calibrate" in err


@pytest.mark.slow
def test_a_calibration_is_written_and_used(
    plan: Command, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_benchmark, "SECONDS", 0.0)
    monkeypatch.setattr(host_benchmark, "VALUES", 1 << 16)
    monkeypatch.setattr(calibrate, "TOKENS", 16)
    code, out, err = plan("--calibrate")
    assert (code, out) == (0, "")
    assert "measuring: codecs" in err
    assert f"{command.CALIBRATION}: " in err
    written = tomllib.loads(command.CALIBRATION.read_text(encoding="utf-8"))
    local = written["gpu"]["local"]
    assert 1e-3 < local["bf16_tflops"] < 1e3
    assert 1e-4 < local["fp32_tflops"] < 1e3
    assert local["bf16_tflops"] != local["fp32_tflops"]  # each measured
    assert local["precision"] in ("bfloat16", "float32")
    assert local["memory_gb_s"] > 0.01
    assert written["host"]["local"]["memory_gib"] > 0.1
    assert set(written["host"]["local"]["encode_gb_s"]) >= {"none", "int4", "topk", "lowrank"}
    code, out, err = plan(file, "--gpu", "local", "--link", "20mbit")
    assert code == 0, err
    assert "lyon, paris: local:1x1; link 20mbit" in out
    # The link to another machine, which answers once.
    monkeypatch.setattr(link_probe, "WARM_UP", 0.05)
    monkeypatch.setattr(link_probe, "SECONDS", 0.2)
    listener = link_probe.listen(0)
    there = threading.Thread(target=link_probe.answer, args=(listener,), daemon=True)
    there.start()
    peer = f"127.0.0.1:{listener.getsockname()[1]}"
    code, out, err = plan("--calibrate", "--peer", peer)
    there.join(20.0)
    assert (code, out) == (0, "")
    assert "use it with --gpu local --link measured" in err
    link = tomllib.loads(command.CALIBRATION.read_text(encoding="utf-8"))["link"]
    assert list(link) == ["measured"]
    assert 0 < link["measured"]["rtt_ms"] < 100
    code, out, _ = plan(file, "--gpu", "l40s", "--link", "measured")
    assert code == 0
    assert "link measured" in out
    # In one go, to a file of one's own; the link is loopback then.
    code, out, _ = plan(file, "--calibrate", "--to", "mine.toml", "--json")
    assert code == 0
    assert Path("mine.toml").exists()
    assert {site["device"] for site in json.loads(out)["sites"]} == {"local"}
