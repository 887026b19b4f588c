"""Builds the plan that `dilocox plan` prints (`plan_run`), as plain data (`RunPlan`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dilocox.config.codec_spec import parse_spec
from dilocox.config.methods import METHODS
from dilocox.config.run_config import RunConfig, with_sites
from dilocox.config.site import SiteSection
from dilocox.coordinator.controller.exchange_timing import Crowd
from dilocox.coordinator.server.plan_builder import FLUSH_CODEC
from dilocox.errors import ConfigError, DilocoxError
from dilocox.tools.planner.advice import Change, advice
from dilocox.tools.planner.core_plan import Cluster, CorePlan, Planned, Progress
from dilocox.tools.planner.faster_link import FasterLink, faster_link
from dilocox.tools.planner.hardware_table import GpuPlacement, Link
from dilocox.tools.planner.host_memory import HostMemory
from dilocox.tools.planner.hybrid import Hybrid, hybrid
from dilocox.tools.planner.memory_footprint import Footprint, counted
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.options import Option, options
from dilocox.tools.planner.payload_costs import parcels
from dilocox.tools.planner.predict import Prediction
from dilocox.tools.planner.step_time import StepTime, compute_limit
from dilocox.tools.planner.variants import at_site, on_device, with_method
from dilocox.training.portable_checkpoint import Handover


@dataclass(frozen=True)
class MethodRow:
    """Predicted speed of one method on the run's sites, model and batch."""

    method: str
    prediction: Prediction | None
    """None if the method cannot be used with this run."""
    problem: str | None
    """Why the method cannot be used with this run; None if it can."""


@dataclass(frozen=True)
class Budget:
    """Time and cost of training on `tokens` tokens."""

    tokens: float
    seconds: float
    egress_bytes: float
    """Payload bytes that leave the sites, summed over all sites."""
    egress_usd: float
    compute_usd: float | None
    """Rent of all GPUs in US dollars. None if the price of a device is unknown."""

    @property
    def usd(self) -> float | None:
        """Rent plus egress in US dollars. None if the rent is unknown."""
        return None if self.compute_usd is None else self.compute_usd + self.egress_usd


@dataclass(frozen=True)
class RunPlan:
    """A run's memory need, predicted speed and cost."""

    config: RunConfig
    outline: ModelOutline
    places: list[GpuPlacement]
    """By site, in the order of `config.sites`."""
    links: list[Link]
    """By site, in the order of `config.sites`."""
    fullest: GpuPlacement
    """The placement whose devices have the highest share of their memory in use. `footprints`,
    `needed` and `available` describe this placement."""
    footprints: list[Footprint]
    """By stage."""
    needed: int
    """Bytes that the fullest device needs."""
    available: int
    """Bytes that training may use of the fullest device."""
    host: HostMemory | None
    """Host memory of the fullest machine. None if no site has GPUs: the device is then the
    machine's memory itself."""
    exact: bool
    """True if activations were counted by running the model's code; False if they are a lower
    bound."""
    advice: list[Change]
    """Changes of the run file that lower the memory need. Empty if the run fits."""
    step: StepTime
    """Inner step of the site that the others wait for."""
    prediction: Prediction
    methods: list[MethodRow]
    budget: Budget
    limit: float
    """Tokens per second of all GPUs if no GPU ever waited."""
    hybrid: Hybrid | None
    """A faster layout of the slowest site. May be None: no faster layout was found."""
    faster_link: FasterLink | None
    """A link with which the network no longer holds the run up. May be None: a faster link does
    not help."""
    options: list[Option] = field(default_factory=list)
    """Changes of the run file that fit in memory and raise the speed or lower the loss."""

    @property
    def fits_devices(self) -> bool:
        """Whether every rank fits its device."""
        return self.needed <= self.available

    @property
    def fits(self) -> bool:
        """Whether every rank fits its device and, where host memory is known, its machine."""
        return self.fits_devices and (self.host is None or self.host.fits)

    @property
    def slowest(self) -> int:
        """Index of the site that the others wait for."""
        return self.prediction.course.slowest


def plan_run(
    config: RunConfig,
    places: Sequence[GpuPlacement],
    links: Sequence[Link],
    fabric: float,
    tokens: float | None = None,
    progress: Progress = lambda _: None,
    methods: Sequence[str] | None = None,
) -> RunPlan:
    """Plan the run of `config`.

    Args:
        config: The run; its number of sites becomes `len(places)`.
        places: GPUs of each site.
        links: Link of each site.
        fabric: Bytes per second of a node's network inside its site.
        tokens: Length of the run in tokens. None: the steps of the run file, less the steps that
            an earlier run has taken already (`model.path` of a portable checkpoint).
        progress: Called with the name of each stage of the work.
        methods: Methods to compare. None: all methods that this process knows.

    Raises:
        ConfigError: The run is not possible, for example more ranks than GPUs.
        CheckpointError: The portable checkpoint at `model.path` cannot be read.
        ModelError: The model cannot be built or cut into stages.
    """
    config = with_sites(config, len(places))
    check_gpus(config, places)
    left = _steps_left(config) if tokens is None else 0
    cluster = Cluster(list(places), list(links), fabric, tokens)
    own = cluster.plan(config, progress=progress)
    config, outline, prediction = own.config, own.outline, own.prediction
    planned = cluster.planned(config, outline)
    there = on_device(at_site(config, max(config.sites, key=config.site_batch)), own.fullest.device)
    changes = [] if own.fits_devices else _changes(there, own, places, planned)
    rows = []
    for method in METHODS if methods is None else methods:
        progress(f"method {method}")
        rows.append(_row(config, method, cluster, outline, prediction))
    progress("other settings")
    total = left * prediction.course.tokens_per_step if tokens is None else tokens
    return RunPlan(
        config=config,
        outline=outline,
        places=list(places),
        links=list(links),
        fullest=own.fullest,
        footprints=own.footprints,
        needed=own.needed,
        available=own.available,
        host=own.host,
        exact=counted(there, outline).exact,
        advice=changes,
        step=own.step,
        prediction=prediction,
        methods=rows,
        budget=budget(config, outline, prediction, places, links, total),
        limit=compute_limit(config, outline, places),
        hybrid=hybrid(own, cluster, planned),
        faster_link=faster_link(own, cluster),
        options=options(own, places, planned),
    )


def _changes(
    there: RunConfig, own: CorePlan, places: Sequence[GpuPlacement], planned: Planned
) -> list[Change]:
    """Return settings that need less memory than `own`, which does not fit its fullest device.

    `there`: the run with batch size and precision of the fullest device's site.
    """

    def check(values: Mapping[str, Any], outline: ModelOutline) -> tuple[int, GpuPlacement] | None:
        found = planned(values, outline)
        fills_host = own.fits_hosts and not found.fits_hosts
        return None if fills_host else (found.needed, found.fullest)

    fewest = min((p.gpus for p in places if not p.device.shared), default=own.fullest.gpus)
    return advice(there, own.outline, own.fullest, fewest, own.prediction.choice, check)


def check_gpus(config: RunConfig, places: Sequence[GpuPlacement]) -> None:
    """Raise `ConfigError` for a site with fewer GPUs than ranks."""
    for place in places:
        if not place.device.shared and place.gpus < config.site.ranks:
            raise ConfigError(
                f"--gpu {place.text}: {place.gpus} GPUs for {_product(config.site)} = "
                f"{config.site.ranks} ranks at each site; lower them, or give more GPUs per site"
            )


def _product(site: SiteSection) -> str:
    """Return the product that gives a site's ranks, such as `site.stages x site.shards`."""
    return " x ".join(f"site.{factor}" for factor in site.product.split(" x "))


def _steps_left(config: RunConfig) -> int:
    """Return the inner steps of the typical site that this run takes itself.

    Steps of the earlier run, whose portable checkpoint this run starts from, are not counted.
    Raises `CheckpointError` if that checkpoint cannot be read, `ConfigError` if no steps are left.
    """
    if config.handover is None:
        return config.total_steps
    taken = Handover.read(config.handover).steps
    if taken >= config.total_steps:
        raise ConfigError(
            f"outer.steps {config.total_steps}: the run that {config.handover} comes "
            f"from has taken {taken} already; raise outer.steps (or outer.rounds)"
        )
    return config.total_steps - taken


def _row(
    config: RunConfig,
    method: str,
    cluster: Cluster,
    outline: ModelOutline,
    own: Prediction,
) -> MethodRow:
    if method == config.outer.method:
        return MethodRow(method, own, None)
    try:
        run = with_method(config, method, int(outline.hf_config.hidden_size))
        return MethodRow(method, cluster.predict(run, outline), None)
    except DilocoxError as error:
        return MethodRow(method, None, str(error))


def budget(
    config: RunConfig,
    outline: ModelOutline,
    prediction: Prediction,
    places: Sequence[GpuPlacement],
    links: Sequence[Link],
    tokens: float,
) -> Budget:
    """Return the time and cost of training on `tokens` tokens.

    The budget is the sum of three parts. The simulated rounds count as simulated, including the
    rounds before the plan settled. The other tokens go at the predicted speed. The flush at the
    end of the run comes on top.
    """
    sites, course = len(links), prediction.course
    simulated = min(1.0, tokens / course.tokens)
    rest = max(0.0, tokens - course.tokens)
    sent = simulated * course.sent_bytes + prediction.payload_per_token * rest
    sent_each = sent / sites
    seconds = simulated * course.seconds + rest / prediction.tokens_per_second
    if sites > 1 and not config.exchanges_gradients:
        last = flushed_bytes(config, outline, prediction.choice.codec, sites)
        sent_each += last
        seconds += last / min(link.rate for link in links)
    egress = sum(sent_each * link.usd_per_gb / 1e9 for link in links)
    rents = [_rent(place) for place in places]
    compute = None
    if all(rent is not None for rent in rents):
        compute = seconds / 3600 * sum(rent for rent in rents if rent is not None)
    return Budget(tokens, seconds, sites * sent_each, egress, compute)


def flushed_bytes(config: RunConfig, outline: ModelOutline, codec: str, sites: int) -> int:
    """Return the bytes that each of `sites` sites sends in the flush after rounds with `codec`."""
    last = codec if parse_spec(codec).record.sparse else FLUSH_CODEC
    payload = sum(each.payload for row in parcels(config, outline.shapes, last) for each in row)
    swaps, size = Crowd(sites, config.outer.exchange).swaps(payload)
    return swaps * size


def _rent(place: GpuPlacement) -> float | None:
    """Return the US dollars per hour for all GPUs of a site. None if the price is unknown."""
    price = place.device.usd_per_hour
    return None if price is None else price * (1 if place.device.shared else place.gpus)
