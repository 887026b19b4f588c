"""Encodes text so that none of it becomes a control token; in conversations, no message's text.

Control tokens are known by name: `<|im_end|>` in a message and `<|im_end|>` of the template are the
same text. So a second tokenizer is made in which each control token has a private character as its
name. The names that the template wrote are replaced by these characters; names in messages are not,
and the second tokenizer does not know them. This holds for every tokenizer model, since vocabulary
and merges are renamed, too. All else is encoded in one piece, with the same ids as by the first
tokenizer.

While the template is rendered, names in messages are masked: their first character becomes another
private character, which is put back afterwards.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from dilocox.data.chat_template import Spans
from dilocox.errors import DataError

_FIRST, _TOKENS, _END = 0x100000, 0x10E000, 0x10FFFE
"""Private characters of plane 16: masks from `_FIRST`, control tokens from `_TOKENS`."""

_PRIVATE = re.compile(f"[{chr(_FIRST)}-{chr(_END)}]")


class Masks:
    """Masks names of control tokens in the texts of one conversation.

    Parts of a name are masked, too, such as the beginning of a name at the end of a text, because
    the template may put texts side by side.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Prepare to mask the control tokens with these names."""
        self._names = sorted(names, key=len, reverse=True)
        self._longest = len(self._names[0]) if self._names else 0
        # A lookahead finds names that overlap, too.
        each = "|".join(map(re.escape, self._names))
        self._pattern = re.compile(f"(?=(?:{each}))") if each else None
        self._begins = {name[:n] for name in self._names for n in range(1, len(name))}
        self._ends = {name[n:] for name in self._names for n in range(1, len(name))}

    def mask(self, value: Any, table: dict[str, str]) -> Any:
        """Returns `value` with all texts masked, in lists and objects and their keys, too.

        Characters of plane 16, which is private, become U+FFFD. `table` maps first characters of
        names to masks; new ones are added.
        """
        if isinstance(value, str):
            return self._mask(value, table)
        if isinstance(value, list):
            return [self.mask(each, table) for each in value]
        if isinstance(value, dict):
            return {self.mask(k, table): self.mask(v, table) for k, v in value.items()}
        return value

    def _mask(self, text: str, table: dict[str, str]) -> str:
        text = _PRIVATE.sub("\ufffd", text)
        if self._pattern is None or not text:
            return text
        places = {found.start() for found in self._pattern.finditer(text)}
        # Templates strip spaces around texts.
        end, start = len(text.rstrip()), len(text) - len(text.lstrip())
        for stop in {end, len(text)}:
            for n in range(1, min(self._longest, stop + 1)):
                if text[stop - n : stop] in self._begins:
                    places.add(stop - n)
        for begin in {start, 0}:
            if any(text[begin : begin + n] in self._ends for n in range(1, self._longest)):
                places.add(begin)
        for place in places:
            table.setdefault(text[place], chr(_FIRST + len(table)))
        letters = list(text)
        for place in places:
            letters[place] = table[text[place]]
        return "".join(letters)


class Encoded(NamedTuple):
    """Tokens of one conversation."""

    ids: list[int]
    counted: Sequence[int]
    """For each token, whether it is learned (0 or 1), see `document_flags`."""
    columns: tuple[float, ...] = ()
    """Number of each column, which all tokens get."""


class ProtectedTokenizer:
    """A tokenizer that takes control tokens from the template alone."""

    def __init__(self, tokenizer: Tokenizer, control: Sequence[str]) -> None:
        """Make the second tokenizer. `control` holds the names of the control tokens.

        Raises `DataError` if the tokenizer cannot be protected.
        """
        names = list(dict.fromkeys(control))
        self._characters = {name: chr(_TOKENS + number) for number, name in enumerate(names)}
        if _TOKENS + len(names) > _END:
            raise DataError(f"data.tokenizer: has {len(names):,} special tokens, too many for chat")
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if names else None
        content = json.loads(tokenizer.to_str())
        _rename(content, self._characters, tokenizer)
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library raises plain `Exception`
            raise DataError(
                f"data.tokenizer: its special tokens cannot be told from text ({error}); use "
                "another tokenizer"
            ) from None
        self._tokenizer.encode_special_tokens = False
        for name, character in self._characters.items():
            if self._tokenizer.token_to_id(character) != tokenizer.token_to_id(name):
                raise DataError(
                    f"data.tokenizer: the id of {name} depends on its name; use another tokenizer"
                )

    def encode(
        self, rendered: Sequence[str], spans: Sequence[Spans], tables: Sequence[dict[str, str]]
    ) -> list[Encoded]:
        """Encode rendered conversations.

        Args:
            rendered: texts with masks.
            spans: for each text, the characters that are learned.
            tables: for each text, the table of its masks, see `Masks.mask`.
        """
        texts, moved = [], []
        for text, ranges, table in zip(rendered, spans, tables, strict=True):
            short, places = self._shorten(text)
            back = {ord(mask): character for character, mask in table.items()}
            texts.append(short.translate(back))
            moved.append([(_moved(start, places), _moved(end, places)) for start, end in ranges])
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            Encoded(list(encoding.ids), _inside(encoding.offsets, ranges))
            for encoding, ranges in zip(encodings, moved, strict=True)
        ]

    def encode_text(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of texts without any control token."""
        plain = [_PRIVATE.sub("\ufffd", text) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(plain, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _shorten(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Replace control tokens by their characters.

        Returns the new text, and for each token the place behind it in the old text and the number
        of characters that are gone up to there.
        """
        if self._pattern is None:
            return text, []
        places, gone = [], 0
        for found in self._pattern.finditer(text):
            gone += len(found[0]) - 1
            places.append((found.end(), gone))
        return self._pattern.sub(lambda found: self._characters[found[0]], text), places


def _moved(place: int, places: list[tuple[int, int]]) -> int:
    """Returns where a place of the old text is in the new one. A place in a token moves behind."""
    at = bisect.bisect_right(places, (place, 1 << 60))
    return place - (places[at - 1][1] if at else 0)


def _inside(offsets: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int]]) -> list[bool]:
    """Returns for each token whether it has a character in one of the ascending ranges."""
    counted, at = [], 0
    for start, end in offsets:
        while at < len(ranges) and ranges[at][1] <= start:
            at += 1
        counted.append(at < len(ranges) and ranges[at][0] < max(end, start + 1))
    return counted


def _rename(content: dict[str, Any], characters: dict[str, str], tokenizer: Tokenizer) -> None:
    """Rename the control tokens in the content of a `tokenizer.json`, and let it add no tokens."""
    content["truncation"] = content["padding"] = content["post_processor"] = None
    for added in content.get("added_tokens", []):
        character = characters.get(added["content"])
        if character is None:
            continue
        added["content"] = character
        # Some normalizers remove private characters.
        normalizer = tokenizer.normalizer
        if normalizer is not None and character not in normalizer.normalize_str(f"a{character}a"):
            added["normalized"] = False
    model = content["model"]
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, dict):
        model["vocab"] = {characters.get(name, name): id_ for name, id_ in vocabulary.items()}
    else:
        model["vocab"] = [[characters.get(name, name), score] for name, score in vocabulary]
    if "unk_token" in model:
        model["unk_token"] = characters.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [each for each in model["merges"] if not _makes(each, characters)]


def _makes(merge: str | Sequence[str], names: dict[str, str]) -> bool:
    """Returns whether a merge of a BPE model takes or makes a control token."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
