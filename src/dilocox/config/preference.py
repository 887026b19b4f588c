"""Section `[preference]` of the run file: training on pairs of answers, one of which is better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from dilocox.config.base import Section

if TYPE_CHECKING:
    from dilocox.config.adapter import AdapterSection
    from dilocox.config.data import DataSection
    from dilocox.config.model import ModelSection

PAIR, REFERENCE = "pair", "reference"
"""Columns that the loss of preference training reads, beside labels: the number of the pair in its
row, below 0 for the rejected answer, and the log-probability of the label by the start model."""
ACCURACY, MARGIN = "val_accuracy", "val_margin"
"""Figures of held-out pairs in reports and metrics: the share that is ranked right, and the mean
margin."""


class PreferenceSection(Section):
    """`[preference]`: the loss for `data.format = "preference"`, which is DPO (arXiv 2305.18290).

    See [preferences](preferences.md).
    """

    beta: Annotated[float, Field(gt=0.0)] = 0.1
    """How much the model may leave the start model: a smaller value lets it go further."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Probability that a pair has its answers interchanged (conservative DPO)."""


def preference_problem(
    preference: PreferenceSection,
    data: DataSection,
    model: ModelSection,
    adapter: AdapterSection | None,
) -> str | None:
    """Returns why the keys of preference training do not fit each other, or None."""
    if data.format != "preference":
        if preference != PreferenceSection():
            return (
                '[preference] needs pairs of answers: set data.format = "preference", or remove '
                "[preference]"
            )
        return None
    if model.path is None or not model.pretrained or model.handover:
        return (
            'data.format "preference" compares with the model that the run starts from: set '
            "model.path to a trained model, with model.pretrained = true and without model.handover"
        )
    if adapter is not None and adapter.base != "full":
        return (
            f'data.format "preference" compares with the whole model, and adapter.base is '
            f'"{adapter.base}": set adapter.base = "full"'
        )
    return None
