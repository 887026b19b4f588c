"""A Trainer as one site of a run: python train.py RUN_FILE SITE TEXT_FILE [KEY=VALUE ...]"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import dilocox
from dilocox.hf import SiteCallback

file, site, text, *sets = sys.argv[1:]
run = dilocox.load_run(file, sets)
model = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=torch.float32)
read = Path(text).read_text(encoding="utf-8")
tokens = AutoTokenizer.from_pretrained(run.model.path)(read)["input_ids"]
length = run.data.sequence_length
cut = [tokens[begin : begin + length] for begin in range(0, len(tokens) - length + 1, length)]
settings = TrainingArguments(
    output_dir=f"{run.folder}/trainer-{site}",
    max_steps=run.total_steps,
    per_device_train_batch_size=run.site.micro_batch_size,
    gradient_accumulation_steps=run.site.batch_size // run.site.micro_batch_size,
    learning_rate=run.inner.learning_rate,
    warmup_steps=run.inner.warmup_steps,
    bf16=torch.cuda.is_available(),
    seed=list(run.sites).index(site),
    report_to=[],
    save_strategy="no",
)
rows = [{"input_ids": row, "labels": row} for row in cut]
held_out = max(1, len(rows) // 20)
trainer = Trainer(model, settings, train_dataset=rows[held_out:], eval_dataset=rows[:held_out])
callback = SiteCallback(trainer, run, name=site)
trainer.add_callback(callback)
trainer.train()
print(callback.site.outcome)
