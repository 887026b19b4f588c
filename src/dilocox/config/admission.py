"""Section `[admission]` of the run file: which contributions count, and how they are averaged."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dilocox.config.base import Positive, Section
from dilocox.config.outer import CompressionSection, OuterSection

Aggregation = Literal["mean", "clip", "median", "trimmed", "rfa"]
BY_VALUE = ("median", "trimmed")
"""Aggregation rules that treat every value of a contribution by itself."""
FEW = 5
"""Number of sites from which `median`, `trimmed` and `rfa` protect; with fewer, a run warns."""


class AdmissionSection(Section):
    """`[admission]`: which contributions count, and how they are averaged.

    These rules come on top of the checks that every contribution must pass in every run.
    """

    aggregation: Aggregation = "mean"
    """How contributions are averaged. `mean`: weighted mean. `clip`: the mean after each tensor is
    scaled down to the median of its norms over the sites; with codecs `topk`, `top1` and
    `cocktail`, each whole contribution is scaled instead. `median`: the median of each value over
    the sites. `trimmed`: the mean of each value over the sites, without the largest and the
    smallest quarter of the values. `rfa`: the geometric median of the contributions. All rules but
    `mean` need `outer.exchange = "gather"`. `median` and `trimmed` do not work with codecs `topk`,
    `top1` and `cocktail`. With fewer than five sites, `median`, `trimmed` and `rfa` give no
    protection from a wrong contribution, and the run warns."""
    gate: bool = False
    """Leave out harmful contributions. A harmful contribution alone would increase the held-out
    loss by more than `gate_tolerance`. Its effect is also clearly worse than the effect of the
    other contributions or of earlier ones. If more than half of the contributions would be left
    out, all count. A site of one rank applies each contribution to a second copy of the model and
    evaluates the copy. In a site of several ranks, each rank computes the inner product of its part
    of the contribution and a gradient of the held-out loss. The inner product tells whether the
    direction is harmful, but not whether the step is too long. So a site of several ranks needs an
    `aggregation` other than `mean`."""
    gate_tolerance: Annotated[float, Field(ge=0.0, le=1.0)] = 0.002
    """Increase of the held-out loss that the gate always allows, as a fraction of the loss."""
    gate_sequences: Positive = 8
    """Number of held-out sequences that the gate reads. A site of one rank evaluates them once for
    each contribution, and once without. A site of several ranks computes one gradient over them at
    each boundary. It rounds their number up, so that each shard of each replica reads a multiple of
    `site.stages` micro-batches."""
    scores: bool = False
    """Compare every contribution with the others by norm and direction, and write the scores to
    `metrics.jsonl`. Scores are always written if `aggregation` is not `mean` or `gate` is true."""

    @property
    def examines(self) -> bool:
        """Whether contributions are compared with each other before they count."""
        return self.scores or self.gate or self.aggregation != "mean"

    def warning(self, sites: int) -> str | None:
        """Returns a warning if `aggregation` cannot work with this number of sites, else None."""
        if self.aggregation in ("median", "trimmed", "rfa") and sites < FEW:
            return (
                f'admission.aggregation "{self.aggregation}" gives no protection with {sites} '
                f"sites: it needs {FEW} sites or more to outvote a wrong contribution; "
                'use "clip" with admission.gate = true'
            )
        return None


def admission_problem(
    admission: AdmissionSection, outer: OuterSection, compression: CompressionSection, ranks: int
) -> str | None:
    """Returns why `[admission]` contradicts other sections, with the remedy, or None if it fits.

    Args:
        admission: the section that is checked.
        outer: `[outer]` of the same run file.
        compression: `[compression]` of the same run file.
        ranks: number of ranks of one site.
    """
    if not admission.examines:
        return None
    if admission.aggregation != "mean":
        key = f'admission.aggregation "{admission.aggregation}"'
    else:
        key = "admission.gate" if admission.gate else "admission.scores"
    if outer.exchanges_gradients:
        return (
            f"{key}: method {outer.method} exchanges gradients, which are not compared: leave it "
            "out, or choose another outer.method"
        )
    if outer.exchange != "gather":
        return f'{key} needs whole contributions at every site: set outer.exchange = "gather"'
    if admission.aggregation in BY_VALUE and compression.kind.picks:
        return (
            f'{key} with codec "{compression.codec}": each site sends different values, so most '
            "values are zero at most sites and the result is nearly zero; set "
            'compression.codec = "int2" or finer, or choose another aggregation'
        )
    if admission.gate and ranks > 1 and admission.aggregation == "mean":
        return (
            f"admission.gate: sites of {ranks} ranks judge only the direction of a contribution, "
            'not its length: set admission.aggregation = "clip", or a rule other than "mean"'
        )
    return None
