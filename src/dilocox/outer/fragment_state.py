"""The outer state of one piece at one rank: anchor, momentum, residual, reference.

A piece's reference is the point from which displacements count. At a boundary it becomes the
live parameters x; when a landing makes x jump, it jumps along. So at any time

    reference − x = −(sum of the inner optimizer's displacements since the last boundary) = δ,

whatever jumps lay between. (docs/algorithm.md §1, §2.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dilocox.compression import (
    Compressor,
    LowRank,
    compressor,
    first_non_finite,
    first_unusable,
)
from dilocox.errors import CheckpointError, ExchangeError, TrainingError
from dilocox.outer.layout import Layout
from dilocox.outer.optimizer import as_kept, nesterov_step
from dilocox.outer.overlap import Rule, local_view
from dilocox.outer.staging import staging_of
from dilocox.utils import tracing
from dilocox.utils.cache_blocks import blocks

_HASHING = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")
"""Its thread begins with the first digest that is started, not before."""


class FragmentState:
    """Flat fp32 buffers of one piece, all [layout.length] on `device`; the momentum may be bf16.

    `live` arguments are this rank's parameters by full name (fp32, any device, a superset of
    the layout's names); copies between devices are explicit and complete on return. Order per
    round: `boundary`, then `committed` when the contribution set is known, then `land`. With a
    delay of a round, the next boundary follows the landing at the same slot end.
    """

    def __init__(
        self,
        layout: Layout,
        live: Mapping[str, Tensor],
        *,
        error_feedback: bool,
        eager: bool = False,
        device: torch.device | None = None,
        momentum_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Start with the anchor at `live`, no momentum, no residual.

        `eager`: keep the last pseudo-gradient and the site's own part of the momentum, which
        overlap `eager` needs (8 more bytes per parameter). `momentum_dtype`: fp32, or bf16 (2 bytes
        per parameter less).
        """
        self.layout = layout
        self.anchor = layout.pack(live, out=torch.zeros(layout.length, device=device))
        """θ."""
        self.momentum = torch.zeros_like(self.anchor, dtype=momentum_dtype)
        """m of the outer optimizer."""
        self.reference = self.anchor.clone()
        self.residual = torch.zeros_like(self.anchor) if error_feedback else None
        """e; none without error feedback."""
        self.previous = torch.zeros_like(self.anchor) if eager else None
        """δ of the last boundary; none unless `eager`."""
        self.own = torch.zeros_like(self.anchor) if eager else None
        """m_i of `dilocox.outer.overlap`; none unless `eager`."""
        self.warm: Tensor | None = None
        """Q of a low-rank codec, flat fp32, the same at all sites; none for other codecs."""
        self.warm_codec = ""
        """Codec that `warm` is of; empty if there is none."""
        self.non_finite: str | None = None
        """`name[index]` of a value that the last `boundary` met which is not finite, or beyond
        `LARGEST`, then with the value; or None."""
        self._hashed: Future[str] | None = None

    def compressor(self, name: str) -> Compressor | LowRank:
        """The codec `name` for this fragment. Q is made, or fitted to another rank, as it needs.

        To be called at a boundary, so that all sites do it at the same moment.
        """
        found = compressor(name, self.layout.geometry)
        if isinstance(found, LowRank) and self.warm_codec != name:
            self._settle()
            before = compressor(self.warm_codec, self.layout.geometry) if self.warm_codec else None
            if self.warm is not None and isinstance(before, LowRank):
                self.warm = found.fit_warm(self.warm, before)
            else:
                self.warm = found.first_warm().to(self.anchor.device)
            self.warm_codec = name
        return found

    def boundary(
        self, live: Mapping[str, Tensor], weight: float, decay: float
    ) -> tuple[Tensor, bool]:
        """The contribution u = w·δ + β·e, flat fp32 [length], and whether it is finite, with no
        value beyond `LARGEST`.

        The residual moves into u and comes back with `committed`: it is never in two
        contributions, even if the next boundary comes before this one's commit.

        Where u is not finite, δ is given up: the fragment's `live` parameters go back to the
        anchor, u is the residual alone, False is returned and `non_finite` names the value. This
        u is not to be contributed; `committed(u, None)` then leaves the residual as it was.
        """
        packed = self.layout.pack(live, device=self.anchor.device)

        def displaced(at: slice, now: Tensor) -> None:
            delta = self.reference[at] - now
            self.reference[at] = now
            if self.previous is not None:
                self.previous[at] = delta
            torch.mul(delta, weight, out=now)

        u, bad = self._with_residual(packed, decay, displaced)
        self.non_finite = None
        if bad is not None:
            position, value = bad
            self.non_finite = self.layout.locate(position)
            if math.isfinite(value):
                self.non_finite += f" ({value:.1e})"
            if self.previous is not None:
                self.previous.zero_()
            self.layout.unpack(self.anchor, live)
            self.reference.copy_(self.anchor)
        return u, bad is None

    def gradients(
        self, gradients: Mapping[str, Tensor], weight: float, decay: float
    ) -> tuple[Tensor, bool]:
        """The contribution u = w·g + β·e of a method that exchanges gradients; as `boundary`.

        `gradients` (full name to fp32) are not changed; a tensor that has none, since it is frozen,
        counts as zero. Where u is not finite it is the residual alone, and is not to be
        contributed.
        """
        shapes = zip(self.layout.names, self.layout.shapes, strict=True)
        frozen = {name: torch.zeros(shape) for name, shape in shapes if name not in gradients}
        packed = self.layout.pack({**gradients, **frozen}, device=self.anchor.device)
        u, bad = self._with_residual(packed, decay, lambda _, own: own.mul_(weight))
        return u, bad is None

    def _with_residual(
        self, packed: Tensor, decay: float, to_own: Callable[[slice, Tensor], object]
    ) -> tuple[Tensor, tuple[int, float] | None]:
        """u = own + β·e, and (position, value) of one that is not finite or beyond `LARGEST`; u is
        then the residual alone.

        `to_own` makes, in place, w·δ or w·g of a block of what is `packed`. The residual moves into
        what is returned. `packed` may be overwritten.
        """
        u, bad = packed, None
        for at in blocks(packed):
            part = packed[at]
            to_own(at, part)
            if self.residual is not None:
                part.add_(self.residual[at].mul(decay))
            position = first_unusable(part)
            if position is not None:
                bad = at.start + position, float(part[position])
                u = torch.zeros_like(packed) if self.residual is None else self.residual.clone()
                break
        if self.residual is not None:
            self.residual.zero_()
        return u, bad

    def committed(
        self, u: Tensor, sent: Tensor | None, second_error: tuple[int, Tensor] | None = None
    ) -> None:
        """The contribution set is fixed: keep what compression has withheld of u.

        `sent` is what the others saw of this site, None if it was left out (then all of u stays
        here). `second_error`: start and values of (Σw)·ε of the chunk that this site averaged in
        exchange `reduce`. Without error feedback there is nothing to keep.
        """
        if self.residual is None:
            return
        u = u.to(self.residual.device)
        sent = None if sent is None else sent.to(self.residual.device)
        for at in blocks(self.residual):
            self.residual[at] += u[at] if sent is None else u[at] - sent[at]
        if second_error is not None:
            start, values = second_error
            self.residual[start : start + values.numel()].add_(values.to(self.residual.device))

    def land(self, live: Mapping[str, Tensor], average: Tensor | None, rule: Rule) -> None:
        """Outer step on the anchor, then the overlap rule's jump of `live` and reference.

        `average` is Δ, flat fp32 [length]; None for an empty contribution set, which leaves anchor
        and momentum as they are. Raises `TrainingError`, with nothing changed, if Δ is not finite
        (finite contributions can overflow together): all sites see the same Δ and end alike.
        """
        if average is not None:
            self._check_average(average)
        self._settle()
        landed = None if average is None else average.to(self.anchor.device)
        view = self.layout.pack(live, device=self.anchor.device)
        for at in blocks(view):
            self._land_block(at, view[at], None if landed is None else landed[at], rule)
        self.layout.unpack(view, live)

    def _land_block(self, at: slice, now: Tensor, average: Tensor | None, rule: Rule) -> None:
        """`land` of a block; `now` are its live parameters, then what they become."""
        reference, anchor = self.reference[at], self.anchor[at]
        displacement = now - reference
        own = None if self.own is None else self.own[at]
        if average is not None:
            nesterov_step(anchor, self.momentum[at], average, rule.learning_rate, rule.momentum)
            if own is not None and self.previous is not None:
                own.mul_(rule.momentum).add_(self.previous[at].mul(rule.share))
        residual = None if self.residual is None else self.residual[at]
        now.copy_(local_view(rule, anchor, displacement, own, residual))
        torch.sub(now, displacement, out=reference)

    def _check_average(self, average: Tensor) -> None:
        if average.shape != self.anchor.shape or average.dtype != torch.float32:
            raise ExchangeError(
                f"an average of {average.dtype} {list(average.shape)} cannot land on a fragment of "
                f"{self.layout.length} fp32 values"
            )
        position = first_non_finite(average)
        if position is not None:
            raise TrainingError(
                f"the averaged pseudo-gradient of {self.layout.locate(position)} is "
                f"{float(average[position])}; go on from the last checkpoint with a lower "
                "inner.learning_rate"
            )

    def reset_to_anchor(self, live: Mapping[str, Tensor], keep_residual: bool = True) -> None:
        """Go on from the anchor: what was trained since the last boundary is given up.

        After non-finite values the residual stays (it is finite); one who enters a run has none.
        """
        self.layout.unpack(self.anchor, live)
        self.reference.copy_(self.anchor)
        if self.residual is not None and not keep_residual:
            self.residual.zero_()

    def fold_into_residual(self, live: Mapping[str, Tensor], weight: float) -> None:
        """All that was trained since the last boundary goes into the residual, if there is one."""
        u, _ = self.boundary(live, weight, 1.0)
        self.committed(u, None)

    def adopt(
        self,
        live: Mapping[str, Tensor],
        agreed: Mapping[str, Tensor],
        codec: str = "",
        keep_residual: bool = False,
    ) -> None:
        """Enter a run: take a peer's `agreed` tensors, and go on from there without residual.

        `codec`: the peer's `warm_codec`; `keep_residual`: of a site that enters again.
        Raises `ExchangeError` if they do not fit.
        """
        self._settle()
        self._expect_warm(codec)
        _copy_all(self.agreed(), agreed, ExchangeError)
        for kept in (self.previous, self.own):
            if kept is not None:
                kept.zero_()
        self.reset_to_anchor(live, keep_residual)

    def take_anchor_from(self, live: Mapping[str, Tensor]) -> None:
        """Make the anchor what `live` is: method `allreduce`, whose sites never differ."""
        self._settle()
        self.layout.pack(live, out=self.anchor)
        self.reference.copy_(self.anchor)

    def take_momentum(self, whole: Mapping[str, Tensor]) -> None:
        """Begin with an outer momentum: this rank's part of it, fp32 by full name. Raises
        `ExchangeError` if it does not fit."""
        self._settle()
        self.momentum.copy_(as_kept(self.layout.pack(whole), self.momentum.dtype))

    def agreed(self) -> dict[str, Tensor]:
        """What is equal at all sites after every landing, by name (not copies)."""
        found = {"anchor": self.anchor, "momentum": self.momentum, "warm": self.warm}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _expect_warm(self, codec: str) -> None:
        """Make room for the Q of `codec`, or have none."""
        self.warm, self.warm_codec = None, ""
        if codec:
            self.compressor(codec)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything to go on from, by name (not copies). What is in flight is the caller's."""
        found = {
            **self.agreed(),
            "reference": self.reference,
            "residual": self.residual,
            "previous": self.previous,
            "own": self.own,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def load(self, tensors: Mapping[str, Tensor], codec: str = "") -> None:
        """Take over what `state_tensors` gave, with its `warm_codec`.

        Raises `CheckpointError` if it does not fit.
        """
        self._settle()
        self._expect_warm(codec)
        _copy_all(self.state_tensors(), tensors, CheckpointError)

    def digest(self) -> str:
        """SHA-256 of what is agreed, hex: equal at all sites after every landing."""
        hashed, self._hashed = self._hashed, None
        return self._sha256() if hashed is None else hashed.result()

    def start_digest(self) -> None:
        """Begin to compute `digest` in another thread; what would change it waits for that."""
        self._settle()
        staging = staging_of(self.anchor.device)
        now = staging.mark()

        def hashed() -> str:
            with staging.beside():
                if now is not None:
                    now.wait()
                return self._sha256()

        self._hashed = _HASHING.submit(hashed)

    def _settle(self) -> None:
        if self._hashed is not None:
            with tracing.span("wait for digest", values=self.layout.length):
                self._hashed.result()
            self._hashed = None

    def digest_of(self, agreed: Mapping[str, Tensor]) -> str:
        """What `digest` would be with these `agreed` tensors of another site.

        Raises `ExchangeError` if they are not of this piece.
        """
        for kind, mine in (("anchor", self.anchor), ("momentum", self.momentum)):
            if kind not in agreed or agreed[kind].shape != mine.shape:
                raise ExchangeError(f"fragment state: no {kind} of {mine.numel()} values")
        views = {
            f"{kind}/{name}": view
            for kind in ("anchor", "momentum")
            for name, view in self.layout.views(agreed[kind]).items()
        }
        if "warm" in agreed:
            views["warm"] = agreed["warm"]
        with tracing.span("digest", values=self.layout.length):
            return tensors_digest(views)

    def _sha256(self) -> str:
        return self.digest_of(self.agreed())


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, hex, over each tensor's name, dtype, shape and little-endian bytes, by name."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        total.update(f"{name}\0{dtype}\0{list(tensor.shape)}\0".encode())
        for block in staging_of(tensor.device).read(tensor):
            total.update(block)
    return total.hexdigest()


def _copy_all(
    into: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    error: type[CheckpointError] | type[ExchangeError],
) -> None:
    """Copy tensors of equal names, shapes and dtypes; nothing is changed if one does not fit."""
    if into.keys() != given.keys():
        raise error(
            f"fragment state holds {', '.join(sorted(given))}, expected {', '.join(sorted(into))}; "
            "overlap or error feedback differ from the run that wrote it"
        )
    for name, tensor in into.items():
        if given[name].shape != tensor.shape or given[name].dtype != tensor.dtype:
            raise error(
                f"fragment state {name}: expected {tensor.dtype} {list(tensor.shape)}, got "
                f"{given[name].dtype} {list(given[name].shape)}"
            )
    for name, tensor in into.items():
        tensor.copy_(given[name])
