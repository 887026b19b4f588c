"""The determinism class: what changes bits changes it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from dilocox.config.run_config import ModelSection
from dilocox.config.site import SiteSection
from dilocox.inner import determinism, determinism_facts, set_determinism
from dilocox.inner.attention import sdpa_backends
from dilocox.inner.determinism import Gpu, gpu_here

pytestmark = pytest.mark.waits

MODEL = ModelSection(architecture={"model_type": "qwen3"})


def facts(precision: torch.dtype = torch.float32, **site: int) -> dict[str, object]:
    section = SiteSection(**site)  # type: ignore[arg-type]
    return determinism_facts(section, MODEL, torch.device("cpu"), precision)


def test_the_class_is_this_process_as_it_is_set_up() -> None:
    here = facts()
    assert json.loads(json.dumps(here)) == here == facts()
    assert here["processor"] or here["machine"]
    assert (here["device"], here["precision"]) == ("cpu", "float32")
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_num_threads(threads + 1)
        more = facts()
        set_determinism(not deterministic)
        other = facts()
    finally:
        torch.set_num_threads(threads)
        set_determinism(deterministic)
    assert len({json.dumps(each) for each in (here, more, other)}) == 3
    assert facts(torch.bfloat16) != here
    assert facts(micro_batch_size=2) != here
    assert facts() == here


def test_the_class_of_a_processor_is_what_it_was() -> None:
    """Runs of earlier versions are audited in it."""
    assert set(facts()) == {
        "machine", "system", "processor", "instructions", "device", "python", "packages",
        "precision", "threads", "deterministic", "mkldnn", "matmul", "layout", "attention",
        "compile",
    }  # fmt: skip


H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    capability="9.0",
    driver="580.65.06",
    cuda="13.0",
    cublas="13.1.0",
    cudnn="91900",
    nccl="2.28.9",
    attention=("flash_attention", "math"),
    flash_attention="2.8.3",
)
CUDA = torch.device("cuda", 0)


def on_gpu(gpu: Gpu = H100, model: ModelSection = MODEL, **site: int) -> dict[str, object]:
    section = SiteSection(**site)  # type: ignore[arg-type]
    return determinism_facts(section, model, CUDA, torch.bfloat16, gpu)


def test_the_class_on_a_gpu_is_not_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    here = on_gpu()
    assert json.loads(json.dumps(here)) == here
    assert (here["device"], here["gpus"]) == ("NVIDIA H100 80GB HBM3", 1)
    monkeypatch.setattr(determinism, "processor", lambda: "another")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert on_gpu() == here
    assert on_gpu(stages=2)["gpus"] == 2


@pytest.mark.parametrize(
    "name", ["name", "capability", "driver", "cuda", "cublas", "cudnn", "nccl"]
)
def test_what_changes_a_gpus_bits_changes_its_class(name: str) -> None:
    assert on_gpu(replace(H100, **{name: "another"})) != on_gpu()


def test_the_class_has_the_attention_that_computes() -> None:
    flash = MODEL.model_copy(update={"attention": "flash_attention_2"})
    assert on_gpu(replace(H100, attention=("math",))) != on_gpu()
    assert on_gpu(replace(H100, flash_attention="2.9")) == on_gpu()
    assert on_gpu(replace(H100, flash_attention="2.9"), flash) != on_gpu(model=flash)
    assert on_gpu(replace(H100, attention=("math",)), flash) == on_gpu(model=flash)
    assert "math" in sdpa_backends()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert sdpa_backends() == ("math",)


def test_the_machine_is_asked_for_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = gpu_here(CUDA)
    assert (found.name, found.capability) == (H100.name, "9.0")
    assert (found.cuda, found.nccl) == ("13.0", "2.28.9")
    # No driver, no cuBLAS, no package: empty, not missing.
    assert all(isinstance(value, str) for value in (found.driver, found.cublas, found.cudnn))
