"""Sections of the run file about rounds between sites: `[outer]`, `[compression]`, `[control]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dilocox.config.base import Fraction, Positive, Section
from dilocox.config.codec_spec import COARSE, parse_spec, sent_with_moments
from dilocox.config.methods import EXCHANGE_GRADIENTS
from dilocox.errors import ConfigError

_BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
RATE = r"[0-9]{1,6}(\.[0-9]{1,3})?(kbit|mbit|gbit)"
"""Pattern of a rate such as `1gbit`, `2.5mbit` or `300kbit`."""

Pin = Literal[
    "inner_steps", "fragments", "delay", "keep", "learning_rate", "momentum", "codec",
    "residual_decay", "residual_view",
]  # fmt: skip
PINS: dict[str, tuple[Pin, ...]] = {
    "outer": ("inner_steps", "fragments", "delay", "keep", "learning_rate", "momentum"),
    "compression": ("codec", "residual_decay", "residual_view"),
}
"""Keys by section that `adapt = "link"` chooses unless the run file sets them."""


class OuterSection(Section):
    """`[outer]`: rounds between sites. Keys left out take the method's value."""

    method: Literal[
        "allreduce",
        "cocktailsgd",
        "diloco",
        "opendiloco",
        "intellect1",
        "sparseloco",
        "dilocox-paper",
        "dilocox",
    ] = "dilocox"
    rounds: Positive | None = None
    """Length of the run: rounds x inner_steps steps per site; 10 if `steps` is not set."""
    steps: Positive | None = None
    """Length of the run in inner steps per site, instead of `rounds`; the last round is cut short
    to fit."""
    inner_steps: Positive
    """H: inner steps per round."""
    slots: Positive
    """S: slots per round; divides inner_steps."""
    fragments: Positive
    """Pieces per stage, each with an outer state of its own, and as many fragments F in a round.
    Unless this key is set, the controller may take fewer: neighbours are exchanged together."""
    delay: Annotated[int, Field(ge=0)]
    """Slots between a fragment's boundary and its landing, at most `slots`; of a method that
    exchanges gradients, inner steps until they are used: 0 or 1."""
    overlap: Literal["none", "naive", "keep", "eager"]
    keep: Fraction = 1.0
    """kappa of overlap `keep`: the share of fresh progress kept on top of the new anchor."""
    learning_rate: Annotated[float, Field(gt=0.0)]
    """gamma, the outer learning rate."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)]
    """mu, the outer Nesterov momentum."""
    momentum_dtype: Literal["fp32", "bf16"] = "fp32"
    """What the outer momentum is kept in: bf16 takes 2 bytes per parameter less."""
    exchange: Literal["gather", "reduce"] = "gather"
    device: Literal["cpu", "model"] = "cpu"
    """Where anchor, momentum and residual live: host memory or the model's device. On a GPU they
    take 20 to 32 bytes of its memory per parameter, exchanges included (docs/planner.md). The GPU
    then encodes, decodes and averages, and only payloads cross PCIe. Boundaries and landings take
    hundredths of a second instead of seconds, so rounds can be short. The bytes are the same."""
    min_sites: Positive = 1
    """Fewer live sites than this: wait instead of going on."""
    global_batch: Literal["by-sites", "fixed"] = "by-sites"
    """Sequences per inner step of all sites together. `by-sites`: those of the sites that are
    there. `fixed`: those of all sites of the run file; while some are away, the others take more
    micro-batches per inner step, which then takes longer. Needs `control.steps = "equal"`, and
    makes it the default."""

    @property
    def exchanges_gradients(self) -> bool:
        """The method averages the gradients of every inner step; there are no outer steps."""
        return self.method in EXCHANGE_GRADIENTS

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
    """`[compression]`: what a pseudo-gradient travels as."""

    codec: str
    """`none`, `fp16`, `bf16`; `int8`, `int4`, `int2`: blocks of 128 values with one bf16 scale;
    `topk:K`: K of every 4,096 values, the largest, in 2 bits; `top1:B`: the largest of every B
    values, in 2 bits; `lowrank:R`: two factors of rank R per matrix, in 4 bits (`lowrank:R:int8`:
    8); `cocktail`: the top fifth of a random tenth, in 4 bits."""
    error_feedback: bool
    residual_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """beta: how much of the residual enters the next contribution."""
    residual_view: Fraction = 0.0
    """lambda: how much of its residual a site trains on top of the anchor with, so that it does not
    forget what it could not send yet. Needs error feedback; not of methods that exchange
    gradients. With `outer.exchange = "reduce"` leave it at 0: an owner's residual also holds the
    rounding of the whole mean, of all sites."""
    moments: bool = False
    """Sites tell each other row means of AdamW's second moments, a byte per row behind the payloads
    of 32 exchanges, and take the mean over the sites. Where `inner.optimizer` is `adamw`, the
    exchange is `gather`, the codec not `lowrank`, and contributions are not examined."""

    @field_validator("codec")
    @classmethod
    def _canonical(cls, text: str) -> str:
        try:
            spec = parse_spec(text)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("compression.codec: ")) from None
        if spec.moments:
            plain = sent_with_moments(text, moments=False)
            raise ValueError(f'{text!r}: set "{plain}", and moments')
        return spec.text

    @property
    def kind(self) -> str:
        """The codec without its numbers."""
        return parse_spec(self.codec).kind


class ControlSection(Section):
    """`[control]`: what is chosen anew every round, and by what.

    `link`: every round takes, of the codecs and numbers of inner steps and fragments whose exchange
    hides behind computation, what is predicted to cost the least loss; keys of `[outer]` and
    `[compression]` that the run file sets are kept. `effective-rank`: rank and inner steps follow
    the effective rank of the averaged pseudo-gradient. `off`: the plan is what the run file says.
    """

    adapt: Literal["off", "link", "effective-rank"]
    steps: Literal["equal", "by-speed"] = "equal"
    """How many inner steps sites of unequal speed take in a round. `by-speed`: one site takes
    `inner_steps`, the others as many as they manage in that time; `equal`: all take `inner_steps`,
    and the fast wait for the slow. Speeds are measured unless `sites.NAME.speed` declares them.
    Where they are measured, that one site is the middle one of three or more by speed, of an even
    number the faster of the two; else the fastest.
    By default `by-speed` where speeds are declared, or `adapt = "link"` measures; else `equal`."""
    weights: Literal["equal", "tokens", "fednova"] = "tokens"
    """What contributions of unequal numbers of steps weigh. `tokens`: by the tokens that they were
    made from; `equal`: by the batch size alone; `fednova`: each is divided by its number of steps.
    Measured in docs/notes/uneven.md."""
    max_speed: Annotated[float, Field(ge=1.0, le=1000.0)] = 8.0
    """A site whose speed is measured counts as at most so many times as fast as the median of the
    others: its measurement is its own word, and how many steps it is given hangs on it. Speeds that
    the run file declares are not limited."""
    max_share: Annotated[float, Field(ge=0.5, le=1.0)] = 0.5
    """Share of all weight that a measured speed may give to one of three sites or more. Batch sizes
    are in the run file: what a site has by them alone is not taken from it."""
    link: Annotated[
        str | None,
        Field(
            pattern=f"^{RATE}$",
            description='a rate such as "1gbit", "2.5mbit" or "300kbit"',
        ),
    ] = None
    """Uplink of the slowest site per second; not set: measured."""
    latency: Annotated[float, Field(ge=0.0, le=3600.0)] = 0.0
    """Seconds that an exchange takes beside its bytes, with a declared `link`; else measured."""
    step_seconds: Annotated[float, Field(ge=1e-6, le=86400.0)] | None = None
    """Seconds of an inner step at the slowest site, with `steps = "by-speed"` at the one that takes
    `inner_steps`; not set: measured."""
    utilisation: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of the time that there is which exchanges are planned to take."""
    work: Annotated[float, Field(gt=0.0, le=1.0)] = 0.03
    """`link`: most that training may lose by a new plan's exchanges beside waiting, as a share of
    the round: on processors the time that their work takes (encoding, votes, decoding, boundaries,
    landings, digests; twice its processor time where training gets half a core), on GPUs the time
    of boundaries and landings, during which these stand still. One in force may take a quarter
    more."""
    window: Annotated[int, Field(ge=1, le=64)] = 5
    """`effective-rank`: rounds at the start with the run file's values, and over which the rank is
    averaged later."""
    pinned: list[Pin] = []  # noqa: RUF012 - pydantic copies defaults
    """`link`: keys that are not to be changed; by default those that the run file sets."""

    @property
    def link_rate(self) -> int | None:
        """Declared uplink in bytes per second; none: measured."""
        if self.link is None:
            return None
        return rate_of(self.link)

    @property
    def measures(self) -> bool:
        """Plans depend on what sites measure."""
        if self.adapt == "link":
            return self.link_rate is None or self.step_seconds is None
        return self.adapt == "effective-rank"


def rate_of(text: str) -> int:
    """Bytes per second, at least 1, of a text that `RATE` matches."""
    return max(1, round(float(text[:-4]) * _BITS[text[-4:]] / 8))


def rate_text(bits_per_second: float, digits: int = 3) -> str:
    """A rate to read, `200 Mbit/s`, with so many significant digits."""
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
    """Why these sections do not go together, with the keys and the mend, or none.

    `schedule`: of the pipeline; none with one stage.
    """
    if outer.global_batch == "fixed" and schedule in ("gpipe", "interleaved-1f1b"):
        return (
            f'outer.global_batch "fixed": with schedule "{schedule}" more micro-batches take more '
            'memory: set site.schedule = "1f1b"'
        )
    codec, kind = compression.codec, compression.kind
    if kind == "lowrank" and outer.exchanges_gradients:
        return (
            f"compression.codec {codec}: method {outer.method} exchanges gradients, which low rank "
            "is not made for; choose another codec"
        )
    if kind in ("topk", "top1", "lowrank") and outer.exchange != "gather":
        return f'compression.codec {codec} is not averaged in parts: set outer.exchange = "gather"'
    if kind in COARSE and not compression.error_feedback:
        return f"compression.codec {codec} needs compression.error_feedback = true"
    if compression.residual_view and outer.exchanges_gradients:
        return (
            f"compression.residual_view: method {outer.method} exchanges gradients, of which a "
            "site can hold nothing on top of its parameters: leave it out"
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
            "control.latency is of a declared link, and control.link is not set: set it too, or "
            "leave latency out, which is measured then"
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
    if control.adapt == "effective-rank" and kind != "lowrank":
        return (
            f'control.adapt "effective-rank" changes the rank, compression.codec {codec} has '
            'none: set codec = "lowrank:R", or adapt = "off"'
        )
    return None


def usual_steps(raw: dict[str, Any], method: str, control: dict[str, Any]) -> str:
    """`control.steps` of a run file that leaves it out."""
    sites = raw.get("sites")
    tables = sites.values() if isinstance(sites, dict) else ()
    declared = any(isinstance(table, dict) and "speed" in table for table in tables)
    measured = control["adapt"] == "link" and not {"link", "step_seconds"} <= control.keys()
    outer = raw.get("outer")
    fixed = isinstance(outer, dict) and outer.get("global_batch") == "fixed"
    by_speed = method not in EXCHANGE_GRADIENTS and (measured or declared) and not fixed
    return "by-speed" if by_speed else "equal"
