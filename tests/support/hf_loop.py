"""A trainer of transformers, or TRL's SFT with LoRA, as one site of a run.

Arguments: run file, site, folder for the trainer, `trainer` or `sft`, overrides.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import dilocox
from dilocox.hf import SiteCallback
from tests.support.own_loop import model_of


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of 32 tokens that count up."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = 40 + (7 * number + torch.arange(32)) % 50
        return {"input_ids": row, "labels": row}


def arguments(folder: str) -> dict[str, Any]:
    """What both trainers are given: optimizer steps of two micro-batches of two rows."""
    return {
        "output_dir": folder, "max_steps": 10**4, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 3e-3, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "logging_steps": 8, "disable_tqdm": True,
        "seed": 3, "lr_scheduler_type": "linear",
    }  # fmt: skip


def trainer_of(config: dilocox.RunConfig, folder: str) -> Trainer:
    """The trainer of transformers, of the whole model."""
    return Trainer(model_of(config), TrainingArguments(**arguments(folder)), train_dataset=Rows())


def sft_of(config: dilocox.RunConfig, folder: str) -> Trainer:
    """TRL's trainer, of adapters alone."""
    from datasets import Dataset as Table
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    assert config.adapter is not None
    own = config.adapter
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    lora = LoraConfig(
        r=own.rank, lora_alpha=own.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    rows = Table.from_list(
        [{"input_ids": Rows()[number]["input_ids"].tolist()} for number in range(64)]
    )
    settings = SFTConfig(**arguments(folder), max_length=32)
    return SFTTrainer(model, args=settings, train_dataset=rows, peft_config=lora)


def main() -> int:
    """Train as one site, and print how that ended."""
    file, name, folder, kind, *sets = sys.argv[1:]
    torch.set_num_threads(1)
    config = dilocox.load_run(file, sets)
    trainer = (sft_of if kind == "sft" else trainer_of)(config, folder)
    callback = SiteCallback(trainer, config, name=name)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.site is not None
    print(callback.site.outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
