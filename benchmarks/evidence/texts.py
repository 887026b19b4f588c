"""Texts of the evidence benchmark that no setting of dilocox was tuned on.

The texts come from packages of Debian 12. `python -m benchmarks.evidence.texts DIR` downloads the
packages with apt-get and writes one file per domain to DIR.

- `mixed`: four domains, and each site has its own: an English dictionary, German manual pages,
  C++ headers, and a book in four Romance languages.
- `perl`: one domain: the manual of Perl.
"""

from __future__ import annotations

import gzip
import html
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quality.data import cut
from dilocox.utils.storage import replace_file

CHARACTERS = 5_000_000
"""Characters of each domain of `mixed`: domains count alike."""
LANGUAGES = ("fr-FR", "es-ES", "it-IT", "pt-BR")
"""Languages of the book, in this order."""


@dataclass(frozen=True)
class Domain:
    """One kind of text, and how to find it in the files of a Debian package."""

    name: str
    package: str
    version: str
    files: Callable[[Path], Sequence[Path]]
    read: Callable[[Path], str]


def _by_path(folder: Path, pattern: str) -> list[Path]:
    return sorted(
        path for path in folder.rglob(pattern) if path.is_file() and not path.is_symlink()
    )


def _plain(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _unzipped(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")


def _without_tags(path: Path) -> str:
    """Return the prose of a page: paragraphs without tags, entities decoded."""
    body = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", _plain(path))
    body = re.sub(r"</(p|div|li|h\d|dt|dd|pre|title)>", "\n\n", body)
    text = html.unescape(re.sub(r"<[^>]*>", "", body))
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", text).strip()


def _book(folder: Path) -> list[Path]:
    return [path for each in LANGUAGES for path in _by_path(folder, f"html/{each}/*.html")]


MIXED = (
    Domain(
        "dictionary",
        "dict-gcide",
        "0.48.5+nmu2",
        lambda folder: _by_path(folder, "*.dict.dz"),
        _unzipped,
    ),
    Domain(
        "manuals-de",
        "manpages-de",
        "4.18.1-1",
        lambda folder: _by_path(folder, "man*/*.gz"),
        _unzipped,
    ),
    Domain(
        "headers",
        "libboost1.81-dev",
        "1.81.0-5+deb12u1",
        lambda folder: _by_path(folder, "*.hpp"),
        _plain,
    ),
    Domain("book", "debian-handbook", "11.20220922", _book, _without_tags),
)
PERL = Domain(
    "perl", "perl-doc", "5.36.0-7+deb12u4", lambda folder: _by_path(folder, "*.pod"), _plain
)


def documents(path: Path) -> list[str]:
    """Return a domain's text as documents of 4 to 8 KiB, in order."""
    return [piece for piece in cut(path.read_text(encoding="utf-8")) if not piece.isspace()]


def mixed_parts(folder: Path) -> list[list[str]]:
    """Return the documents of each domain of `mixed`.

    Raises `SystemExit` if a file is missing.
    """
    return [documents(_known(folder / f"{domain.name}.txt")) for domain in MIXED]


def perl_documents(folder: Path) -> list[str]:
    """Return the documents of `perl`. Raises `SystemExit` if the file is missing."""
    return documents(_known(folder / f"{PERL.name}.txt"))


def _known(path: Path) -> Path:
    if not path.exists():
        raise SystemExit(
            f"{path}: does not exist; write it with: python -m benchmarks.evidence.texts "
            f"{path.parent}"
        )
    return path


def write(domain: Domain, folder: Path, most: int | None) -> Path:
    """Download a domain's package, and write up to `most` characters of its text to `folder`.

    Files are taken evenly from the whole package. Raises `SystemExit` if the package cannot be
    downloaded, or has less text.
    """
    target = folder / f"{domain.name}.txt"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(prefix="dilocox-texts-") as temporary:
        where = Path(temporary)
        wanted = f"{domain.package}={domain.version}"
        for command in (["apt-get", "download", wanted], ["dpkg-deb", "-x", "PACKAGE", "files"]):
            found = [str(path) for path in where.glob("*.deb")]
            line = [word.replace("PACKAGE", found[0]) if found else word for word in command]
            try:
                done = subprocess.run(line, cwd=where, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                raise SystemExit(
                    f"{wanted}: {line[0]} was not found; make the texts on Debian 12"
                ) from None
            if done.returncode:
                said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
                mend = "; run apt-get update first" if line[0] == "apt-get" else ""
                raise SystemExit(f"{wanted}: {' '.join(line)} failed: {said[0]}{mend}")
        text = "\n\n".join(_spread([domain.read(p) for p in domain.files(where / "files")], most))
    if most is not None and len(text) < most:
        raise SystemExit(f"{wanted}: has {len(text)} characters of text, {most} are needed")
    replace_file(target, text[:most].encode())
    return target


def _spread(texts: Sequence[str], most: int | None) -> Iterator[str]:
    """Yield texts evenly over the package until `most` characters are reached."""
    total = sum(len(text) + 2 for text in texts)
    if most is None or total <= most or len(texts) == 1:
        yield from texts
        return
    taken, passed = 0, 0
    for text in texts:
        passed += len(text) + 2
        if taken * total < most * passed:
            taken += len(text) + 2
            yield text


def main(arguments: Sequence[str]) -> int:
    """Write all domains to the folder that the command line names. Returns the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for domain in (*MIXED, PERL):
        path = write(domain, folder, CHARACTERS if domain in MIXED else None)
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB from {domain.package}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
