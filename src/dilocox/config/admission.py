"""Section `[admission]` of the run file: which contributions count, and how they are averaged."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dilocox.config.base import Positive, Section
from dilocox.config.codec_spec import PICKED
from dilocox.config.outer import CompressionSection, OuterSection

Aggregation = Literal["mean", "clip", "median", "trimmed", "rfa"]
BY_VALUE = ("median", "trimmed")
"""They look at every value by itself."""
FEW = 5
"""With fewer sites than this, robust rules mean nothing."""


class AdmissionSection(Section):
    """`[admission]`: which contributions count, beside the usual checks, and how they count."""

    aggregation: Aggregation = "mean"
    """`mean`; `clip`: every tensor cut down to the sites' median norm (with codecs that send few
    values, each site others: the whole contribution), then the mean; `median` and `trimmed`
    (without the largest and smallest quarter): value by value, not with such codecs; `rfa`: the
    geometric median. All but `mean` need `outer.exchange = "gather"`; the last three, five sites or
    more."""
    gate: bool = False
    """Leave out a contribution that, taken alone, makes the held-out loss worse. Sites of one rank
    try it in a second copy of the model; of several ranks, each measures its part along a
    gradient of the held-out loss, which tells its direction and not how far is too far: it needs
    another `aggregation` than `mean`."""
    gate_tolerance: Annotated[float, Field(ge=0.0, le=1.0)] = 0.002
    """By how much worse the loss may be, as a share of it."""
    gate_sequences: Positive = 8
    """Held-out sequences that the gate reads: for each contribution, or for a gradient at each
    boundary, rounded up to whole micro-batches of all stages and shards."""
    scores: bool = False
    """Compare every contribution with the others (norm, direction) and write that down; done in
    any case where `aggregation` is not `mean` or there is a gate."""

    @property
    def examines(self) -> bool:
        """Contributions are compared with each other before they count."""
        return self.scores or self.gate or self.aggregation != "mean"

    def warning(self, sites: int) -> str | None:
        """What a run of so many sites should not expect of this, or none."""
        if self.aggregation in ("median", "trimmed", "rfa") and sites < FEW:
            return (
                f'admission.aggregation "{self.aggregation}" means nothing with {sites} sites: '
                f"fewer than {FEW} cannot outvote anyone; "
                'use "clip" with admission.gate = true'
            )
        return None


def admission_problem(
    admission: AdmissionSection, outer: OuterSection, compression: CompressionSection, ranks: int
) -> str | None:
    """Why this section does not go with the others, with the keys and the mend, or none.

    `ranks`: of one site.
    """
    if not admission.examines:
        return None
    if admission.aggregation != "mean":
        key = f'admission.aggregation "{admission.aggregation}"'
    else:
        key = "admission.gate" if admission.gate else "admission.scores"
    if outer.exchanges_gradients:
        return f"{key}: method {outer.method} exchanges gradients, which are not compared"
    if outer.exchange != "gather":
        return f'{key} needs whole contributions at every site: set outer.exchange = "gather"'
    if admission.aggregation in BY_VALUE and compression.kind in PICKED:
        return (
            f'{key} with codec "{compression.codec}": each site sends other values, so that most '
            'are zero at most sites and nearly nothing counts; set compression.codec = "int2" or '
            "finer, or another aggregation"
        )
    if admission.gate and ranks > 1 and admission.aggregation == "mean":
        return (
            f"admission.gate: sites of {ranks} ranks judge the direction of a contribution, not "
            'its length: set admission.aggregation = "clip", or another rule that bounds it'
        )
    return None
