"""What GPUs do to a run, played on processors: no deterministic kernel, too little memory."""

from __future__ import annotations

import pytest

from dilocox.record.log.round_document import Document
from dilocox.tools.audit.audited_run import AuditedRun
from tests.support.forge import Forge
from tests.support.harness import PATIENT, Workshop, verdicts

pytestmark = pytest.mark.runs


def test_an_operation_without_a_deterministic_kernel(workshop: Workshop, forge: Forge) -> None:
    """The run says so once for each site and trains to its end; the other stage of the site does
    without, too, and both say so in their class."""
    run = forge.train(
        workshop, "lacks-a-kernel", "outer.rounds=2", "record.states_every=1",
        "checkpoint.every_rounds=0", PATIENT, hooks="lacks-a-kernel",
    )  # fmt: skip
    assert run.wait() == 0, run.output()
    for site in ("paris", "lyon"):
        told = [line for line in run.printed().split(f"{site}: ")[1:] if line.startswith("no det")]
        assert len(told) == 1, run.printed()
        assert "kernel on this GPU for put_:" in " ".join(told[0].split())
    assert "FAIL" not in verdicts(run.folder).values()
    audited = AuditedRun(run.folder, (), None)
    states = list(audited.course.rounds.values())
    documents = [Document.from_bytes(audited.case().get(each.document)) for each in states]
    assert len(documents) >= 2 * 2 * 2
    assert {each.facts["deterministic"] for each in documents} == {False}


def test_a_gpu_that_is_too_small_is_not_tried_again(workshop: Workshop, forge: Forge) -> None:
    run = forge.train(
        workshop, "out-of-memory", "outer.min_sites=2", "outer.rounds=2",
        "network.heartbeat=5", hooks="out-of-memory",
    )  # fmt: skip
    # The coordinator says so, then the site. The other site cannot go on alone, so the run ends.
    assert run.wait() == 1, run.output()
    assert "since fewer than outer.min_sites 2 are left (lyon stage 1 shard 0" in run.last_line()
    printed = " ".join(run.printed().split())
    assert "the run waits for sites: outer.min_sites is 2, active now: 1" in printed
    assert (
        "lyon stage 1 shard 0: its GPU is out of memory; lower site.micro_batch_size (now 2)"
        in (printed)
    )
    assert "lyon joins again" not in printed
    logs = (run.folder / "logs" / "lyon-stage1-shard0.log").read_text()
    assert logs.count("its GPU is out of memory") >= 1
    assert logs.count("torch.OutOfMemoryError: CUDA out of memory") == 1
