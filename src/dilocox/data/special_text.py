"""Finds text that spells a tokenizer's special tokens, such as `<|im_start|>` in rendered chats.

Text never turns into a special token: such markup would be trained on as ordinary tokens, which a
model that knows the special ones does not expect.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from tokenizers import Tokenizer

LOOKED = 10_000
"""Documents that are looked at, the first ones: markup is in all of them, or in next to none."""


class SpecialText:
    """Counts documents that spell special tokens, by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        known = tokenizer.get_added_tokens_decoder().values()
        # Single characters, and what is no markup, are words of every text.
        names = [each.content for each in known if each.special and len(each.content) > 2]
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if names else None
        self._left = LOOKED
        self.found: Counter[str] = Counter()

    def look(self, documents: Iterable[str]) -> None:
        """Count these documents, as long as not enough were looked at."""
        if self._pattern is None:
            return
        for document in documents:
            if self._left <= 0:
                return
            self._left -= 1
            self.found.update(set(self._pattern.findall(document)))


def warning(found: Mapping[str, int]) -> str:
    """One line about what was counted."""
    named = ", ".join(f"{token} in {count:,}" for token, count in sorted(found.items())[:4])
    return (
        f"documents spell special tokens of the tokenizer ({named} of the first {LOOKED:,}); they "
        "are trained on as ordinary text, not as these tokens: for a model that knows the special "
        "ones, rendered chats are broken markup"
    )
