"""The contributions to one exchange at one rank: decode, score before the vote, then average."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from dilocox.compression import all_zero, refuse_unusable
from dilocox.config.codec_spec import parse_spec
from dilocox.coordinator.protocol.verdicts import RankOpinion
from dilocox.errors import ExchangeError
from dilocox.outer.aggregation import aggregate
from dilocox.outer.averaging import added, divided
from dilocox.outer.contribution import Contribution
from dilocox.outer.scoring import examine

log = logging.getLogger(__name__)


class Weighing:
    """Decodes the payloads of an exchange, forms opinions of the contributions, and averages them.

    Only contributions that count by the votes enter the average. Each payload is decoded once. The
    mean of all contributions is computed during that pass; it is discarded in the rare case that
    the contribution set is smaller, and the payloads are decoded again. Rules that compare
    contributions with each other keep the decoded tensors instead.
    """

    def __init__(
        self,
        what: Contribution,
        me: str,
        senders: Sequence[str],
        decode: Callable[[Tensor], Tensor],
    ) -> None:
        """Prepare for one exchange.

        Args:
            what: this site's contribution.
            me: name of this site.
            senders: sites that contribute, in the order of the contribution set.
            decode: turns a payload into flat fp32 [length].
        """
        self._what, self._me, self._decode = what, me, decode
        self._senders = senders
        self._payloads: Mapping[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._expected: list[str] = []
        self._mean: Tensor | None = None
        self.held: list[str] = []
        """Sites whose contribution has arrived and decodes to finite numbers."""
        self.own: Tensor | None = None
        """This site's contribution as the other sites decode it. None if it only receives."""

    def examined(self, payloads: Mapping[str, Tensor]) -> dict[str, RankOpinion]:
        """Decode `payloads` (by site) and return this rank's opinions of them, by site.

        Without `Contribution.examines`, only sites with a problem get an opinion.
        """
        self._payloads = payloads
        opinions: dict[str, RankOpinion] = {}
        if self._what.examines:
            self._kept = {site: each for site, each, _ in self._decoded(opinions)}
            picked = parse_spec(self._what.compressor.name).record.picks
            found = examine(
                self._kept, self._what.weights, self._offsets(), self._what.aggregation, picked
            )
            if self._what.probe is not None:
                found = self._what.probe.opinions(self._kept, found, self._what.weights)
            return opinions | found
        weights: list[float] = []  # grows while the mean is computed

        def good() -> Iterator[Tensor]:
            for site, sent, empty in self._decoded(opinions):
                # The vote is expected to leave an all-zero contribution out, so the mean does too.
                if not empty:
                    self._expected.append(site)
                    weights.append(self._what.weights[site])
                    yield sent
                del sent

        total, count = added(good())
        if total is not None:
            self._mean = divided(total, count, weights)
        return opinions

    def settled(self, counted: Sequence[str], shares: Mapping[str, Sequence[int]]) -> Tensor | None:
        """Return Δ of the sites `counted`, flat fp32 [length]. None if no site counts.

        `shares`: how much of each site's contribution counts, see `aggregate`.
        """
        if not counted:
            return None
        if self._mean is not None and list(counted) == self._expected:
            return self._mean
        self._mean = None
        weights = [self._what.weights[site] for site in counted]
        own = [shares.get(site, ()) for site in counted]
        sent = (self._copy_of(site) for site in counted)
        return aggregate(self._what.aggregation, sent, weights, own, self._offsets())

    def _decoded(self, opinions: dict[str, RankOpinion]) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield (site, decoded contribution, True if all zero) of each payload that decodes.

        A payload that does not decode to finite numbers gets an entry in `opinions` instead.
        """
        for site in self._senders:
            if site not in self._payloads:
                continue
            sent = self._usable(site)
            if sent is None:
                opinions[site] = RankOpinion(code="not-finite")
                continue
            self.held.append(site)
            if site == self._me:
                self.own = sent
            empty = all_zero(sent)
            if empty:
                opinions[site] = RankOpinion(code="zero")
            yield site, sent, empty
            del sent  # before the next payload is decoded

    def _usable(self, site: str) -> Tensor | None:
        """Return the decoded contribution of a site; None, with a warning, if it is not finite."""
        try:
            sent = self._decode(self._payloads[site])
            refuse_unusable(sent, self._what.compressor.name)
        except ExchangeError as error:
            # The error itself has a reference to the tensor, by its traceback.
            log.warning("%s from %s: %s", self._what.key.text, site, str(error))
            return None
        return sent

    def _copy_of(self, site: str) -> Tensor:
        """Decoded contribution of a site, which the caller may overwrite."""
        kept = self._kept.get(site)
        if kept is not None:
            return kept.clone() if site == self._me else kept
        return self._decode(self._payloads[site])

    def _offsets(self) -> Sequence[int]:
        return self._what.compressor.geometry.offsets
