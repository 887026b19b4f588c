"""`dilocox export --gguf`: a run's model as a folder with a GGUF file and Ollama's Modelfile."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dilocox.errors import CheckpointError, ConfigError
from dilocox.tools.serving.gguf_file import DTYPES, check_gguf, write_gguf
from dilocox.tools.serving.other_servers import modelfile
from dilocox.tools.serving.tokens import ends_of_turn
from dilocox.training.run_model import check_plain_folder, export, model_folder
from dilocox.utils.adapter_files import is_adapter_folder

MODELFILE = "Modelfile"


def export_gguf(model: str | Path, to: str | Path, dtype: str = "f16") -> Path:
    """Write a model to the folder `to`: `NAME-DTYPE.gguf` and `Modelfile`. Return the GGUF's path.

    Adapters are added to their base model first, in fp32, in a temporary folder beside `to`.

    Args:
        model: a run folder, a Hugging Face folder or a PEFT folder.
        to: a new or empty folder. Its name is the model's name.
        dtype: data type of the matrices, one of `DTYPES`.

    Raises:
        CheckpointError: there is no model, `to` is not empty, or a file cannot be read or written.
        ConfigError: the model or its tokenizer has no form in GGUF, or gguf is not installed.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"gguf {dtype!r}: use one of {', '.join(DTYPES)}")
    check_gguf()
    source, target = model_folder(model), Path(to)
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"{target}: is not empty; choose another folder")
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror or error}); choose another folder"
        ) from None
    path = target / f"{target.resolve().name}-{dtype}.gguf"
    if not is_adapter_folder(source):
        check_plain_folder(source)
        return _written(source, path, dtype)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as work:
        return _written(export(source, Path(work) / "merged", merge=True), path, dtype)


def _written(source: Path, path: Path, dtype: str) -> Path:
    write_gguf(source, path, dtype, path.parent.resolve().name)
    (path.parent / MODELFILE).write_text(
        modelfile(path.name, ends_of_turn(source)), encoding="utf-8"
    )
    return path
