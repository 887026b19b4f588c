"""Builds the compressor of a codec specification, by the record of the codec's kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from dilocox.compression.base import Codec
from dilocox.compression.buffer_layout import Geometry
from dilocox.compression.compressor import Compressor
from dilocox.compression.fragment_codec import FragmentCodec
from dilocox.config.codec_kinds import BUILT_IN, CodecKind
from dilocox.config.codec_spec import Spec, parse_spec
from dilocox.errors import ConfigError

IDENTIFIERS = range(0x1000, 0x8000)
"""Identifiers, for frame headers, that codecs of other packages may have."""


def _function(kind: CodecKind) -> Callable[..., Any]:
    """Return the function that builds codecs of a kind. Raises `ConfigError` if there is none."""
    if not isinstance(kind.build, str):
        return kind.build
    module, _, name = kind.build.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"codec {kind.name!r}: its build {kind.build!r} is no module:function: {error}"
        ) from error
    return found


CODECS: dict[str, Codec] = {
    kind.name: _function(kind)(0, 0, 0)
    for kind in BUILT_IN
    if kind.number is None and not kind.sparse
}
"""The built-in flat codecs."""


def codec(name: str) -> Codec:
    """The flat codec of that name. Raises `ConfigError` with the names that there are."""
    if name not in CODECS:
        raise ConfigError(f"compression.codec: no codec {name!r}; use one of: {', '.join(CODECS)}")
    return CODECS[name]


@lru_cache(maxsize=1024)
def compressor(spec: str, geometry: Geometry) -> FragmentCodec:
    """Return the codec that encodes buffers of that geometry as `spec` says.

    Raises `ConfigError` for a text that is no spec, and for a kind whose codec cannot be made.
    """
    parsed = parse_spec(spec)
    kind = parsed.record
    if kind.agrees_first:
        agreed: FragmentCodec = _function(kind)(geometry, parsed.number, parsed.variant)
        return agreed
    build: Callable[[int, int], Codec] = partial(_function(kind), parsed.number)
    one = build(0, 0)
    if kind not in BUILT_IN:
        _check(one, parsed)
    found = Compressor(one.name, one.identifier, geometry, build)
    return found.with_moments() if parsed.moments else found


def _check(one: Codec, parsed: Spec) -> None:
    """Raise `ConfigError` unless name and identifier tell the codec from all others."""
    due = parsed.record.text(parsed.number, parsed.variant)
    if one.name != due:
        raise ConfigError(f"codec {due!r}: its build gives one named {one.name!r}; name it {due!r}")
    if one.identifier not in IDENTIFIERS:
        raise ConfigError(
            f"codec {due!r}: identifier {one.identifier}; take one from {IDENTIFIERS.start} to "
            f"{IDENTIFIERS.stop - 1}"
        )
