"""Shows counts, sources, licences and digests of token files, and how full their rows are."""

from __future__ import annotations

from typing import Any

from dilocox.config.data import RowRules
from dilocox.data.conversations import conversation_lines
from dilocox.data.list_files import counted
from dilocox.data.manifest import held_out_whole, source_names
from dilocox.data.mixed import mixture_lines
from dilocox.data.record_filter import filter_text
from dilocox.data.rows import describe_rows, rows_line
from dilocox.data.token_files import SPLITS, TokenFiles


def show(files: TokenFiles, rules: RowRules | None = None) -> str:
    """Returns lines for display: counts, sources, licences and digests of token files.

    `rules`: rules of the rows that are described; None: those that the files were made for.
    """
    content = files.content
    tokenizer = content["tokenizer"]
    lines = [f"token files  {files.folder}", f"digest       {files.digest}"]
    for split in SPLITS:
        part = content["splits"][split]
        lines.append(
            f"{split:<11}  {part['tokens']:,} tokens in {part['documents']:,} documents, "
            f"{_size(part['bytes'])} of text, "
            f"{_plural(len(part['shards']), 'file')} of {content['dtype']}"
            + (f", {part['counted']:,} tokens count as labels" if "counted" in part else "")
        )
    rows = describe_rows(files, rules) if rules else files.manifest["made_with"].get("rows")
    if rows is not None:
        lines += [f"rows         {split}, {rows_line(rows, split)}" for split in SPLITS]
    origin = (
        f"trained on {_size(tokenizer['sample']['bytes'])} of the text"
        if tokenizer["kind"] == "trained"
        else f"loaded from {files.manifest['made_with']['options']['tokenizer']}"
    )
    # The key is missing in token files of earlier versions, and if the tokenizer has no such token.
    begin = [each["token"] for each in content.get("begin_of_text", [])]
    lines.append(
        f"tokenizer    {content['vocabulary_size']:,} tokens, {origin}, end of text "
        f"{content['end_of_text']['token']}"
        + (f", begin of text {' '.join(begin)}" if begin else "")
    )
    names = source_names(files.manifest["made_with"]["options"])
    left_out = files.manifest["made_with"].get("left_out", [{}] * len(names))
    without = files.manifest["made_with"].get("without_text", [0] * len(names))
    filtered = files.manifest["made_with"].get("filtered", [None] * len(names))
    whole = held_out_whole(content)
    lines += mixture_lines(content)
    each = zip(names, content["sources"], left_out, without, strict=True)
    for number, (name, source, left, empty) in enumerate(each):
        what = "held out" if whole[number] else "source"
        lines.append(f"{what:<11}  {name}: {_source_line(source)}")
        if filtered[number] is not None:
            taken, read = filtered[number]
            wanted = filter_text(source["filter"])
            lines.append(f"filter       {wanted}: {taken:,} of {read:,} records were taken")
        if left:
            lines.append(f"left out     {counted(left)}")
        if empty:
            lacking = "conversation" if "conversations" in content else "text"
            lines.append(
                f"left out     {_plural(empty, 'record')} whose {lacking} is null or missing"
            )
    lines += conversation_lines(content)
    if files.column_names:
        named = ", ".join(files.column_names)
        lines.append(f"columns      {named}: one float32 number per token")
    lines += [f"warning      {line}" for line in files.warnings]
    return "\n".join(lines)


def _source_line(source: dict[str, Any]) -> str:
    parts = []
    if source["kind"] == "hub":
        documents = source["documents"]
        parts.append(f"{documents['count']:,} documents, {_size(documents['bytes'])}")
    else:
        size = sum(file["bytes"] for file in source["files"])
        parts.append(f"{_plural(len(source['files']), 'file')}, {_size(size)}")
        if source["skipped_files"]:
            parts.append(f"{_plural(source['skipped_files'], 'file')} skipped (not UTF-8 text)")
    parts.append(f"revision {source['revision'] or 'not given'}")
    parts.append(f"licence {source['licence'] or 'not given'}")
    return ", ".join(parts)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _size(count: int) -> str:
    """Returns a number of bytes as text with a decimal unit."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
