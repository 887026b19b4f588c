"""dilocox: one model, trained on GPUs in several places, over ordinary links."""

from dilocox.api import (
    RunConfig,
    code_digest,
    evaluate,
    export,
    generate,
    join,
    load_run,
    resolve_run,
    site,
    train,
)
from dilocox.config.codec_kinds import CodecKind, CodecNumber, register_codec
from dilocox.config.methods import Method, register_method
from dilocox.errors import DilocoxError
from dilocox.version import __version__

__all__ = [
    "CodecKind",
    "CodecNumber",
    "DilocoxError",
    "Method",
    "RunConfig",
    "__version__",
    "code_digest",
    "evaluate",
    "export",
    "generate",
    "join",
    "load_run",
    "register_codec",
    "register_method",
    "resolve_run",
    "site",
    "train",
]
