"""Section `[privacy]` of the run file: clipping and noise at sites with text of their own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import Field, model_validator

from dilocox.config.admission import AdmissionSection
from dilocox.config.base import Section
from dilocox.config.outer import OuterSection


class PrivacySection(Section):
    """`[privacy]`: differential privacy of sites with text of their own (`sites.NAME.data`).

    Such a site clips its change of the model in a round and adds noise, before compression. Only
    the noised change is sent. The coordinator counts the contributions and reports the (epsilon,
    delta) of each such site. [Private data](private-data.md) says which leaks this bounds, and
    which it does not.
    """

    clip: Annotated[float, Field(ge=0.0, lt=1e9)] = 0.0
    """Largest L2 norm of the change of the whole model that such a site contributes per round, in
    units of the parameters. The stages share the squared norm equally, and each part of a stage
    that is exchanged by itself gets a share by its number of values. Longer changes are scaled
    down, and what is cut off is not sent later. 0: contributions are neither clipped nor noised."""
    noise: Annotated[float, Field(ge=0.0, lt=1e6)] = 0.0
    """Noise multiplier: the standard deviation of the Gaussian noise on every value of such a
    contribution, as a multiple of `clip`. Nobody can repeat the noise, because its key is drawn
    from the operating system. 0: no noise; then there is no epsilon."""
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-6
    """delta of the reported (epsilon, delta)."""

    @model_validator(mode="after")
    def _consistent(self) -> PrivacySection:
        if self.noise and not self.clip:
            raise ValueError("noise is a multiple of clip, and clip is 0: set clip too")
        return self

    @property
    def enabled(self) -> bool:
        """Whether sites with text of their own clip their contributions."""
        return self.clip > 0.0


def privacy_problem(
    privacy: PrivacySection,
    outer: OuterSection,
    admission: AdmissionSection,
    own_data: Collection[str],
    ranks: int,
) -> str | None:
    """Returns why the bound of `[privacy]` would be false or empty in this run, or None.

    Args:
        privacy: the section that is checked.
        outer: `[outer]` of the same run file.
        admission: `[admission]` of the same run file.
        own_data: names of the sites with text of their own.
        ranks: number of ranks of one site.
    """
    if not privacy.enabled:
        return None
    if not own_data:
        return (
            "privacy.clip is for sites with text of their own, and no site has any: set "
            "sites.NAME.data, or leave [privacy] out"
        )
    if outer.exchanges_gradients:
        return (
            f"privacy.clip: method {outer.method} exchanges the gradients of every inner step, "
            "which are not clipped: choose another outer.method"
        )
    if admission.gate and ranks > 1:
        return (
            f"privacy.clip with admission.gate: sites of {ranks} ranks judge contributions by "
            "gradients at their own parameters, which are not noised: leave gate out, or set one "
            "rank per site"
        )
    return None
