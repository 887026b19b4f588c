"""Writes a Hugging Face folder as a GGUF file, for llama.cpp, Ollama and what builds on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dilocox.errors import CheckpointError, ConfigError
from dilocox.models.architecture import one_line
from dilocox.models.hf_weights import INDEX_FILE, SINGLE_FILE
from dilocox.tools.serving.gguf_families import (
    Array,
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
_FREQUENCIES = "rope_freqs.weight"
Shape = tuple[int, ...]


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
    tensors = _Tensors(source)
    shapes = _complete(tensors, config)
    vocabulary = read_vocabulary(source, int(config.vocab_size))
    partial = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = _begun(partial, config, vocabulary, dtype, name)
        _write_tensors(writer, tensors, shapes, config, dtype)
        writer.close()
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
        raise CheckpointError(
            f"{source}: its config.json cannot be read ({one_line(error)})"
        ) from None


def _begun(
    path: Path, config: PretrainedConfig, vocabulary: Vocabulary, dtype: str, name: str
) -> Any:
    """Return gguf's writer of a new file, with all but the tensors."""
    import gguf

    writer = gguf.GGUFWriter(path, family_of(config).architecture)
    _write_header(writer, config, dtype, name)
    _write_vocabulary(writer, vocabulary)
    return writer


def _write_tensors(
    writer: Any, tensors: _Tensors, shapes: Mapping[str, Shape], config: PretrainedConfig,
    dtype: str,
) -> None:  # fmt: skip
    """Write where all tensors lie, and then the tensors, one at a time."""
    import gguf

    targets = _targets(tensors.folder, shapes, config)
    factors = rotation_factors(config)
    every = {targets[name]: shape for name, shape in shapes.items()}
    if factors is not None:
        every[_FREQUENCIES] = factors.shape
    chosen, plain = _types(dtype), gguf.GGMLQuantizationType.F32
    kinds = {target: chosen if len(shape) > 1 else plain for target, shape in every.items()}
    for target, shape in every.items():
        kind = kinds[target]
        as_bytes = str(kind.name) == "BF16"  # numpy has no such type, so gguf takes the bytes
        stored = gguf.quants.quant_shape_to_byte_shape(shape, kind) if as_bytes else shape
        size = int(np.prod(shape)) * (4 if kind == plain else 2)
        raw = kind if as_bytes else None
        writer.add_tensor_info(target, stored, _numpy_type(kind), size, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in shapes:
        target = targets[name]
        tensor = converted(name, tensors.read(name), config)
        writer.write_tensor_data(_stored(tensor, kinds[target], target, tensors.folder))
    if factors is not None:
        writer.write_tensor_data(factors)


def _types(dtype: str) -> Any:
    import gguf

    kinds = gguf.GGMLQuantizationType
    return {"f16": kinds.F16, "bf16": kinds.BF16, "f32": kinds.F32}[dtype]


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


def _targets(source: Path, shapes: Mapping[str, Shape], config: PretrainedConfig) -> dict[str, str]:
    """Return the name in the file of each tensor of the checkpoint.

    Raises `CheckpointError` for a tensor that the architecture does not know.
    """
    import gguf

    architecture = family_of(config).architecture
    number = next(n for n, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(number, int(config.num_hidden_layers))
    found: dict[str, str] = {}
    for name in shapes:
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise CheckpointError(
                f"{source}: {name} is no tensor of llama.cpp's {architecture}; was the folder "
                "changed?"
            )
        found[name] = target
    return found


def _complete(tensors: _Tensors, config: PretrainedConfig) -> dict[str, Shape]:
    """Return the shapes of the folder's tensors, without a head that is tied to the embedding.

    Raises `CheckpointError` for the first tensor that is missing, unknown or of another shape.
    """
    from dilocox.models.meta_model import build_skeleton

    wanted = {name: tuple(each.shape) for name, each in build_skeleton(config).state_dict().items()}
    found = {name: tensors.shape(name) for name in tensors.names}
    if config.tie_word_embeddings:
        wanted.pop(_HEAD, None)
        found.pop(_HEAD, None)
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{tensors.folder}: tensor {name} has the shape {found.get(name)}, and config.json "
                f"asks for {wanted.get(name)}; was the folder changed?"
            )
    return found


class _Tensors:
    """The tensors of a Hugging Face folder, read one by one."""

    def __init__(self, folder: Path) -> None:
        """Read which file has which tensor. Raises `CheckpointError`."""
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._places = self._read_index()

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in a fixed order."""
        return sorted(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        try:
            return tuple(self._open(name).get_slice(name).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read ({error})") from None

    def read(self, name: str) -> Array:
        """Return a tensor as float32."""
        found: Array = self._open(name).get_tensor(name).float().numpy()
        return found

    def _read_index(self) -> dict[str, str]:
        said = read_json(self.folder / INDEX_FILE)
        if not said:
            return dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        places = said.get("weight_map")
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and file == Path(file).name for file in places.values()
        ):
            raise CheckpointError(f"{self.folder / INDEX_FILE}: names no files of this folder")
        return places

    def _open(self, name: str) -> Any:
        return self._file(self._places[name])

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self.folder / name
            try:
                self._files[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read ({error})") from None
        return self._files[name]
