"""Writes a Hugging Face folder as a GGUF file, for llama.cpp, Ollama and what builds on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dilocox.errors import CheckpointError, ConfigError
from dilocox.tools.serving.gguf_families import (
    Array,
    Family,
    converted,
    family_of,
    header,
    rotation_factors,
)
from dilocox.tools.serving.gguf_vocabulary import Vocabulary, read_vocabulary
from dilocox.tools.serving.other_servers import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = ("f16", "bf16", "f32")
_HEAD = "lm_head.weight"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def check_gguf() -> None:
    """Raise `ConfigError` if the package gguf is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--gguf needs the package gguf; install it with: pip install 'dilocox[serve]'"
        ) from None


def write_gguf(source: Path, path: Path, dtype: str, name: str) -> Path:
    """Write the model of the Hugging Face folder `source` to the file `path`.

    Matrices are written in `dtype`, vectors in f32, as llama.cpp does. One tensor is in memory at a
    time. The file appears completely or not at all. Returns `path`.

    Args:
        source: a folder with a whole model, its configuration and its tokenizer.
        path: the file.
        dtype: one of `DTYPES`.
        name: name of the model in the file.

    Raises:
        CheckpointError: a file cannot be read or written, or a tensor does not fit f16.
        ConfigError: the model or its tokenizer has no form in GGUF, or gguf is not installed.
    """
    check_gguf()
    config = _config(source)
    family_of(config)
    _check_complete(source, config)
    vocabulary = read_vocabulary(source, int(config.vocab_size))
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(partial, source, config, vocabulary, dtype, name)
        os.replace(partial, path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error}); free disk space or choose "
            "another folder"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return path


def _config(source: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError or KeyError, depending on the folder
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip()
        raise CheckpointError(f"{source}: its config.json cannot be read ({reason})") from None


def _write(
    path: Path, source: Path, config: PretrainedConfig, vocabulary: Vocabulary, dtype: str,
    name: str,
) -> None:  # fmt: skip
    import gguf

    family = family_of(config)
    writer = gguf.GGUFWriter(path, family.architecture)
    _write_header(writer, config, dtype, name)
    _write_vocabulary(writer, vocabulary)
    chosen = _types(dtype)
    layout = list(_layout(source, family, config))
    factors = rotation_factors(config)
    if factors is not None:
        layout.append(("", "rope_freqs.weight", factors.shape))
    for _, target, shape in layout:
        kind = chosen if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quant_shape_to_byte_shape(shape, kind) if _as_bytes(kind) else shape
        bytes_each = 4 if kind == gguf.GGMLQuantizationType.F32 else 2
        size = int(np.prod(shape)) * bytes_each
        writer.add_tensor_info(
            target, stored, _numpy_type(kind), size, raw_dtype=kind if _as_bytes(kind) else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with _Tensors(source) as tensors:
        for original, target, shape in layout:
            kind = chosen if len(shape) > 1 else gguf.GGMLQuantizationType.F32
            if factors is not None and not original:
                tensor = factors
            else:
                tensor = converted(original, tensors.read(original), config)
            writer.write_tensor_data(_stored(tensor, kind, target, source))
    writer.close()


def _types(dtype: str) -> Any:
    import gguf

    kinds = gguf.GGMLQuantizationType
    return {"f16": kinds.F16, "bf16": kinds.BF16, "f32": kinds.F32}[dtype]


def _as_bytes(kind: Any) -> bool:
    """Whether numpy has no such type, so that gguf takes the bytes of the tensor."""
    return str(kind.name) == "BF16"


def _numpy_type(kind: Any) -> Any:
    names = {"F16": np.float16, "BF16": np.uint8, "F32": np.float32}
    return np.dtype(names[str(kind.name)])


def _stored(tensor: Array, kind: Any, name: str, source: Path) -> Any:
    """Return a tensor in the data type `kind`, rounded to nearest, ties to even."""
    import gguf

    with np.errstate(over="ignore"):
        fits = kind.name != "F16" or np.isfinite(tensor.astype(np.float16)).all()
    if not fits:
        raise CheckpointError(
            f"{source}: {name} has values that f16 cannot hold; write --gguf bf16 or f32"
        )
    return gguf.quants.quantize(tensor, kind)


def _write_header(writer: Any, config: PretrainedConfig, dtype: str, name: str) -> None:
    import gguf

    writer.add_name(name)
    writer.add_type(gguf.GGUFType.MODEL)
    types = gguf.LlamaFileType
    writer.add_file_type(
        {"f16": types.MOSTLY_F16, "bf16": types.MOSTLY_BF16, "f32": types.ALL_F32}[dtype]
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in header(config).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{writer.arch}.{key}", value)


def _write_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    # An array without elements has no type in GGUF.
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for key, number in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", number)
    writer.add_add_bos_token(vocabulary.begins)
    writer.add_add_eos_token(vocabulary.ends)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _layout(
    source: Path, family: Family, config: PretrainedConfig
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (name in the checkpoint, name in the file, shape) of every tensor.

    Raises `CheckpointError` for a tensor that the architecture does not know.
    """
    import gguf

    architecture = next(
        number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == family.architecture
    )
    names = gguf.get_tensor_name_map(architecture, int(config.num_hidden_layers))
    with _Tensors(source) as tensors:
        for original in tensors.names:
            if original == _HEAD and config.tie_word_embeddings:
                continue
            target = names.get_name(original, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise CheckpointError(
                    f"{source}: {original} is no tensor of llama.cpp's {family.architecture}; was "
                    "the folder changed?"
                )
            yield original, target, tensors.shape(original)


def _check_complete(source: Path, config: PretrainedConfig) -> None:
    """Check that the folder has the tensors of its model, in their shapes.

    Raises `CheckpointError` for the first that is missing, unknown or of another shape.
    """
    from dilocox.models.meta_model import build_skeleton

    wanted = {name: tuple(each.shape) for name, each in build_skeleton(config).state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop(_HEAD, None)
    with _Tensors(source) as tensors:
        found = {name: tensors.shape(name) for name in tensors.names}
    if config.tie_word_embeddings:
        found.pop(_HEAD, None)
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{source}: tensor {name} has the shape {found.get(name)}, and config.json asks "
                f"for {wanted.get(name)}; was the folder changed?"
            )


class _Tensors:
    """The tensors of a Hugging Face folder, read one by one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._places = self._read_index()

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in a fixed order."""
        return sorted(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        try:
            return tuple(self._open(name).get_slice(name).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder}: {name} cannot be read ({error})") from None

    def read(self, name: str) -> Array:
        """Return a tensor as float32."""
        found: Array = self._open(name).get_tensor(name).float().numpy()
        return found

    def _read_index(self) -> dict[str, str]:
        said = read_json(self._folder / INDEX)
        if not said:
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        places = said.get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and file == Path(file).name for file in places.values()
        ):
            raise CheckpointError(f"{self._folder / INDEX}: names no files of this folder")
        return places

    def _open(self, name: str) -> Any:
        return self._file(self._places[name])

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self._folder / name
            try:
                self._files[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read ({error})") from None
        return self._files[name]
