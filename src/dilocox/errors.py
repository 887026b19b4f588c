"""Errors that users see as one line. The text names the thing, the reason and the remedy."""


class DilocoxError(Exception):
    """Base of every error that dilocox raises on purpose."""

    permanent = False
    """Whether a retry is useless, because the same action would fail again in the same way."""


class ConfigError(DilocoxError):
    """A run file or an override that cannot be used."""

    permanent = True


class ModelError(DilocoxError):
    """A model that cannot be loaded, divided into stages or trained."""

    permanent = True


class DataError(DilocoxError):
    """Text, tokenizer or token files that cannot be used."""

    permanent = True


class JoinError(DilocoxError):
    """A site that may not, or cannot, take part in a run."""

    permanent = True


class RetryLaterError(JoinError):
    """A site that cannot join at this moment, but may be able to later."""

    permanent = False


class ExchangeError(DilocoxError):
    """An exchange between sites that cannot be completed."""


class CheckpointError(DilocoxError):
    """A checkpoint that cannot be written or read."""


class EvaluationError(DilocoxError):
    """An evaluation on tasks that cannot be done."""


class TrainingError(DilocoxError):
    """A run that cannot go on."""


class DifferentAnchorsError(TrainingError):
    """Some sites hold another anchor than the majority does.

    `sites` holds the names of the sites that differ from the majority.
    """

    def __init__(self, text: str, sites: list[str]) -> None:
        super().__init__(text)
        self.sites = sites


class SupersededError(TrainingError):
    """A coordinator's log is not the newest of its run: a standby has taken over, or a site has
    seen more than this log has."""


class RunEndedError(TrainingError):
    """The run has ended: no site can take part in it any more."""

    permanent = True


class RunStoppedError(RunEndedError):
    """The run was stopped before its end. The site ends, too, and this is no failure."""


class RecordError(DilocoxError):
    """A record of a run that cannot be written or read, or that is not authentic."""


class SettlementError(DilocoxError):
    """A chain, a key or a settlement that cannot be used."""


class AttestationError(DilocoxError):
    """Evidence of a machine, or a policy for such evidence, that cannot be used or is wrong."""
