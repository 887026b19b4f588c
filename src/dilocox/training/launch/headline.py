"""The lines that say what a run will train, shown before it starts."""

from __future__ import annotations

from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.data import TokenFiles
from dilocox.data.rows import describe_rows, rows_line
from dilocox.training.builder import ModelPlan
from dilocox.training.portable_checkpoint import Handover
from dilocox.training.record_volume import record_line
from dilocox.utils.formatting import number


def headline(config: RunConfig, files: TokenFiles) -> str:
    """Return a few lines that say what will be trained."""
    blueprint = ModelPlan.of(config, files.vocabulary_size)
    hf: Any = blueprint.hf_config
    outer, site = config.outer, config.site
    counts = [("site", len(config.sites)), ("stage", site.stages), ("shard", site.shards)]
    if site.replicas > 1:
        counts.insert(1, ("replica", site.replicas))
    shape = " x ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts)
    left = [f"{files.left_out} files"] if files.left_out else []
    left += [f"{files.records_left_out:,} records"] if files.records_left_out else []
    lines = [
        f"run {config.run.name}: {hf.model_type}, {_size(blueprint)}, {shape}",
        f"data: {number(files.token_count('train'))} tokens, "
        f"{number(files.token_count('validation'))} held out, vocabulary {files.vocabulary_size}"
        + (f"; {' and '.join(left)} left out (dilocox data show)" if left else "")
        + ("; filters took {:,} of {:,} records".format(*files.filtered) if files.filtered else ""),
        f"method {outer.method}: {_course(config)}",
    ]
    rows = describe_rows(files, config.data.rows)
    if rows is not None:
        lines.insert(2, f"rows: {rows_line(rows, 'train')}")
    if config.record.enabled and not config.exchanges_gradients:
        lines.append(record_line(config, blueprint, blueprint.trained))
    if config.handover is not None:
        lines.append(Handover.read(config.handover).line)
    return "\n".join(lines)


def _size(blueprint: ModelPlan) -> str:
    """Describe the number of parameters of the model, and of those that are trained."""
    if blueprint.adapter is None:
        return f"{number(blueprint.parameters)} parameters"
    frozen = blueprint.parameters - blueprint.trained
    kept = " in NF4" if blueprint.adapter.base == "nf4" else ""
    trained = number(blueprint.trained)
    return f"{trained} parameters of adapters on {number(frozen)} frozen ones{kept}"


def _course(config: RunConfig) -> str:
    """Describe the length and the first plan of the run."""
    outer, adapt = config.outer, config.control.adapt
    steps = f"{config.total_steps} inner steps in rounds of {outer.inner_steps}"
    if config.exchanges_gradients:
        when = "one step late" if config.gradient_delay else "at once"
        return f"{steps}, gradients used {when}, codec {config.compression.codec}"
    fragments = "1 fragment" if outer.fragments == 1 else f"{outer.fragments} fragments"
    return (
        f"{steps}, {fragments} landing {outer.delay} of {outer.slots} slots later, codec "
        f"{config.compression.codec}"
        + ("" if adapt == "off" else f" to begin with, then by control.adapt {adapt}")
    )
