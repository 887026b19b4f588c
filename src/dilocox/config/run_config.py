"""The run file: one TOML file that describes a run, with all its sections and keys.

`load_run` reads a file, applies command-line overrides, fills in the defaults of the method
(`dilocox.config.methods`) and checks everything that needs neither a GPU nor the network. The
result is a resolved `RunConfig`, which is immutable.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, ValidationError, model_validator

from dilocox.config.adapter import AdapterSection, adapter_problem
from dilocox.config.admission import AdmissionSection, admission_problem
from dilocox.config.availability import AvailabilitySection, availability_problem
from dilocox.config.base import Section
from dilocox.config.code_file import agree_on_code
from dilocox.config.codec_spec import sent_with_moments
from dilocox.config.data import DataSection, own_data_problem
from dilocox.config.error_messages import first_problem
from dilocox.config.handover import handed_tokenizer
from dilocox.config.methods import BEFORE, find_method, method_defaults
from dilocox.config.model import ModelSection as ModelSection
from dilocox.config.model import own_model_problem
from dilocox.config.network import NetworkSection
from dilocox.config.one_machine import drop_own_keys
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
from dilocox.config.preference import PAIR, REFERENCE, PreferenceSection, preference_problem
from dilocox.config.privacy import PrivacySection, privacy_problem
from dilocox.config.settlement import SettlementSection, settlement_problem
from dilocox.config.site import ZERO_BUBBLE, InnerSection, SiteName, SiteOverride, SiteSection
from dilocox.errors import ConfigError


class RunSection(Section):
    """`[run]`: name, folder and seed of the run."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,60}$",
            description="up to 61 letters, digits, dots, hyphens and underscores, with a letter or "
            "digit first",
        ),
    ] = "run"
    folder: str = "runs/{name}"
    """Folder into which the run is written. `{name}` is replaced by `run.name`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    code: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the source of user functions that replace parts of the training (`dilocox.join`,
    `dilocox.train`), or of the file `site.code`. All sites must use the same functions. If the key
    is missing, it is that of `site.code`; without a file, the error message shows the value."""


class RunConfig(Section):
    """A resolved run file: every key has its value, and all checks have passed."""

    run: RunSection = RunSection()
    model: ModelSection
    adapter: AdapterSection | None = None
    data: DataSection = DataSection()
    preference: PreferenceSection = PreferenceSection()
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
    privacy: PrivacySection = PrivacySection()
    settlement: SettlementSection | None = None
    availability: AvailabilitySection | None = None
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
            or privacy_problem(
                self.privacy, self.outer, self.admission, self.own_data, self.site.ranks
            )
            or adapter_problem(self.adapter, self.model)
            or preference_problem(self.preference, self.data, self.model, self.adapter)
            or settlement_problem(
                self.settlement, self.sites, self.record.enabled, self.exchanges_gradients
            )
            or availability_problem(
                self.availability,
                self.sites,
                self.record.enabled and not self.exchanges_gradients,
                self.outer.exchange,
                self.record.keep,
            )
            or own_model_problem(
                self.model,
                self.control.adapt != "off",
                self.site.ranks * self.site.replicas,
                bool(self.evaluation.tasks),
                self.checkpoint.hugging_face,
            )
            or own_data_problem(
                self.data,
                self.sites,
                "vocab_size" not in (self.model.architecture or {"vocab_size": 0}),
                self.handover is not None,
                self.admission.gate,
                bool(self.evaluation.tasks),
            )
        )
        if problem is not None:
            raise ValueError(problem)
        if self.evaluation.tasks_site not in (None, *self.sites):
            raise ValueError(
                f"evaluation.tasks_site {self.evaluation.tasks_site!r} is not one of the sites: "
                f"{', '.join(self.sites)}"
            )
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
    def loss_columns(self) -> tuple[str, ...]:
        """Sorted names of the columns that the loss reads beside labels."""
        if self.data.format == "preference":
            return (PAIR, REFERENCE)
        return tuple(sorted(self.data.columns))

    @property
    def handover(self) -> str | None:
        """Folder of the handover that this run continues from; None if it begins anew."""
        if self.adapter is not None and self.adapter.handover is not None:
            return self.adapter.handover
        return self.model.path if self.model.handover else None

    @property
    def record_store(self) -> str:
        """Folder or URL of the record's payload store."""
        return self.record.store.replace("{run}", str(self.folder))

    @property
    def checkpoint_store(self) -> str:
        """Folder or URL of the checkpoints."""
        return self.checkpoint.store.replace("{run}", str(self.folder))

    @property
    def tasks_site(self) -> str | None:
        """The site that evaluates `evaluation.tasks`; None without tasks."""
        if not self.evaluation.tasks:
            return None
        return self.evaluation.tasks_site or next(iter(self.sites))

    @property
    def total_steps(self) -> int:
        """Inner steps of one site in the whole run."""
        return self.outer.steps or (self.outer.rounds or 0) * self.outer.inner_steps

    @property
    def exchanges_gradients(self) -> bool:
        """Whether the method averages the gradients of every inner step, without outer steps."""
        return self.outer.exchanges_gradients

    @property
    def gradient_delay(self) -> int:
        """Inner steps from a gradient to its use, 0 or 1, with methods that exchange gradients."""
        return self.outer.delay

    @property
    def shares_moments(self) -> bool:
        """Whether payloads, except lowrank ones, carry row means of AdamW's second moments."""
        return (
            self.compression.moments
            and len(self.sites) > 1
            and self.inner.optimizer == "adamw"
            and self.outer.exchange == "gather"
            and not self.exchanges_gradients
            and not self.admission.examines
            and not self.privacy.enabled
        )

    @property
    def own_data(self) -> tuple[str, ...]:
        """Names of the sites that train on text of their own."""
        return tuple(name for name, site in self.sites.items() if site.data is not None)

    @property
    def private_sites(self) -> tuple[str, ...]:
        """Names of the sites that clip, and usually noise, their contributions."""
        return self.own_data if self.privacy.enabled else ()

    def sent_as(self, codec: str) -> str:
        """Returns `codec` with `+moments` if the sites share second moments."""
        return sent_with_moments(codec, self.shares_moments)

    def site_batch(self, site: str) -> int:
        """Sequences per inner step at `site`, without those taken over from absent sites."""
        return self.sites[site].batch_size or self.site.batch_size

    @property
    def global_batch(self) -> int:
        """Sequences per inner step, summed over all sites of the run file."""
        return sum(map(self.site_batch, self.sites))

    @property
    def declares_speeds(self) -> bool:
        """Whether the run file declares the speed of at least one site."""
        return any(site.speed is not None for site in self.sites.values())

    @property
    def measures(self) -> bool:
        """Whether plans depend on measurements of the sites."""
        paced = self.control.steps == "by-speed" and not self.declares_speeds
        return self.control.measures or paced

    def to_toml(self) -> str:
        """Returns the resolved run file as TOML. Keys whose value is None are left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def shared(self, without_defaults: bool = False) -> dict[str, Any]:
        """Returns the keys that all sites must agree on: all but the settings of one machine."""
        shared = self.model_dump(
            mode="json", exclude={"metrics": True}, exclude_defaults=without_defaults
        )
        if self.adapter is None:
            shared.pop("adapter", None)
        else:
            # Adapters count even if all their keys are at their defaults.
            shared["adapter"] = {"kind": self.adapter.kind, **shared.get("adapter", {})}
        if self.settlement is None:
            shared.pop("settlement", None)
        elif not without_defaults:
            shared["settlement"] = self.settlement.agreed()
        if self.availability is None:
            shared.pop("availability", None)
        else:
            shared["availability"] = self.availability.agreed(self.sites)
        drop_own_keys(shared)
        return {name: keys for name, keys in shared.items() if keys or not without_defaults}

    def digest(self) -> str:
        """Returns the SHA-256 (hex) of the `shared` keys that differ from their defaults.

        Sites present it when they join. Defaults are left out so that a run can resume under a
        later version with more keys or other defaults (`FORMER_DEFAULTS`). All sites have the same
        defaults, since they must have the same version (`Versions`).
        """
        shared = self.shared(without_defaults=True)
        for (section, key), former in FORMER_DEFAULTS.items():
            if shared.get(section, {}).get(key) == former:
                del shared[section][key]
        return digest_of({name: keys for name, keys in shared.items() if keys})

    def as_begun(self, earlier: RunConfig) -> RunConfig:
        """Returns this configuration with the former defaults that `earlier` began with.

        `earlier` is the resolved run file in the folder of the run that resumes; it has the same
        digest. Only keys at their default change, so that ranks compute as the record says.
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
"""Defaults of earlier versions, by section and key. `RunConfig.digest` leaves out a key with its
former default, as the earlier version did."""


def digest_of(shared: Mapping[str, Any]) -> str:
    """Returns the SHA-256 (hex) of a `RunConfig.shared` mapping of this or another version."""
    text = json.dumps(shared, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and resolve it.

    `overrides` are `section.key=value` texts; values are TOML, bare words are strings.
    Raises `ConfigError`, which names the key, the reason and the remedy, for an invalid file.
    """
    return resolve_run(_read(Path(path), overrides), where=str(path))


def load_written(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the `run.toml` in a run's folder, which an earlier version may have resolved.

    Keys that this earlier version did not know take its behaviour (`methods.BEFORE`).
    Raises `ConfigError` like `load_run`, and if the file is not a plain file in the folder.
    """
    from dilocox.utils.storage import (
        unsafe_reason,  # imports fsspec, which other callers of this module do not need
    )

    reason = unsafe_reason(Path(path), Path(path).parent)
    if reason:
        raise ConfigError(f"{path}: {reason}; the run.toml of a run must be a plain file")
    raw = _read(Path(path), overrides)
    for section, keys in BEFORE.items():
        if isinstance(raw.get(section), dict):
            raw[section] = {**keys, **raw[section]}
    return resolve_run(raw, where=str(path))


def _read(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        # Windows editors may begin a file with a byte order mark.
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
    """Fill in the method's defaults and validate. Raises `ConfigError` that begins with `where`."""
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    tables = {name: raw.get(name, {}) for name in ("outer", "compression", "control")}
    if all(isinstance(table, dict) for table in tables.values()):
        outer, compression, control = tables.values()
        method = outer.get("method", "dilocox")
        # An unknown method is left to the validation, which lists the known methods.
        known = "dilocox" if find_method(method) is None else str(method)
        defaults = method_defaults(known, outer, compression)
        if isinstance(raw.get("model"), dict) and raw["model"].get("own") is True:
            defaults["control"]["adapt"] = "off"
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
    agree_on_code(raw, where)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error, RunConfig)}") from None


def _take_the_models_tokenizer(raw: dict[str, Any]) -> None:
    """Set a missing `data.tokenizer` to the tokenizer of the pretrained model or earlier run."""
    model, data = raw.get("model"), raw.get("data", {})
    # Values of a wrong type are left to the validation.
    if not isinstance(model, dict) or not isinstance(data, dict) or "tokenizer" in data:
        return
    path, revision = model.get("path"), model.get("revision")
    adapter = raw.get("adapter")
    handed = adapter.get("handover") if isinstance(adapter, dict) else None
    if isinstance(handed, str):
        raw["data"] = handed_tokenizer(handed) | data
    elif isinstance(path, str) and model.get("handover") is True:
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
    """Returns the run with another number of sites, or with sites of the given names.

    Sites of the run file keep their settings; a number keeps the first of them. New sites have no
    settings of their own. What other sections say of sites that are left out is left out, too.
    Raises `ConfigError` if the run is not valid with these sites.
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
    if raw["evaluation"].get("tasks_site") not in names:
        raw["evaluation"].pop("tasks_site", None)
    if config.settlement is not None:
        accounts = raw["settlement"]["accounts"]
        raw["settlement"]["accounts"] = {n: a for n, a in accounts.items() if n in names}
    raw["outer"]["min_sites"] = min(config.outer.min_sites, len(names))
    return resolve_run(raw)
