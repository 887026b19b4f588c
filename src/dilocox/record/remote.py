"""A run behind a URL: what is verified of it besides the store, fetched to this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from dilocox.errors import RecordError
from dilocox.record.audits import FOLDER
from dilocox.record.log import CHECKPOINT, ENTRIES, PUBLIC

LOG_FILES = tuple(f"record/{name}" for name in (ENTRIES, CHECKPOINT, PUBLIC))
"""Without these there is nothing to verify."""
METRICS = "metrics.jsonl"
AUDITS = f"record/{FOLDER}"


@contextmanager
def fetched(url: str) -> Iterator[Path]:
    """A folder with the log, the run file and the model of the run at `url`, for as long as it is
    needed. The store stays where it is. Raises `RecordError`."""
    with tempfile.TemporaryDirectory(prefix="dilocox-verify-") as place:
        folder = Path(place)
        try:
            files, root = fsspec.core.url_to_fs(url.rstrip("/"))
            wanted = list(LOG_FILES)
            for name in ("run.toml", METRICS):
                if files.exists(f"{root}/{name}"):
                    wanted.append(name)
            if files.exists(f"{root}/model"):
                for each in files.ls(f"{root}/model", detail=True):
                    where, _, name = str(each["name"]).rstrip("/").rpartition("/")
                    if each["type"] == "file":
                        wanted.append(f"model/{name}")
                    elif where == f"{root}/model":  # that it is there is what is to be judged
                        (folder / "model" / name).mkdir(parents=True, exist_ok=True)
            if files.exists(f"{root}/{AUDITS}"):
                names = files.ls(f"{root}/{AUDITS}", detail=False)
                wanted += [f"{AUDITS}/{str(found).rsplit('/', 1)[-1]}" for found in names]
            for path in wanted:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                files.get_file(f"{root}/{path}", str(folder / path))
        except (OSError, ValueError, ImportError) as error:
            raise RecordError(f"{url}: cannot be fetched ({error})") from None
        yield folder
