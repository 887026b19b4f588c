"""Encodes documents as `[data]` says: text, or conversations with flags beside their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dilocox.config.data import DataSection
from dilocox.data.chat_encoding import ChatEncoder
from dilocox.data.columns import columns_of
from dilocox.data.conversations import LEARNED, Conversation
from dilocox.data.flags import SECOND
from dilocox.data.packing import SHARD_BYTES, Packer
from dilocox.data.protected_tokens import Encoded, ProtectedTokenizer
from dilocox.data.special_text import SpecialText, spelled
from dilocox.data.tokenizer import Encoder
from dilocox.errors import DataError


class DocumentEncoder:
    """Encodes the documents of all splits, and counts what the manifest says of them."""

    def __init__(self, folder: Path, data: DataSection, encoder: Encoder) -> None:
        """Prepare to encode with the tokenizer in `folder`.

        Args:
            folder: the tokenizer's folder, with the chat template.
            data: `[data]` of the run file.
            encoder: the same tokenizer, for text.

        Raises:
            DataError: if conversations need a chat template and there is none, or if tokenizer and
                template do not fit.
        """
        self._data, self._encoder = data, encoder
        self._special = SpecialText(encoder.tokenizer)
        self._chat: ChatEncoder | None = None
        self._protected: ProtectedTokenizer | None = None
        self.begin_of_text = encoder.begin_of_text if data.begin_of_text else ()
        """Tokens before every document of text; conversations get theirs from the template."""
        if data.has_conversations:
            pairs = data.format == "preference"
            # Without a template, prompts get the tokens that documents of text get.
            plain = replace(encoder, begin_of_text=self.begin_of_text)
            self._chat = ChatEncoder(folder, plain, "last" if pairs else data.loss_on)
            if self._chat.templates:
                self.begin_of_text = ()
            self._chat.check_template(given=data.chat_template, needed=data.format == "chat")
        elif spelled(encoder.tokenizer):
            known = encoder.tokenizer.get_added_tokens_decoder().values()
            special = [each.content for each in known if each.special]
            self._protected = ProtectedTokenizer(encoder.tokenizer, special)

    def packer(self, folder: Path, split: str) -> Packer:
        """Returns the writer of a split into `folder`."""
        size, end = self._encoder.vocabulary_size, self._encoder.end_of_text
        names = self._data.columns
        if self._chat is not None:
            return Packer(folder, split, size, None, SHARD_BYTES, flagged=True, columns=names)
        begin, flagged = self.begin_of_text, bool(names)
        return Packer(folder, split, size, end, SHARD_BYTES, begin, flagged=flagged, columns=names)

    def encode(self, batch: Sequence[str]) -> list[Encoded | None]:
        """Returns the tokens of each document, or None for a conversation to be left out.

        Tokens that begin or end every document of text are not among them: `packer` adds these.
        Raises `DataError`, which names the record, if the chat template refuses a conversation.
        """
        self._special.look(batch)
        if self._chat is not None:
            conversations = cast(Sequence[Conversation], batch)
            if self._data.format == "preference":
                return self._pairs(self._chat, conversations)
            made = self._chat.encode(conversations)
        else:
            encoded = (
                self._encoder.encode(list(batch))
                if self._protected is None
                else self._protected.encode_text(batch)
            )
            flagged = bool(self._data.columns)
            made = [Encoded(ids, [True] * len(ids) if flagged else []) for ids in encoded]
        if not self._data.columns:
            return made
        both = zip(made, batch, strict=True)
        return [each and each._replace(columns=columns_of(document)) for each, document in both]

    def _pairs(self, chat: ChatEncoder, pairs: Sequence[Conversation]) -> list[Encoded | None]:
        """Returns chosen and rejected answer of each pair, one behind the other."""
        encoded = chat.encode([answer for pair in pairs for answer in pair.answers()])
        made: list[Encoded | None] = []
        for chosen, rejected in zip(encoded[::2], encoded[1::2], strict=True):
            if chosen is None or rejected is None:
                made.append(None)
                continue
            # No token stands before the second answer's first one, so that it is no label.
            counted = [*map(int, chosen.counted), SECOND, *map(int, rejected.counted[1:])]
            made.append(Encoded(chosen.ids + rejected.ids, counted))
        return made

    @property
    def special_text(self) -> Mapping[str, int]:
        """Documents that contain special tokens as text, by token."""
        return self._special.found

    def check_labels(self, counted: Mapping[str, int]) -> None:
        """Raise `DataError` if a split of conversations has no token that is learned.

        `counted` holds the number of learned tokens by split.
        """
        empty = [split for split, tokens in counted.items() if not tokens]
        if self._chat is None or not empty:
            return
        left = self._chat.without_labels
        because = f" ({left:,} conversations without a learned token were left out)" if left else ""
        name = {"train": "training", "validation": "held-out"}[empty[0]]
        apart = empty[0] == "validation" and self._data.validation_source is not None
        key = "data.validation_source" if apart else "data.source"
        raise DataError(
            f"{key}: no token of the {name} conversations is learned{because}; {LEARNED}"
        )

    def describe(self) -> dict[str, Any]:
        """Returns the manifest's entry about conversations."""
        assert self._chat is not None
        ends = self._chat.ends_of_turn()
        return {
            "format": self._data.format,
            "loss_on": "last" if self._data.format == "preference" else self._data.loss_on,
            "chat_template": bool(self._chat.templates),
            "end_of_turn": [
                {"token": self._encoder.tokenizer.id_to_token(end), "id": end} for end in ends
            ],
            "without_labels": self._chat.without_labels,
        }
