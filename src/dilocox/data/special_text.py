"""Finds text that spells a tokenizer's special tokens, such as `<|im_start|>` in rendered chats.

Text is never encoded as a special token, so such markup is trained on as ordinary tokens. A model
that was trained with the special tokens does not expect this.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from tokenizers import Tokenizer

LOOKED = 10_000
"""Number of first documents that are searched. This number suffices, since markup occurs in nearly
all documents of a corpus or in nearly none."""


def spelled(tokenizer: Tokenizer) -> list[str]:
    """Returns the names of the special tokens that `tokenizer` makes of text which spells them.

    `tokenizer.encode_special_tokens` is set, so special tokens are not looked for in text. A model
    of words or of unigrams makes them all the same, since their names are in its vocabulary.
    """
    known = tokenizer.get_added_tokens_decoder()
    special = {id_: each.content for id_, each in known.items() if each.special}
    probes = [text for name in special.values() for text in (name, f"a {name} b", f"a{name}b")]
    made = tokenizer.encode_batch_fast(probes, add_special_tokens=False)
    found = {special[id_] for each in made for id_ in each.ids if id_ in special}
    # The unknown token stands for any text, also for text that spells another special token.
    return sorted(found - {getattr(tokenizer.model, "unk_token", None)})


class SpecialText:
    """Counts, for each special token, the documents that contain it as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        known = tokenizer.get_added_tokens_decoder().values()
        # Only special tokens are markup. Names of up to two characters occur in text by chance.
        names = [each.content for each in known if each.special and len(each.content) > 2]
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if names else None
        self._left = LOOKED
        self.found: Counter[str] = Counter()

    def look(self, documents: Iterable[str]) -> None:
        """Search `documents`, until `LOOKED` documents have been searched in all."""
        if self._pattern is None:
            return
        for document in documents:
            if self._left <= 0:
                return
            self._left -= 1
            self.found.update(set(self._pattern.findall(document)))


def warning(found: Mapping[str, int]) -> str:
    """Returns a one-line warning about the special tokens that were found."""
    named = ", ".join(f"{token} in {count:,}" for token, count in sorted(found.items())[:4])
    return (
        f"documents contain special tokens of the tokenizer as text ({named} of the first "
        f"{LOOKED:,}); they are trained on as ordinary text, so rendered chats become wrong markup "
        "for a model that knows the special tokens"
    )
