"""What other servers need to serve a model: vLLM's command line, and Ollama's Modelfile."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from dilocox.errors import CheckpointError
from dilocox.utils.adapter_files import ADAPTER_CONFIG, is_adapter_folder
from dilocox.utils.template_files import TEMPLATE_FILE


def chat_template(folder: Path) -> str | None:
    """Return the chat template of the tokenizer in a Hugging Face folder. None: it has none.

    Several templates in the tokenizer's settings are returned as one JSON text.
    Raises `CheckpointError` if a file cannot be read.
    """
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error}); was it changed?") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        if found := read_json(folder / name).get("chat_template"):
            return found if isinstance(found, str) else json.dumps(found)
    return None


def vllm_line(folder: Path, name: str) -> str:
    """Return the command by which vLLM serves the model in `folder` under `name`.

    Adapters are served beside their base model.
    """
    if not is_adapter_folder(folder):
        words = ["vllm", "serve", str(folder.resolve()), "--served-model-name", name]
        return shlex.join(words)
    said = read_json(folder / ADAPTER_CONFIG)
    base, rank = str(said.get("base_model_name_or_path")), int(said.get("r", 16))
    words = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", str(_lora_rank(rank))]
    return shlex.join([*words, "--lora-modules", f"{name}={folder.resolve()}"])


def _lora_rank(rank: int) -> int:
    """Return the least value of vLLM's `--max-lora-rank` that holds adapters of `rank`."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def modelfile(model: str, ends: list[str]) -> str:
    """Return Ollama's Modelfile for the GGUF file `model` beside it.

    `ends`: texts of the tokens that end a message. Those that the form cannot hold are left out.
    """
    # Ollama takes what is between the quotes as it stands.
    stops = [end for end in ends if '"' not in end and "\n" not in end]
    lines = [f"FROM ./{model}", *(f'PARAMETER stop "{end}"' for end in stops)]
    return "\n".join(lines) + "\n"


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. It is empty if there is no file.

    Raises `CheckpointError` if the file holds anything else.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); was it changed?") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: holds no JSON object; was it changed?")
    return found
