"""Sites whose loops run in several processes each, with DistributedDataParallel."""

from __future__ import annotations

import socket

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_operations import coordinate, flush_digests
from tests.e2e.test_own_loop import OWN, SCRIPT, SETS
from tests.support.forge import Forge, ForkedRun
from tests.support.harness import Workshop, verdicts

pytestmark = pytest.mark.runs


def processes(
    forge: Forge, workshop: Workshop, name: str, site: str, words: list[str], mode: str = "plain"
) -> list[ForkedRun]:
    """Begin the two processes of a site, as torchrun does."""
    sets = [word for word in words[1:] if word != "--set"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    return [
        forge.command(
            workshop, name, "python", SCRIPT, words[0], site, mode, *sets,
            environment={
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]  # fmt: skip


def weights(run: ForkedRun) -> dict[str, torch.Tensor]:
    """The published model."""
    files = sorted((run.folder / "model").glob("*.safetensors"))
    return {name: each for file in files for name, each in load_file(file).items()}


def test_two_sites_of_two_processes(workshop: Workshop, forge: Forge) -> None:
    """They end where one process per site ends, up to the rounding of gradients' sums.

    They are stopped on the way. The optimizers of all processes go on from the checkpoint.
    """
    usual = forge.train(workshop, "one-process", *SETS, "outer.rounds=5", hooks="adamw")
    assert usual.wait() == 0, usual.output()
    words = workshop.run_file("ddp", *SETS, *OWN, "outer.rounds=5")
    run = coordinate(forge, workshop, "ddp", *words)
    for outcome, code, more in (("stopped", 130, ["--resume"]), ("finished", 0, [])):
        sites = [processes(forge, workshop, "ddp", site, words) for site in ("paris", "lyon")]
        if outcome == "stopped":
            run.until_round(0)
            run.interrupt()
        ended = [[rank.wait() for rank in site] for site in sites]
        assert ended == [[0, 0], [0, 0]], [rank.printed() for site in sites for rank in site]
        assert run.wait() == code, run.output()
        assert {rank.last_line() for site in sites for rank in site} == {outcome}
        if more:
            run = coordinate(forge, workshop, "ddp", *words, *more)
    assert not verdicts(run.folder)
    assert len(flush_digests(run)) == 1
    found, expected = weights(run), weights(usual)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=5e-4, rtol=0.0, msg=name)
        assert float((found[name] - tensor).abs().mean()) < 2e-6, name
    for key in ("tokens", "loss"):
        own, other = ([r[key] for r in each.records("round", "lyon")] for each in (run, usual))
        assert own == pytest.approx(other, rel=1e-4)


def test_a_process_that_crashes_ends_its_site(workshop: Workshop, forge: Forge) -> None:
    """The other process says why; both join again while the partner goes on."""
    words = workshop.run_file("ddp-crash", *SETS, *OWN, "outer.rounds=24", "outer.min_sites=1")
    run = coordinate(forge, workshop, "ddp-crash", *words)
    paris = processes(forge, workshop, "ddp-crash", "paris", words)
    lyon = processes(forge, workshop, "ddp-crash", "lyon", words, "dies")
    assert [rank.wait() for rank in lyon] == [1, 1]
    why = "process 1: its loop ended by ZeroDivisionError: a mistake of the loop"
    assert lyon[0].last_line() == f"TrainingError: site lyon: {why}"
    assert lyon[1].last_line() == "ZeroDivisionError: a mistake of the loop"
    run.until(lambda: why in run.printed())
    lyon = processes(forge, workshop, "ddp-crash", "lyon", words, "unwrapped")
    assert [rank.wait() for rank in lyon] == [1, 1]
    for rank in lyon:
        assert "hold different tensors" in rank.last_line()
        assert "wrap the model in DistributedDataParallel" in rank.last_line()
    before = run.records("round", "lyon")
    lyon = processes(forge, workshop, "ddp-crash", "lyon", words, "leaves")
    ended = [rank.wait() for rank in (*lyon, *paris)]
    assert ended == [0] * 4, [rank.printed() for rank in (*lyon, *paris)]
    assert [rank.last_line() for rank in (*lyon, *paris)] == ["left"] * 2 + ["finished"] * 2
    assert run.wait() == 0, run.output()
    after = run.records("round", "lyon")[len(before) :]
    assert after
    assert {report["anchor_digest"] for report in after} <= {
        report["anchor_digest"] for report in run.records("round", "paris")
    }
    assert not verdicts(run.folder)
