"""Datasets from the Hugging Face hub as sources, streamed by the optional package `datasets`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dilocox.config.data import DataSection
from dilocox.data.arrow_values import json_record
from dilocox.data.conversations import Layout
from dilocox.data.packed_files import UNPACKED
from dilocox.data.readers import FIELD, clean, with_columns
from dilocox.data.record_filter import RecordFilter, columns_of
from dilocox.errors import DataError

_RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Endings of local files with records."""


class HubSource:
    """One split of a hub dataset, or of a local folder in a layout that `datasets` can load.

    The revision is resolved to a commit first, so that the manifest names the exact data and every
    pass reads the same documents. The digest covers the documents that were read, each preceded by
    its length (8 bytes, little-endian).
    """

    size: int | None = None
    left_out: Mapping[str, int] = MappingProxyType({})

    def __init__(self, name: str, data: DataSection) -> None:
        """Open dataset `name` as `data` says.

        Raises `DataError` if the package `datasets` is not installed, if the dataset cannot be
        loaded, or if it has no column `data.text_field`.
        """
        try:
            import datasets
        except ImportError:
            raise DataError(
                f"data.source {name}: hub datasets need the package datasets; "
                "run: pip install datasets"
            ) from None
        self.name = name
        self.field = data.text_field
        self.subset, self.split = data.subset, data.split
        self.local = Path(name).expanduser().is_dir()
        self.revision, self.licence = data.revision, data.licence
        self.filter = RecordFilter(data.filter) if data.filter else None
        try:
            if not self.local:
                self._resolve()
            self.rows = datasets.load_dataset(
                str(Path(name).expanduser()) if self.local else name,
                data.subset,
                split=data.split,
                revision=None if self.local else self.revision,
                streaming=True,
            )
        except Exception as error:  # the package's errors have no common base class
            raise DataError(
                f"data.source {name}: cannot be loaded ({_first_line(error)}); check name, subset, "
                "split and connection"
            ) from None
        columns = self.rows.column_names
        self._layout = Layout.of(data)
        self._columns = tuple(data.columns)
        needed = (self.field,) if self._layout is None else self._layout.fields
        mend = FIELD if self._layout is None else self._layout.mend
        for field in needed:
            if columns is not None and field not in columns:
                names = ", ".join(columns[:8]) or "none"
                raise DataError(
                    f'data.source {name}: no column "{field}" (columns: {names}); {mend}'
                )
        wanted = self.filter.wanted if self.filter else {}
        for field in wanted if columns is not None else ():
            if not columns_of(field, columns):
                names = ", ".join(columns[:8]) or "none"
                raise DataError(
                    f'data.source {name}: no column "{field}" of the filter (columns: {names}); '
                    "correct the filter"
                )
        self._begin()

    def _resolve(self) -> None:
        from huggingface_hub import HfApi

        info = HfApi().dataset_info(self.name, revision=self.revision)
        self.revision = info.sha
        card = info.card_data
        if self.licence is None and card is not None:
            licence = card.get("license")
            self.licence = ", ".join(licence) if isinstance(licence, list) else licence

    def _begin(self) -> None:
        self._digest = hashlib.sha256()
        self._documents = self._bytes = self.without_text = 0
        if self.filter is not None:
            self.filter.begin()

    def documents(self) -> Iterator[str]:
        """Yield the texts of the rows in the dataset's order, without blank and missing ones.

        Raises `DataError` if reading fails or if a row holds something other than text.
        """
        self._begin()
        rows = iter(self.rows)
        number = 0
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # network, decoder and loader: no common base class
                raise DataError(
                    f"data.source {self.name}: reading stopped at row {number} "
                    f"({_first_line(error)}); try again"
                ) from None
            if row is None:
                return
            number += 1
            if self.filter is not None and not self.filter.takes(row):
                continue
            text = self._document(row, number - 1)
            self.without_text += text is None
            if text and not text.isspace():
                raw = text.encode()
                self._digest.update(len(raw).to_bytes(8, "little") + raw)
                self._documents += 1
                self._bytes += len(raw)
                yield text

    def _document(self, row: dict[str, Any], number: int) -> str | None:
        """Returns the text or conversation of a row, or None if it is null or missing."""
        where = f"data.source {self.name}: row {number}"
        if self._layout is not None:
            names = (*self._layout.fields, *self._layout.optional)
            return self._layout.parse(json_record(row, names), where)
        text = row.get(self.field)
        if text is not None and not isinstance(text, str):
            raise DataError(
                f'data.source {self.name}: column "{self.field}" of row {number} holds '
                f"{type(text).__name__}, not text; {FIELD}"
            )
        return with_columns(clean(text) if text else text, row, self._columns, where)

    def placed(self) -> Iterator[tuple[int, str]]:
        """Yield (file number, text) of every document; the whole dataset counts as file 0."""
        return ((0, text) for text in self.documents())

    def describe(self) -> dict[str, Any]:
        """Returns the manifest's entry for the documents that the last pass has read."""
        return {
            "kind": "hub",
            # The path of a local folder means nothing on other machines.
            "name": None if self.local else self.name,
            "subset": self.subset,
            "split": self.split,
            "licence": self.licence,
            "revision": self.revision,
            "documents": {
                "count": self._documents,
                "bytes": self._bytes,
                "sha256": self._digest.hexdigest(),
            },
            **({} if self.filter is None else {"filter": self.filter.wanted}),
        }


def on_hub(name: str, data: DataSection) -> bool:
    """Returns whether source `name` is a hub dataset.

    With conversations it is one if it is written like OWNER/NAME and is no local path.
    """
    if not data.has_conversations:
        return data.format == "hub"
    named = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None
    return named and not Path(name).exists() and Path(name).suffix not in (*UNPACKED, *_RECORDS)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0].strip() if lines else type(error).__name__
