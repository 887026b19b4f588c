"""dilocox: one model, trained on GPUs in several places, over ordinary links."""

from dilocox.api import (
    RunConfig,
    code_digest,
    export,
    generate,
    join,
    load_run,
    resolve_run,
    train,
)
from dilocox.errors import DilocoxError
from dilocox.version import __version__

__all__ = [
    "DilocoxError",
    "RunConfig",
    "__version__",
    "code_digest",
    "export",
    "generate",
    "join",
    "load_run",
    "resolve_run",
    "train",
]
