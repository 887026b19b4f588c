"""Index of a checkpoint's tensors: the dtype, the shape and the place of each tensor's bytes.

`torch.distributed.checkpoint` keeps its index in `.metadata`, a pickle. A pickle is a program, so
no pickle of a checkpoint is ever run, whoever wrote the folder. New checkpoints have the same
index as JSON in `tensors.json`. In checkpoints of earlier versions `.metadata` is read by an
unpickler that only makes a few inert records, dtypes and sizes, and can run nothing.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import torch

from dilocox.errors import CheckpointError

FILE = "tensors.json"
OLD_FILE = ".metadata"

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}
_FUNCTIONS = {("torch", "Size"), ("torch.serialization", "_get_layout")}
_OPERATIONS = frozenset(
    (
        "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE",
        "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE",
        "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST",
        "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "STACK_GLOBAL", "REDUCE",
        "NEWOBJ", "BUILD",
    )
)  # fmt: skip
"""Operations that pickle.dump writes for such an index. BINPUT is not allowed, because it can make
the unpickler allocate gigabytes."""


@dataclass(frozen=True)
class Entry:
    """Place of one tensor: `length` bytes from `offset` on in `file`, as torch.save wrote them."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        """Raise `ValueError` if a field cannot belong to a tensor that dilocox has written."""
        kind = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else None
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"dtype {self.dtype!r}")
        for number in (*self.shape, self.offset, self.length):
            if type(number) is not int or number < 0:
                raise ValueError(f"number {number!r}")
        if not isinstance(self.file, str) or not is_plain_name(self.file):
            raise ValueError(f"file {self.file!r}")
        if math.prod(self.shape) * kind.itemsize > self.length:
            raise ValueError(f"shape {self.shape}, larger than {self.length} bytes")

    def read(self, file: BinaryIO) -> torch.Tensor:
        """Read the tensor from its open file.

        Raises `CheckpointError` if another tensor lies at this place.
        """
        file.seek(self.offset)
        content = io.BytesIO(file.read(self.length))
        tensor = torch.load(content, map_location="cpu", weights_only=True)
        expected = (torch.Tensor, torch.strided, getattr(torch, self.dtype), self.shape)
        found = isinstance(tensor, torch.Tensor) and (
            type(tensor), tensor.layout, tensor.dtype, tuple(tensor.shape)
        )  # fmt: skip
        if found != expected:
            raise CheckpointError(
                f"{self.file}: another tensor than the index names lies at byte {self.offset}; "
                "resume from another checkpoint"
            )
        whole: torch.Tensor = tensor.detach().contiguous()
        return whole


def is_plain_name(name: str) -> bool:
    """Return whether `name` names a file in the folder itself: no path, no control characters."""
    return name.isprintable() and not {"/", "\\"} & set(name) and name not in ("", ".", "..")


def index_of(metadata: Any, results: Sequence[Sequence[Any]]) -> dict[str, Entry]:
    """Return the index of a checkpoint that PyTorch's writer has just written.

    The arguments are those of `StorageWriter.finish`: `Metadata`, and lists with a `WriteResult`
    for each tensor.
    """
    places = {item.index.fqn: item.storage_data for items in results for item in items}
    return {
        name: Entry(
            str(entry.properties.dtype).removeprefix("torch."),
            tuple(entry.size),
            places[name].relative_path,
            places[name].offset,
            places[name].length,
        )
        for name, entry in metadata.state_dict_metadata.items()
    }


def to_json(index: Mapping[str, Entry]) -> bytes:
    """Return the content of `tensors.json`."""
    document = {"format": 1, "tensors": {name: asdict(entry) for name, entry in index.items()}}
    return json.dumps(document, sort_keys=True).encode()


def from_json(text: bytes, where: str) -> dict[str, Entry]:
    """Return the index in `text`, the content of the file `where`.

    Raises `CheckpointError` if `text` is not such an index.
    """
    try:
        found = json.loads(text)
        if found["format"] != 1:
            raise ValueError(f"format {found['format']!r}")
        return {
            name: Entry(**(fields | {"shape": tuple(fields["shape"])}))
            for name, fields in found["tensors"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _refused(where, error) from None


def from_pickle(text: bytes, where: str) -> dict[str, Entry]:
    """Return the index in `text`, the content of a `.metadata` file of an earlier version.

    Nothing in `text` is run. `where` is the name of the file. Raises `CheckpointError` if `text`
    is not such an index.
    """
    try:
        for operation, _, _ in pickletools.genops(text):
            if operation.name not in _OPERATIONS:
                raise ValueError(f"operation {operation.name}")
        return _from_records(_Unpickler(text).load())
    except Exception as error:  # a hostile pickle may raise any error
        raise _refused(where, error) from None


def _refused(where: str, error: BaseException) -> CheckpointError:
    said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return CheckpointError(
        f"{where}: not an index of tensors that dilocox has written ({said}); nothing of it was "
        "run: resume from another checkpoint"
    )


class _Unpickler(pickle.Unpickler):
    """Makes records without behaviour for the classes of PyTorch's index. Refuses other classes."""

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a record class, the name of a dtype, or `tuple`.

        Raises `UnpicklingError` for any other name.
        """
        key = (module, name)
        if key not in self._made:
            if name in _RECORDS.get(module, ()):
                self._made[key] = _record_class(name)
            elif key in _FUNCTIONS:
                self._made[key] = tuple if name == "Size" else _record_class(name)
            elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
                self._made[key] = name
            else:
                raise pickle.UnpicklingError(f"it names {module}.{name}"[:100])
        return self._made[key]


def _record_class(name: str) -> type:
    """Return a new class. Each pickle gets new ones, so that it cannot change another's classes."""

    class Record:
        def __new__(cls, *_: Any) -> Any:
            return super().__new__(cls)

        def __setstate__(self, state: Any) -> None:
            self.state = state

    Record.__name__ = name
    return Record


def _from_records(metadata: Any) -> dict[str, Entry]:
    fields: dict[str, Any] = metadata.state
    places: dict[str, dict[str, Any]] = {}
    for key, info in fields["storage_data"].items():
        if any(key.state["offset"] or ()) or info.state.get("transform_descriptors"):
            raise ValueError(f"tensor {key.state['fqn']} in parts")
        places[key.state["fqn"]] = info.state
    index = {}
    for name, entry in fields["state_dict_metadata"].items():
        if type(entry).__name__ == "BytesStorageMetadata":
            continue
        properties: Sequence[Any] = entry.state["properties"].state
        place = places[name]
        index[name] = Entry(
            properties[0],
            tuple(entry.state["size"]),
            place["relative_path"],
            place["offset"],
            place["length"],
        )
    return index
