"""What a rank may meet when it talks to the coordinator, beside the errors of every room."""

from __future__ import annotations

from dilocox.errors import TrainingError


class CoordinatorError(TrainingError):
    """The coordinator refused a call: a bug or another run, not to be retried."""


class EpochOverError(CoordinatorError):
    """A group was to be formed for an epoch that no exchange needs any more: begin again."""


class CoordinatorUnreachableError(TrainingError):
    """The coordinator did not answer within the limit that `link_timeout` allows."""


class SiteGoneError(TrainingError):
    """The coordinator has declared this incarnation of the site gone: join again to go on."""
