"""Low-rank codec in the form of PowerSGD (arXiv 1905.13727), with quantised factors.

Error feedback takes place outside the codec. An exchange of one matrix u_i per site i, where all
sites have the same warm start Q:

    project        left_i = Quant(u_i Q)                   every site, to the owner
    orthonormalise P      = Quant8(orth(Σ left_i))         the owner alone, to every site
    encode         Q_i    = Quant(u_iᵀ P)                  every site, to every site
    decode         sent_i = P Q_iᵀ                         everywhere, the same bytes
    next_warm      Q      = Σ Q_i / Σ w_i                  everywhere, the same bytes

QR differs between processors and thread counts, so one site alone runs it and sends the result.
Encoding may differ between machines, too; no other site depends on how a payload was computed. A
site's residual is u_i - sent_i, from the site's own quantised factor and the common basis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from dilocox.compression.base import check_payload, check_values, require_finite
from dilocox.compression.blockwise_int import Quantised
from dilocox.compression.buffer_layout import Geometry
from dilocox.compression.compressor import Part
from dilocox.compression.frame import payload_digest
from dilocox.compression.lowrank.layout import BATCH, DENSE, Arrangement, whole_blocks
from dilocox.compression.lowrank.messages import Message, OnBasis
from dilocox.compression.lowrank.quantised_factors import (
    basis_bytes,
    decode_basis,
    decode_factors,
    encode_basis,
    encode_factors,
)
from dilocox.compression.lowrank.warm_start import refreshed, seeded, strongest
from dilocox.errors import ConfigError, ExchangeError

FACTOR_IDENTIFIER = 16
BASIS_IDENTIFIER = 17
PAYLOAD_IDENTIFIER = 18

MOST_ENERGY = 1e60
"""Largest energy of a matrix outside the basis that a payload may report. The square of a larger
energy could overflow."""
_DIGEST_BYTES = 32
_ENERGY_BYTES = 8


class LowRank:
    """Codec of rank `rank`, with factors of `bits` bits (4 or 8), for the tensors of `geometry`.

    Let r = min(rank, rows, columns) of each low-rank matrix, B(n) = ceil(n / 128), and
    s = 2 + 16 bits, the bytes of 128 values of a factor. The three messages have these exact sizes
    in bytes:

        factor:  Σ r B(rows) s
        basis:   Σ r B(rows) 129
        payload: 32 + Σ (8 + r B(columns) s) + 66 Σ B(size of a dense tensor)

    The payload holds the SHA-256 of the basis, one float64 per matrix, scales and codes of the
    factors, and the dense tensors as int4.

    Methods work on the device of their first tensor; `next_warm` works on the device of the warm
    start. A basis may be in host memory. Sums that must be equal at all sites are exact, so a GPU
    gives the same bits as a CPU. Methods raise `ExchangeError` for a payload of another size, or
    beyond the limits that keep decoding exact. The constructor raises `ConfigError` for a rank
    below 1, and for bits other than 4 and 8.
    """

    identifier = PAYLOAD_IDENTIFIER
    moments = None
    """Payloads carry no second moments."""

    def __init__(self, geometry: Geometry, rank: int, bits: int = 4) -> None:
        if rank < 1 or bits not in (4, 8):
            raise ConfigError(
                f"compression.codec: low rank needs a rank from 1 and 4 or 8 bits, not {rank} and "
                f"{bits}"
            )
        self.geometry = geometry
        self.rank = rank
        self.bits = bits
        self.name = f"lowrank:{rank}" + (":int8" if bits == 8 else "")
        self._codec = Quantised("int4", 5, bits=4) if bits == 4 else Quantised("int8", 4, bits=8)
        self._arranged = Arrangement.of(geometry, rank, self._codec)
        self._left = tuple(group.left for group in self._arranged.groups)
        self._right = tuple(group.right for group in self._arranged.groups)
        self.warm_length = self._arranged.right_length
        """Number of values of the warm start: all Q, transposed, columns padded to whole blocks."""
        self.matrices = sum(stack.count for stack in self._left)
        """Number of tensors that are sent as low rank."""
        left = self._arranged.left_length
        self.factor_bytes = self._codec.payload_bytes(left)
        self.basis_bytes = basis_bytes(left)
        self._cuts = (
            _DIGEST_BYTES,
            _ENERGY_BYTES * self.matrices,
            self._codec.payload_bytes(self.warm_length),
            DENSE.payload_bytes(self._arranged.dense_length),
        )
        self.payload_bytes = sum(self._cuts)
        numbers = rank, bits
        self.factor_part = Message(
            FACTOR_IDENTIFIER, numbers, f"{self.name} factor", left, self.factor_bytes
        )
        self.basis_part = Message(
            BASIS_IDENTIFIER, numbers, f"{self.name} basis", left, self.basis_bytes
        )
        self.payload_part = Message(
            PAYLOAD_IDENTIFIER, numbers, self.name, geometry.length, self.payload_bytes
        )

    @property
    def phases(self) -> tuple[Message, ...]:
        """Properties of the three messages (`FragmentCodec`)."""
        return self.factor_part, self.basis_part, self.payload_part

    @property
    def agreement(self) -> LowRank:
        """This codec: the sites agree on a basis before they encode."""
        return self

    def part(self, start: int, end: int, seed: int = 0, basis: Tensor | None = None) -> Part:
        """Return the whole buffer as a part, which is encoded on `basis`, uint8 [basis_bytes].

        `seed` has no effect. Raises `ExchangeError` without a basis, and for less than the whole
        buffer.
        """
        if basis is None or (start, end) != (0, self.geometry.length):
            raise ExchangeError(
                f"{self.name}: only whole buffers can be encoded, on a basis that the sites have "
                "agreed on"
            )
        encode, decode = partial(self.encode, basis=basis), partial(self.decode, basis=basis)
        codec = OnBasis(self.payload_part, encode, decode)
        return Part(self.name, self.identifier, end, codec, ())

    def carrying(self, moments: Tensor) -> LowRank:
        """Raise `ExchangeError`: low-rank payloads carry no second moments."""
        raise ExchangeError(f"{self.name}: second moments must be none, got {moments.dtype}")

    def first_warm(self) -> Tensor:
        """Return the seeded warm start, fp32 [warm_length] on the CPU, equal on every machine."""
        return seeded(self.warm_length, 0)

    def fit_warm(self, warm: Tensor, before: LowRank) -> Tensor:
        """Convert the warm start of `before`, a codec of another rank, to this codec's warm start.

        `warm` is fp32 [before.warm_length]; the result is fp32 [warm_length]. Each matrix keeps its
        strongest columns, as many as fit. Missing columns are seeded, all of them for a matrix that
        `before` sent dense. Raises `ExchangeError` if `before` has another geometry.
        """
        if before.geometry != self.geometry:
            raise ExchangeError(
                "a low-rank warm start cannot be converted for other tensors: start with a new one"
            )
        before._check_warm(warm)
        fitted = self.first_warm().to(warm.device)
        known = {
            offset: columns
            for group in before._arranged.groups
            for offset, columns in zip(group.offsets, group.right.view(warm), strict=True)
        }
        for group in self._arranged.groups:
            for offset, columns in zip(group.offsets, group.right.view(fitted), strict=True):
                if offset in known:
                    kept = strongest(known[offset])[: len(columns)]
                    columns[: len(kept)].copy_(kept)
        return fitted

    def project(self, u: Tensor, warm: Tensor) -> Tensor:
        """Return this site's factor Quant(u Q), uint8 [factor_bytes].

        `u` is fp32 [length], `warm` fp32 [warm_length]. Each column of Q is first divided by its
        largest magnitude. This leaves the spanned space unchanged, and keeps the factor's magnitude
        near that of u. Raises `ExchangeError` if the factor is not finite.
        """
        self._check(u)
        self._check_warm(warm)
        left = torch.zeros(self._arranged.left_length, device=u.device)
        tiny = torch.finfo(torch.float32).tiny
        for group in self._arranged.groups:
            start = group.right.view(warm)
            start = start / start.abs().amax(2, keepdim=True).clamp_(min=tiny)
            found = group.left.view(left)
            for first, last in group.batches():
                some = group.stacked(u, first, last)
                found[first:last] = torch.bmm(start[first:last], some.transpose(1, 2))
        require_finite(left, "low-rank factor")
        return encode_factors(left, self._left, self._codec)

    def check_factor(self, factor: Tensor) -> None:
        """Raise `ExchangeError` if `orthonormalise` would refuse this factor."""
        decode_factors(factor, self._left, self._arranged.left_length, self._codec)

    def check_basis(self, basis: Tensor) -> None:
        """Raise `ExchangeError` if `encode` and `decode` would refuse this basis."""
        self._basis(basis)

    def orthonormalise(self, factors: Sequence[Tensor]) -> Tensor:
        """Return the basis, uint8 [basis_bytes], of the sites' `factors`, uint8 [factor_bytes].

        The basis is the Q of a float64 QR of the factors' sum. QR replaces dependent or zero
        columns by arbitrary orthonormal ones. Raises `ExchangeError` without factors.
        """
        if not factors:
            raise ExchangeError("no low-rank factor has arrived from any site: repeat the exchange")
        length = self._arranged.left_length
        total = torch.zeros(length, dtype=torch.float64, device=factors[0].device)
        for factor in factors:
            total += decode_factors(factor, self._left, length, self._codec)
        basis = torch.zeros_like(total)
        for group in self._arranged.groups:
            summed, found = group.left.view(total), group.left.view(basis)
            for first, last in group.batches():
                columns = torch.linalg.qr(summed[first:last].transpose(1, 2)).Q
                found[first:last] = columns.transpose(1, 2)
        return encode_basis(basis, self._left)

    def encode(self, u: Tensor, basis: Tensor) -> Tensor:
        """Encode this site's contribution `u`, fp32 [length], to uint8 [payload_bytes].

        `basis` is uint8 [basis_bytes]. For each matrix the payload holds ‖u‖² - ‖Pᵀu‖², at least 0:
        the energy outside the basis. Raises `ExchangeError` if factors or energies are not finite.
        """
        self._check(u)
        digest = self._digest(basis).to(u.device)
        left = self._basis(basis.to(u.device)).to(torch.float32)
        right = torch.zeros(self.warm_length, device=u.device)
        missed = torch.zeros(self.matrices, dtype=torch.float64, device=u.device)
        for group, energies in zip(self._arranged.groups, self._by_group(missed), strict=True):
            columns, found = group.left.view(left), group.right.view(right)
            for first, last in group.batches():
                some = group.stacked(u, first, last)
                found[first:last] = torch.bmm(columns[first:last], some)
                energies[first:last] = _energy(some) - _energy(found[first:last])
        require_finite(right, "low-rank factor")
        require_finite(missed, "low-rank residual energy")
        rest = torch.zeros(self._arranged.dense_length, device=u.device)
        for place, start, size in self._dense():
            rest[place : place + size].copy_(u[start : start + size])
        sent = encode_factors(right, self._right, self._codec)
        return torch.cat([digest, missed.clamp_(min=0).view(torch.uint8), sent, DENSE.encode(rest)])

    def decode(self, payload: Tensor, basis: Tensor) -> Tensor:
        """Decode uint8 [payload_bytes] to P Qᵀ and the dense tensors, fp32 [length], zero in gaps.

        The result has the same bytes on every machine, because sums are exact in float64 and
        rounded once.
        """
        _, factor, rest = self._split(payload, self._digest(basis))
        left = self._basis(basis.to(payload.device))
        right = factor.to(torch.float64)
        flat = torch.zeros(self.geometry.length, device=payload.device)
        for group in self._arranged.groups:
            ps, qs = group.left.view(left), group.right.view(right)
            step = max(1, BATCH // group.columns)
            for first, last in group.batches():
                for top in range(0, group.rows, step):
                    rows = ps[first:last, :, top : top + step].transpose(1, 2)
                    # Add zero: the sign of a zero sum depends on how the library began the sum.
                    some = torch.bmm(rows, qs[first:last]).add_(0.0)
                    for number in range(first, last):
                        group.matrix(flat, number)[top : top + step].copy_(some[number - first])
        for place, start, size in self._dense():
            flat[start : start + size].copy_(rest[place : place + size])
        return flat

    def basis_digest(self, payload: Tensor) -> bytes:
        """Return the SHA-256 of the basis with which `payload`, uint8 [payload_bytes], was made."""
        payload = check_payload(payload, self.payload_bytes, self.name, self.geometry.length)
        basis: Tensor = payload.split(self._cuts)[0]
        return basis.cpu().numpy().tobytes()

    def next_warm(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        basis: Tensor,
        warm: Tensor,
        count: int,
    ) -> Tensor:
        """Return the warm start after landing `count`, fp32 [warm_length], equal at every site.

        The result is the mean of the contributions' Q, summed in the given order. A column of zeros
        keeps its value in `warm`, because a round without gradient gives no direction. At every
        eighth landing, the weakest eighth of each matrix's columns (at least one) is replaced by
        seeded columns.

        Args:
            payloads: payloads of the contribution set, in its order.
            weights: w_i of each payload.
            basis: the basis of this exchange.
            warm: the present warm start, fp32 [warm_length].
            count: number of this landing.

        Raises `ExchangeError` if the set is empty, or has another number of weights, or if the sum
        of the weights is not positive.
        """
        self._check_warm(warm)
        weight = sum(weights)
        if not payloads or len(payloads) != len(weights) or not weight > 0:
            raise ExchangeError(
                f"cannot average {len(payloads)} low-rank factors of weights {list(weights)}: the "
                "sites disagree about the contribution set"
            )
        digest = self._digest(basis)
        mean = torch.zeros_like(warm)
        for payload in payloads:
            mean += self._split(payload.to(warm.device), digest)[1]
        # The divisor is a tensor on purpose: some devices turn a division by a plain number into a
        # multiplication, which rounds otherwise.
        mean.div_(torch.full((1,), weight, device=warm.device))
        return refreshed(mean, warm, self._right, count)

    @property
    def low_rank_values(self) -> int:
        """Number of values of the fragment that are sent as low rank."""
        return sum(group.size * len(group.offsets) for group in self._arranged.groups)

    def effective_rank(self, payloads: Sequence[Tensor], basis: Tensor) -> float | None:
        """Return an estimate of the effective rank of the averaged pseudo-gradient.

        The effective rank of a matrix with singular values s is (Σs²)² / Σs⁴. The result is the
        mean over the low-rank matrices, weighted by their numbers of values. It is 0 for a zero
        pseudo-gradient, and None if no matrix is sent as low rank. The last digits may differ
        between machines, so the number is for reports.

        Each payload holds a right factor and the energy (sum of s²) outside the basis. These two
        nearly determine the effective rank, but not the entropy of s².

        - Σs² is the energy within the basis plus the energy outside. The payloads do not hold the
          energy of the *mean* outside the basis. The estimate assumes that differences between
          sites average out there in the same proportion as within the basis.
        - Σs⁴ within the basis follows from the right factors. Outside the basis an upper bound is
          used: the energy there times the smallest squared norm of a column of the summed right
          factors. A basis of the largest directions leaves out no larger s².

        Because of the bound the estimate errs on the low side. It is exact for equal singular
        values, and exceeds `rank` if the basis is too small (docs/algorithm.md §4).
        """
        digest = self._digest(basis)
        device = payloads[0].device if payloads else basis.device
        missed = torch.zeros(self.matrices, dtype=torch.float64, device=device)
        inside = torch.zeros(self.matrices, dtype=torch.float64, device=device)
        total = torch.zeros(self.warm_length, dtype=torch.float64, device=device)
        for payload in payloads:
            lost, right, _ = self._split(payload, digest)
            missed += lost
            for stack, energies in zip(self._right, self._by_group(inside), strict=True):
                energies += _energy(stack.view(right))
            total += right
        worth, weight = 0.0, self.low_rank_values
        for group, lost, apart in zip(
            self._arranged.groups, self._by_group(missed), self._by_group(inside), strict=True
        ):
            columns = group.right.view(total)
            core = torch.bmm(columns, columns.transpose(1, 2))
            kept = core.diagonal(dim1=1, dim2=2).sum(1)
            # Scale by kept / apart: energy of the sum over the sites' own energies, in the basis.
            lost = lost * torch.where(apart > 0, kept / apart, 1.0)
            others = max(1, min(group.rows, group.columns) - group.right.rank)
            worth += group.size * float(effective_ranks(core, lost, others).sum())
        return worth / weight if weight else None

    def _check(self, u: Tensor) -> None:
        if check_values(u) != self.geometry.length:
            raise ExchangeError(
                f"{self.name} is for {self.geometry.length} values, got {u.numel()}: the sites "
                "differ in their fragments"
            )

    def _check_warm(self, warm: Tensor) -> None:
        if check_values(warm) != self.warm_length:
            raise ExchangeError(
                f"{self.name} has a warm start of {self.warm_length} values, got {warm.numel()}: "
                "convert it with `fit_warm` when the rank changes"
            )

    def _dense(self) -> Iterator[tuple[int, int, int]]:
        """Yield (place among the dense values, start in the fragment, number of values) of each
        dense tensor."""
        place = 0
        for start, size in self._arranged.dense:
            yield place, start, size
            place += whole_blocks(size)

    def _by_group(self, of_matrices: Tensor) -> Iterator[Tensor]:
        """Split a tensor with one entry per low-rank matrix into views [count], one per group."""
        return iter(of_matrices.split([stack.count for stack in self._left]))

    def _digest(self, basis: Tensor) -> Tensor:
        digest = payload_digest(basis.cpu())
        return torch.frombuffer(bytearray(digest), dtype=torch.uint8)

    def _basis(self, basis: Tensor) -> Tensor:
        return decode_basis(basis, self._left, self._arranged.left_length)

    def _split(self, payload: Tensor, digest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return energies outside the basis (float64), right factors and dense values (fp32).

        Raises `ExchangeError` if the payload was made with another basis, or is out of limits.
        """
        payload = check_payload(payload, self.payload_bytes, self.name, self.geometry.length)
        made_with, energies, factor, rest = payload.split(self._cuts)
        if not torch.equal(made_with.cpu(), digest):
            raise ExchangeError(
                f"{self.name} payload refused: it was made with another basis than the one here; "
                "the site must encode again"
            )
        missed = energies.clone().view(torch.float64)
        if not bool(((missed >= 0) & (missed <= MOST_ENERGY)).all()):
            raise ExchangeError(
                f"{self.name} payload refused: a residual energy is below 0, above "
                f"{MOST_ENERGY:g}, or not a number"
            )
        return (
            missed,
            decode_factors(factor, self._right, self.warm_length, self._codec),
            DENSE.decode(rest, self._arranged.dense_length),
        )


def build_lowrank(geometry: Geometry, rank: int, variant: str) -> LowRank:
    """Return `lowrank:RANK`, with factors of 8 bits if `variant` is `int8`, else of 4 bits."""
    return LowRank(geometry, rank, 8 if variant == "int8" else 4)


def _energy(matrices: Tensor) -> Tensor:
    """Return the sum of squares of each matrix of fp32 [count, rows, columns]: float64 [count].

    Rows are summed in fp32, then the matrix in float64.
    """
    rows = torch.linalg.vector_norm(matrices, dim=2)
    energy: Tensor = rows.to(torch.float64).square_().sum(1)
    return energy


def effective_ranks(core: Tensor, missed: Tensor, others: int) -> Tensor:
    """Return (Σs²)² / Σs⁴ of the singular values s of each matrix, float64 [count]; 0 if all are 0.

    Args:
        core: QᵀQ, [count, rank, rank]; its eigenvalues are the s² within the basis.
        missed: sum of the s² outside the basis, [count].
        others: number of singular values outside the basis. Their Σs⁴ is taken from the upper
            bound of `LowRank.effective_rank`, but is at least that of `others` equal values.
    """
    own = core.diagonal(dim1=1, dim2=2)
    tail = torch.maximum(missed * torch.minimum(missed, own.amin(1)), missed.square() / others)
    fourth = core.square().sum((1, 2)) + tail
    worth = (own.sum(1) + missed).square() / fourth
    return torch.where(fourth > 0, worth, 0.0)
