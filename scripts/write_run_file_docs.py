"""Writes docs/run-file.md from the run file's own definition (src/dilocox/config*.py).

Types, limits and defaults come from the pydantic models. The meaning of a key is the text below the
key in the source, or else its entry in `PLAIN`.

    python scripts/write_run_file_docs.py           writes the file
    python scripts/write_run_file_docs.py --check   exits with 1 if the file is not up to date
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
from markdown_entry import entry
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dilocox.config import (
    adapter,
    admission,
    availability,
    data,
    data_sources,
    network,
    outputs,
    preference,
    privacy,
    run_config,
    settlement,
    site,
)
from dilocox.config import model as config_model
from dilocox.config import outer as config_rounds
from dilocox.config.methods import METHODS, method_defaults
from dilocox.config.one_machine import OF_ONE_MACHINE

TARGET = Path(__file__).parents[1] / "docs" / "run-file.md"

PLAIN = {
    "run.name": "Name of the run. The default of `run.folder` contains it.",
    "run.seed": "Random seed of initial weights, of the order of the text, and of the choice of "
    "held-out text.",
    "model.revision": "Hub models: branch, tag or commit.",
    "model.attention": "Attention implementation of the transformers library.",
    "data.revision": "Hub datasets: branch, tag or commit.",
    "data.licence": "Licence of the text, which is written to the manifest. For hub datasets, the "
    "default is the licence on the dataset card.",
    "data.max_documents": "Largest number of documents that are read. If not set, all are read.",
    "data.sequence_length": "Tokens that are predicted per sequence.",
    "data.validation_fraction": "Fraction of documents that are held out, if "
    "`validation_source` is not set.",
    "site.stages": "M: pipeline stages per site.",
    "site.shards": "K: FSDP ranks per stage.",
    "site.schedule": "Pipeline schedule.",
    "site.device": "Device of the training. `auto`: a GPU if PyTorch finds one, else the CPU.",
    "site.deterministic": "Use kernels that give the same bits in every run. If a GPU operation "
    "has no such kernel, the run reports it at the start and trains with the usual kernel.",
    "inner.optimizer": "Optimizer of the inner steps. `muon`: Muon for the matrices of the layers, "
    "AdamW for all other parameters, embedding and head included. Muon's updates are scaled as in "
    "arXiv 2502.16982, so that AdamW's learning rate and weight decay fit. `sgd`: without momentum "
    "and weight decay.",
    "inner.learning_rate": "Peak learning rate.",
    "inner.betas": "AdamW: decay rates of the two moments, per step.",
    "inner.eps": "AdamW: epsilon.",
    "inner.weight_decay": "Decoupled weight decay of AdamW and Muon. Tensors of one dimension are "
    "not decayed.",
    "inner.schedule": "Learning rate after the warm-up. `cosine`: half a cosine. `wsd`: constant, "
    "with a linear decay at the end. `constant`: constant.",
    "inner.warmup_steps": "Inner steps of linear warm-up.",
    "outer.method": "Set of defaults for the keys of `[outer]`, `[compression]` and `[control]`: "
    "see [methods](#methods).",
    "outer.overlap": "Parameters from which a site goes on at a landing. `none`: the site waits "
    "for the exchange at the boundary and goes on from the new anchor. `naive`: the new anchor, "
    "without the site's progress since the boundary, which is exchanged later. `keep`: the new "
    "anchor plus the fraction `keep` of this progress. `eager`: the new anchor after one more "
    "outer step, which uses the site's own newest contribution alone. See "
    "[the algorithm](algorithm.md#2-a-round).",
    "outer.exchange": "How payloads are exchanged. `gather`: every site receives every payload. "
    "`reduce`: every site averages a part of the values and sends its mean to all; each site "
    "receives 2(D-1)/D payloads, where D is the number of sites.",
    "compression.error_feedback": "Keep the residual, which is the part of a contribution that the "
    "codec left out, and add it to the next contribution.",
    "control.adapt": "How settings are chosen: see above.",
    "evaluation.completion_tokens": "Length of that completion in tokens. 0: no completion.",
    "record.enabled": "Write the record; see [verification](verification.md).",
    "metrics.sinks": "Further services that receive the metrics. Each needs its own package.",
    "metrics.project": "Project name at Weights & Biases and Trackio.",
}
"""Meanings of keys that have no text in the source, by `section.key`."""

HEAD = """\
# The run file

<!-- Written by scripts/write_run_file_docs.py from the modules in src/dilocox/config. -->
<!-- Change the texts there. -->

A run file is one TOML file that describes a run. Every key can also be given on the command line as
`--set section.key=value`. The value is a TOML value; a bare word is text. Unknown keys are refused
with the nearest valid key, and wrong types with the expected type. The resolved run file, with the
values of all keys, is written to `run.toml` in the run's folder.

A run file needs `[model]` and at least one `[sites.NAME]`. All sites must use the same file and the
same `--set` options, and a site with other values is refused when it joins. Only the settings of
one machine may differ:

{own}
- all of `[metrics]`;
- in `[sites.NAME]` the keys `interface`, `advertise`, `ports`, and the folder in `data`. All sites
  must agree on whether a site sets `data`.

[examples/quickstart.toml](../examples/quickstart.toml) is a working run file.
"""

METHODS_HEAD = """\
## Methods

`outer.method` gives these keys their defaults (src/dilocox/config/methods.py). A run file may set
each of the keys itself.
"""

METHODS_TAIL = """\
Some defaults depend on keys that the run file sets:

- `outer.slots` is `outer.inner_steps` with several fragments or overlap `keep`, else 1.
- `outer.delay` is 0 with overlap `none`, and `outer.slots` with `naive` and `eager`. With `keep`,
  it is the number of slots between two fragments' boundaries: slots / fragments, at least 1.
- `control.adapt` is `off` for `dilocox` with an overlap rule other than `keep`, and for
  `dilocox-paper` with a codec other than `lowrank`.

`allreduce` and `cocktailsgd` average the gradients of every inner step. Their round is only the
interval of accounting, and the outer optimizer is not used. Their `outer.delay` is explained above.
The keys `outer.slots` and `outer.fragments` do not change their results.
"""


def main() -> int:
    """Write the file. With `--check`, write nothing and return 1 if the file is not up to date."""
    text = document()
    if "--check" in sys.argv[1:]:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET.name} is not up to date: run python scripts/write_run_file_docs.py")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


def document() -> str:
    """Returns the text of docs/run-file.md."""
    texts = source_texts()
    parts = [HEAD.format(own="\n".join(own_keys()))]
    for table, model in sections():
        title, _, rest = (model.__doc__ or "").partition("\n")
        parts.append(f"## `[{table}]`\n\n{_after_colon(title)}{rest and _paragraphs(rest)}\n")
        for name, hint in get_type_hints(model, include_extras=True).items():
            if name not in model.model_fields:
                continue
            key = f"{table.removesuffix('.NAME')}.{name}"
            meaning = texts.get((model.__name__, name)) or PLAIN.get(key, "")
            # Other packages may add methods: the run file's type is a text.
            known = ", ".join(f"`{method}`" for method in METHODS)
            type_ = known if key == "outer.method" else type_text(hint)
            default = default_text(model.model_fields[name], table)
            parts.append(entry(f"**`{name}`** ({type_}; {default})", meaning))
        parts.append("")
    parts.append(METHODS_HEAD)
    parts.extend(methods_table())
    parts.append("")
    parts.append(METHODS_TAIL)
    return "\n".join(parts).rstrip() + "\n"


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields (table, model) in the order of the run file; the table of a site is `sites.NAME`."""
    for name, field in run_config.RunConfig.model_fields.items():
        if name == "sites":
            yield "sites.NAME", site.SiteOverride
        else:
            kinds = [kind for kind in (field.annotation, *get_args(field.annotation))
                     if isinstance(kind, type) and issubclass(kind, BaseModel)]  # fmt: skip
            yield name, kinds[0]
            if kinds[0] is data.DataSection:
                yield "[data.sources]", data_sources.SourceSection


def source_texts() -> dict[tuple[str, str], str]:
    """Returns the text below each key in the source, on one line, by (class name, key)."""
    texts: dict[tuple[str, str], str] = {}
    sources = (
        run_config, config_model, adapter, admission, availability, data, data_sources, network,
        outputs, preference, privacy, config_rounds, settlement, site,
    )  # fmt: skip
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
    """Returns a type and its limits in words."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *extras = get_args(hint)
        return type_text(inner) + "".join(_limits(extras))
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
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "table"
    return {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}[hint]


def _limits(extras: list[Any]) -> Iterator[str]:
    for extra in extras:
        if isinstance(extra, FieldInfo):
            if extra.description:
                yield f": {extra.description}"
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
                yield f" {sign} " + ("2^31" if limit == 2**31 else f"{limit:g}")


def default_text(field: FieldInfo, table: str) -> str:
    """Returns what is said of a key's default, which is written as TOML."""
    if field.is_required():
        by_method = table in ("outer", "compression", "control")
        return "default by method" if by_method else "required"
    if field.default is None:
        return "not set by default"
    if isinstance(field.default, tuple):
        return f"default `[{', '.join(number_text(value) for value in field.default)}]`"
    if isinstance(field.default, float):
        return f"default `{number_text(field.default)}`"
    return f"default `{json.dumps(field.default)}`"


def number_text(value: float) -> str:
    """Returns a number as TOML, below 0.01 in scientific notation."""
    return f"{value:.0e}".replace("e-0", "e-") if 0 < abs(value) < 1e-2 else f"{value}"


def own_keys() -> Iterator[str]:
    """Yields one list item per section: its keys that may differ between sites."""
    for section, keys in OF_ONE_MACHINE.items():
        yield entry(", ".join(f"`{section}.{key}`" for key in keys) + ";", "")


def methods_table() -> Iterator[str]:
    """Yields the rows of the table of methods: one per method, with the values that it sets."""
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
