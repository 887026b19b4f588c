"""How a whole network of a folder is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.models.network import attention_of


@pytest.mark.parametrize(
    ("model_type", "wanted"), [("qwen3", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")]
)
def test_attention_is_one_that_can_compute_the_model(
    tmp_path: Path, model_type: str, wanted: str
) -> None:
    """Gemma 2 caps the logits of attention, and GPT-OSS has attention sinks."""
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    assert attention_of(str(tmp_path), None) == wanted
