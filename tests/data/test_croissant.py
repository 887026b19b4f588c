"""The Croissant description of a corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilocox.data import TokenFiles, prepare
from dilocox.data.croissant import CROISSANT, croissant
from dilocox.data.manifest import hash_file
from dilocox.errors import DataError
from tests.data.conftest import section

HUB = {
    "kind": "hub", "name": "someone/poems", "subset": None, "split": "train",
    "licence": "cc-by-4.0", "revision": "abc",
    "documents": {"count": 3, "bytes": 40, "sha256": "5" * 64},
}  # fmt: skip


def test_every_file_is_there_with_its_digest(files: TokenFiles, corpus: Path) -> None:
    found = json.loads((files.folder / CROISSANT).read_text(encoding="utf-8"))
    digests = {each["@id"]: each["sha256"] for each in found["distribution"]}
    for path in files.folder.rglob("*"):
        name = path.relative_to(files.folder).as_posix()
        if path.is_file() and name not in (CROISSANT, "manifest.json"):
            assert digests.pop(name) == hash_file(path)
    for path in corpus.rglob("*.txt"):
        assert digests.pop(f"source-0/{path.relative_to(corpus).as_posix()}") == hash_file(path)
    assert digests == {}
    assert "license" not in found
    assert "licence not stated" in found["description"]


def test_a_licence_is_what_was_stated(corpus: Path, tmp_path: Path) -> None:
    stated = prepare(section(corpus, licence="CC0-1.0"), tmp_path / "data", seed=0)
    assert croissant(stated.content)["license"] == ["CC0-1.0"]
    # One source's licence is not that of all of them.
    mixed = stated.content | {"sources": [HUB, {**stated.content["sources"][0], "licence": None}]}
    found = croissant(mixed)
    assert "license" not in found
    assert "licence cc-by-4.0" in found["description"]
    assert found["distribution"][0]["contentUrl"].endswith("someone/poems/tree/abc")


def test_a_changed_description_is_found(copy: TokenFiles) -> None:
    path = copy.folder / CROISSANT
    path.write_text(path.read_text().replace("not stated", "CC0-1.0"))
    with pytest.raises(DataError, match="not the description of these token files"):
        copy.verify()
    path.unlink()
    copy.verify()


@pytest.mark.parametrize("hub", [False, True])
def test_its_own_tool_accepts_it(files: TokenFiles, tmp_path: Path, hub: bool) -> None:
    tool: Any = pytest.importorskip("mlcroissant", reason="mlcroissant is not installed")
    content = files.content
    if hub:
        content = content | {"sources": [HUB]}
    path = tmp_path / CROISSANT
    path.write_text(json.dumps(croissant(content)), encoding="utf-8")
    dataset = tool.Dataset(jsonld=str(path))
    assert not dataset.metadata.ctx.issues.errors
    assert len(dataset.metadata.distribution) == len(croissant(content)["distribution"])
