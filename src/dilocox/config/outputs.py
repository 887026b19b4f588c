"""What a run leaves behind: checkpoints, evaluations, the record, metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dilocox.config.base import Fraction, Section, parse_bytes
from dilocox.config.methods import EXCHANGE_GRADIENTS


class CheckpointSection(Section):
    """`[checkpoint]`: what is kept to go on from, and what is published."""

    every_rounds: Annotated[int, Field(ge=0)] = 5
    """In rounds of `outer.inner_steps` inner steps; 0 writes only the one at the end."""
    keep: Annotated[int, Field(ge=2)] = 2
    """How many are kept; two at least, as the newest may not be whole at every rank yet."""
    hugging_face: bool = False
    """Also write every checkpoint as a Hugging Face folder."""
    best: bool = False
    """Also keep `model-best/`, the Hugging Face folder of the evaluation with the lowest held-out
    loss so far, replaced as a whole when one is lower. Written by the site that evaluates; with
    `evaluation.patience`, where all evaluate, by every site that has a run folder of its own. It is
    no part of the record. Needs `evaluation.every_rounds`."""
    published_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the weights in Hugging Face folders. `bf16`: fp32 is rounded, to nearest, ties to even."""
    published_file_size: str = "5GB"
    """Bytes of weights in one file of a Hugging Face folder, at most; a stage that has more writes
    several."""
    store: str = "{run}/checkpoints"
    """Where they are kept, a folder or a URL that fsspec knows; `{run}` is the run's folder. A
    write over a network is tried again for `network.link_timeout`, beside the training."""

    @field_validator("published_file_size")
    @classmethod
    def _size(cls, text: str) -> str:
        parse_bytes(text)
        return text


class EvaluationSection(Section):
    """`[evaluation]`: held-out loss of the anchor."""

    every_rounds: Annotated[int, Field(ge=0)] = 0
    """In rounds of `outer.inner_steps` inner steps; 0 evaluates before the first and after the
    last round only."""
    prompt: str = ""
    """Prompt of the sampled completion at the end."""
    completion_tokens: Annotated[int, Field(ge=0)] = 48
    patience: Annotated[int, Field(ge=0)] = 0
    """The run ends early, as if its steps were done, when the held-out loss has not become lower in
    so many evaluations: at more than half of the sites, which all evaluate for that. 0: never."""

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSection:
        if self.patience and not self.every_rounds:
            raise ValueError(
                f"patience = {self.patience} counts evaluations, and every_rounds = 0 has none "
                "while the run trains: set every_rounds, or leave patience out"
            )
        return self


class RecordSection(Section):
    """`[record]`: what lets a stranger check how the model was made (`dilocox verify`)."""

    enabled: bool = True
    store: str = "{run}/record/store"
    """Where payloads and theta_0 are kept, a folder or a URL that fsspec knows; `{run}` is the
    run's folder."""
    keep: Annotated[int, Field(gt=0)] | str = "auto"
    """Bound on the payloads in each site's store. "all": no bound. A number: the newest rounds, at
    least. A size, such as "500GB": bytes of one site. Older payloads are removed, and their signed
    digests stay: `dilocox verify` then replays from a signed state that lies with the oldest kept
    round. "auto": no bound below 1e9 parameters; 80 bytes per parameter and at least 500 GB for a
    larger model."""
    states_every: Annotated[int, Field(ge=0)] = 0
    """Every so many rounds each site also keeps the state in which the round begins, and that of
    the flush in the end, so that `dilocox audit` can repeat them; 0: never. A site with text of its
    own only signs it."""
    states_keep: Annotated[int, Field(ge=0)] = 0
    """How many of these rounds, the newest, have their states in the store at least, one more at
    most; older ones are removed, and nobody can audit them then; 0: all. How many payloads stay,
    `keep` says."""
    audit_rate: Fraction = 0.05
    """Share of these rounds of each site that `dilocox auditor` audits."""

    anchor: list[str] = []  # noqa: RUF012 - pydantic copies defaults
    """A command, word by word, that the coordinator runs beside training whenever the log has a
    new signed checkpoint: once a round, and at the end. It gets the checkpoint on its standard
    input and takes it to where others can see it. Its failures are said and change nothing."""

    @field_validator("keep")
    @classmethod
    def _bound(cls, keep: int | str) -> int | str:
        if isinstance(keep, str) and keep not in ("auto", "all"):
            try:
                parse_bytes(keep)
            except ValueError as error:
                raise ValueError(
                    f'{error}; or give "auto", "all" or a whole number of rounds'
                ) from None
        return keep

    @model_validator(mode="after")
    def _consistent(self) -> RecordSection:
        if self.states_keep and not self.states_every:
            raise ValueError(
                "states_keep says how many states are kept, and states_every = 0 keeps none: "
                "set states_every, or leave states_keep out"
            )
        return self


class MetricsSection(Section):
    """`[metrics]`: JSONL is always written; others by name."""

    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = []  # noqa: RUF012 - pydantic copies defaults
    project: str = "dilocox"


def keeping_problem(
    checkpoint: CheckpointSection,
    evaluation: EvaluationSection,
    record: RecordSection,
    method: str,
) -> str | None:
    """What cannot be kept of a run by this `outer.method`, and the mend; None if all can."""
    if checkpoint.best and not evaluation.every_rounds:
        return (
            "checkpoint.best chooses among evaluations, and evaluation.every_rounds = 0 has none "
            "while the run trains: set every_rounds, or leave best out"
        )
    if record.states_every and method in EXCHANGE_GRADIENTS:
        return (
            f"record.states_every: method {method} exchanges gradients, which are not kept, "
            "so that no round can be repeated: set it to 0"
        )
    return None
