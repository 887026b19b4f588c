"""Describes the text and the token files as Croissant 1.0 metadata (JSON-LD).

The metadata hold sources, licences, revisions and the SHA-256 of every file, for programs that
search for datasets. They are a pure function of the manifest's `content`. A licence is stated by
`data.licence` or by the dataset's own card; otherwise the description says "not stated".
Format: https://docs.mlcommons.org/croissant/docs/croissant-spec.html
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dilocox.data.columns import COLUMN_DTYPE
from dilocox.data.flags import COUNTED, STARTS
from dilocox.data.manifest import held_out_whole
from dilocox.data.record_filter import filter_text
from dilocox.errors import DataError

CROISSANT = "croissant.json"
"""Name of the metadata file in the folder of the token files."""

_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
_FORMATS = {
    ".json": "application/json",
    ".jsonl": "application/jsonlines",
    ".ndjson": "application/jsonlines",
    ".parquet": "application/x-parquet",
    ".gz": "application/gzip",
    ".zst": "application/zstd",
    ".jinja": "text/plain",
}


def croissant(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the Croissant metadata of token files whose manifest has `content`."""
    sources = content["sources"]
    licences = sorted({each["licence"] for each in sources if each["licence"]})
    described: dict[str, Any] = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": "-".join(dict.fromkeys(_name(each) for each in sources)),
        "description": _description(content),
        "isLiveDataset": False,
        "distribution": [
            *(part for number, each in enumerate(sources) for part in _files(number, each)),
            *_token_files(content),
        ],
    }
    if licences and all(each["licence"] for each in sources):
        described["license"] = licences
    return described


def render_croissant(content: dict[str, Any]) -> str:
    """Returns the text of `croissant.json` for the manifest's `content`."""
    return json.dumps(croissant(content), indent=1, sort_keys=True) + "\n"


def write_croissant(folder: Path, content: dict[str, Any]) -> None:
    """Write `croissant.json` into the folder of the token files. Raises `OSError`."""
    (folder / CROISSANT).write_text(render_croissant(content), encoding="utf-8")


def check_croissant(folder: Path, content: dict[str, Any]) -> None:
    """Raise `DataError` if `folder` has a `croissant.json` that does not describe `content`."""
    path = folder / CROISSANT
    try:
        found = path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if found is not None and found != render_croissant(content):
        raise DataError(f"{path}: not the description of these token files; prepare the data again")


def _name(source: dict[str, Any]) -> str:
    return str(source.get("name") or source["kind"])


def _description(content: dict[str, Any]) -> str:
    parts = ["Text, and the token files that were made of it."]
    whole = held_out_whole(content)
    for number, each in enumerate(content["sources"]):
        parts.append(
            f"Source {number} ({_name(each)}): licence {each['licence'] or 'not stated'}, revision "
            f"{each['revision'] or 'not stated'}."
            + (f" Records taken: {filter_text(each['filter'])}." if "filter" in each else "")
            + (" All of it is held out." if whole[number] else "")
        )
    about = content.get("conversations")
    if about is not None:
        template = "with a chat template" if about["chat_template"] else "without a chat template"
        parts.append(
            f"The documents are conversations (format {about['format']}), rendered {template}. "
            f"Tokens that count as labels: {about['loss_on']}."
        )
    first = 0
    for each in content.get("mixture", ()):
        last = first + each["sources"] - 1
        numbers = f"source {first}" if first == last else f"sources {first} to {last}"
        parts.append(f"{each['name']}: {numbers}{_terms(each)}.")
        first = last + 1
    begin = [str(each["id"]) for each in content.get("begin_of_text", [])]
    begun = f"begun by token {' and '.join(begin)} and " if begin else ""
    for split, part in sorted(content["splits"].items()):
        bounds = (
            f"with a byte of flags per token: {COUNTED} for a token that counts as a label, "
            f"{STARTS} for the first token of a document"
            if "counted" in part
            else f"each {begun}closed by token {content['end_of_text']['id']}"
        )
        parts.append(
            f"Split {split}: {part['tokens']} tokens ({content['dtype']}, little-endian) in "
            f"{part['documents']} documents, {bounds}."
        )
    return " ".join(parts)


def _terms(part: dict[str, Any]) -> str:
    weight = "" if part["weight"] is None else f", weight {part['weight']}"
    return weight + ("" if part["epochs"] is None else f", {part['epochs']} epochs at most")


def _files(number: int, source: dict[str, Any]) -> list[dict[str, Any]]:
    folder = f"source-{number}"
    if source["kind"] != "hub":
        return [
            _file(f"{folder}/{file['name']}", file["sha256"], file["bytes"])
            for file in source["files"]
        ]
    name, revision = source["name"], source["revision"]
    place = f"https://huggingface.co/datasets/{name}/tree/{revision}" if name else folder
    documents = source["documents"]
    return [
        _file(folder, documents["sha256"], documents["bytes"])
        | {
            "contentUrl": place,
            "encodingFormat": "git+https",
            "description": f"Split {source['split']}; the SHA-256 is over the documents that were "
            "read, each behind its length (8 bytes, little-endian), not over a file.",
        }
    ]


def _token_files(content: dict[str, Any]) -> list[dict[str, Any]]:
    size = 2 if content["dtype"] == "uint16" else 4
    shards = [
        _file(shard["file"], shard["sha256"], shard["tokens"] * size)
        for _, part in sorted(content["splits"].items())
        for shard in part["shards"]
    ]
    flags = [
        _file(shard["flags"]["file"], shard["flags"]["sha256"], shard["tokens"])
        for _, part in sorted(content["splits"].items())
        for shard in part["shards"]
        if "flags" in shard
    ]
    tokenizer = [
        _file(f"tokenizer/{name}", file["sha256"], file["bytes"])
        for name, file in sorted(content["tokenizer"]["files"].items())
    ]
    columns = [
        _file(column["file"], column["sha256"], shard["tokens"] * COLUMN_DTYPE.itemsize)
        for _, part in sorted(content["splits"].items())
        for shard in part["shards"]
        for _, column in sorted(shard.get("columns", {}).items())
    ]
    return shards + flags + columns + tokenizer


def _file(name: str, sha256: str, size: int) -> dict[str, Any]:
    ending = Path(name).suffix.lower()
    usual = "application/octet-stream" if ending in (".bin", ".flags", ".col") else "text/plain"
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "contentSize": f"{size} B",
        "encodingFormat": _FORMATS.get(ending, usual),
        "sha256": sha256,
    }
