"""Writes the model card of a released model from the files of its run.

The card states only facts that are in the run's folder. A fact that nobody has stated is called
unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.tools.report.folder import RunFiles
from dilocox.tools.report.markdown import plain, table
from dilocox.tools.report.page import Page, is_hub_name, model_name
from dilocox.tools.report.settings import setup


@dataclass(frozen=True)
class Terms:
    """Facts about a release that are not in the run's folder."""

    dtype: str
    """fp32, bf16 or fp16."""
    licence: str | None
    """Licence of the weights, as their owner states it. None: not stated."""
    key: str
    """SHA-256 of the signing key's public key in DER form, hex."""


def card(page: Page, files: RunFiles, terms: Terms) -> str:
    """Return the text of the model card, README.md."""
    parts = [
        _front(files, terms),
        f"# {plain(page.name)}",
        plain(page.lead),
        "Trained with dilocox: sites train apart and exchange compressed pseudo-gradients. "
        "Everything below comes from the run's own record.",
        "## Results\n\n" + table(("figure", "value", ""), [
            (tile.label, tile.value, tile.note) for tile in page.tiles
        ]),
        "## Training\n\n" + table(("setting", "value"), setup(files)),
        _adapters(files),
        "## Sites\n\n" + table(("site", "share of the tokens", "tokens", "waited"), [
            (row.name, f"{row.share:.1%}", dict(row.cells)["tokens"], dict(row.cells)["waited"])
            for row in page.sites
        ]),
        "## Data\n\n" + _data(page),
        "## Licence\n\n" + _licence(terms),
        "## Verify\n\n" + _verify(page, terms),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(files: RunFiles, terms: Terms) -> str:
    """Return the YAML metadata block. JSON strings are valid YAML."""
    library = "peft" if files.config.get("adapter") else "transformers"
    lines = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:", "- dilocox"]
    if terms.licence:
        lines.append(f"license: {json.dumps(terms.licence)}")
    names = [
        each["name"]
        for each in (files.data["content"]["sources"] if files.data else [])
        if each.get("kind") == "hub" and each.get("name")
    ]
    if names:
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in names)]
    base = base_model(files.config)
    if base:
        lines.append(f"base_model: {json.dumps(base)}")
    return "\n".join(["---", *lines, "---"])


def _adapters(files: RunFiles) -> str:
    """Return the section about the base model of adapters; empty for a whole model."""
    adapter = files.config.get("adapter")
    if not isinstance(adapter, Mapping):
        return ""
    course = files.record.course if files.record else None
    digests = {str(each["base"]) for each in course.enrolments if "base" in each} if course else ()
    # Only the name of a folder of first adapters is shown: the rest of its path is private.
    rows = [(key, Path(str(value)).name if key in ("handover", "path") else str(value))
            for key, value in adapter.items()]  # fmt: skip
    rows.append(("base model", model_name(files.config)))
    rows += [("digest that all sites signed", digest) for digest in sorted(digests)]
    text = "These weights are adapters (PEFT). They are of use with their base model alone."
    return f"## Adapters\n\n{text}\n\n" + table(("setting", "value"), rows)


def base_model(config: Mapping[str, Any]) -> str:
    """Return the hub's name of the weights that the run started from. Empty if unknown.

    If the weights came from a folder that still exists, the name is `_name_or_path` of the
    folder's configuration.
    """
    model = config.get("model")
    if not isinstance(model, Mapping) or not model.get("pretrained") or not model.get("path"):
        return ""
    path = str(model["path"])
    try:
        own = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
        path = str(own.get("_name_or_path") or "")
    except (OSError, ValueError, AttributeError):
        pass  # not a folder of this machine: a hub's name, or a folder of another machine
    return path if "/" in path and is_hub_name(path) else ""


def _data(page: Page) -> str:
    if not page.sources:
        return "The manifest of the token files was not found, so the training text is unknown."
    rows = [
        (source.name, source.licence or "not stated", dict(source.cells)["revision"])
        for source in page.sources
    ]
    facts = [(name, value) for name, value in page.data_facts]
    return (
        table(("source", "licence", "revision"), rows)
        + "\n\n"
        + table(("token files", ""), facts)
        + "\n\nLicences are as the run's owner, or the data set's own card, has stated them. Every "
        "file's SHA-256 is in `croissant.json`."
    )


def _licence(terms: Terms) -> str:
    if terms.licence:
        return f"{plain(terms.licence)}, as the owner of these weights has stated it."
    return "Nobody has stated a licence for these weights."


def _verify(page: Page, terms: Terms) -> str:
    lines = [
        "The files of this folder are signed (OpenSSF Model Signing). Get the signer's public key "
        "from the signer, not from here; the SHA-256 of the right one (DER) is "
        f"`{terms.key}`.",
        "```\npip install model-signing==1.1.1 pyopenssl\nmodel_signing verify key . --signature "
        "model.sig --public_key KEY.pub\n```",
    ]
    if not page.identity:
        return "\n\n".join([*lines, "The run has no record: how the weights came about cannot be "
                            "verified."])  # fmt: skip
    identity = dict(page.identity)
    lines += [
        "How the weights came about: with the run's folder, every outer step is repeated from "
        "theta_0 and the payloads to these weights, bit for bit.",
        "```\ndilocox verify RUN"
        + (" --model ." if terms.dtype == "fp32" else "")
        + f" --key '{identity['log key']}'\n```",
        table(("", ""), [("run", identity["run"]), ("log key", identity["log key"])]),
    ]
    if terms.dtype != "fp32":
        lines.append(
            f"These weights were rounded to {terms.dtype}; those that the record leads to are fp32."
        )
    lines.append(
        "What happened inside a site (whether its steps were honest, on what text) is not proved "
        "by this."
    )
    return "\n\n".join(lines)
