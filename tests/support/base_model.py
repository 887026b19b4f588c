"""A tiny model with weights and a tokenizer, as runs with adapters begin from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ("def ", "return ", "self", "import ", "the ", "    ", "message", "value")


def write_base(folder: Path, seed: int = 0, **keys: Any) -> Path:
    """Write a Qwen3 of two layers with random weights, and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    config = Qwen3Config(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        **keys,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=272,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(WORDS * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    return folder


def peft_folder(base: Path, folder: Path, dtype: Any = None, **keys: Any) -> Path:
    """Write adapters of PEFT whose B is not zero, as a trained one."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", **keys}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings))
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.02)
    (model if dtype is None else model.to(dtype)).save_pretrained(folder)
    return folder
