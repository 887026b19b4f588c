"""Sections of the run file about rounds between sites: `[outer]`, `[compression]`, `[control]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dilocox.config.base import Fraction, Positive, Section
from dilocox.config.codec_kinds import CodecKind
from dilocox.config.codec_spec import parse_spec, sent_with_moments
from dilocox.config.error_messages import UNKNOWN_NAME
from dilocox.config.methods import exchanges_gradients, find_method, known_methods
from dilocox.errors import ConfigError

_BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
RATE = r"[0-9]{1,9}(\.[0-9]{1,3})?(kbit|mbit|gbit)"
"""Regular expression of a rate such as `1gbit`, `2.5mbit` or `300kbit`."""

Pin = Literal[
    "inner_steps", "fragments", "delay", "keep", "learning_rate", "momentum", "codec",
    "residual_decay", "residual_view",
]  # fmt: skip
PINS: dict[str, tuple[Pin, ...]] = {
    "outer": ("inner_steps", "fragments", "delay", "keep", "learning_rate", "momentum"),
    "compression": ("codec", "residual_decay", "residual_view"),
}
"""Keys, by section, that `control.adapt = "link"` chooses unless the run file sets them."""


def _known_method(value: object) -> object:
    if find_method(value) is None:
        raise PydanticCustomError(UNKNOWN_NAME, "no such method", {"known": known_methods()})
    return value


class OuterSection(Section):
    """`[outer]`: rounds between sites. A key that is left out takes the method's value."""

    method: Annotated[str, BeforeValidator(_known_method)] = "dilocox"
    rounds: Positive | None = None
    """Length of the run in rounds. Each site takes `rounds` x `inner_steps` inner steps. The
    default is 10 if `steps` is not set."""
    steps: Positive | None = None
    """Length of the run in inner steps per site. Set it instead of `rounds`. The last round is
    shortened if `steps` is not a multiple of `inner_steps`."""
    inner_steps: Positive
    """H: inner steps per round."""
    slots: Positive
    """S: slots per round. `inner_steps` must be a multiple of it."""
    fragments: Positive
    """F: number of pieces per stage, and of fragments per round. Each piece has its own outer
    state. If the run file does not set this key, the controller may choose fewer fragments in a
    round; neighbouring pieces are then exchanged together."""
    delay: Annotated[int, Field(ge=0)]
    """Slots from a fragment's boundary to its landing, at most `slots`. For methods that exchange
    gradients: inner steps from a gradient to its use, 0 or 1."""
    overlap: Literal["none", "naive", "keep", "eager"]
    keep: Fraction = 1.0
    """kappa. With overlap `keep`: fraction of a site's progress since the boundary that it keeps on
    top of the new anchor."""
    learning_rate: Annotated[float, Field(gt=0.0)]
    """gamma: the outer learning rate."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)]
    """mu: the outer Nesterov momentum."""
    momentum_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the stored outer momentum. `bf16` saves 2 bytes per parameter."""
    exchange: Literal["gather", "reduce"] = "gather"
    device: Literal["cpu", "model"] = "cpu"
    """Where anchor, momentum and residual are stored: `cpu` is host memory, `model` is the device
    of the model. On a GPU they take 20 to 32 bytes of GPU memory per parameter, exchanges included
    (docs/planner.md). The GPU then encodes, decodes and averages, and only payloads cross PCIe.
    Boundaries and landings take hundredths of a second instead of seconds, so rounds can be short.
    The payloads have the same bytes in both cases."""
    min_sites: Positive = 1
    """Fewest live sites with which the run goes on. With fewer live sites, the run waits."""
    global_batch: Literal["by-sites", "fixed"] = "by-sites"
    """Sequences per inner step over all sites. `by-sites`: the sum of the batch sizes of the sites
    that are present. `fixed`: the sum over all sites of the run file. While a site is absent, the
    others then take more micro-batches per inner step, and the step takes longer. `fixed` needs
    `control.steps = "equal"` and makes it the default."""

    @property
    def exchanges_gradients(self) -> bool:
        """Whether the method averages the gradients of every inner step, without outer steps."""
        return exchanges_gradients(self.method)

    @property
    def pieces(self) -> int:
        """Number of pieces of a stage, each with an outer state of its own."""
        return 1 if self.exchanges_gradients else self.fragments

    @model_validator(mode="after")
    def _consistent(self) -> OuterSection:
        if (self.rounds is None) == (self.steps is None):
            raise ValueError("give exactly one of rounds and steps")
        if self.inner_steps % self.slots:
            raise ValueError(
                f"inner_steps {self.inner_steps} is not divisible by slots {self.slots}"
            )
        problem = self._gradients() if self.exchanges_gradients else self._landings()
        if problem is not None:
            raise ValueError(problem)
        return self

    def _gradients(self) -> str | None:
        if self.overlap != "none":
            return (
                f'overlap "{self.overlap}": method {self.method} exchanges gradients, there is no '
                'pseudo-gradient to land: set overlap = "none"'
            )
        if self.delay > 1:
            return (
                f"delay {self.delay}: with method {self.method} gradients are used in the same "
                "inner step (0) or in the next (1)"
            )
        return None

    def _landings(self) -> str | None:
        if self.overlap == "none" and self.delay != 0:
            return 'overlap "none" lands at the boundary: set delay = 0'
        if self.overlap in ("naive", "eager") and self.delay != self.slots:
            return f'overlap "{self.overlap}" lands a whole round later: set delay = {self.slots}'
        if self.overlap == "keep" and not 1 <= self.delay <= self.slots:
            return f'overlap "keep" needs delay from 1 to slots = {self.slots}'
        if self.fragments > self.slots:
            return f"fragments {self.fragments} is above slots {self.slots}"
        return None


class CompressionSection(Section):
    """`[compression]`: how contributions are encoded for the exchange."""

    codec: str
    """Codec of the payloads. `none`, `fp16`, `bf16`: all values in fp32, fp16 or bf16. `int8`,
    `int4`, `int2`: all values in codes of 8, 4 or 2 bits, with one bf16 scale per 128 values.
    `topk:K`: the K values of largest magnitude out of every 4,096, as indices and 2-bit codes.
    `top1:B`: the value of largest magnitude out of every B, as an index and a 2-bit code.
    `lowrank:R`: two factors of rank R per matrix, 4 bits per value (`lowrank:R:int8`: 8 bits).
    `cocktail`: the fifth of largest magnitude out of a random tenth of the values, as indices and
    4-bit codes."""
    error_feedback: bool
    residual_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """beta: fraction of the residual that enters the next contribution."""
    residual_view: Fraction = 0.0
    """lambda: fraction of its residual that a site applies to its own parameters, on top of the
    anchor. The site then trains with the progress that it has not sent yet. Needs error feedback. A
    method that exchanges gradients cannot use it. Leave it at 0 with `outer.exchange = "reduce"`:
    there the residual also holds the rounding error of the mean over all sites."""
    moments: bool = False
    """Sites exchange row means of AdamW's second moments and take the mean over the sites. The
    means take one byte per row, spread over the payloads of 32 exchanges. The key has an effect
    only with `inner.optimizer = "adamw"`, `outer.exchange = "gather"` and a codec other than
    `lowrank`, and only if `[admission]` does not compare contributions and `[privacy]` is not
    used."""

    @field_validator("codec")
    @classmethod
    def _canonical(cls, text: str) -> str:
        try:
            spec = parse_spec(text)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("compression.codec: ")) from None
        if spec.moments:
            plain = sent_with_moments(text, moments=False)
            raise ValueError(f'{text!r}: set codec = "{plain}" and moments = true')
        return spec.text

    @property
    def kind(self) -> CodecKind:
        """Record of the codec's kind."""
        return parse_spec(self.codec).record


class ControlSection(Section):
    """`[control]`: how the settings of each round are chosen.

    With `adapt = "link"`, the controller chooses codec, inner steps and number of fragments for
    every round. It considers only settings whose exchange is hidden behind computation, and takes
    the settings with the least predicted rise of the loss. It keeps the keys of `[outer]` and
    `[compression]` that the run file sets. With `adapt = "effective-rank"`, the rank and the inner
    steps follow the effective rank of the averaged pseudo-gradient. With `adapt = "off"`, every
    round has the settings of the run file.
    """

    adapt: Literal["off", "link", "effective-rank"]
    steps: Literal["equal", "by-speed"] = "equal"
    """Number of inner steps of sites of unequal speed. `equal`: every site takes `inner_steps`, and
    fast sites wait for slow sites. `by-speed`: the typical site takes `inner_steps`, and every
    other site takes as many steps as it can in the same time. Speeds are measured unless
    `sites.NAME.speed` declares them. With measured speeds of three sites or more, the typical site
    is the median: with an even number of sites, the faster of the two middle sites. With two sites
    or with declared speeds, it is the fastest site. The default is `by-speed` if speeds are
    declared or if `adapt = "link"` uses measurements, else `equal`."""
    weights: Literal["equal", "tokens", "fednova"] = "tokens"
    """Weights of contributions that were made with unequal numbers of steps. `tokens`: proportional
    to the number of tokens. `equal`: proportional to the batch size alone. `fednova`: proportional
    to the batch size divided by the number of steps. See docs/notes/uneven.md for measurements."""
    max_speed: Annotated[float, Field(ge=1.0, le=1000.0)] = 8.0
    """Largest measured speed of a site, as a multiple of the median speed of the others. A larger
    value is reduced to this limit, because a site reports its own speed and its number of steps
    follows from it. Speeds that the run file declares are not limited."""
    max_share: Annotated[float, Field(ge=0.5, le=1.0)] = 0.5
    """With three sites or more: largest fraction of the total weight that a measured speed may give
    to one site. A fraction that a site has by its batch size alone is not reduced, since batch
    sizes are in the run file."""
    link: Annotated[
        str | None,
        Field(
            pattern=f"^{RATE}$",
            description='a rate such as "1gbit", "2.5mbit" or "300kbit"',
        ),
    ] = None
    """Upload rate of the slowest site, per second. If not set, it is measured."""
    latency: Annotated[float, Field(ge=0.0, le=3600.0)] = 0.0
    """Seconds that an exchange takes in addition to the transfer of its bytes. Needs a declared
    `link`; if `link` is measured, so is this."""
    step_seconds: Annotated[float, Field(ge=1e-6, le=86400.0)] | None = None
    """Seconds of an inner step at the slowest site, or at the typical site with
    `steps = "by-speed"`. If not set, it is measured."""
    utilisation: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Fraction of the available time that exchanges are planned to fill."""
    work: Annotated[float, Field(gt=0.0, le=1.0)] = 0.03
    """With `adapt = "link"`: largest fraction of a round that training may lose to the exchanges of
    a new plan. Time in which training waits for other sites does not count. On CPUs, the lost time
    is the CPU time of encoding, votes, decoding, boundaries, landings and digests, multiplied by a
    factor. The factor is the number of seconds that the training thread needs for one second of CPU
    time. It is 1.0 if the thread has a core to itself, and 2.0 if it gets half a core. On GPUs, the
    lost time is the time of boundaries and landings, during which the GPUs stand still. A plan in
    force may lose a quarter more."""
    window: Annotated[int, Field(ge=1, le=64)] = 5
    """With `adapt = "effective-rank"`: number of first rounds that use the run file's values, and
    number of rounds over which the rank is averaged later."""
    pinned: list[Pin] = []  # noqa: RUF012 - pydantic copies defaults
    """With `adapt = "link"`: keys that the controller must not change. The default is the keys that
    the run file sets."""

    @field_validator("link")
    @classmethod
    def _carries(cls, link: str | None) -> str | None:
        if link is not None:
            rate_of(link)
        return link

    @property
    def link_rate(self) -> int | None:
        """Declared upload rate in bytes per second; None if it is measured."""
        if self.link is None:
            return None
        return rate_of(self.link)

    @property
    def measures(self) -> bool:
        """Whether `adapt` makes plans depend on measurements of the sites."""
        if self.adapt == "link":
            return self.link_rate is None or self.step_seconds is None
        return self.adapt == "effective-rank"


def rate_of(text: str) -> int:
    """Returns bytes per second, at least 1, of a rate text. `RATE` must match `text`.

    Raises `ValueError`, with the reason and the remedy, for a rate of zero.
    """
    rate = float(text[:-4]) * _BITS[text[-4:]] / 8
    if rate == 0:
        raise ValueError(f'the rate "{text}" carries nothing; give a rate above 0, such as 2.5mbit')
    return max(1, round(rate))


def rate_text(bits_per_second: float, digits: int = 3) -> str:
    """Returns a rate for display, such as `200 Mbit/s`, with `digits` significant digits."""
    bits = float(f"{bits_per_second:.{digits}g}")
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.{digits}g} {unit}"
    return f"{bits:.{digits}g} bit/s"


def rounds_problem(
    outer: OuterSection,
    compression: CompressionSection,
    control: ControlSection,
    schedule: str | None,
) -> str | None:
    """Returns why sections of a run file contradict each other, with the remedy, or None.

    Args:
        outer: `[outer]`.
        compression: `[compression]`.
        control: `[control]`.
        schedule: the pipeline schedule; None if sites have one stage.
    """
    if outer.global_batch == "fixed" and schedule in ("gpipe", "interleaved-1f1b"):
        return (
            f'outer.global_batch "fixed": with schedule "{schedule}" more micro-batches take more '
            'memory: set site.schedule = "1f1b"'
        )
    codec, kind = compression.codec, compression.kind
    if kind.agrees_first and outer.exchanges_gradients:
        return (
            f"compression.codec {codec}: method {outer.method} exchanges gradients, and lowrank "
            "encodes only pseudo-gradients; choose another codec"
        )
    if not kind.averages_in_parts and outer.exchange != "gather":
        return (
            f'compression.codec {codec} does not support outer.exchange "reduce": '
            'set outer.exchange = "gather"'
        )
    if kind.needs_feedback and not compression.error_feedback:
        return f"compression.codec {codec} needs compression.error_feedback = true"
    if compression.residual_view and outer.exchanges_gradients:
        return (
            f"compression.residual_view: method {outer.method} exchanges gradients, and a residual "
            "of gradients cannot be applied to parameters: leave it out"
        )
    if compression.residual_view and not compression.error_feedback:
        return "compression.residual_view needs compression.error_feedback = true"
    if control.steps == "by-speed" and outer.global_batch == "fixed":
        return (
            'outer.global_batch "fixed": with control.steps "by-speed" the batch follows the '
            'sites\' speeds: set steps = "equal", or global_batch = "by-sites"'
        )
    if control.steps == "by-speed" and outer.exchanges_gradients:
        return (
            f'control.steps "by-speed": with method {outer.method} all sites take every inner step '
            'together: set steps = "equal"'
        )
    if control.latency and control.link is None:
        return (
            "control.latency belongs to a declared link, but control.link is not set: set "
            "control.link too, or leave latency out, so that both are measured"
        )
    if control.adapt == "off":
        return None
    if outer.exchanges_gradients:
        return f'control.adapt: method {outer.method} has nothing to adapt: set adapt = "off"'
    if control.adapt == "link" and outer.overlap != "keep":
        return (
            'control.adapt "link" hides exchanges behind computation: set outer.overlap = "keep", '
            'or adapt = "off"'
        )
    if control.adapt == "effective-rank" and not kind.agrees_first:
        return (
            f'control.adapt "effective-rank" changes the rank, but compression.codec {codec} has '
            'no rank: set codec = "lowrank:R", or adapt = "off"'
        )
    return None


def usual_steps(raw: dict[str, Any], method: str, control: dict[str, Any]) -> str:
    """Returns the default of `control.steps` for a run file that does not set it.

    Args:
        raw: the run file, as written.
        method: `outer.method`.
        control: `[control]` with the method's defaults filled in.
    """
    sites = raw.get("sites")
    tables = sites.values() if isinstance(sites, dict) else ()
    declared = any(isinstance(table, dict) and "speed" in table for table in tables)
    measured = control["adapt"] == "link" and not {"link", "step_seconds"} <= control.keys()
    outer = raw.get("outer")
    fixed = isinstance(outer, dict) and outer.get("global_batch") == "fixed"
    by_speed = not exchanges_gradients(method) and (measured or declared) and not fixed
    return "by-speed" if by_speed else "equal"
