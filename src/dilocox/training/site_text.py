"""Token files of a site's own text (`sites.NAME.data`)."""

from __future__ import annotations

from pathlib import Path

from dilocox.config.run_config import RunConfig
from dilocox.data import TokenFiles
from dilocox.errors import DataError


def own_token_files(config: RunConfig, site: str) -> TokenFiles | None:
    """Return the site's own token files. None: the site trains on those of the run.

    Raises `DataError`, which names the key, if the files cannot be opened.
    """
    folder = config.sites[site].data
    if folder is None:
        return None
    try:
        return TokenFiles.open(Path(folder).expanduser())
    except DataError as error:
        raise DataError(f"sites.{site}.data: {error}") from None
