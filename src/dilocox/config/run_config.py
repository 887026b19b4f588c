"""One run, one TOML file: every section and key that a run file may hold.

`load_run` reads a file, applies command-line overrides, fills in what the method (see
`dilocox.config.methods`) leaves to its own defaults, and checks everything that can be checked
without touching a GPU or the network. A `RunConfig` is frozen: what was resolved is what runs.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError, model_validator

from dilocox.config.admission import AdmissionSection, admission_problem
from dilocox.config.base import Positive, Section
from dilocox.config.codec_spec import sent_with_moments
from dilocox.config.error_messages import first_problem
from dilocox.config.handover import handed_tokenizer
from dilocox.config.methods import BEFORE, METHODS, method_defaults
from dilocox.config.outer import (
    PINS,
    CompressionSection,
    ControlSection,
    OuterSection,
    rounds_problem,
    usual_steps,
)
from dilocox.config.outputs import (
    CheckpointSection,
    EvaluationSection,
    MetricsSection,
    RecordSection,
    keeping_problem,
)
from dilocox.config.site import ZERO_BUBBLE, InnerSection, SiteName, SiteOverride, SiteSection
from dilocox.errors import ConfigError


class RunSection(Section):
    """`[run]`: name, place and seed."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,60}$",
            description="up to 61 letters, digits, dots, hyphens and underscores, with a letter or "
            "digit first",
        ),
    ] = "run"
    folder: str = "runs/{name}"
    """Where the run is written; `{name}` is replaced."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    code: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 over the source of functions that replace parts of the training (`dilocox.join`,
    `dilocox.train`): all sites must bring the same. The refusal of a site that brings functions
    without it says what to write here."""


class ModelSection(Section):
    """`[model]`: a Hugging Face causal LM, by folder, by hub name, or inline."""

    path: str | None = None
    """A local folder or a hub name."""
    revision: str | None = None
    pretrained: bool = True
    """With `path`: start from its weights (true) or from its configuration alone (false)."""
    handover: bool = False
    """`path` was written by `dilocox handover`: the run goes on from the run that it is of, with
    its outer momentum, inner steps (which count towards the length of this run) and token ranges.
    Sites, stages and shards may be others."""
    architecture: dict[str, Any] | None = None
    """Inline architecture: `model_type` and the keys of that type's configuration."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    activation_checkpointing: bool | Literal["selective"] = False
    """What the backward pass computes again: nothing (`false`), each layer from its input alone
    (`true`), or all of a layer but its attention and every second matrix product (`selective`)."""
    compile: bool | Literal["auto"] = "auto"
    """Compile every layer with `torch.compile`. `auto`: on a GPU, but not with the zero-bubble
    schedules; a layer that cannot be compiled runs as it is, and a warning says why. `true`: such a
    layer is an error. Not with the zero-bubble schedules."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.architecture is None):
            raise ValueError("give exactly one of path and architecture")
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError('architecture needs model_type, for example "qwen3"')
        if self.handover and (self.path is None or not self.pretrained):
            raise ValueError("handover needs path, and pretrained = true")
        return self


class DataSection(Section):
    """`[data]`: text to token files."""

    source: str | list[str] | None = None
    """`python-stdlib`, or files and folders, or a hub dataset name (with `format = "hub"`). Of a
    folder, files of other kinds and hidden ones are left out, counted and shown by `dilocox data
    show`; links are followed."""
    format: Literal["auto", "text", "jsonl", "parquet", "code", "hub"] = "auto"
    """What the source is; `auto` goes by the file names. `jsonl`: JSON objects, one per line or all
    in one array; in a folder, `.json` files are taken with this format only. Text and JSONL may be
    packed (`.gz`, `.zst`)."""
    text_field: str = "text"
    """Field or column that holds the text in JSONL, Parquet and hub datasets. Records whose text is
    null or missing are left out and counted by `dilocox data show`."""
    subset: str | None = None
    """Hub datasets: the configuration name."""
    split: str = "train"
    """Hub datasets: the split."""
    revision: str | None = None
    licence: str | None = None
    max_documents: Positive | None = None
    folder: str = "{run}/data"
    """Where the token files are; `{run}` is the run's folder."""
    tokenizer: str = "train"
    """A local folder or hub name (`NAME@REVISION`: of that branch, tag or commit), or `train`:
    byte-level BPE trained on the corpus. Not set, where `model.path` gives the weights: that
    model's own, since its weights know no other; `train` is refused there. With `model.handover`:
    what the run before had."""
    vocabulary_size: Annotated[int, Field(ge=257)] = 4096
    """Size of a trained tokenizer."""
    begin_of_text: bool = True
    """Begin every document with what the tokenizer itself writes before a text, as Llama's,
    Mistral's and Gemma's do; a trained one writes nothing."""
    sequence_length: Positive = 256
    validation_fraction: Annotated[float, Field(gt=0.0, le=0.5)] = 0.02
    validation_source: str | list[str] | None = None
    """Held-out text of its own, given as `source` is: all of it is held out, and all of `source` is
    trained on. Documents that are in both are not looked for."""
    validation_split: str = "validation"
    """Hub datasets: the split of `validation_source`."""
    validation_sequences: Positive = 64
    """How many held-out sequences an evaluation reads, at most."""


class NetworkSection(Section):
    """`[network]`: the coordinator's address, and the two time-outs."""

    host: str = "127.0.0.1"
    """Address that the coordinator listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free port."""
    advertise: str | None = None
    """Address that the join line shows; not set: `host`, or this machine's own address if `host` is
    0.0.0.0."""
    interface: str | None = None
    """Default interface of the exchange; none: the one that reaches the coordinator."""
    congestion: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,15}$")] | None = None
    """TCP congestion control of the exchange's connections at this site, such as `cubic`; not set:
    the machine's. Three sites or more share their links more evenly with `cubic` than with `bbr`,
    which is better on links that lose packets (docs/notes/exchange.md)."""
    link_timeout: Annotated[float, Field(ge=5.0)] = 120.0
    """Seconds that a link may be silent. From this and `heartbeat` all other time-outs are
    derived."""
    heartbeat: Annotated[float, Field(gt=0.0)] = 5.0
    """Seconds within which it is noticed that a rank has died."""

    @model_validator(mode="after")
    def _consistent(self) -> NetworkSection:
        if self.heartbeat > self.link_timeout:
            raise ValueError(
                f"heartbeat {self.heartbeat:g} s is above link_timeout {self.link_timeout:g} s"
            )
        return self


class RunConfig(Section):
    """A whole run file, resolved."""

    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection = DataSection()
    site: SiteSection = SiteSection()
    inner: InnerSection = InnerSection()
    outer: OuterSection
    compression: CompressionSection
    control: ControlSection
    sites: dict[SiteName, SiteOverride]
    network: NetworkSection = NetworkSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    record: RecordSection = RecordSection()
    admission: AdmissionSection = AdmissionSection()
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if not self.sites:
            raise ValueError("name at least one site: add a table [sites.NAME]")
        if self.outer.min_sites > len(self.sites):
            raise ValueError(
                f"outer.min_sites {self.outer.min_sites} is above the {len(self.sites)} sites named"
            )
        schedule = self.site.schedule if self.site.stages > 1 else None
        problem = (
            rounds_problem(self.outer, self.compression, self.control, schedule)
            or admission_problem(self.admission, self.outer, self.compression, self.site.ranks)
            or keeping_problem(self.checkpoint, self.evaluation, self.record, self.outer.method)
        )
        if problem is not None:
            raise ValueError(problem)
        if self.model.compile is True and self.site.schedule in ZERO_BUBBLE:
            raise ValueError(
                f'model.compile: cannot be used with site.schedule "{self.site.schedule}", which '
                "splits the backward pass: set it to false, or use another schedule"
            )
        if self.model.attention == "flash_attention_2" and self.site.precision == "fp32":
            raise ValueError(
                'model.attention: "flash_attention_2" computes in 16 bits: set site.precision to '
                '"bf16", or use "sdpa"'
            )
        for name, site in self.sites.items():
            problem = None
            if site.batch_size is not None:
                problem = self.site.batch_problem(site.batch_size)
            if problem is not None:
                raise ValueError(f"sites.{name}.batch_size {site.batch_size} {problem}")
            first, last = site.port_range or (1, self.site.exchanging_ranks)
            if last - first + 1 < self.site.exchanging_ranks:
                raise ValueError(
                    f'sites.{name}.ports "{site.ports}" holds {last - first + 1} ports, the '
                    f"site's {self.site.exchanging_ranks} ranks need one each: widen it"
                )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run.folder.replace("{name}", self.run.name)).expanduser()

    @property
    def data_folder(self) -> Path:
        """Folder of the token files that all sites share."""
        return Path(self.data.folder.replace("{run}", str(self.folder))).expanduser()

    @property
    def record_store(self) -> str:
        """Folder or URL of the record's store."""
        return self.record.store.replace("{run}", str(self.folder))

    @property
    def checkpoint_store(self) -> str:
        """Folder or URL of the checkpoints."""
        return self.checkpoint.store.replace("{run}", str(self.folder))

    @property
    def total_steps(self) -> int:
        """Inner steps that a site takes in the whole run."""
        return self.outer.steps or (self.outer.rounds or 0) * self.outer.inner_steps

    @property
    def exchanges_gradients(self) -> bool:
        """The method averages the gradients of every inner step; there are no outer steps."""
        return self.outer.exchanges_gradients

    @property
    def gradient_delay(self) -> int:
        """Inner steps between a gradient and its use, 0 or 1, if the method exchanges them."""
        return self.outer.delay

    @property
    def shares_moments(self) -> bool:
        """Payloads carry row means of second moments, whatever does not go as low rank."""
        return (
            self.compression.moments
            and len(self.sites) > 1
            and self.inner.optimizer == "adamw"
            and self.outer.exchange == "gather"
            and not self.exchanges_gradients
            and not self.admission.examines
        )

    def sent_as(self, codec: str) -> str:
        """What rounds of `codec` are sent as: with moments, if sites share them."""
        return sent_with_moments(codec, self.shares_moments)

    def site_batch(self, site: str) -> int:
        """Sequences per inner step at `site`, if no other one's are added."""
        return self.sites[site].batch_size or self.site.batch_size

    @property
    def global_batch(self) -> int:
        """Sequences per inner step at all sites of the run file."""
        return sum(map(self.site_batch, self.sites))

    @property
    def declares_speeds(self) -> bool:
        """The run file says how fast sites are."""
        return any(site.speed is not None for site in self.sites.values())

    @property
    def measures(self) -> bool:
        """Plans depend on what sites measure."""
        paced = self.control.steps == "by-speed" and not self.declares_speeds
        return self.control.measures or paced

    def to_toml(self) -> str:
        """The resolved run file. Keys that are none are left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def shared(self, without_defaults: bool = False) -> dict[str, Any]:
        """What all sites must agree on: all but places on one machine."""
        shared = self.model_dump(
            mode="json", exclude={"metrics": True}, exclude_defaults=without_defaults
        )
        for section, keys in _OF_ONE_MACHINE.items():
            for key in keys:
                shared.get(section, {}).pop(key, None)
        for site in shared["sites"].values():
            for key in ("interface", "advertise", "ports"):
                site.pop(key, None)
            # Where private text lies is the site's own matter; that it is private is not: its
            # token ranges come from a space of their own.
            if "data" in site:
                site["data"] = site["data"] is not None
        return {name: keys for name, keys in shared.items() if keys or not without_defaults}

    def digest(self) -> str:
        """SHA-256, hex, over what of `shared` is not a default: what sites show when they join.

        So a run can go on under a later version that knows more keys, or has other defaults
        (`FORMER_DEFAULTS`). Sites that join must have one version and the same defaults
        (`Versions`).
        """
        shared = self.shared(without_defaults=True)
        for (section, key), former in FORMER_DEFAULTS.items():
            if shared.get(section, {}).get(key) == former:
                del shared[section][key]
        return digest_of({name: keys for name, keys in shared.items() if keys})

    def as_begun(self, earlier: RunConfig) -> RunConfig:
        """This run as it goes on in the folder of `earlier`, which has the same digest.

        A key that stands at its default goes on with the former default that the run was begun
        with: the run's record says so, and what ranks compute does not change under way.
        """
        config = self
        for (section, key), former in FORMER_DEFAULTS.items():
            own, begun = getattr(config, section), getattr(earlier, section)
            default = type(own).model_fields[key].default
            if getattr(begun, key) == former and getattr(own, key) == default:
                own = own.model_copy(update={key: former})
                config = config.model_copy(update={section: own})
        return config


FORMER_DEFAULTS: dict[tuple[str, str], Any] = {("model", "compile"): False}
"""By section and key, what the default was in earlier versions. In a digest a key with this value
is at its default, as it was when such a version made the digest."""


_OF_ONE_MACHINE = {
    "run": ("folder",),
    "data": ("folder",),
    "site": ("device", "threads"),
    "network": ("host", "port", "advertise", "interface", "congestion"),
    "checkpoint": ("store",),
    "record": ("store", "anchor"),
}
"""Keys by section."""


def digest_of(shared: Mapping[str, Any]) -> str:
    """SHA-256, hex, over what `RunConfig.shared` gives, from this version or another."""
    text = json.dumps(shared, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and resolve it.

    `overrides` are `section.key=value` texts; values are TOML, bare words are strings.
    Raises `ConfigError` with the key, the reason and the mend.
    """
    return resolve_run(_read(Path(path), overrides), where=str(path))


def load_written(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the `run.toml` of a run's folder: resolved, maybe by an older version.

    Keys that methods have set only since then are what that version did without them.
    Raises `ConfigError`, as `load_run`.
    """
    from dilocox.utils.storage import (
        unsafe_reason,  # imports fsspec, which who reads no run needs not
    )

    reason = unsafe_reason(Path(path), Path(path).parent)
    if reason:
        raise ConfigError(f"{path}: {reason}; the run.toml of a run is a plain file")
    raw = _read(Path(path), overrides)
    for section, keys in BEFORE.items():
        if isinstance(raw.get(section), dict):
            raw[section] = {**keys, **raw[section]}
    return resolve_run(raw, where=str(path))


def _read(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        # Windows' editors begin a file with a byte order mark.
        raw = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such run file; see examples/ for ones that work") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    for override in overrides:
        _apply_override(raw, override)
    return raw


def resolve_run(raw: dict[str, Any], where: str = "run file") -> RunConfig:
    """Fill in the method's defaults and validate `raw`. Raises `ConfigError`."""
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    tables = {name: raw.get(name, {}) for name in ("outer", "compression", "control")}
    if all(isinstance(table, dict) for table in tables.values()):
        outer, compression, control = tables.values()
        method = outer.get("method", "dilocox")
        # What is no method is left to the validation, which lists the methods there are.
        known = method if isinstance(method, str) and method in METHODS else "dilocox"
        defaults = method_defaults(known, outer, compression)
        control = {**defaults["control"], **control}
        if control["adapt"] != "link":
            control["pinned"] = []
        elif "pinned" not in control:
            control["pinned"] = [
                key for name, keys in PINS.items() for key in keys if key in tables[name]
            ]
        raw["outer"] = {**defaults["outer"], **outer}
        raw["compression"] = {**defaults["compression"], **compression}
        control.setdefault("steps", usual_steps(raw, known, control))
        raw["control"] = control
    _take_the_models_tokenizer(raw)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error, RunConfig)}") from None


def _take_the_models_tokenizer(raw: dict[str, Any]) -> None:
    """Set `data.tokenizer` to that of the model whose weights the run starts from, or of the run
    that it goes on from, if not set."""
    model, data = raw.get("model"), raw.get("data", {})
    # What has another type is left to the validation.
    if not isinstance(model, dict) or not isinstance(data, dict) or "tokenizer" in data:
        return
    path, revision = model.get("path"), model.get("revision")
    if isinstance(path, str) and model.get("handover") is True:
        raw["data"] = handed_tokenizer(path) | data
    elif isinstance(path, str) and model.get("pretrained", True):
        raw["data"] = {**data, "tokenizer": f"{path}@{revision}" if revision else path}


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {override!r}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = raw
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override!r}: {part} is a value, not a section")
        table = inner
    table[parts[-1]] = value


def with_sites(config: RunConfig, sites: int | Sequence[str]) -> RunConfig:
    """The run with so many sites, or with sites of these names; those of the run file come first.

    Sites beyond them are like one without settings of its own. Raises `ConfigError` for a run that
    cannot be with these.
    """
    names = list(config.sites)[:sites] if isinstance(sites, int) else list(sites)
    if isinstance(sites, int):
        number = len(names)
        while len(names) < sites:
            number += 1
            if f"site{number}" not in names:
                names.append(f"site{number}")
    raw = config.model_dump(mode="json", exclude_none=True)
    own = raw["sites"]
    raw["sites"] = {name: copy.deepcopy(own.get(name, {})) for name in names}
    raw["outer"]["min_sites"] = min(config.outer.min_sites, len(names))
    return resolve_run(raw)
