"""Token files of the fine-tuning benchmark: all conversations, and each site's own part of them.

Sites have contiguous parts of about equally many conversations, as firms' offices differ: the first
ones have functions alone, the last ones text of WikiText-2 as well. Nobody trains on a held-out
conversation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.finetune.chats import Chat, of_functions, of_paragraphs
from benchmarks.finetune.rows import SEQUENCE_LENGTH
from benchmarks.quality.data import WIKITEXT, write_once
from dilocox.config.data import DataSection
from dilocox.data import TokenFiles, prepare
from dilocox.utils import processes

HELD_OUT_SEQUENCES = 48
MOST = 6000
"""Largest number of conversations of each kind."""


@dataclass(frozen=True)
class Conversations:
    """The conversations in a folder, and their token files."""

    folder: Path
    tokenizer: Path

    @classmethod
    def write(cls, folder: Path, tokenizer: Path, wikitext: Path | None) -> Conversations:
        """Make the conversations, and write them below `folder` if they are not there yet.

        Ends the program if the folder has other conversations. `wikitext`: folder of WikiText-2.
        None: functions alone.
        """
        made = cls(folder, tokenizer)
        folder.mkdir(parents=True, exist_ok=True)
        texts = sorted(wikitext.glob(WIKITEXT)) if wikitext is not None else []
        chats = of_functions()[:MOST] + of_paragraphs(texts)[:MOST]
        trained = [chat for chat in chats if not chat.held_out]
        for sites in (1, 2, 4):
            for site in range(sites):
                first, last = (len(trained) * n // sites for n in (site, site + 1))
                write_once(made.part(site, sites), (chat.line for chat in trained[first:last]))
        write_once(made.held_out_file, (chat.line for chat in chats if chat.held_out))
        return made

    def held_out(self) -> list[Chat]:
        """Return the held-out conversations."""
        lines = self.held_out_file.read_text(encoding="utf-8").splitlines()
        said = [json.loads(line)["messages"] for line in lines]
        return [Chat(asked["content"], answered["content"]) for asked, answered in said]

    @property
    def held_out_file(self) -> Path:
        """JSONL of the held-out conversations."""
        return self.folder / "held-out.jsonl"

    def part(self, site: int, sites: int) -> Path:
        """Return the JSONL of site number `site` of `sites`. One site has all conversations."""
        return self.folder / f"part-{site}-of-{sites}.jsonl"

    def tokens(self, seed: int, site: int = 0, sites: int = 1) -> Path:
        """Return the folder of the token files of that part, made for runs with that seed."""
        return self.folder / f"tokens-{seed}-{site}-of-{sites}"

    def section(self, site: int = 0, sites: int = 1) -> dict[str, Any]:
        """Return the section `[data]` of a part, without `folder`."""
        return {
            "source": str(self.part(site, sites)),
            "validation_source": str(self.held_out_file),
            "format": "chat",
            "tokenizer": str(self.tokenizer),
            "sequence_length": SEQUENCE_LENGTH,
            "validation_sequences": HELD_OUT_SEQUENCES,
        }

    def tokenise(self, seed: int, sites: int) -> None:
        """Write the token files of all conversations, and of each of `sites` parts.

        The child process ends with its memory before training begins.
        """
        parts = [(0, 1), *((site, sites) for site in range(sites))]
        processes.call_in_child(_tokenise, self, seed, parts, on_progress=_quiet)

    def described(self, seed: int) -> dict[str, int | str]:
        """Return the facts about the conversations that a reader of the results needs."""
        files = TokenFiles.open(self.tokens(seed))
        return {
            "digest": files.digest,
            "conversations": files.document_count("train"),
            "train_tokens": files.token_count("train"),
            "held_out_conversations": files.document_count("validation"),
            "held_out_sequences": HELD_OUT_SEQUENCES,
        }


def _tokenise(text: Conversations, seed: int, parts: list[tuple[int, int]], progress: Any) -> None:
    for site, sites in parts:
        folder = text.tokens(seed, site, sites)
        prepare(DataSection(**text.section(site, sites)), folder, seed, progress)


def _quiet(_step: str, _share: float) -> None:
    """Print no progress."""
