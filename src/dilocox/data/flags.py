"""Flags beside tokens: one uint8 per token of a split.

Text has no flags: every token of text is a label that counts, and the end-of-text token closes a
document. Formats such as chat have flags. Their loss counts some tokens only, and their documents
end with whatever token the template ends them with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

COUNTED = 1
"""Bit of a token that counts as a label."""

STARTS = 2
"""Bit of the first token of a document."""

SECOND = 4
"""Bit of the first token of a pair's second answer, whose positions begin at 0 again."""

FLAGS_DTYPE: np.dtype[Any] = np.dtype("u1")
"""Type of the flags on disk."""


def document_flags(counted: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns the flags of one document: uint8 [n].

    Args:
        counted: for each token, whether the token counts as a label (0 or 1); `SECOND` for the
            first token of the second answer, if the document is a pair.

    Raises:
        ValueError: if the document has no token.
    """
    flags = np.asarray(counted, dtype=np.uint8) & np.uint8(COUNTED | SECOND)
    if not len(flags):
        raise ValueError("a document without tokens")
    flags[0] |= STARTS
    return flags
