"""Reads a PEFT folder: adapters, and the name of the base model that they belong to.

The folder may come from a stranger, so no code in it is run and no pickle is read.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.errors import CheckpointError
from dilocox.models.adapter import check_peft
from dilocox.utils.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE


@dataclass(frozen=True)
class AdapterFolder:
    """A folder with `adapter_config.json` and `adapter_model.safetensors`."""

    folder: Path
    base: tuple[str, str | None]
    """Folder or hub name of the base model, and its revision; None: the newest."""

    @classmethod
    def of(cls, folder: Path) -> AdapterFolder:
        """Read the folder's configuration.

        Raises `CheckpointError` if the folder names no base model or has no safetensors. Raises
        `ConfigError` if the package peft is not installed.
        """
        check_peft()
        try:
            said: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            path, revision = said["base_model_name_or_path"], said.get("revision")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{folder / ADAPTER_CONFIG}: cannot be read ({error})") from None
        if not isinstance(path, str) or not path:
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG}: names no base model; write its folder or hub name as "
                "base_model_name_or_path"
            )
        if not (folder / ADAPTER_FILE).is_file():
            raise CheckpointError(f"{folder}: has no {ADAPTER_FILE}; pickled adapters are not read")
        local = Path(path).expanduser()
        base = str(local) if local.is_dir() else path
        return cls(folder, (base, revision if isinstance(revision, str) else None))

    def added_to(self, model: Any) -> Any:
        """Return the base model `model` with the folder's adapters, as PEFT loads them."""
        from peft import PeftModel

        with warnings.catch_warnings():
            # PEFT uses a name of transformers that is deprecated since transformers 5.23.
            warnings.filterwarnings(
                "ignore", message="`is_gradient_checkpointing`", category=FutureWarning
            )
            return PeftModel.from_pretrained(model, self.folder)
