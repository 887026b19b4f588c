"""The acceptance run: calls that are killed, rows of earlier calls, and its ties to the product."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import faults, kernels, layouts, link, mixed, product, runs, sizes, speed
from benchmarks.gpu.child import Context, Outcome
from benchmarks.gpu.parts import Part, part_of
from benchmarks.gpu.results import Results
from benchmarks.gpu.runner import ROOT, Setting, order, run_all

HERE = "tests.support.gpu_parts"


def row(name: str, **figures: float) -> dict[str, Any]:
    return {"name": name, "verdict": "INFO", "message": "", "figures": figures, "seconds": 1.0}


CALL = f"""
import sys, time
from pathlib import Path
from benchmarks.gpu.__main__ import end_on_signals
from benchmarks.gpu.parts import Part
from benchmarks.gpu.results import Results
from benchmarks.gpu.runner import Setting, run_all

folder = Path(sys.argv[1])
end_on_signals()
part = Part("family", "{HERE}:family", ("endless",), 1, 60, "hangs")
results = Results(folder / "rows.json", "", None)
run_all([(part, ["endless"])], results, Setting("tiny", folder, time.monotonic() + 120))
"""


def living(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.waits
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_parts_and_their_runs_end_with_a_call_that_is_killed(number: int, tmp_path: Path) -> None:
    """Their session is their own, so nothing else ends them, and they would keep the GPU."""
    call = subprocess.Popen([sys.executable, "-c", CALL, str(tmp_path)], cwd=ROOT)
    pids = tmp_path / "family" / "pids"
    until = time.monotonic() + 60.0
    while not pids.exists() and time.monotonic() < until:
        time.sleep(0.05)
    family = [int(pid) for pid in pids.read_text().split()]
    assert all(map(living, family))
    call.send_signal(number)
    assert call.wait(30.0) != 0
    until = time.monotonic() + 10.0
    while any(map(living, family)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(living, family))


@pytest.mark.slow
@pytest.mark.waits
def test_ranks_of_a_part_that_hangs_write_their_stacks_before_their_parents_end(
    tmp_path: Path,
) -> None:
    """The end of its parent kills a rank at once, so the rank has to be asked first."""
    part = Part("hangs", f"{HERE}:hanging_rank", ("endless",), 1, 4.0, "hangs")
    asked = Setting("tiny", tmp_path, time.monotonic() + 60.0, logs=tmp_path / "rows.log")
    run_all([(part, ["endless"])], Results(None, "", None), asked)
    written = (tmp_path / "rows.log").read_text()
    assert "in _slow_to_tell" in written
    assert "in _sleeps" in written


def test_the_command_has_no_folder_of_this_machine() -> None:
    told = command.told(
        ["--json=/home/me/gpu.json", "--wheels", "/tmp/whl", "--only", "codec int4"]
    )
    assert told == "python -m benchmarks.gpu --json=gpu.json --wheels whl --only 'codec int4'"


def test_a_call_without_time_for_the_machine_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="machine could not be asked: no time left in this call"):
        command.main(["--minutes", "0.05", "--scale", "tiny", "--json", str(tmp_path / "r.json")])
    assert not (tmp_path / "r.json").exists()


@pytest.mark.slow
@pytest.mark.waits
def test_a_site_is_built_as_the_product_builds_it(tmp_path: Path) -> None:
    """The adapter to the product follows its changes: no GPU is needed to see that it does."""
    words = ["--scale", "tiny", "--minutes", "5", "--json", str(tmp_path / "gpu.json")]
    assert command.main([*words, "--only", "host syncs"]) == 0
    with (
        product.paced(1e6),
        product.slower_learning("north"),
        product.gpu_time_of_spans((), tmp_path / "spans"),
    ):
        pass


def only(tmp_path: Path, *wanted: str) -> Context:
    """The context of a part of which some rows are wanted."""
    return Context("tiny", tmp_path, tmp_path / "shared", list(wanted), tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("part", "name", "row"),
    [(layouts, "two-stages", "two stages, verify"), (mixed, "mixed", "mixed sites, verify")],
)
def test_a_run_that_another_call_trained_is_trained_again_before_it_is_verified(
    part: Any, name: str, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def train(*_: Any, **__: Any) -> Outcome:
        trained.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").touch()
        return Outcome(True)

    def verified(folder: Path) -> Outcome:
        return Outcome((folder / "summary.json").exists())

    monkeypatch.setattr(product, "prepare", lambda *_: None)
    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(mixed, "_train", train)
    monkeypatch.setattr(runs, "verified", verified)
    part.run(only(tmp_path, row))
    begun, done = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert json.loads(begun) == {"begun": row}
    assert json.loads(done)["verdict"] == "PASS"
    assert trained == [name]


def test_a_run_that_fails_otherwise_than_by_memory_leaves_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.CompletedProcess([], 1, "dilocox: the driver is too old\n", None)
    monkeypatch.setattr(product, "prepare", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    faults.memory(only(tmp_path, "out of memory"))
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[-1])
    assert (row["verdict"], row["message"]) == (
        "FAIL", "no step began; dilocox: the driver is too old",
    )  # fmt: skip
    assert "the driver is too old" in capsys.readouterr().out


def test_sites_alone_count_while_all_of_them_train(tmp_path: Path) -> None:
    """A site that begins earlier has the GPU to itself, and trains twice as fast until then."""

    def alone(site: str, *rounds: tuple[float, int]) -> Path:
        folder = tmp_path / site
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(
            json.dumps({"kind": "round", "round": number, "site": site, "time": time, "tokens": n})
            + "\n" for number, (time, n) in enumerate(rounds)
        ))  # fmt: skip
        return folder

    folders = {
        "north": alone("north", (10, 80), (14, 80), (20, 80), (28, 80), (32, 80)),
        "south": alone("south", (18, 80), (26, 80), (34, 80), (40, 80), (44, 80)),
    }
    # From 18 to 28: two seconds of north's round of 6 s and its next round; 10 tokens/s of south.
    assert link.speed_together(folders, 1) == pytest.approx((80 * 2 / 6 + 80 + 100) / 10)
    folders["south"] = alone("south", (27, 80), (34, 80), (40, 80), (44, 80))
    assert link.speed_together(folders, 1) is None


def test_allreduce_is_compared_with_two_steps_of_an_earlier_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [{"tokens": 100, "time": float(time), "payload_bytes": 4} for time in (0, 100)]
    monkeypatch.setattr(runs, "rounds", lambda *_: ends)
    monkeypatch.setattr(link.Bench, "together", lambda *_, **__: tmp_path)
    context = only(tmp_path, "link, allreduce")
    context.known = {"link, two steps": {"share_of_no_network": 0.99}}
    bench = link.Bench(context, {"alone": 800.0, "step": 1.0, "bits": 1e6})
    found = link.allreduce(bench).figures
    assert found["two_steps_over_allreduce"] == pytest.approx(0.99 * 400)
    # The same as in one process.
    bench.notes["two-steps"] = 0.99 * 800.0
    assert link.allreduce(bench).figures == pytest.approx(found)


def test_a_row_without_the_figure_of_its_aim_is_measured_again() -> None:
    results, part = Results(None, "", "abc"), part_of("link, allreduce")
    results.set_head({"gpu": "NVIDIA H100"})
    results.add(part, row("link, allreduce", share_of_no_network=0.002))
    again = [(part, ["link, allreduce"])]
    assert order(again, results, again=False) == again
    results.add(part, row("link, allreduce", two_steps_over_allreduce=400.0))
    assert order(again, results, again=False) == []


def test_a_process_knows_the_figures_of_earlier_ones(tmp_path: Path) -> None:
    results = Results(None, "", None)
    part = Part("tells", f"{HERE}:tells", ("first", "second"), 1, 60, "rows")
    results.add(part, row("first", speed=2.0))
    run_all([(part, ["second"])], results, Setting("tiny", tmp_path, time.monotonic() + 60.0))
    assert results.rows["second"]["message"] == "first: {'speed': 2.0}"


@pytest.mark.parametrize("clear", [True, False])
def test_the_runs_of_a_part_do_not_fill_the_disk_of_the_next_one(
    clear: bool, tmp_path: Path
) -> None:
    work, log = tmp_path / "work", tmp_path / "rows.log"
    asked = Setting("tiny", work, time.monotonic() + 60.0, logs=log, clear=clear)
    quick = Part("quick", f"{HERE}:quick", ("passes",), 1, 60, "rows")
    run_all([(quick, ["passes"])], Results(None, "", None), asked)
    assert (work / "quick" / "log.txt").exists() is not clear
    assert work.exists()


def test_the_plain_loop_has_all_kernels_of_attention_after_a_site() -> None:
    """A deterministic site on a GPU switches cuDNN's attention off in its process."""
    before = speed.Flags.now()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert speed.loop(sizes.QWEN_06B["tiny"], False, False).flags.sdp == (True,) * 4
    finally:
        before.set()


def test_regions_with_a_name_are_no_kernels() -> None:
    def event(name: str, microseconds: float, named: bool = False) -> Any:
        return SimpleNamespace(
            name=name, device_type=torch.autograd.DeviceType.CUDA, is_user_annotation=named,
            time_range=SimpleNamespace(elapsed_us=lambda: microseconds),
        )  # fmt: skip

    events = [
        event("Optimizer.step#AdamW.step", 50.0, named=True), event("multi_tensor_apply", 40.0),
        event("triton_poi_fused_addmm_copy", 10.0), event("nvjet_tst_128", 5.0),
    ]  # fmt: skip
    each, calls = kernels.counted(events, True)
    assert calls["multi_tensor_apply"] == 1
    assert kernels._grouped(each) == {"other": 40.0, "compiled": 10.0, "matrices": 5.0}
    assert kernels.counted(events, False) == ({}, {})
