"""Errors of calls to the coordinator, in addition to those of `dilocox.errors`."""

from __future__ import annotations

from dilocox.errors import RetryLaterError, TrainingError


class CoordinatorError(TrainingError):
    """The coordinator refused a call, because of a defect or another run; a retry does not help."""


class EpochOverError(CoordinatorError):
    """A group was being formed for an epoch that has ended: begin the exchange again."""


class StakeUnknownError(RetryLaterError):
    """The coordinator has no answer of the chain on the site's stake yet: ask again soon."""


class CoordinatorUnreachableError(TrainingError):
    """The coordinator did not answer within the limit that `link_timeout` allows."""


class SiteGoneError(TrainingError):
    """The coordinator has declared this incarnation of the site lost: join the run again."""
