"""`model-best/`: the model with the lowest held-out loss of a run's evaluations.

The run file's key `checkpoint.best` asks for the folder. It is replaced as a whole: a new model
is written beside the folder and then renamed. The file `held_out.json` in the folder names the
evaluation of the model.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

FOLDER = "model-best"
FILE = "held_out.json"


def partial(run: Path, site: str) -> Path:
    """Return the folder in which `site` writes a model before it becomes the best model."""
    return run / f"{FOLDER}.{site}.part"


def lowest(run: Path, site: str) -> float | None:
    """Return the held-out loss of the best model so far. None if there is no best model.

    A replacement by `site` that a crash interrupted is completed first.
    """
    folder, new, old = _places(run, site)
    if not folder.exists() and (new / FILE).exists():
        new.replace(folder)
    elif not folder.exists() and old.exists():
        old.replace(folder)
    shutil.rmtree(old, ignore_errors=True)
    try:
        loss = float(json.loads((folder / FILE).read_text(encoding="utf-8"))["val_loss"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a model without a readable loss is replaced by the next one
    return loss if math.isfinite(loss) else None


def improves(run: Path, site: str, loss: float) -> bool:
    """Return whether a model with held-out loss `loss` is better than the best model so far."""
    if not math.isfinite(loss):
        return False
    known = lowest(run, site)
    return known is None or loss < known


def put(run: Path, site: str, round_: int, loss: float) -> None:
    """Replace the best model by the Hugging Face folder that `site` has written.

    `loss`: held-out loss of the anchor after `round_`. Raises `OSError` if the disk fails.
    """
    folder, new, old = _places(run, site)
    said = {"after_round": round_, "val_loss": loss, "site": site}
    (new / FILE).write_text(json.dumps(said) + "\n", encoding="utf-8")
    if folder.exists():
        folder.replace(old)
    new.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def _places(run: Path, site: str) -> tuple[Path, Path, Path]:
    return run / FOLDER, partial(run, site), run / f"{FOLDER}.{site}.old"
