"""The outer state of one piece at one rank: anchor, momentum, residual, reference.

The reference of a piece is the point from which displacements are counted. At a boundary the
reference is set to the live parameters x. When a landing makes x jump, the reference jumps by the
same distance. Therefore, at any time and however many jumps took place since the boundary,

    reference − x = −(sum of the inner optimizer's displacements since the last boundary) = δ.

See docs/algorithm.md §1 and §2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dilocox.compression import FragmentCodec, compressor, first_non_finite, first_unusable
from dilocox.errors import CheckpointError, ExchangeError, TrainingError
from dilocox.outer.layout import Layout
from dilocox.outer.outer_step import Rule, as_kept, local_view, nesterov_step
from dilocox.outer.private import ContributionPrivacy
from dilocox.outer.staging import staging_of
from dilocox.utils import tracing
from dilocox.utils.cache_blocks import blocks


class FragmentState:
    """Flat fp32 buffers of one piece, all [layout.length] on `device`; the momentum may be bf16.

    Every `live` argument holds this rank's parameters by full name: fp32, on any device, at least
    the layout's names. Copies between devices are explicit and complete on return.

    Order of calls per round: `boundary`, then `committed` when the contribution set is known, then
    `land`. With a delay of a whole round, `land` comes first at the slot end of the next boundary.
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
        privacy: ContributionPrivacy | None = None,
    ) -> None:
        """Start with the anchor equal to `live`, without momentum and without residual.

        Args:
            layout: place of each tensor in the buffers.
            live: this rank's parameters.
            error_feedback: keep a residual.
            eager: keep the last pseudo-gradient and the site's own part of the momentum, which
                overlap `eager` needs. Both together take 8 more bytes per parameter.
            device: device of the buffers; None means the CPU.
            momentum_dtype: fp32, or bf16, which saves 2 bytes per parameter.
            privacy: clips δ and adds noise at every boundary. None: δ is contributed as it is.
        """
        self.layout = layout
        self.anchor = layout.pack(live, out=torch.zeros(layout.length, device=device))
        """θ."""
        self.momentum = torch.zeros_like(self.anchor, dtype=momentum_dtype)
        """m of the outer optimizer."""
        self.reference = self.anchor.clone()
        self.residual = torch.zeros_like(self.anchor) if error_feedback else None
        """e. None without error feedback."""
        self.previous = torch.zeros_like(self.anchor) if eager else None
        """δ of the last boundary. None unless `eager`."""
        self.own = torch.zeros_like(self.anchor) if eager else None
        """m_i of `dilocox.outer.overlap`. None unless `eager`."""
        self.warm: Tensor | None = None
        """Q of a low-rank codec, flat fp32, equal at all sites. None for other codecs."""
        self.warm_codec = ""
        """Name of the codec that `warm` belongs to; empty without one."""
        self.non_finite: str | None = None
        """`name[index]` of the first unusable value that the last `boundary` found: a value that is
        not finite, or beyond `LARGEST` (then the value follows). None if all values are usable."""
        self._privacy = privacy
        self._hashed: Future[str] | None = None

    def compressor(self, name: str) -> FragmentCodec:
        """Return the codec `name` for this piece.

        For a low-rank codec, `warm` is created, or converted from the low-rank codec used before.
        Call this at a boundary, so that all sites convert `warm` at the same moment.
        """
        found = compressor(name, self.layout.geometry)
        agreement, before = found.agreement, None
        if agreement is not None and self.warm_codec != name:
            self._settle()
            if self.warm_codec:
                before = compressor(self.warm_codec, self.layout.geometry).agreement
            if self.warm is not None and before is not None:
                self.warm = agreement.fit_warm(self.warm, before)
            else:
                self.warm = agreement.first_warm().to(self.anchor.device)
            self.warm_codec = name
        return found

    def boundary(
        self, live: Mapping[str, Tensor], weight: float, decay: float
    ) -> tuple[Tensor, bool]:
        """Return the contribution u = w·δ + β·e, flat fp32 [length], and True if u is usable.

        u is usable if all values are finite and none is beyond `LARGEST`. `weight` is w, `decay`
        is β. The residual e becomes zero here; `committed` then adds the part of u that is not
        sent. So e is never part of two contributions, even if the next boundary comes before
        `committed` of this one.

        If u is not usable, δ is dropped: the `live` parameters return to the anchor, u is the
        residual alone, and `non_finite` names the value. Such a u must not be contributed;
        `committed(u, None)` then leaves the residual as it was.

        With `privacy`, δ stands for the clipped and noised δ everywhere but in `live`. So residual
        and payload never hold what was clipped away.
        """
        packed = self.layout.pack(live, device=self.anchor.device)
        u, bad = (self._plain if self._privacy is None else self._private)(packed, weight, decay)
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

    def _plain(
        self, packed: Tensor, weight: float, decay: float
    ) -> tuple[Tensor, tuple[int, float] | None]:
        """Return `_with_residual` of w·δ, and set the reference to `packed`, the live values."""

        def displaced(at: slice, now: Tensor) -> None:
            delta = self.reference[at] - now
            self.reference[at] = now
            if self.previous is not None:
                self.previous[at] = delta
            torch.mul(delta, weight, out=now)

        return self._with_residual(packed, decay, displaced)

    def _private(
        self, packed: Tensor, weight: float, decay: float
    ) -> tuple[Tensor, tuple[int, float] | None]:
        """Do what `_plain` does, with δ clipped and noised. An unusable δ is not noised."""
        assert self._privacy is not None
        delta = self.reference - packed
        self.reference.copy_(packed)
        position = first_unusable(delta)
        if position is not None:
            return self._residual_alone(delta), (position, float(delta[position]))
        self._privacy.apply(delta, self.layout)
        if self.previous is not None:
            self.previous.copy_(delta)
        return self._with_residual(delta, decay, lambda _, own: own.mul_(weight))

    def gradients(
        self, gradients: Mapping[str, Tensor], weight: float, decay: float
    ) -> tuple[Tensor, bool]:
        """Return u = w·g + β·e of a method that exchanges gradients, and True if u is usable.

        See `boundary` for the result and for `weight` and `decay`. `gradients` (full name to fp32)
        stay unchanged. A frozen tensor has no gradient and counts as zero. If u is not usable, the
        returned u is the residual alone and must not be contributed.
        """
        shapes = zip(self.layout.names, self.layout.shapes, strict=True)
        frozen = {name: torch.zeros(shape) for name, shape in shapes if name not in gradients}
        packed = self.layout.pack({**gradients, **frozen}, device=self.anchor.device)
        u, bad = self._with_residual(packed, decay, lambda _, own: own.mul_(weight))
        return u, bad is None

    def _with_residual(
        self, packed: Tensor, decay: float, to_own: Callable[[slice, Tensor], object]
    ) -> tuple[Tensor, tuple[int, float] | None]:
        """Return u = own + β·e, and (position, value) of the first unusable value, or None.

        A value is unusable if it is not finite or is beyond `LARGEST`; u is then the residual
        alone. `to_own` turns one block of `packed` into w·δ or w·g in place. The residual moves
        into u and becomes zero. `packed` may be overwritten.
        """
        for at in blocks(packed):
            part = packed[at]
            to_own(at, part)
            if self.residual is not None:
                part.add_(self.residual[at].mul(decay))
            position = first_unusable(part)
            if position is not None:
                value = float(part[position])
                return self._residual_alone(packed), (at.start + position, value)
        if self.residual is not None:
            self.residual.zero_()
        return packed, None

    def _residual_alone(self, like: Tensor) -> Tensor:
        """Return the residual, or zeros in the form of `like`, and set the residual to zero."""
        if self.residual is None:
            return torch.zeros_like(like)
        alone = self.residual.clone()
        self.residual.zero_()
        return alone

    def committed(
        self, u: Tensor, sent: Tensor | None, second_error: tuple[int, Tensor] | None = None
    ) -> None:
        """Add to the residual the part of u that compression left out.

        Call this once the contribution set is known. Does nothing without error feedback.

        Args:
            u: the contribution, from `boundary` or `gradients`.
            sent: the contribution as the other sites decode it. None if this site was left out;
                all of u then goes into the residual.
            second_error: (start, values) of (Σ w)·ε of the chunk that this site averaged in
                exchange `reduce`.
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
        """Take the outer step on the anchor, then move `live` and reference by the overlap rule.

        `average` is Δ, flat fp32 [length]. It is None for an empty contribution set, which leaves
        anchor and momentum unchanged.

        Raises `TrainingError`, without changing anything, if Δ is not finite: a sum of finite
        contributions can overflow. All sites have the same Δ, so all raise. Raises `ExchangeError`
        if Δ has another shape or dtype.
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
        """Land one block. `now` holds its live parameters, and is overwritten with the new ones."""
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
        """Set `live` and the reference to the anchor. Training since the last boundary is lost.

        `keep_residual`: True after non-finite values, because the residual itself is finite; False
        at a site that enters a run.
        """
        self.layout.unpack(self.anchor, live)
        self.reference.copy_(self.anchor)
        if self.residual is not None and not keep_residual:
            self.residual.zero_()

    def fold_into_residual(self, live: Mapping[str, Tensor], weight: float) -> None:
        """Add w·δ, the training since the last boundary, to the residual, if there is a residual.

        `weight` is w of this site. With `privacy` this training is lost instead, because it is
        neither clipped nor noised, and no contribution of its own that would be counted.
        """
        if self._privacy is not None:
            self.layout.pack(live, out=self.reference)
            return
        u, _ = self.boundary(live, weight, 1.0)
        self.committed(u, None)

    def adopt(
        self,
        live: Mapping[str, Tensor],
        agreed: Mapping[str, Tensor],
        codec: str = "",
        keep_residual: bool = False,
    ) -> None:
        """Take over a peer's state when this site enters a run.

        Args:
            live: this rank's parameters, which are set to the new anchor.
            agreed: the tensors that the peer's `agreed` returned.
            codec: the peer's `warm_codec`.
            keep_residual: True for a site that enters the run again.

        Raises `ExchangeError` if names, shapes or dtypes of the tensors do not fit this piece.
        """
        self._settle()
        self._expect_warm(codec)
        _copy_all(self.agreed(), agreed, ExchangeError)
        for kept in (self.previous, self.own):
            if kept is not None:
                kept.zero_()
        self.reset_to_anchor(live, keep_residual)

    def take_anchor_from(self, live: Mapping[str, Tensor]) -> None:
        """Set anchor and reference to `live`, for method `allreduce`, whose sites never differ."""
        self._settle()
        self.layout.pack(live, out=self.anchor)
        self.reference.copy_(self.anchor)

    def take_momentum(self, whole: Mapping[str, Tensor]) -> None:
        """Start from an outer momentum: `whole` holds this rank's part, fp32 by full name.

        Raises `ExchangeError` if a tensor is missing or has another shape or dtype.
        """
        self._settle()
        self.momentum.copy_(as_kept(self.layout.pack(whole), self.momentum.dtype))

    def agreed(self) -> dict[str, Tensor]:
        """Return the tensors, not copies, that are equal at all sites after a landing, by name."""
        found = {"anchor": self.anchor, "momentum": self.momentum, "warm": self.warm}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _expect_warm(self, codec: str) -> None:
        """Allocate `warm` for the low-rank codec `codec`; an empty name leaves `warm` at None."""
        self.warm, self.warm_codec = None, ""
        if codec:
            self.compressor(codec)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a checkpoint needs, by name; no copies.

        The caller saves exchanges that are in flight.
        """
        found = {
            **self.agreed(),
            "reference": self.reference,
            "residual": self.residual,
            "previous": self.previous,
            "own": self.own,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def load(self, tensors: Mapping[str, Tensor], codec: str = "") -> None:
        """Restore the tensors of `state_tensors`. `codec` is the `warm_codec` of that time.

        Raises `CheckpointError` if names, shapes or dtypes do not fit this piece.
        """
        self._settle()
        self._expect_warm(codec)
        _copy_all(self.state_tensors(), tensors, CheckpointError)

    def digest(self) -> str:
        """Return the SHA-256, hex, of `agreed` tensors: equal at all sites after every landing."""
        hashed, self._hashed = self._hashed, None
        return self._sha256() if hashed is None else hashed.result()

    @property
    def hashed(self) -> bool:
        """Whether `start_digest` was called for the present tensors, and `digest` was not since."""
        return self._hashed is not None

    def start_digest(self, pool: Executor) -> None:
        """Begin to compute `digest` in `pool`, which has one thread. Methods that change these
        tensors wait for the digest first."""
        self._settle()
        staging = staging_of(self.anchor.device)
        now = staging.mark()

        def hashed() -> str:
            with staging.beside():
                if now is not None:
                    now.wait()
                return self._sha256()

        self._hashed = pool.submit(hashed)

    def _settle(self) -> None:
        if self._hashed is not None:
            with tracing.span("wait for digest", values=self.layout.length):
                self._hashed.result()
            self._hashed = None

    def digest_of(self, agreed: Mapping[str, Tensor]) -> str:
        """Return the `digest` of the `agreed` tensors of another site.

        Raises `ExchangeError` if anchor or momentum is missing or has another length.
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


def digests(states: Sequence[FragmentState]) -> list[str]:
    """Return `FragmentState.digest` of each piece; two threads compute them."""
    due = [state for state in states if not state.hashed]
    with digest_thread() as pool:
        for state in due[1::2]:
            state.start_digest(pool)
        here = {state: state.digest() for state in due[::2]}
        return [here[state] if state in here else state.digest() for state in states]


def digest_thread() -> ThreadPoolExecutor:
    """Return a pool of one thread for `start_digest`. The thread starts with the first digest."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, hex, over name, dtype, shape and little-endian bytes of each tensor.

    The tensors are hashed in the order of their names.
    """
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
    """Copy `given` into `into`. Raises `error`, without changing anything, if names, shapes or
    dtypes differ."""
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
