"""A replay compiles the layers of a rank that says so, whatever another site's run file has."""

from __future__ import annotations

from typing import Any

import pytest

from dilocox.inner.compilation import Compile
from dilocox.tools.audit.judge import compile_again


@pytest.mark.parametrize(
    ("agreed", "facts", "again"),
    [
        ("auto", {"compile": True}, "auto"),
        ("auto", {"compile": False}, False),
        (False, {"compile": True}, "auto"),
        (False, {"compile": False}, False),
        (False, {}, False),
        (True, {"compile": True}, True),
        # The rank's class is another one then, and the verdict goes by that.
        (True, {"compile": False}, True),
    ],
)
def test_who_is_compiled_in_a_replay(
    agreed: Compile, facts: dict[str, Any], again: Compile
) -> None:
    assert compile_again(agreed, facts) == again
