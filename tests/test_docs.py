"""The documents say what is: links, commands, keys, tables and snippets."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from pydantic import BaseModel

import dilocox
from dilocox.cli.main import _parser
from dilocox.config.network import NetworkSection
from dilocox.config.one_machine import OF_ONE_MACHINE
from dilocox.config.run_config import RunConfig, load_run
from dilocox.config.site import SiteOverride
from dilocox.coordinator.protocol.timeouts import Timeouts
from tests.support.scripts import tool

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
FILE_ENDINGS = ("toml", "json", "jsonl", "py", "md", "safetensors", "sqlite", "log", "svg", "sig")

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)


# --- reading Markdown -----------------------------------------------------------------------


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(language, content) for language, content in found]


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Inline code."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def anchor_of(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


# --- links and paths ------------------------------------------------------------------------


def broken_links(path: Path, text: str) -> list[str]:
    """Relative links of a document that lead nowhere."""
    bad = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        if not place.exists():
            bad.append(target)
        elif anchor and place.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(anchor_of, headings):
                bad.append(target)
    return bad


def missing_paths(text: str) -> list[str]:
    """Files of this repository that are named, in commands too, and not there."""
    named = re.findall(
        r"(?<![\w./-])(?:src|tests|scripts|benchmarks|examples|docs)/[\w./-]*\w", text
    )
    return [name for name in named if not (ROOT / name).exists()]


@each_document
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert broken_links(path, text) == []
    assert missing_paths(text) == []


def test_a_broken_link_is_found() -> None:
    text = "## One thing\n[a](docs/nowhere.md) [b](README.md) [c](#one-thing) [d](#two)"
    assert broken_links(ROOT / "README.md", text)[0] == "docs/nowhere.md"
    assert "#two" in broken_links(ROOT / "README.md", text)
    text = "see tests/test_docs.py, `src/x.py`\n```\npytest tests/outer/test_nothing.py\n```\n"
    assert missing_paths(text) == ["src/x.py", "tests/outer/test_nothing.py"]


def test_one_round_is_read_in_fifteen_files() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    part = text.partition("## Dive into the code")[2].partition("\n## ")[0]
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", part, re.MULTILINE)
    assert len(files) == 15
    assert all((ROOT / "src/dilocox" / file).exists() for file in files)


# --- tables ---------------------------------------------------------------------------------

CELL = 120
"""Most characters of a table's cell, without the targets of links."""


def wide_cells(text: str) -> list[str]:
    """Cells of tables that are too wide to be read at a glance."""
    rows = [line.strip() for line in prose(text).splitlines() if line.lstrip().startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [cell for cell in cells if len(re.sub(r"\]\([^)]*\)", "]", cell)) > CELL]


@each_document
def test_cells_of_tables_are_short(path: Path) -> None:
    assert wide_cells(path.read_text(encoding="utf-8")) == []


def test_a_wide_cell_is_found() -> None:
    wide, linked = "w" * (CELL + 1), f"[{'l' * (CELL - 2)}](page.md#{'x' * CELL})"
    text = f"{wide}\n\n| a | b |\n|---|---|\n| {linked} | {wide} |\n| a\\|{wide[2:]} | c |"
    assert wide_cells(text) == [wide, f"a\\|{wide[2:]}"]
    assert wide_cells(f"```\n| {wide} |\n```") == []


# --- sentences ------------------------------------------------------------------------------

WORDS = 30
"""Most words of a sentence, or of its part before or after a colon or semicolon."""


def long_sentences(text: str) -> list[str]:
    """Sentences that are too long to be read once. Tables, code and comments do not count."""
    plain = re.sub(r"^ *\|.*$|^#.*$|^ *<!--.*?-->", "\n", prose(text), flags=re.MULTILINE)
    plain = re.sub(r"`[^`]*`", "code", plain)
    plain = re.sub(r"\]\([^)]*\)", "]", plain).replace("*", "")
    parts = re.split(r"\n\s*(?:-|\d+\.)\s|\n\s*\n|(?<=[.!?:;])[)\"]*\s+", plain)
    found = [" ".join(part.split()) for part in parts]
    return [part for part in found if len(re.findall(r"\S*\w\S*", part)) > WORDS]


@each_document
def test_sentences_are_short(path: Path) -> None:
    assert long_sentences(path.read_text(encoding="utf-8")) == []


def test_a_long_sentence_is_found() -> None:
    long = " ".join(["word"] * (WORDS + 1))
    assert long_sentences(f"Short. {long}\n\n- {long} and so on.\n") == [long, f"{long} and so on."]
    short = " ".join(["word"] * WORDS)
    assert long_sentences(f"{short}; {short}: {short}.\n- {short}\n\n| {long} |\n") == []
    assert long_sentences(f"```\n{long}\n```\n# {long}\n[{short}]({'x ' * WORDS})") == []


# --- commands -------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """Arguments of every `dilocox` command in a fenced block, behind a launcher too."""
    for language, content in blocks(text):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in content.replace("\\\n", " ").splitlines():
            words = re.split(r"^(?:\$ )?(?:\S+/)?dilocox |^(?:torchrun|srun) .*?dilocox ", line)
            if len(words) == 2:
                yield shlex.split(words[1], comments=True)


def problem_of(arguments: list[str]) -> str:
    """What the real parser says against a command; empty if it takes it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            _parser().parse_args(arguments)
    except SystemExit as end:
        return said.getvalue() if end.code else ""
    return ""


def words_of_commands(parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Command ("data show") -> its options."""
    known: dict[str, set[str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                known[name] = set(inner._option_string_actions)
                below = words_of_commands(inner)
                known |= {f"{name} {more}": options for more, options in below.items()}
    return known


def unknown_words(span: str) -> list[str]:
    """What is no command or option in inline code such as `dilocox train RUN.toml --resume`."""
    known = words_of_commands(_parser())
    words = span.split()[1:]
    if not words or words[0].startswith("-"):
        options = set(_parser()._option_string_actions)
    elif words[0] not in known:
        return [words[0]]
    else:
        options = set(known[words[0]])
        for name, more in known.items():
            if name.startswith(f"{words[0]} "):
                options |= more
    return [
        word for word in words if word.startswith("--") and word.partition("=")[0] not in options
    ]


@each_document
def test_commands_are_ones_that_dilocox_takes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for arguments in commands(text):
        assert problem_of(arguments) == "", arguments
    for span in spans(text):
        if span == "dilocox" or span.startswith("dilocox "):
            assert unknown_words(span.replace("[", "").replace("]", "")) == [], span


def test_documents_hold_commands() -> None:
    found = [c for path in DOCUMENTS for c in commands(path.read_text(encoding="utf-8"))]
    assert {words[0] for words in found} >= {"coordinator", "join"}
    assert problem_of(["join", "HOST:1", "--site", "a"]) != ""
    assert problem_of(["train"]) != ""
    assert problem_of(["train", "--help"]) == ""
    assert unknown_words("dilocox trian RUN.toml") == ["trian"]
    assert unknown_words("dilocox train RUN.toml --again --resume") == ["--again"]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        lines = [line for _, content in blocks(text) for line in content.splitlines()]
        for code in [*spans(text), *lines]:
            if code.startswith("make "):
                assert code.split()[1] in targets, f"{path.name}: {code}"


# --- keys -----------------------------------------------------------------------------------


def has_key(parts: list[str]) -> bool:
    """True if `section.key`, in parts, is one of the run file's."""
    model: Any = RunConfig
    for number, part in enumerate(parts):
        if get_origin(model) is dict:
            inner = get_args(model)[1]
            # sites.NAME.key; below model.architecture anything goes.
            if inner is SiteOverride and part not in SiteOverride.model_fields:
                model = SiteOverride
                continue
            return inner is not SiteOverride or part in SiteOverride.model_fields
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return False
        if part not in model.model_fields:
            return False
        model = model.model_fields[part].annotation
        kinds = () if get_origin(model) is dict else get_args(model)
        kinds = tuple(get_args(k)[0] if get_origin(k) is Annotated else k for k in kinds)
        sections = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        options = sections + [kind for kind in kinds if get_origin(kind) is dict]
        if options and number < len(parts) - 1:
            model = options[0]
    return True


def keys_named(text: str) -> Iterator[str]:
    """`section.key` in inline code, and in `--set`."""
    sections = "|".join(RunConfig.model_fields)
    pattern = rf"(?<![\w./-])((?:{sections})\.[A-Za-z_]+(?:\.[A-Za-z_]+)*)(?![\w/(])"
    for span in spans(text):
        for key in re.findall(pattern, span):
            if key.rsplit(".", 1)[1] not in FILE_ENDINGS:
                yield key
    for _, content in blocks(text):
        for key in re.findall(r"--set ([\w.-]+)=", content):
            yield key


def keys_of_table(table: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Every key of a TOML document, in parts."""
    for key, value in table.items():
        yield [*above, key]
        if isinstance(value, dict):
            yield from keys_of_table(value, (*above, key))


@each_document
def test_keys_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [key for key in keys_named(text) if not has_key(key.split("."))] == []
    for language, content in blocks(text):
        if language == "toml":
            unknown = [k for k in keys_of_table(tomllib.loads(content)) if not has_key(k)]
            assert unknown == []


@pytest.mark.parametrize(
    ("key", "there"),
    [
        ("outer.rounds", True),
        ("outer.round", False),
        ("outer.rounds.more", False),
        ("sites.NAME.ports", True),
        ("sites.NAME.port", False),
        ("sites.NAME", True),
        ("model.architecture.hidden_size", True),
        ("model.architectures", False),
        ("data.filter.meta.language", True),
        ("adapter.rank", True),
        ("adapter.ranks", False),
    ],
)
def test_a_key_that_is_none_is_found(key: str, there: bool) -> None:
    assert has_key(key.split(".")) is there


def test_keys_are_seen() -> None:
    text = "Set `outer.rouds` or `--set data.sorce=x`, see `run.toml`.\n```sh\nx --set a.b=1\n```\n"
    assert list(keys_named(text)) == ["outer.rouds", "data.sorce", "a.b"]


# --- what is generated or measured ----------------------------------------------------------


def test_run_file_reference_is_what_its_script_writes() -> None:
    written = (ROOT / "docs" / "run-file.md").read_text(encoding="utf-8")
    assert written == tool("write_run_file_docs").document(), (
        "run python scripts/write_run_file_docs.py"
    )
    head = " ".join(written.partition("\n## ")[0].split())
    missing = [
        f"{section}.{key}"
        for section, keys in OF_ONE_MACHINE.items()
        for key in keys
        if f"`{section}.{key}`" not in head
    ]
    assert not missing, "which keys may differ between sites"


def test_references_of_commands_and_python_are_what_their_script_writes() -> None:
    script = tool("write_reference_docs")
    assert set(script.ORDER) == set(dilocox.__all__)
    for path, text in script.documents().items():
        assert path.read_text(encoding="utf-8") == text, (
            "run python scripts/write_reference_docs.py"
        )


def test_the_reference_has_every_command_and_every_option() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for name, options in words_of_commands(_parser()).items():
        part = page.partition(f"\n## dilocox {name}\n")[2].partition("\n## ")[0]
        assert part, name
        for option in options - {"-h", "--help", "--debug"}:
            assert re.search(rf"^- \*\*`[^`]*{option}\b", part, re.MULTILINE), (name, option)


def test_sections_of_docstrings_become_lists() -> None:
    script = tool("write_reference_docs")
    text = "One line.\n\nArgs:\n    a: first,\n        goes on.\n    b: second.\n\nReturns:\n    c."
    assert script.prose(text) == [
        "One line.", "", "**Arguments**", "", "- **`a`**: first, goes on.",
        "- **`b`**: second.", "", "**Returns**: c.",
    ]  # fmt: skip


def test_pictures_and_the_gpu_table_are_of_the_committed_results() -> None:
    drawn = tool("draw_measured").pictures()
    committed = {*(ROOT / "docs").glob("*.svg"), *(ROOT / "benchmarks" / "results").glob("*.svg")}
    # The terminal of a run is drawn by scripts/draw_run.py from the run's folder.
    assert {path for path in drawn if path.suffix == ".svg"} == committed - {
        ROOT / "docs" / "quickstart.svg"
    }
    for path, text in drawn.items():
        assert path.read_text(encoding="utf-8") == text, "run python scripts/draw_measured.py"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_examples_are_run_files_named_as_their_runs(path: Path) -> None:
    assert load_run(path).run.name == path.stem


def test_every_key_is_explained_once() -> None:
    script = tool("write_run_file_docs")
    texts = script.source_texts()
    keys = set()
    for table, model in script.sections():
        for name in model.model_fields:
            key = f"{table.removesuffix('.NAME')}.{name}"
            keys.add(key)
            explained = [(model.__name__, name) in texts, key in script.PLAIN]
            assert sum(explained) == 1, f"{key}: explain it in config.py or in the script"
    assert set(script.PLAIN) <= keys
    assert len(keys) > 60


def test_time_outs_are_the_derived_ones() -> None:
    table = Timeouts.derive(NetworkSection()).table()
    assert table in (ROOT / "docs" / "network.md").read_text(encoding="utf-8")


def test_the_toy_of_the_overlap_notes_prints_what_they_show() -> None:
    found = blocks((ROOT / "docs" / "notes" / "overlap.md").read_text(encoding="utf-8"))
    (script, shown) = [content for _, content in found]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "overlap.md", "exec"), {})
    assert printed.getvalue().strip() == shown.strip()
    assert len(shown.splitlines()) == 4
