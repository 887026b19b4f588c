"""The determinism class: what changes bits changes it."""

from __future__ import annotations

import json

import torch

from dilocox.config import ModelSection
from dilocox.config_site import SiteSection
from dilocox.site import determinism_facts, set_determinism

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
