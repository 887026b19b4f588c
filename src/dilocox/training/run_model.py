"""The model of a finished run: find it, copy it in another dtype, sample text from it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.errors import CheckpointError, ConfigError
from dilocox.training.device_check import check_device
from dilocox.utils.adapter_files import is_adapter_folder
from dilocox.utils.storage import unsafe_reason

if TYPE_CHECKING:
    from dilocox.models.adapter_folder import AdapterFolder

DTYPES = ("fp32", "bf16", "fp16")
INDEX = "model.safetensors.index.json"


def model_folder(place: str | Path) -> Path:
    """Return the model's folder in the run folder `place`, or `place` itself if it is one.

    A model's folder holds a whole model in Hugging Face's form, or adapters in PEFT's form.

    Raises `CheckpointError` if there is neither.
    """
    place = Path(place)
    for folder in (place / "model", place):
        if (folder / "config.json").exists() or is_adapter_folder(folder):
            return folder
    raise CheckpointError(f"{place}: no model is here; a run writes it to RUN_FOLDER/model")


def export(
    run_folder: str | Path, to: str | Path, dtype: str = "fp32", *, merge: bool = False
) -> Path:
    """Copy a run's model to the folder `to`, in `dtype` (fp32, bf16 or fp16).

    A whole model is copied as a Hugging Face folder, and adapters as a PEFT folder. With `merge`,
    adapters are added to their base model, and `to` is a Hugging Face folder. `to` appears
    completely or not at all. Returns the path of the new folder. Raises `CheckpointError` if the
    run has no model yet, if its base model cannot be loaded, or if `to` is not empty or cannot be
    written. Raises `ConfigError` for another dtype, or for `merge` of a whole model.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: use one of {', '.join(DTYPES)}")
    source, target = model_folder(run_folder), Path(to)
    if merge and not is_adapter_folder(source):
        raise ConfigError(f"{source}: is a whole model, so there is nothing to merge; leave it out")
    partial = target.with_name(f".{target.name}.part")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"{target}: is not empty; choose another folder")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if merge:
            check_plain_folder(source)
            _write_merged(source, partial, dtype)
        else:
            _copy(source, partial, dtype)
        partial.replace(target)
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror or error}); choose another folder"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _copy(source: Path, target: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from dilocox.utils.rounding import round_to_bf16

    chosen = _torch_dtype(dtype)
    total = 0
    check_plain_folder(source)
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            for name, tensor in tensors.items():
                # Converted one tensor at a time, because a file may hold gigabytes.
                if tensor.is_floating_point() and tensor.dtype != chosen:
                    as_bf16 = chosen == torch.bfloat16
                    tensors[name] = round_to_bf16(tensor.float()) if as_bf16 else tensor.to(chosen)
            total += sum(tensor.nbytes for tensor in tensors.values())
            save_file(tensors, target / file.name, metadata={"format": "pt"})
            # Readable like the other files, so that a web server can serve the file.
            (target / file.name).chmod(0o644)
        elif file.name == "config.json":
            content = _read(file)
            content["dtype"] = str(chosen).removeprefix("torch.")
            content.pop("torch_dtype", None)  # the key's older name
            _write(target / file.name, content)
        elif file.is_dir():
            shutil.copytree(file, target / file.name)
        elif file.name != INDEX:
            shutil.copy2(file, target / file.name)
    if (source / INDEX).exists():
        content = _read(source / INDEX)
        content["metadata"]["total_size"] = total
        _write(target / INDEX, content)


def _torch_dtype(dtype: str) -> Any:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


def _adapters(folder: Path) -> AdapterFolder | None:
    """Return what `folder` says of its adapters; None if it holds a whole model."""
    if not is_adapter_folder(folder):
        return None
    from dilocox.models.adapter_folder import AdapterFolder

    return AdapterFolder.of(folder)


def _write_merged(source: Path, target: Path, dtype: str) -> None:
    """Write adapters and their base model as one; see `merged_model.write_merged`."""
    from dilocox.models.adapter_folder import AdapterFolder
    from dilocox.training import merged_model

    merged_model.write_merged(AdapterFolder.of(source), target, _torch_dtype(dtype))


def check_plain_folder(folder: Path) -> None:
    """Check that copying `folder` copies only files inside it, and that the copy ends.

    The folder may come from a stranger: a link in it could name a private file of the user who
    copies the folder. Raises `CheckpointError` for a path that is not safe.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        reason = unsafe_reason(path, folder)
        if reason:
            raise CheckpointError(f"{path}: {reason}; remove it, or put a copy of the file there")


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def generate(
    model: str | Path,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    chat: bool = False,
    tokens: int = 100,
    temperature: float = 0.8,
    seed: int = 0,
    device: str = "cpu",
) -> str:
    """Sample a completion of `prompt`, and return prompt and completion as one text.

    With `chat`, return the assistant's next message alone. It ends where the model ends it.

    Args:
        model: a run folder, a Hugging Face folder, or a PEFT folder, whose base model must be on
            this machine or on the hub.
        prompt: text to continue. If empty, the completion starts from the end-of-text token. With
            `chat`, a user's message, or a list of messages with `role` and `content`.
        chat: write the prompt with the model's chat template.
        tokens: largest number of tokens of the completion.
        temperature: sampling temperature. 0 always takes the most likely token.
        seed: seed of the sampling.
        device: PyTorch's name of a device. On "cpu" the model computes in its own dtype, on any
            other device in bf16. After "cuda" this process can no longer start a run on GPUs.

    Raises:
        CheckpointError: there is no model, or the model cannot be loaded.
        ConfigError: a number is out of range, the device cannot be used, or `prompt` is empty and
            the model has no end-of-text token. Or, with `chat`, the model has no chat template, or
            the template refuses the messages.
    """
    if tokens < 1:
        raise ConfigError(f"tokens {tokens}: give 1 or more")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(
            f"temperature {temperature:g}: give 0 (always the most likely token) or more"
        )
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"seed {seed}: give a number of at most 64 bits")
    folder = model_folder(model)
    check_device(device, "generate")
    asked = None
    if chat:
        # Imported only now: a coordinator runs without numpy, which the import needs.
        from dilocox.training.chat_prompt import chat_prompt

        asked = chat_prompt(folder, prompt)
    tokenizer, network = load_model(folder, device)
    import torch

    network.to(device)
    if asked is None:
        text = prompt or tokenizer.eos_token or tokenizer.bos_token
        if not text:
            raise ConfigError(
                f"prompt: {folder} has no end-of-text token to begin with; give a prompt"
            )
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False).to(device)
    else:
        ids = torch.tensor([asked.ids], device=device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch.manual_seed(seed)
    choice: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        choice = {"do_sample": True, "temperature": temperature}
    # If the tokenizer has no padding token, transformers takes the end-of-text token, and warns
    # each time.
    choice["pad_token_id"] = tokenizer.pad_token_id or tokenizer.eos_token_id
    if asked is not None:
        choice["eos_token_id"] = asked.ends
    output = network.generate(**inputs, max_new_tokens=tokens, **choice)
    shown = output[0] if asked is None else output[0, len(asked.ids) :]
    return str(tokenizer.decode(shown, skip_special_tokens=True))


def load_model(folder: Path, device: str) -> tuple[Any, Any]:
    """Return the tokenizer and the model of a Hugging Face or PEFT folder.

    The model is in evaluation mode, on the CPU, with its adapters. `device`: where the model will
    compute. For "cpu" the model has its own dtype, for any other device bf16. No code in the
    folder is run. Raises `CheckpointError` if tokenizer or model cannot be loaded.
    """
    adapters = _adapters(folder)
    # Imported only now: the two imports take seconds, and there may be no model.
    import torch
    from transformers import AutoTokenizer

    from dilocox.models.network import load_network

    try:
        with _no_progress_bar():
            # The folder may come from a stranger, so no code in it is run.
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            dtype = None if device == "cpu" else torch.bfloat16
            network = load_network(folder, adapters, dtype).eval()
    except Exception as error:  # missing or damaged files: many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{folder}: cannot be loaded ({reason}); was it changed?") from None
    return tokenizer, network


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Context without transformers' progress bars: loading a local model takes little time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
