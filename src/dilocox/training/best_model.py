"""`model-best/`: the model with the lowest held-out loss of a run's evaluations.

`checkpoint.best` asks for the folder. It is replaced as a whole: a new model is written beside it
and renamed. `held_out.json` in it says which evaluation the model is of.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

FOLDER = "model-best"
FILE = "held_out.json"


def partial(run: Path, site: str) -> Path:
    """Where `site` writes a model that is to become the run folder's best one."""
    return run / f"{FOLDER}.{site}.part"


def lowest(run: Path, site: str) -> float | None:
    """Held-out loss of the model that is kept; None if none is.

    A replacement by `site` that a crash has cut off is completed first.
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
        return None  # what cannot be compared is replaced
    return loss if math.isfinite(loss) else None


def improves(run: Path, site: str, loss: float) -> bool:
    """Whether a model of this held-out loss is better than the one that is kept."""
    if not math.isfinite(loss):
        return False
    known = lowest(run, site)
    return known is None or loss < known


def clear(run: Path, site: str) -> None:
    """Remove what a write that was cut off has left."""
    shutil.rmtree(partial(run, site), ignore_errors=True)


def put(run: Path, site: str, round_: int, loss: float) -> None:
    """Make the Hugging Face folder that `site` has written the best model.

    `loss`: held-out loss of the anchor after `round_`. Raises `OSError`.
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
