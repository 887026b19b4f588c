"""What training asks of a run's hooks, if a loop of the user's own takes the inner steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from dilocox.config.run_config import RunConfig
from dilocox.training.builder import Hooks


@dataclass(frozen=True)
class LoopHooks(Hooks):
    """Hooks of a site whose inner steps are the user's own."""

    steps: list[int] = field(default_factory=lambda: [0])
    """One number: the inner step of the run that is due."""

    @property
    def replaced(self) -> list[str]:
        """See `Hooks`: audits read it, and do not repeat the site's rounds."""
        return ["loop"]

    def learning_rate(self, step: int, config: RunConfig) -> float:
        """See `Hooks`. Also notes that `step` is due."""
        self.steps[0] = step
        return super().learning_rate(step, config)
