"""Writes docs/run-file.md from the run file's own definition (src/dilocox/config*.py).

Types, limits and defaults come from the pydantic models, meanings from the text below each key in
the source; what a key's name says by itself has its line in `PLAIN` here.

    python scripts/write_run_file_docs.py           writes the file
    python scripts/write_run_file_docs.py --check   says whether it is up to date
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dilocox.config import admission, outputs, run_config, site
from dilocox.config import outer as config_rounds
from dilocox.config.methods import METHODS, method_defaults

TARGET = Path(__file__).parents[1] / "docs" / "run-file.md"

PLAIN = {
    "run.name": "Name of the run; part of its folder.",
    "run.seed": "Seed of fresh weights, of the order of the text and of what is held out.",
    "model.revision": "Hub models: branch, tag or commit.",
    "model.attention": "Attention implementation of transformers.",
    "data.revision": "Hub datasets: branch, tag or commit.",
    "data.licence": "Licence of the text, for the manifest; for hub datasets the one on the card, "
    "if not given.",
    "data.max_documents": "Read no more documents than this.",
    "data.sequence_length": "Tokens that are predicted per sequence.",
    "data.validation_fraction": "Share of documents held out, without `validation_source`.",
    "site.stages": "M: pipeline stages per site.",
    "site.shards": "K: FSDP ranks per stage.",
    "site.schedule": "Pipeline schedule.",
    "site.device": "`auto` takes a GPU where PyTorch sees one.",
    "site.deterministic": "Take kernels that give the same bits in every run. On a GPU an "
    "operation may have none: the run says so at its start and trains without.",
    "inner.optimizer": "`muon` trains the matrices of the layers by Muon (scaled as in arXiv "
    "2502.16982, so that AdamW's learning rate and weight decay fit) and all else, embedding and "
    "head too, by AdamW. `sgd` is plain: no momentum, no weight decay.",
    "inner.learning_rate": "Peak of the schedule.",
    "inner.betas": "AdamW: decay of the two moments, per step.",
    "inner.eps": "AdamW: epsilon.",
    "inner.weight_decay": "AdamW and Muon, decoupled; not on tensors of one dimension.",
    "inner.schedule": "After the warm-up: half a cosine, constant with a linear decay at the end, "
    "or constant.",
    "inner.warmup_steps": "Inner steps of linear warm-up.",
    "outer.method": "What the keys left out are set to: see [methods](#methods).",
    "outer.overlap": "What a site goes on from at a landing.",
    "outer.exchange": "`gather`: every site gets every payload. `reduce`: every site averages a "
    "part and hands it round, 2(D-1)/D payloads per site.",
    "compression.error_feedback": "Keep what the codec withheld (the residual) and add it to the "
    "next contribution.",
    "control.adapt": "What follows what: see above.",
    "evaluation.completion_tokens": "Length of that completion; 0 samples none.",
    "record.enabled": "Write the record; see [verification](verification.md).",
    "metrics.sinks": "Where else the round's numbers go. Each needs its own package.",
    "metrics.project": "Project name at Weights & Biases and Trackio.",
}
"""Keys that have no text of their own in config.py."""

HEAD = """\
# The run file

<!-- Written by scripts/write_run_file_docs.py from src/dilocox/config/run_config.py and -->
<!-- its neighbours (config_site.py, config_rounds.py and so on). Change it there. -->

One TOML file describes a run. Every key can also be given on the command line, as
`--set section.key=value` (TOML values; a bare word is text). Unknown keys and wrong types are
refused with the nearest valid key. What was resolved is written to `run.toml` in the run's folder.

A run file needs `[model]` and at least one `[sites.NAME]`. All sites must use the same file and
the same `--set` options, but for what belongs to one machine: `run.folder`, `data.folder`,
`checkpoint.store`, `record.store`, `record.anchor`, `site.device`, `site.threads`, `[network]` but
for its time-outs, all of `[metrics]`, and in `[sites.NAME]` the keys `interface`, `advertise` and
`ports`; of `data` there only whether it is set. A site whose file differs otherwise is refused
when it joins.

A working one: [examples/quickstart.toml](../examples/quickstart.toml).
"""

METHODS_HEAD = """\
## Methods

`outer.method` names a composition of the same parts (src/dilocox/config/methods.py). It sets these
keys where the run file leaves them out; a run file may set every one of them itself.
"""

METHODS_TAIL = """\
If you set some of these keys, the others follow: `outer.slots` is `outer.inner_steps` with several
fragments or overlap `keep`, else 1; `outer.delay` is 0 for `none`, all slots for `naive` and
`eager`, and the time between two fragments' boundaries (slots / fragments, at least 1) for `keep`.
`dilocox` with another overlap rule and `dilocox-paper` with another codec than `lowrank` do not
adapt.

`allreduce` and `cocktailsgd` average the gradients of every inner step; their round is only the
interval of accounting, and the outer optimizer is not used. Of `outer.delay` see above; the keys
`outer.slots` and `outer.fragments` have no effect on what they compute.
"""


def main() -> int:
    """Write the file, or with `--check` say whether it is what would be written."""
    text = document()
    if "--check" in sys.argv[1:]:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET.name} is not up to date: run python scripts/write_run_file_docs.py")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


def document() -> str:
    """The whole of docs/run-file.md."""
    texts = source_texts()
    parts = [HEAD]
    for table, model in sections():
        title, _, rest = (model.__doc__ or "").partition("\n")
        parts.append(f"## `[{table}]`\n\n{_after_colon(title)}{rest and _paragraphs(rest)}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        for name, hint in get_type_hints(model, include_extras=True).items():
            if name not in model.model_fields:
                continue
            key = f"{table.removesuffix('.NAME')}.{name}"
            meaning = texts.get((model.__name__, name)) or PLAIN.get(key, "")
            cells = [f"`{name}`", type_text(hint), default_text(model.model_fields[name], table)]
            parts.append(_row([*cells, meaning]))
        parts.append("")
    parts.append(METHODS_HEAD)
    parts.extend(methods_table())
    parts.append("")
    parts.append(METHODS_TAIL)
    return "\n".join(parts).rstrip() + "\n"


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """(table, model) in the order of the run file; one site's table is `sites.NAME`."""
    for name, field in run_config.RunConfig.model_fields.items():
        if name == "sites":
            yield "sites.NAME", site.SiteOverride
        else:
            model = field.annotation
            assert isinstance(model, type)
            assert issubclass(model, BaseModel)
            yield name, model


def source_texts() -> dict[tuple[str, str], str]:
    """(class, key) -> the text that stands below the key in the source, on one line."""
    texts: dict[tuple[str, str], str] = {}
    sources = (run_config, admission, outputs, config_rounds, site)
    written = [inspect.getsource(module) for module in sources]
    for node in ast.parse("\n".join(written)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, following in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                text = " ".join(str(following.value.value).split())
                texts[node.name, statement.target.id] = text
    return texts


def type_text(hint: Any) -> str:
    """A type and its limits, in words."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *extras = get_args(hint)
        limits = " ".join(_limits(extras))
        return f"{type_text(inner)}{limits and ' ' + limits}"
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if origin in (Union, types.UnionType):
        kinds = [type_text(part) for part in get_args(hint) if part is not types.NoneType]
        return " or ".join(kinds)
    if origin is list:
        return f"list of {type_text(get_args(hint)[0])}"
    if origin is tuple:
        return f"list of {len(get_args(hint))}: {type_text(get_args(hint)[0])}"
    if origin is dict:
        return "table"
    return {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}[hint]


def _limits(extras: list[Any]) -> Iterator[str]:
    for extra in extras:
        if isinstance(extra, FieldInfo):
            if extra.description:
                yield f"({extra.description})"
            else:
                yield from _limits(extra.metadata)
        for kind, name, sign in (
            (Ge, "ge", "≥"),
            (Gt, "gt", ">"),
            (Le, "le", "≤"),
            (Lt, "lt", "<"),
        ):
            if isinstance(extra, kind):
                limit = getattr(extra, name)
                yield f"{sign} " + ("2^31" if limit == 2**31 else f"{limit:g}")


def default_text(field: FieldInfo, table: str) -> str:
    """A key's default as TOML."""
    if field.is_required():
        return "by method" if table in ("outer", "compression", "control") else "required"
    if field.default is None:
        return "not set"
    if isinstance(field.default, tuple):
        return f"`[{', '.join(number_text(value) for value in field.default)}]`"
    if isinstance(field.default, float):
        return f"`{number_text(field.default)}`"
    return f"`{json.dumps(field.default)}`"


def number_text(value: float) -> str:
    """A number as people write it in TOML."""
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 1e-2 else f"{value}"


def methods_table() -> Iterator[str]:
    """One row per method: all that it sets, resolved."""
    outer = ("inner_steps", "fragments", "slots", "delay", "overlap", "learning_rate", "momentum",
             "exchange")  # fmt: skip
    compression = ("codec", "error_feedback", "residual_decay", "moments")
    columns = (*outer, *compression, "adapt")
    yield _row(["method", *(f"`{key}`" for key in columns)])
    yield _row(["---"] * (1 + len(columns)))
    for method in METHODS:
        set_ = method_defaults(method, {})
        values = [set_["outer"].get(key, "gather") for key in outer]
        fields = config_rounds.CompressionSection.model_fields
        values += [set_["compression"].get(key, fields[key].default) for key in compression]
        values.append(set_["control"]["adapt"])
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        yield _row([f"`{method}`", *texts])


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _after_colon(title: str) -> str:
    text = title.partition(":")[2].strip() or title
    return text[:1].upper() + text[1:]


def _paragraphs(rest: str) -> str:
    text = inspect.cleandoc(rest)
    return f"\n\n{text}" if text else ""


if __name__ == "__main__":
    sys.exit(main())
