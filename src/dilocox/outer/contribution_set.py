"""A rank's contributions to one exchange, from their decoding before the vote to the average."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from dilocox.compression import all_zero, refuse_unusable
from dilocox.config.codec_spec import PICKED, parse_spec
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.errors import ExchangeError
from dilocox.outer.aggregation import aggregate
from dilocox.outer.averaging import average
from dilocox.outer.contribution import Contribution
from dilocox.outer.scoring import examine

log = logging.getLogger(__name__)


class Weighing:
    """Decodes what came, says what is to be said of it, and averages what counts.

    Every payload is decoded once: the mean of all is computed while they are looked at, and thrown
    away in the rare case that not all of them count. Rules that compare contributions keep them.
    """

    def __init__(
        self,
        what: Contribution,
        me: str,
        senders: Sequence[str],
        decode: Callable[[Tensor], Tensor],
    ) -> None:
        """`senders`: sites that contribute, in order; `decode`: payload to flat fp32 [length]."""
        self._what, self._me, self._decode = what, me, decode
        self._senders = senders
        self._payloads: Mapping[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._expected: list[str] = []
        self._mean: Tensor | None = None
        self.held: list[str] = []
        """Sites whose contribution is here and decodes to finite numbers."""
        self.own: Tensor | None = None
        """What the others see of this site, as it was sent; none if it only receives."""

    def examined(self, payloads: Mapping[str, Tensor]) -> dict[str, RankOpinion]:
        """What is to be said of `payloads`, by site. Nothing is said of what is in order."""
        self._payloads = payloads
        opinions: dict[str, RankOpinion] = {}
        if self._what.examines:
            self._kept = {site: each for site, each, _ in self._decoded(opinions)}
            picked = parse_spec(self._what.compressor.name).kind in PICKED
            found = examine(
                self._kept, self._what.weights, self._offsets(), self._what.aggregation, picked
            )
            if self._what.probe is not None:
                found = self._what.probe.opinions(self._kept, found, self._what.weights)
            return opinions | found
        weights: list[float] = []  # grows while the mean is computed

        def good() -> Iterator[Tensor]:
            for site, sent, empty in self._decoded(opinions):
                # A site without anything to say is expected not to count.
                if not empty:
                    self._expected.append(site)
                    weights.append(self._what.weights[site])
                    yield sent

        contributions = good()
        first = next(contributions, None)
        if first is not None:
            self._mean = average(itertools.chain([first], contributions), weights)
        return opinions

    def settled(self, counted: Sequence[str], shares: Mapping[str, Sequence[int]]) -> Tensor | None:
        """Δ of the sites that count, flat fp32 [length]; none if there are none."""
        if not counted:
            return None
        if self._mean is not None and list(counted) == self._expected:
            return self._mean
        weights = [self._what.weights[site] for site in counted]
        own = [shares.get(site, ()) for site in counted]
        sent = (self._copy_of(site) for site in counted)
        return aggregate(self._what.aggregation, sent, weights, own, self._offsets())

    def _decoded(self, opinions: dict[str, RankOpinion]) -> Iterator[tuple[str, Tensor, bool]]:
        """(site, sent, whether it is all zero) of what decodes; what does not goes to opinions."""
        for site in self._senders:
            if site not in self._payloads:
                continue
            try:
                sent = self._decode(self._payloads[site])
                refuse_unusable(sent, self._what.compressor.name)
            except ExchangeError as error:
                log.warning("%s from %s: %s", self._what.key.text, site, error)
                opinions[site] = RankOpinion(code="not-finite")
                continue
            self.held.append(site)
            if site == self._me:
                self.own = sent
            empty = all_zero(sent)
            if empty:
                opinions[site] = RankOpinion(code="zero")
            yield site, sent, empty

    def _copy_of(self, site: str) -> Tensor:
        """What a site sent, to be changed."""
        kept = self._kept.get(site)
        if kept is not None:
            return kept.clone() if site == self._me else kept
        return self._decode(self._payloads[site])

    def _offsets(self) -> Sequence[int]:
        return self._what.compressor.geometry.offsets
