"""Hooks of mkdocs.yml: the pages of docs/ are written for the repository, and become a site here.

- A link that leaves docs/ (a run file, a script, a result) leads to a copy below `repository/`;
  README.md is the site's first page.
- Lists and their continuation lines are indented as Python-Markdown wants them; GitHub takes less.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COPIES = "repository"
"""Where the site has files from outside of docs/."""
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Markdown outside of docs/ that becomes pages, too."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
LIST_ITEM = re.compile(r"( *)([-*]|\d+\.) ")


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside of docs/."""
    from mkdocs.structure.files import File

    for path in sorted(linked_outside()):
        copy = File.generated(
            config, f"{COPIES}/{path}", abs_src_path=str(ROOT / path), inclusion=_inclusion(path)
        )
        if files.get_file_from_path(copy.src_uri) is None:
            files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page as Python-Markdown and the site's folders need it."""
    return indented(relinked(markdown, page.file.src_uri))


def linked_outside() -> set[str]:
    """Repository paths outside of docs/ that some page of the site links to, and `PAGES`."""
    found: set[str] = set()
    inside = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    pages = [*inside, *PAGES]
    while pages:
        at = pages.pop()
        found.add(at)
        for line, quoted in _lines((ROOT / at).read_text(encoding="utf-8")):
            for match in () if quoted else LINK.finditer(line):
                path = _target(match[2], at)[0]
                if path is not None and path not in found and path != "README.md":
                    found.add(path)
                    pages += [path] if path.endswith(".md") else []
    return {path for path in found if not path.startswith("docs/")}


def relinked(markdown: str, src_uri: str) -> str:
    """`markdown` with links that hold inside the site."""
    inside = src_uri.removeprefix(f"{COPIES}/")
    at = inside if inside != src_uri else f"docs/{src_uri}"

    def changed(match: re.Match[str]) -> str:
        path, anchor = _target(match[2], at)
        if path is None:
            return match[0]
        if path == "README.md":
            path, anchor = "docs/index.md", ""
        uri = path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIES}/{path}"
        way = posixpath.relpath(uri, posixpath.dirname(src_uri) or ".")
        return f"{match[1]}{way}{anchor}{match[3]}"

    return "".join(line if quoted else LINK.sub(changed, line) for line, quoted in _lines(markdown))


def indented(markdown: str) -> str:
    """Lists as Python-Markdown reads them: a blank line before, four spaces for what belongs to an
    item."""
    written: list[str] = []
    inside, before = False, ""
    for line, quoted in _lines(markdown):
        item = None if quoted else LIST_ITEM.match(line)
        if not quoted and line.strip() and not line.startswith(" ") and item is None:
            inside = inside and bool(before.strip())
        if item is not None:
            if not inside and before.strip():
                written.append("\n")
            inside = True
        if inside and (depth := re.match(r" +", line)):
            wanted = depth[0] if len(depth[0]) > 3 else "    " if len(depth[0]) > 1 else ""
            line = wanted + line[len(depth[0]) :]
        written.append(line)
        before = line
    return "".join(written)


def _target(link: str, at: str) -> tuple[str | None, str]:
    """(repository path, `#anchor`) of a relative link of the page at `at`; None if it is another
    kind of link or leads nowhere. A folder stands for the nearest README.md at it or above."""
    name, mark, anchor = link.partition("#")
    if not name or re.match(r"[a-z]+:", link):
        return None, ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(at), name))
    if (ROOT / path).is_dir():
        above = [path, *map(str, PurePosixPath(path).parents)]
        path = next(p for p in (f"{each}/README.md" for each in above) if (ROOT / p).is_file())
        path = posixpath.normpath(path)
    return (path if (ROOT / path).is_file() else None), mark + anchor


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Lines with their ends, and whether each is part of a fenced block."""
    fenced = False
    for line in markdown.splitlines(keepends=True):
        fence = line.lstrip().startswith("```")
        yield line, fenced or fence
        fenced = fenced != fence


def _inclusion(path: str) -> Any:
    from mkdocs.structure.files import InclusionLevel

    return InclusionLevel.NOT_IN_NAV if path.endswith(".md") else InclusionLevel.INCLUDED
