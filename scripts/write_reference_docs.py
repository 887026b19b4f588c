"""Writes docs/commands.md from the parsers of `dilocox`, and docs/python-api.md from the public
names of the package `dilocox` and their docstrings.

    python scripts/write_reference_docs.py           writes both
    python scripts/write_reference_docs.py --check   says whether they are up to date
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from markdown_entry import entry

import dilocox
from dilocox import errors
from dilocox.cli import main as cli

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ROOT / "docs" / "commands.md"
PYTHON = ROOT / "docs" / "python-api.md"
RESULT = ("src/dilocox/training/launch/local.py", "Result")
"""Where the class is that `train` returns: importing the module would import torch."""

COMMANDS_HEAD = """\
# Commands

<!-- Written by scripts/write_reference_docs.py from the parsers in src/dilocox/cli. -->
<!-- Change the texts there. -->

With `--help` every command prints the same. `python -m dilocox` is the same as `dilocox`. Every
command also takes `--debug`, which shows where an error comes from.

## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | failed; one line on standard error says why, and `--debug` shows where |
| 2 | the command line is not one that dilocox takes |
| 3 | not all judged (`verify`, `audit`, `auditor`) or filed (`attest`); `status`: stopped or left |
| 130 | asked to go (Ctrl-C, SIGTERM) |

## Examples
"""

PYTHON_HEAD = """\
# Python

<!-- Written by scripts/write_reference_docs.py from the docstrings of the package dilocox. -->
<!-- Change them there. -->

The functions and classes of `import dilocox`. Everything else in the package may change with any
version. Before a name or a parameter goes away, it gives a `DeprecationWarning` for
a release.

```python
import dilocox

run = dilocox.load_run("run.toml", ["outer.rounds=20"])
result = dilocox.train(run)
dilocox.export(result.folder, "my-model")
```

[Functions of your own](your-model.md#functions-of-your-own) says how to bring a loss or a data set,
[codecs and methods of your own](extending.md) how to register these.
"""

SITE = ("src/dilocox/loop.py", "Site")
"""Where the class is that `site` returns."""
ORDER = ("load_run", "resolve_run", "RunConfig", "train", "join", "code_digest", "site", "export",
         "generate", "evaluate", "register_codec", "CodecKind", "CodecNumber", "register_method",
         "Method", "DilocoxError", "__version__")  # fmt: skip
"""The public names, as one reads of them."""
RECORDS = {
    "CodecKind": "src/dilocox/config/codec_kinds.py",
    "CodecNumber": "src/dilocox/config/codec_kinds.py",
    "Method": "src/dilocox/config/methods.py",
}
"""Public classes whose fields users set, with their modules."""
KINDS = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Errors"}
"""Sections of docstrings that become lists, with the lists' titles."""


def main() -> int:
    """Write the pages, or with `--check` say whether they are what would be written."""
    check = "--check" in sys.argv[1:]
    stale = [
        path for path, text in documents().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]  # fmt: skip
    for path in stale:
        if check:
            print(f"{path.name} is not up to date: run python scripts/write_reference_docs.py")
        else:
            path.write_text(documents()[path], encoding="utf-8")
    return 1 if check and stale else 0


def documents() -> dict[Path, str]:
    """Each page with what it should hold."""
    return {COMMANDS: commands_page(), PYTHON: python_page()}


# --- commands -------------------------------------------------------------------------------


def commands_page() -> str:
    """The whole of docs/commands.md."""
    parser = cli._parser()
    lines = [COMMANDS_HEAD, "```sh", *examples(cli.EXAMPLES), "```", ""]
    for name, inner, told in subcommands(parser):
        lines += section(f"dilocox {name}", inner, told)
    return "\n".join(lines).rstrip() + "\n"


def examples(epilog: str) -> Iterator[str]:
    """The examples of `dilocox --help`, what is said of them as comments."""
    for line in epilog.splitlines():
        if line.startswith("  dilocox "):
            command, _, said = line.strip().partition("  ")
            said = said.strip().removeprefix("(").removesuffix(")")
            yield f"{command}   # {said}" if said else command


def subcommands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """(name, parser, help) of a parser's commands, in the parser's order."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            told = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, inner in action.choices.items():
                yield name, inner, told.get(name, "")


def section(title: str, parser: argparse.ArgumentParser, told: str) -> list[str]:
    """A command's heading, its arguments, and the same of its own commands."""
    lines = [f"## {title}", "", sentence(told), ""]
    actions = [action for action in parser._actions if shown(action)]
    if actions:
        lines += [*map(argument, actions), ""]
    for name, inner, more in subcommands(parser):
        lines += section(f"{title} {name}", inner, more)
    return lines


def shown(action: argparse.Action) -> bool:
    """False for what every command has, hidden arguments and the lists of commands."""
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return False
    return action.help != argparse.SUPPRESS and action.dest != "debug"


def argument(action: argparse.Action) -> str:
    """One argument of a command."""
    said = (action.help or "") % {"default": action.default, "prog": "dilocox"}
    if action.choices is not None:
        said += f"{'; ' if said else ''}one of {', '.join(map(str, action.choices))}"
        if action.default is not None:
            said += f" (default: {action.default})"
    if action.required and action.option_strings:
        said += f"{'; ' if said else ''}required"
    line: str = entry(f"**`{written(action)}`**", literal(sentence(said)))
    return line


def written(action: argparse.Action) -> str:
    """An argument as it is typed."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    value = "" if action.nargs == 0 else metavar
    if action.nargs in ("+", "*"):
        value += " ..."
    return " ".join(part for part in (", ".join(action.option_strings), value) if part)


def literal(text: str) -> str:
    """Help text whose underscores, stars and angles are no markup."""
    return re.sub(r"([*_<])", r"\\\1", text) if "`" not in text else text


def sentence(text: str) -> str:
    """`text` with a large first letter and a full stop."""
    text = " ".join(text.split())
    if not text:
        return ""
    if not text.startswith(("--", "`")):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", ":")) else f"{text}."


# --- Python ---------------------------------------------------------------------------------


def python_page() -> str:
    """The whole of docs/python-api.md."""
    lines = [PYTHON_HEAD]
    for name in ORDER:
        lines += [f"## `dilocox.{name}`", "", *described(name), ""]
        if name == "train":
            lines += [f"### `{RESULT[1]}`", "", *class_from_source(*RESULT), ""]
        if name == "site":
            lines += [f"### `{SITE[1]}`", "", *class_from_source(*SITE), ""]
            lines += methods_from_source(*SITE)
    return "\n".join(lines).rstrip() + "\n"


def described(name: str) -> list[str]:
    """Returns the lines about a public name."""
    found = getattr(dilocox, name)
    if name == "__version__":
        return ["The version of dilocox, a text."]
    if name == "RunConfig":
        keys = ", ".join(f"`{key}`" for key in found.model_fields)
        return [
            *prose(found.__doc__), "",
            f"One attribute per table of the [run file](run-file.md): {keys}.",
        ]  # fmt: skip
    if name in RECORDS:
        return class_from_source(RECORDS[name], name)
    if inspect.isclass(found):
        return [*prose(found.__doc__), "", *error_list()]
    return ["```python", signature(name, found), "```", "", *prose(found.__doc__)]


def signature(name: str, function: Callable[..., object]) -> str:
    """A call with one parameter per line, as in the source."""
    found = inspect.signature(function)
    lines, keywords = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            lines.append("    *,")
            keywords = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        default = default.replace("'", '"')
        lines.append(f"    {parameter.name}: {parameter.annotation}{default},")
    returned = found.return_annotation
    return "\n".join([f"dilocox.{name}(", *lines, f") -> {returned}"])


def prose(docstring: str | None) -> list[str]:
    """A docstring as Markdown: sections such as `Args:` become lists or paragraphs."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring or "")):
        title, _, rest = block.partition("\n")
        if title.endswith(":") and title.rstrip(":") in KINDS:
            kind = KINDS[title.rstrip(":")]
            lines += ["", f"**{kind}**", "", *entries(rest)]
        elif title in ("Returns:", "Yields:"):
            lines += ["", f"**{title.rstrip(':')}**: {' '.join(rest.split())}"]
        else:
            lines += ["", *block.splitlines()]
    return lines[1:]


def entries(text: str) -> Iterator[str]:
    """Entries of `name: meaning`, whose further lines are indented deeper."""
    rows: list[list[str]] = []
    for line in inspect.cleandoc(text).splitlines():
        if line.startswith(" ") and rows:
            rows[-1].append(line.strip())
        else:
            rows.append([line.strip()])
    for each in rows:
        name, _, meaning = " ".join(each).partition(":")
        yield entry(f"**`{name}`**", meaning.strip())


def class_from_source(path: str, name: str) -> list[str]:
    """A class's docstring and its fields and properties, read without importing it."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    rows = []
    for node, after in zip(found.body, [*found.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                said = " ".join(str(after.value.value).split())
            rows.append(entry(f"**`{node.target.id}`** (`{ast.unparse(node.annotation)}`)", said))
        elif isinstance(node, ast.FunctionDef) and is_property(node):
            kind = ast.unparse(node.returns) if node.returns else ""
            said = " ".join((ast.get_docstring(node) or "").split())
            rows.append(entry(f"**`{node.name}`** (`{kind}`)", said))
    return [*prose(ast.get_docstring(found)), "", *rows]


def methods_from_source(path: str, name: str) -> list[str]:
    """A class's public methods with their signatures, read without importing it."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    lines: list[str] = []
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            if is_property(node):
                continue
            node.args.args = node.args.args[1:]
            returned = ast.unparse(node.returns) if node.returns else "None"
            call = f"{node.name}({ast.unparse(node.args)}) -> {returned}"
            lines += [f"#### `{name}.{node.name}`", "", "```python", call, "```", ""]
            lines += [*prose(ast.get_docstring(node)), ""]
    return lines


def is_property(node: ast.FunctionDef) -> bool:
    """Whether a function of a class is read as an attribute."""
    names = [ast.unparse(each) for each in node.decorator_list]
    return not node.name.startswith("_") and bool({"property", "cached_property"} & set(names))


def error_list() -> list[str]:
    """Every error of `dilocox.errors` with its base and what it is."""
    rows = [
        entry(f"**`{name}`** (`{kind.__mro__[1].__name__}`)", sentence(kind.__doc__ or ""))
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.DilocoxError)
        and kind is not errors.DilocoxError
    ]  # fmt: skip
    head = ["Classes of `dilocox.errors`; [errors by message](errors.md) has cause and remedy.", ""]
    return [*head, *rows]


if __name__ == "__main__":
    sys.exit(main())
