"""The sources of text that `[data]` names, grouped by the tables `[[data.sources]]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dilocox.config.data import DataSection
from dilocox.data.conversations import Layout
from dilocox.data.hub import HubSource, on_hub
from dilocox.data.manifest import source_names
from dilocox.data.readers import FIELD
from dilocox.data.sources import Source, read_source
from dilocox.errors import DataError

APART = "validation source"
"""Name of the held-out text of `data.validation_source` beside several sources. No source can have
this name."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Named:
    """The names of a group's sources, before they are opened."""

    name: str
    """Name of the table; empty if there are no tables."""
    data: DataSection
    """`[data]` with the keys of the table."""
    names: list[str]
    """Names of the group's sources; those that are held out come last."""
    trained: int
    """Number of sources that are trained on."""
    terms: dict[str, Any]
    """Weight and epochs."""

    @property
    def key(self) -> str:
        """The key of the run file, for messages."""
        return f'data.sources "{self.name}"' if self.name else "data.source"

    def describe(self) -> dict[str, Any]:
        """Returns the manifest's entry: name, number of sources, terms."""
        return {"name": self.name, "sources": len(self.names), "trained": self.trained} | self.terms

    @property
    def own_from(self) -> int | None:
        """Number of the first held-out source of the group; None: documents are held out."""
        return self.trained if self.trained < len(self.names) else None


@dataclass(frozen=True)
class Group:
    """The opened sources of one table, or of the whole `[data]` without tables."""

    named: Named
    sources: list[Source]
    first: int
    """Number of the first of these sources among all sources."""

    @property
    def without_documents(self) -> str:
        """The message if the last pass over the sources gave no document."""
        key, data = self.named.key, self.named.data
        left = sum(source.without_text for source in self.sources)
        if not left:
            return f"{key}: no text in the sources; name files that contain text"
        layout = Layout.of(data)
        what = "text" if layout is None else "a conversation"
        names = (data.text_field,) if layout is None else layout.fields
        mend = FIELD if layout is None else layout.mend
        fields = " or ".join(f'"{name}"' for name in names)
        return f"{key}: none of {left:,} records has {what}: {fields} is null or empty; {mend}"


def named_groups(data: DataSection) -> list[Named]:
    """Returns the groups of `data`, in the manifest's order.

    Raises `DataError` if `data` names no source.
    """
    if data.sources is None:
        return [_named("", data)]
    groups = [
        _named(each.name, data.of_source(each), weight=each.weight, epochs=each.epochs)
        for each in data.sources
    ]
    if data.validation_source is not None:
        apart = source_names({"source": data.validation_source})
        groups.append(Named(APART, data, apart, 0, {"weight": None, "epochs": None}))
    return groups


def _named(name: str, data: DataSection, **terms: Any) -> Named:
    names = source_names({"source": data.source})
    if not names:
        key = f'data.sources "{name}"' if name else "data.source"
        raise DataError(
            f'{key}: missing; name files or folders of text, or "python-stdlib" for a corpus '
            "that every machine has"
        )
    own = source_names({"validation_source": data.validation_source})
    return Named(name, data, names + own, len(names), terms)


def open_groups(named: list[Named], report: Progress) -> list[Group]:
    """Open all sources. Raises `DataError` if one has no text or cannot be read."""
    groups, first = [], 0
    for each in named:
        sources: list[Source] = []
        _check_split(each)
        held = {"split": each.data.validation_split, "filter": each.data.held_out_filter}
        held_data = each.data.model_copy(update=held)
        for number, name in enumerate(each.names):
            own = each.data if number < each.trained else held_data
            hub = on_hub(name, own)
            sources.append(HubSource(name, own) if hub else read_source(name, own, report))
        groups.append(Group(each, sources, first))
        first += len(sources)
    return groups


def _check_split(group: Named) -> None:
    """Raise `DataError` if `[data]` names a split or subset of sources that are files."""
    data = group.data
    # Keys of `[data]` beside tables may be meant for those tables that are hub datasets.
    if group.name or any(on_hub(name, data) for name in group.names):
        return
    for key in ("split", "subset", "validation_split"):
        value = getattr(data, key)
        if value != DataSection.model_fields[key].default:
            raise DataError(
                f'data.{key} is "{value}", which hub datasets alone have: leave it out, set '
                'data.format = "hub", or use data.filter'
            )
