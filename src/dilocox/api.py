"""The Python API: load a run file, train it, export and sample the model.

import dilocox
run = dilocox.load_run("run.toml", ["outer.rounds=20"])
result = dilocox.train(run, on_evaluation=lambda round_, loss: print(round_, loss))
dilocox.export(result.folder, "my-model")
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from dilocox.config import RunConfig, load_run, resolve_run
from dilocox.errors import CheckpointError, TrainingError

__all__ = ["RunConfig", "export", "generate", "load_run", "resolve_run", "train"]


def train(
    config: RunConfig,
    *,
    dataset: Callable | None = None,  # type: ignore[type-arg]
    loss: Callable | None = None,  # type: ignore[type-arg]
    on_evaluation: Callable[[int, float], None] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    debug: bool = False,
):  # type: ignore[no-untyped-def]
    """Train a run with all of its sites as processes on this machine.

    `dataset(start, count)` gives sequences `start` up to `start + count` as int64
    [count, sequence_length + 1], a pure function that is the same at every site; without it the
    token files of `[data]` are read (they are prepared in any case: tokenizer and held-out text
    come from them). `loss(logits [b, L, V], labels int64 [b, L])` is a mean over the micro-batch.
    `on_evaluation(round, held-out loss)` is called in the process of the first rank of the first
    site. Functions run in the ranks' processes. Returns a `Result`; raises `DilocoxError`.
    """
    from dilocox.assembly import Hooks
    from dilocox.launch import train_here
    from dilocox.site import mean_cross_entropy

    hooks = Hooks(dataset, loss or mean_cross_entropy, on_evaluation)
    return train_here(config, hooks, resume=resume, overwrite=overwrite, debug=debug)


def export(run_folder: str | Path, to: str | Path, dtype: str = "fp32") -> Path:
    """Copy a run's model to `to`, as a Hugging Face folder in `dtype` (fp32, bf16 or fp16).

    Raises `CheckpointError` if the run has no model yet or `to` holds something.
    """
    import torch
    from safetensors.torch import load_file, save_file

    source, target = model_folder(run_folder), Path(to)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}: is not empty; choose another folder")
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    chosen = kinds[dtype]
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            tensors = {name: tensor.to(chosen) for name, tensor in load_file(file).items()}
            save_file(tensors, target / file.name, metadata={"format": "pt"})
        elif file.name == "config.json":
            content = json.loads(file.read_text(encoding="utf-8"))
            content["dtype"] = str(chosen).removeprefix("torch.")
            (target / file.name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        elif file.name == "model.safetensors.index.json":
            content = json.loads(file.read_text(encoding="utf-8"))
            scale = 4 // torch.empty(0, dtype=chosen).element_size()
            content["metadata"]["total_size"] //= scale
            (target / file.name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        else:
            shutil.copy2(file, target / file.name)
    return target


def model_folder(place: str | Path) -> Path:
    """The Hugging Face folder of a run folder, or `place` itself if it is one.

    Raises `CheckpointError` if neither is there.
    """
    place = Path(place)
    for folder in (place / "model", place):
        if (folder / "config.json").exists():
            return folder
    raise CheckpointError(f"{place}: no model is here; a run writes it to RUN_FOLDER/model")


def generate(
    model: str | Path,
    prompt: str,
    *,
    tokens: int = 100,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Prompt and a sampled completion of up to `tokens` tokens.

    `model` is a run folder or a Hugging Face folder; temperature 0 takes the likeliest token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if tokens < 1:
        raise TrainingError(f"--tokens {tokens}: give 1 or more")
    folder = model_folder(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = prompt or tokenizer.eos_token
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(seed)
    choice = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
    output = network.generate(**inputs, max_new_tokens=tokens, **choice)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
