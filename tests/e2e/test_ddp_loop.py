"""Sites whose loops run in several processes each, by DistributedDataParallel and FSDP2."""

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


DIVIDED = ("site.shards=2", "site.micro_batch_size=2")


def processes(
    forge: Forge, workshop: Workshop, name: str, site: str, words: list[str], mode: str = "plain"
) -> list[ForkedRun]:
    """Begin the two processes of a site's loop."""
    sets = [word for word in words[1:] if word != "--set"]
    return two_processes(forge, workshop, name, [SCRIPT, words[0], site, mode, *sets])


def two_processes(
    forge: Forge, workshop: Workshop, name: str, script: list[str]
) -> list[ForkedRun]:
    """Begin a script with its arguments in two processes, as torchrun does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    return [
        forge.command(
            workshop, name, "python", *script,
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


def ended(forge: Forge, workshop: Workshop, name: str, *sets: str) -> ForkedRun:
    """A run of two sites of two processes each, which was stopped on the way and has gone on."""
    words = workshop.run_file(name, *sets, *OWN)
    run = coordinate(forge, workshop, name, *words)
    for outcome, code in (("stopped", 130), ("finished", 0)):
        sites = [processes(forge, workshop, name, site, words) for site in ("paris", "lyon")]
        if outcome == "stopped":
            run.until_round(0)
            run.interrupt()
        codes = [[rank.wait() for rank in site] for site in sites]
        said = [rank.printed() for site in sites for rank in site]
        assert codes == [[0, 0], [0, 0]], said
        assert run.wait() == code, run.output()
        assert {rank.last_line() for site in sites for rank in site} == {outcome}
        if outcome == "stopped":
            run = coordinate(forge, workshop, name, *words, "--resume")
    assert not verdicts(run.folder)
    assert len(flush_digests(run)) == 1
    return run


def close(run: ForkedRun, usual: ForkedRun) -> None:
    """Both runs trained the same model, up to the rounding of gradients' sums.

    A rounding may change the 4 bits of a value, so the largest difference is not the usual one.
    """
    found, expected = weights(run), weights(usual)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=5e-4, rtol=0.0, msg=name)
        assert float((found[name] - tensor).abs().mean()) < 2e-6, name
    for key, within in (("tokens", 0.0), ("loss", 1e-4), ("grad_norm", 1e-2)):
        own, other = ([r[key] for r in each.records("round", "lyon")] for each in (run, usual))
        assert own == pytest.approx(other, rel=within), key
    last = [each.summary()["val_loss_last"] for each in (run, usual)]
    assert last[0] == pytest.approx(last[1], rel=1e-4)


def test_two_sites_of_two_processes(workshop: Workshop, forge: Forge) -> None:
    """They end where one process per site ends.

    The optimizers of all processes go on from the checkpoint.
    """
    usual = forge.train(workshop, "one-process", *SETS, "outer.rounds=5", hooks="adamw")
    assert usual.wait() == 0, usual.output()
    close(ended(forge, workshop, "ddp", *SETS, "outer.rounds=5"), usual)


@pytest.mark.slow
def test_a_model_that_fsdp_divides(workshop: Workshop, forge: Forge) -> None:
    """Each process exchanges its rows. They end where dilocox's own shards end."""
    # 63 rows: the processes hold different numbers of them.
    uneven = "model.architecture.intermediate_size=63"
    sets = (*SETS, *DIVIDED, "outer.rounds=5", uneven)
    usual = forge.train(workshop, "shards", *sets, hooks="adamw")
    assert usual.wait() == 0, usual.output()
    run = ended(forge, workshop, "fsdp", *sets)
    close(run, usual)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_process_that_crashes_ends_its_site(workshop: Workshop, forge: Forge, kind: str) -> None:
    """The other process says why; both join again while the partner goes on."""
    name, sets = f"{kind}-crash", DIVIDED if kind == "fsdp" else ()
    more = (f"outer.rounds={24 if kind == 'ddp' else 12}", "outer.min_sites=1")
    words = workshop.run_file(name, *SETS, *OWN, *sets, *more)
    run = coordinate(forge, workshop, name, *words)
    paris = processes(forge, workshop, name, "paris", words)
    lyon = processes(forge, workshop, name, "lyon", words, "dies")
    assert [rank.wait() for rank in lyon] == [1, 1]
    why = "process 1: its loop ended by ZeroDivisionError: a mistake of the loop"
    assert lyon[0].last_line() == f"TrainingError: site lyon: {why}"
    assert lyon[1].last_line() == "ZeroDivisionError: a mistake of the loop"
    run.until(lambda: why in run.printed())
    if kind == "ddp":
        lyon = processes(forge, workshop, name, "lyon", words, "unwrapped")
        assert [rank.wait() for rank in lyon] == [1, 1]
        for rank in lyon:
            assert "hold different tensors" in rank.last_line()
            assert "wrap the model in DistributedDataParallel" in rank.last_line()
    before = run.records("round", "lyon")
    lyon = processes(forge, workshop, name, "lyon", words, "leaves")
    codes = [rank.wait() for rank in (*lyon, *paris)]
    assert codes == [0] * 4, [rank.printed() for rank in (*lyon, *paris)]
    assert [rank.last_line() for rank in (*lyon, *paris)] == ["left"] * 2 + ["finished"] * 2
    assert run.wait() == 0, run.output()
    after = run.records("round", "lyon")[len(before) :]
    assert after
    assert {report["anchor_digest"] for report in after} <= {
        report["anchor_digest"] for report in run.records("round", "paris")
    }
    assert not verdicts(run.folder)


@pytest.mark.slow
def test_torchrun_starts_a_loop_again_which_joins_again(workshop: Workshop, forge: Forge) -> None:
    """`torchrun` itself, beside a site of one process."""
    words = workshop.run_file("elastic", *SETS, *OWN, "outer.rounds=2000", "outer.min_sites=1")
    run = coordinate(forge, workshop, "elastic", *words)
    sets = [word for word in words[1:] if word != "--set"]
    paris = forge.command(workshop, "elastic", "python", SCRIPT, words[0], "paris", "plain", *sets)
    lyon = forge.command(
        workshop, "elastic", "torchrun", "--nproc-per-node=2", "--standalone", "--max-restarts=1",
        SCRIPT, words[0], "lyon", "dies once", *sets,
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    run.until(lambda: "its loop ended by ZeroDivisionError" in run.printed())
    before = len(run.records("round", "lyon"))
    run.until(lambda: len(run.records("round", "lyon")) > before + 1)
    run.interrupt()
    assert lyon.wait() == 0, lyon.printed()
    assert paris.wait() == 0, paris.printed()
    assert run.wait() == 130, run.output()
    assert lyon.printed().count("stopped") >= 2
    last = [run.records("round", site)[-1]["anchor_digest"] for site in ("paris", "lyon")]
    assert last[0] == last[1]
