"""TRL as one site of a run: python train.py sft|dpo RUN_FILE SITE RECORDS [KEY=VALUE ...]"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import dilocox
from dilocox.hf import SiteCallback

kind, file, site, records, *sets = sys.argv[1:]
run = dilocox.load_run(file, sets)
rows = load_dataset("json", data_files=records, split="train")
lora = LoraConfig(
    r=run.adapter.rank,
    lora_alpha=run.adapter.alpha,
    target_modules="all-linear",
    task_type="CAUSAL_LM",
)
settings = {
    "output_dir": f"{run.folder}/trainer-{site}",
    "max_steps": run.total_steps,
    "max_length": run.data.sequence_length,
    "per_device_train_batch_size": run.site.micro_batch_size,
    "gradient_accumulation_steps": run.site.batch_size // run.site.micro_batch_size,
    "learning_rate": run.inner.learning_rate,
    "bf16": torch.cuda.is_available(),
    "seed": list(run.sites).index(site),
    "report_to": [],
    "save_strategy": "no",
}
parts = {
    "model": AutoModelForCausalLM.from_pretrained(run.model.path, dtype=torch.float32),
    "processing_class": AutoTokenizer.from_pretrained(run.model.path),
    "peft_config": lora,
}
if kind == "dpo":
    trainer = DPOTrainer(args=DPOConfig(**settings), train_dataset=rows, **parts)
else:
    rows = rows.remove_columns("rejected").rename_column("chosen", "completion")
    trainer = SFTTrainer(args=SFTConfig(**settings), train_dataset=rows, **parts)
callback = SiteCallback(trainer, run, name=site)
trainer.add_callback(callback)
trainer.train()
print(callback.site.outcome)
