"""Nothing that a stranger wrote moves a terminal's cursor."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.utils.plain_text import plain, plain_lines

pytestmark = pytest.mark.waits

WITH_SURROGATES = st.text(st.characters(codec=None, exclude_categories=()), max_size=30)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("lyon, 12 % of Zürich's tokens: 日本語", "lyon, 12 % of Zürich's tokens: 日本語"),
        ("\x1b[2J\x1b[Hall PASS", "\ufffd[2J\ufffd[Hall PASS"),
        ("\x9b2J", "\ufffd2J"),
        ("FAIL\rPASS\x08\x7f", "FAIL PASS\ufffd\ufffd"),
        ("a\r\nb\tc\u2028d", "a b c d"),
        ("\u202eSSAP\u202c \u2066x\u2069", "\ufffdSSAP\ufffd \ufffdx\ufffd"),
        ("half \ud83d", "half \ufffd"),
    ],
)
def test_by_hand(said: str, shown: str) -> None:
    assert plain(said) == shown


@given(WITH_SURROGATES)
def test_one_line_that_can_be_printed_and_is_no_longer(text: str) -> None:
    shown = plain(text)
    assert len(shown) <= len(text)
    assert plain(shown) == shown
    assert len(shown.splitlines()) <= 1
    assert shown.encode("utf-8").decode("utf-8") == shown
    assert not any(unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") for each in shown)
    bidi = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    assert not any(unicodedata.bidirectional(each) in bidi for each in shown)


def test_lines_stay_lines() -> None:
    assert plain_lines("a\x1b\nb\r\nc") == "a\ufffd\nb \nc"
