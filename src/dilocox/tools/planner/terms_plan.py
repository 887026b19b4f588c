"""What the planner says of a run's terms: to the sponsor who writes them, and to a GPU owner."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.config.terms import Deposit, Need, Terms, TermsFile, agreed_keys, offer_of
from dilocox.errors import ConfigError
from dilocox.inner.memory import GIB
from dilocox.tools.planner.core_plan import Cluster, CorePlan, filled_devices
from dilocox.tools.planner.hardware_table import GpuPlacement, HardwareTable, Link
from dilocox.tools.planner.host_memory import HostMemory, host_memory
from dilocox.tools.planner.model_outline import ModelOutline
from dilocox.tools.planner.plan import check_gpus
from dilocox.utils.formatting import number, size

GWEI = 10**9
"""Wei; a chain's coin is 10^9 gwei."""


@dataclass(frozen=True)
class SitePlan:
    """What a run's terms mean for one owner of GPUs. The other sites are as the terms say."""

    terms: TermsFile
    place: GpuPlacement
    link: Link
    core: CorePlan
    own: int
    """Number of the owner's site in `core`."""
    needed: int
    """Bytes that the fullest of the owner's GPUs needs."""
    host: HostMemory | None
    """Host memory that a machine of the owner needs. None if the owner has no GPUs."""
    slow_link: bool
    """True if the owner's link is slower than the terms ask for."""

    @property
    def share(self) -> float:
        """Share of the run's tokens that the site trains on."""
        course = self.core.prediction.course
        return course.sites[self.own].tokens * course.steps_of(self.own) / course.settled_tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the site."""
        return self.share * self.core.prediction.tokens_per_second

    @property
    def seconds(self) -> float:
        """Seconds of the whole run.

        The terms offer tokens for equal sites. If sites take steps by their speed, slower sites
        take fewer, and the run ends with fewer tokens.
        """
        prediction = self.core.prediction
        tokens = self.core.config.total_steps * prediction.course.tokens_per_step
        return tokens / prediction.tokens_per_second

    @property
    def coins_per_hour(self) -> float:
        """Pay per hour, in the chain's coin, if all rounds of the site count."""
        price = self.terms.terms.offer.price
        return self.tokens_per_second * 3600 / 1e6 * price / GWEI

    @property
    def coins(self) -> float:
        """Pay for the whole run, in the chain's coin, if all rounds of the site count."""
        return self.coins_per_hour * self.seconds / 3600

    @property
    def upload(self) -> float:
        """Payload bytes per second that the site sends, on average. It receives as many."""
        return upload_of(self.core)

    @property
    def usd_per_hour(self) -> float | None:
        """Rent of the site's GPUs in US dollars per hour; None if the price is unknown."""
        price = self.place.device.usd_per_hour
        if price is None:
            return None
        return price * (1 if self.place.device.shared else self.place.gpus)

    @property
    def fits(self) -> bool:
        """Whether the GPUs and, if its size is known, the host memory are large enough."""
        return self.fits_devices and (self.host is None or self.host.fits)

    @property
    def fits_devices(self) -> bool:
        """Whether every rank fits its GPU."""
        return self.needed <= self.place.device.memory


def upload_of(core: CorePlan) -> float:
    """Return the payload bytes that each site sends per second, on average."""
    return core.prediction.payload_bytes / core.prediction.round_seconds


def write_terms(
    config: RunConfig, gpu: str, link: str, fabric: float, stake: int, window: int
) -> Terms:
    """Return the terms of a run.

    Args:
        config: The run.
        gpu: GPUs that a site needs, in the form of `--gpu`, of the planner's own table.
        link: Least link of a site, in the form of `--link`, of the planner's own table.
        fabric: Bytes per second of a node's network inside its site.
        stake: Gwei that each site stakes.
        window: Seconds in which a settlement can be vetoed.

    Raises:
        ConfigError: The run does not fit these GPUs, names no contract, or is not possible, or
            the planner's table, which owners have as well, does not have the GPU.
        ModelError: The model cannot be built or cut into stages.
    """
    table = HardwareTable.load()
    settlement = None if config.settlement is None else config.settlement.agreed()
    offer = offer_of(config, settlement)
    places, links = [table.place(gpu)] * offer.sites, [table.link(link)] * offer.sites
    check_gpus(config, places)
    outline = ModelOutline.of(config)
    core = Cluster(places, links, fabric).plan(config, outline)
    if not core.fits_devices:
        raise ConfigError(
            f"--gpu {gpu}: does not fit, {core.needed / GIB:.1f} GiB of {core.available / GIB:.1f} "
            "GiB: name GPUs that fit (dilocox plan without --write-terms shows changes)"
        )
    return Terms(
        format=1,
        offer=offer,
        deposit=Deposit(stake=stake, window=window),
        need=Need(
            gpu=places[0].text,
            link=link,
            gpu_memory=core.needed,
            host_memory=0 if core.host is None else core.host.needed,
            upload=round(upload_of(core), 1),
            tokens_per_second=round(core.prediction.tokens_per_second, 1),
        ),
        architecture={} if config.adapter is not None else _architecture(config, outline),
        run_file=agreed_keys(config),
    )


def _architecture(config: RunConfig, outline: ModelOutline) -> dict[str, Any]:
    """Return the model's configuration for who has neither its folder nor its tokenizer."""
    found = outline.hf_config
    keys = config.model.architecture or found.to_diff_dict()
    left_out = ("_name_or_path", "transformers_version", "architectures")
    kept = {key: value for key, value in keys.items() if key not in left_out and value is not None}
    return {**kept, "model_type": found.model_type, "vocab_size": int(found.vocab_size)}


def plan_site(
    file: TermsFile, place: GpuPlacement, link: Link, fabric: float, table: HardwareTable
) -> SitePlan:
    """Plan one site of a run by its terms. All other sites have the GPUs and links of the terms.

    Args:
        file: The terms.
        place: The owner's GPUs.
        link: The owner's link.
        fabric: Bytes per second of a node's network inside its site.
        table: Devices and links by name.

    Raises:
        ConfigError: The owner has fewer GPUs than the terms ask for, or the terms hold no valid
            run.
        ModelError: The model cannot be built or cut into stages.
    """
    terms, need = file.terms, file.terms.need
    config = terms.planned()
    if not place.device.shared and place.gpus < terms.offer.gpus:
        raise ConfigError(
            f"--gpu {place.text}: {_count(place.gpus, 'GPU')}, and each site of this run needs "
            f"{terms.offer.gpus}"
        )
    usual, least = table.place(need.gpu), table.link(need.link)
    others = terms.offer.sites - 1
    cluster = Cluster([*[usual] * others, place], [*[least] * others, link], fabric)
    slow = min(link.up, link.down) < min(least.up, least.down)
    core = cluster.plan(config)
    (own,) = filled_devices(config, core.outline, [place], core.prediction.choice)
    host = host_memory([(place, own.footprints)], config)
    return SitePlan(file, place, link, core, others, own.needed, host, slow)


def as_json(plan: SitePlan) -> dict[str, Any]:
    """Return a plan as plain data for programs."""
    host = plan.host
    return {
        "terms": plan.terms.digest,
        "offer": plan.terms.terms.offer.model_dump(mode="json"),
        "deposit": plan.terms.terms.deposit.model_dump(mode="json"),
        "fits": plan.fits,
        "gpu_memory": {"needed": plan.needed, "available": plan.place.device.memory},
        "host_memory": None if host is None else {
            **{key: asdict(host)[key] for key in ("needed", "available")}, "fits": host.fits,
        },
        "share": plan.share,
        "tokens_per_second": plan.tokens_per_second,
        "run_tokens_per_second": plan.core.prediction.tokens_per_second,
        "seconds": plan.seconds,
        "coins_per_hour": plan.coins_per_hour,
        "coins": plan.coins,
        "usd_per_hour": plan.usd_per_hour,
        "upload_bytes_per_second": plan.upload,
        "slow_link": plan.slow_link,
    }  # fmt: skip


def as_text(plan: SitePlan) -> str:
    """Return a plan as a few lines for people."""
    terms, core = plan.terms.terms, plan.core
    offer, deposit, need = terms.offer, terms.deposit, terms.need
    name, outline = core.config.run.name, core.outline
    lines = [
        f"{name}: {outline.hf_config.model_type}, {number(outline.parameters)} trained parameters, "
        f"{_count(offer.sites, 'site')} of {_count(offer.gpus, 'GPU')}, "
        f"{number(offer.tokens)} tokens",
        f"terms: sha256 {plan.terms.digest}",
        f"pay: {offer.price:,} gwei for a million tokens that count; {offer.audit_rate:.0%} of "
        "each site's rounds are audited",
        f"stake: {deposit.stake / GWEI:g} coins, bound until {2 * deposit.window:,} s after you "
        f"leave; contract {offer.contract} on chain {offer.chain}, of {offer.owner}",
        "",
        f"your site: {plan.place.text}, link {plan.link.name}",
        *_memory(plan),
        f"share: {plan.share:.1%} of the tokens, {number(plan.tokens_per_second)} tokens/s, beside "
        f"{_count(plan.own, 'site')} with {need.gpu} and {need.link}",
        f"pay: {plan.coins_per_hour:.9f} coins an hour, {plan.coins:.9f} for all "
        f"{plan.seconds / 3600:.1f} hours, if all your rounds count" + _rent(plan),
        f"uplink: {size(plan.upload)}/s sent on average, and as many received "
        f"({_rate(plan.upload)})"
        + (f"; SLOWER than {need.link}, which the terms ask for" if plan.slow_link else ""),
    ]
    return "\n".join(lines)


def _memory(plan: SitePlan) -> list[str]:
    word, device = "fits" if plan.fits_devices else "DOES NOT FIT", plan.place.device
    where = "all ranks" if device.shared else "a GPU"
    lines = [
        f"{word}: {plan.needed / GIB:.1f} GiB of the {device.memory / GIB:.1f} GiB that training "
        f"may use, of {where}"
    ]
    host = plan.host
    if host is None:
        return lines
    need = f"{host.needed / GIB:.1f} GiB per machine"
    if host.available is None:
        return [*lines, f"host memory: {need} (--host-memory GIB checks that it fits)"]
    word = "fits" if host.fits else "DOES NOT FIT"
    return [*lines, f"host memory {word}: {need}, of {host.available / GIB:.1f} GiB"]


def _rent(plan: SitePlan) -> str:
    usd = plan.usd_per_hour
    return "" if usd is None else f"; these GPUs cost ${usd:,.2f} an hour (--rent)"


def _count(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _rate(upload: float) -> str:
    return f"{8 * upload / 1e6:,.2f} mbit/s"
