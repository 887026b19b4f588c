"""Errors that users see as one line. The text names the thing, the reason and the mend."""


class DilocoxError(Exception):
    """Base of every error that dilocox raises on purpose."""


class ConfigError(DilocoxError):
    """A run file or an override that cannot be used."""


class ModelError(DilocoxError):
    """A model that cannot be loaded, cut or trained."""


class DataError(DilocoxError):
    """Text, tokenizer or token files that cannot be used."""


class JoinError(DilocoxError):
    """A site that may not, or cannot, take part in a run."""


class ExchangeError(DilocoxError):
    """An exchange between sites that cannot be completed."""


class CheckpointError(DilocoxError):
    """A checkpoint that cannot be written or read."""


class TrainingError(DilocoxError):
    """A run that cannot go on."""


class RecordError(DilocoxError):
    """A record of a run that cannot be written, read or believed."""
