"""Answers the exchanges of a replayed round with their recorded outcomes.

The replay encodes its own payloads, which must equal the payloads that the site has signed. The
average comes from the payloads in the store, which all sites averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.compression import FragmentCodec, Part, pack_frame, payload_digest
from dilocox.compression.second_moments import carried
from dilocox.config.codec_spec import parse_spec
from dilocox.errors import DilocoxError, RecordError
from dilocox.outer.averaging import average, chunk_bounds, requantise
from dilocox.outer.contribution import Contribution, Outcome
from dilocox.outer.layout import Layout
from dilocox.outer.staging import sha256_of
from dilocox.record.log.digests import sealed
from dilocox.record.log.step_statements import Step
from dilocox.record.verify.replay import DIGEST_BYTES, Get, basis_of, payload_tensor, step_average
from dilocox.record.verify.run_history import RunHistory
from dilocox.training.builder import RankPlace
from dilocox.transport.exchange import advancing, chunk_index


@dataclass(frozen=True)
class PayloadCheck:
    """Comparison of one replayed payload with the site's."""

    key: str
    """Key of the exchange."""
    after: int
    """Inner steps of the round before the payload's boundary."""
    same: bool
    """Whether the payload's digest is the signed one."""
    difference: float | None
    """Norm of the difference of the two payloads' values over the norm of the site's values. None
    if the site's payload is not kept, because it did not count."""
    moments: bool = True
    """Whether the second moments of the two payloads, if any, are at most one code apart."""
    committed: bool = True
    """Whether the payload was made from the values that the site had committed to, if it had."""


@dataclass(frozen=True)
class _Made:
    """A replayed contribution."""

    digest: str
    """SHA-256 of its payload, hex."""
    decoded: Tensor
    """Values of the replayed payload after decoding."""
    signed: Callable[[], Tensor]
    """Returns the decoded values of the site's own payload, if it is in the store."""
    moments: Callable[[], bool] = lambda: True
    """Returns whether the second moments in the site's payload are like the replayed ones."""


class RecordedExchanges:
    """Replaces the exchange threads of one rank during a replay."""

    def __init__(
        self,
        course: RunHistory,
        place: RankPlace,
        layouts: Sequence[Layout],
        get: Get,
        taken: Callable[[], int],
        on_cpu: bool,
    ) -> None:
        """Create the exchanges of one rank.

        Args:
            course: History of the run, from its record.
            place: The rank.
            layouts: Layouts of the rank's pieces.
            get: Returns an object of the stores by its SHA-256.
            taken: Returns the inner steps of the round so far.
            on_cpu: Whether training runs on a CPU. Exchanges then compute on one thread.
        """
        self._course, self._place, self._layouts = course, place, layouts
        self._get, self._taken, self._on_cpu = get, taken, on_cpu
        self.checks: list[PayloadCheck] = []

    def submit(self, given: Contribution) -> Future[Outcome]:
        """Return the recorded outcome of an exchange; an error if the record has none."""
        future: Future[Outcome] = Future()
        try:
            with _one_thread(self._on_cpu):
                future.set_result(self._outcome(given))
        except DilocoxError as error:
            future.set_exception(error)
        return future

    def _outcome(self, given: Contribution) -> Outcome:
        key = given.key.text
        step = self._course.steps.get(key)
        if step is None:
            raise RecordError(f"{key}: the log does not say what came of it")
        pieces = step.pieces(len(self._layouts))
        layout = Layout.joined([self._layouts[piece] for piece in pieces])
        if layout.length != given.length:
            raise RecordError(
                f"{key}: the log says of other pieces than its plan what came of them"
            )
        mean = step_average(step, layout, self._place.shard, self._get)
        codec, agreement = given.compressor, given.compressor.agreement
        basis, advance, second = None, None, None
        if given.values is None or (agreement is not None and not step.set):
            return self._result(step, mean, None)
        if agreement is not None:
            chosen = self._payloads(step)
            basis = basis_of(codec, chosen[0], self._get)
            assert basis is not None
            advance = advancing(agreement, given.key, chosen, list(step.weights), basis)
        if agreement is not None or step.exchange == "gather":
            part = codec.part(0, given.length, given.seed, basis)
            made = self._whole(step, given.values, part, codec)
        else:
            made, second = self._chunks(step, given)
        counts = self._place.site in step.set
        same = self._check(step, made, counts, given.values)
        sent = None if not counts else made.decoded if same else made.signed()
        return self._result(step, mean, sent, second, advance)

    def _result(
        self,
        step: Step,
        mean: Tensor | None,
        sent: Tensor | None,
        second: tuple[int, Tensor] | None = None,
        advance: Callable[[Tensor], Tensor] | None = None,
    ) -> Outcome:
        payloads = self._payloads(step) if parse_spec(step.codec).moments else []
        return Outcome(
            mean, step.set, sent, second, 0, 0.0, 1, advance=advance, payloads=tuple(payloads)
        )

    def _payloads(self, step: Step) -> list[Tensor]:
        """Return the payloads that count, in the order of the contribution set."""
        addresses = [step.payloads[f"{site}/{self._place.shard}"] for site in step.set]
        return [payload_tensor(self._get(address)) for address in addresses]

    def _check(self, step: Step, made: _Made, counts: bool, values: Tensor) -> bool:
        """Compare a replayed payload with the signed one, and return whether they are equal.

        `counts`: the site is in the contribution set, so its payload is in the store.
        """
        place = self._place
        where = (step.key.text, step.attempt, place.site, place.shard)
        expected = self._course.contributions.get(where)
        if expected is None:
            return True  # the site took no part in that attempt
        same = made.digest == expected
        difference: float | None = 0.0
        if not same:
            difference = _difference(made.decoded, made.signed()) if counts else None
        moments = same or not counts or made.moments()
        said = self._course.commitments.get((step.key.text, place.site, place.shard))
        digest, run = sha256_of(values), self._course.run
        expected = sealed(digest, run, step.key.text, place.site, place.shard)
        committed = said is None or said.values == expected
        check = PayloadCheck(step.key.text, self._taken(), same, difference, moments, committed)
        self.checks.append(check)
        return same

    def _own(self, step: Step) -> bytes:
        return self._get(step.payloads[f"{self._place.site}/{self._place.shard}"])

    def _whole(
        self,
        step: Step,
        values: Tensor,
        part: Part,
        codec: FragmentCodec,
    ) -> _Made:
        payload = part.encode(values)

        def alike() -> bool:
            if codec.moments is None:
                return True
            both = (payload, payload_tensor(self._own(step)))
            ours, theirs = (carried(each, codec.geometry).cpu().int() for each in both)
            return bool(((ours - theirs).abs() <= 1).all())

        return _Made(
            payload_digest(payload.cpu()).hex(),
            part.decode(payload),
            lambda: part.decode(payload_tensor(self._own(step)).to(payload.device)),
            alike,
        )

    def _chunks(self, step: Step, given: Contribution) -> tuple[_Made, tuple[int, Tensor] | None]:
        """Replay the contribution of an exchange `reduce`, which has one payload per chunk.

        The second value is (start, error of the second quantisation) of the site's own chunk, or
        None.
        """
        codec, values = given.compressor, given.values
        assert values is not None
        bounds = dict(zip(step.owners, chunk_bounds(given.length, len(step.owners)), strict=True))
        parts = {
            site: codec.part(start, end, given.seed)
            for site, (start, end) in bounds.items()
            if end > start
        }
        mine = {site: part.encode(values[slice(*bounds[site])]) for site, part in parts.items()}
        index = chunk_index(pack_frame(parts[site], payload) for site, payload in mine.items())

        def signed() -> Tensor:
            named = _named(self._own(step))
            pairs = zip(parts.values(), named, strict=True)
            sent = ((part, payload_tensor(self._get(one))) for part, one in pairs)
            return _joined([part.decode(each.to(values.device)) for part, each in sent])

        decoded = _joined([part.decode(mine[site]) for site, part in parts.items()])
        made = _Made(payload_digest(index).hex(), decoded, signed)
        own = parts.get(self._place.site)
        if own is None or not step.set:
            return made, None
        number, shard = list(parts).index(self._place.site), self._place.shard
        payloads = [
            _named(self._get(step.payloads[f"{site}/{shard}"]))[number] for site in step.set
        ]
        mean = average((own.decode(payload_tensor(self._get(p))) for p in payloads), step.weights)
        again = requantise(own, mean, sum(step.weights))
        return made, (bounds[self._place.site][0], again.second_error)


def _named(index: bytes) -> list[str]:
    """Return the SHA-256 of the chunks' payloads that an index lists, as hex."""
    starts = range(0, len(index), DIGEST_BYTES)
    return [index[start : start + DIGEST_BYTES].hex() for start in starts]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    size = float(theirs.double().norm())
    return float((ours.double() - theirs.double()).norm()) / size if size else 1.0


@contextlib.contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """Compute on one thread if `wanted`, as exchanges of a run on CPUs do: sums depend on it."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
