"""Sections of the run file about a run's outputs: checkpoints, evaluations, record, metrics."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from dilocox.config.base import Fraction, Section, parse_bytes
from dilocox.config.methods import exchanges_gradients
from dilocox.config.site import SiteName
from dilocox.utils.secret_text import secret_problem


def _without_secret(store: str) -> str:
    """Return a store's place. Raises `ValueError` if it holds a secret: run files are public."""
    problem = secret_problem(store)
    if problem is not None:
        raise ValueError(problem)
    return store


class CheckpointSection(Section):
    """`[checkpoint]`: checkpoints to resume from, and the published model."""

    every_rounds: Annotated[int, Field(ge=0)] = 5
    """Interval between checkpoints, in rounds of `outer.inner_steps` inner steps. With 0, the only
    checkpoint is the one at the end of the run."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Number of checkpoints that are kept. At least two are kept, since the newest may not be
    complete at every rank yet."""
    hugging_face: bool = False
    """Also write every checkpoint as a Hugging Face folder."""
    best: bool = False
    """Also keep `model-best/`, a Hugging Face folder of the anchor with the lowest held-out loss so
    far. The model before training does not count. An evaluation with a lower loss replaces the
    whole folder. The site that evaluates writes the folder. With `evaluation.patience`, all sites
    evaluate, and every site that has its own run folder writes one. After the last round one site
    alone evaluates, so only its folder can hold the finished model. The folder is not part of the
    record. Needs `evaluation.every_rounds`."""
    published_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the weights in Hugging Face folders. `bf16` rounds the fp32 weights to the
    nearest value, ties to even."""
    published_file_size: str = "5GB"
    """Largest size of one weights file in a Hugging Face folder. A stage with more weights writes
    several files."""
    store: str = "{run}/checkpoints"
    """Where checkpoints are kept: a folder, or a URL that fsspec supports. `{run}` is the run's
    folder. A failed write over a network is retried for `network.link_timeout` seconds while
    training goes on."""

    @field_validator("store")
    @classmethod
    def _open(cls, store: str) -> str:
        return _without_secret(store)

    @field_validator("published_file_size")
    @classmethod
    def _size(cls, text: str) -> str:
        parse_bytes(text)
        return text


class EvaluationSection(Section):
    """`[evaluation]`: evaluations of the anchor: its held-out loss, and tasks of lm-eval."""

    every_rounds: Annotated[int, Field(ge=0)] = 0
    """Interval between evaluations, in rounds of `outer.inner_steps` inner steps. With 0, the run
    evaluates only before the first and after the last round."""
    prompt: str = ""
    """Prompt of the sampled completion at the end of the run."""
    completion_tokens: Annotated[int, Field(ge=0)] = 48
    patience: Annotated[int, Field(ge=0)] = 0
    """Number of evaluations without a lower held-out loss after which the run ends early, as if its
    steps were done. All sites evaluate then, and the run ends when more than half of them see no
    lower loss. 0: the run never ends early."""
    tasks: list[str] = []  # noqa: RUF012 - pydantic copies defaults
    """Tasks of lm-eval: names, task files in YAML, or folders with task files. These need the extra
    `[eval]`. A function of your own, `FILE.py:FUNCTION`, is a task, too. One site evaluates the
    model on the tasks in a process of lowest priority, beside training. The finished model is
    always evaluated, and also the given weights that a run starts from. Sites need not agree on the
    keys `tasks*`, and a resumed run may change the keys."""
    tasks_every: Annotated[int, Field(ge=0)] = 0
    """Interval between evaluations on `tasks`, in rounds. An evaluation is skipped while an earlier
    one still runs. 0: none while the run trains."""
    tasks_limit: Annotated[int, Field(ge=0)] = 0
    """Largest number of examples per task of lm-eval. 0: all."""
    tasks_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Examples in each prompt. If not set, as each task says."""
    tasks_chat: bool = False
    """Write prompts with the tokenizer's chat template."""
    tasks_site: SiteName | None = None
    """Site that evaluates the tasks. If not set, it is the first site of the run file."""
    tasks_device: str = "cpu"
    """Device that evaluates the tasks, as PyTorch names it, such as `cuda:0`. On a GPU that also
    trains, the memory must hold the whole model a second time."""
    tasks_timeout: Annotated[float, Field(gt=0.0)] = 3600.0
    """Seconds after which one evaluation on all tasks is given up, with a warning."""

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSection:
        if self.patience and not self.every_rounds:
            raise ValueError(
                f"patience = {self.patience} counts evaluations, but with every_rounds = 0 there "
                "are none while the run trains: set every_rounds, or leave patience out"
            )
        return self


class RecordSection(Section):
    """`[record]`: the signed record, with which `dilocox verify` checks how the model was made."""

    enabled: bool = True
    store: str = "{run}/record/store"
    """Where payloads and theta_0 are kept: a folder, or a URL that fsspec supports. `{run}` is the
    run's folder."""
    keep: Annotated[int, Field(gt=0)] | str = "auto"
    """Limit on the payloads in each site's store. "all": no limit. A number N: at least the newest
    N rounds are kept. A size, such as "500GB": bytes per site. Older payloads are removed, but
    their signed digests stay. `dilocox verify` then replays from a signed state that is kept with
    the oldest kept round. "auto" sets no limit below 1e9 parameters. For larger models it keeps 80
    bytes per parameter, and at least 500 GB."""
    states_every: Annotated[int, Field(ge=0)] = 0
    """N: each site stores its state at the start of every round whose number is a multiple of N,
    and at the start of the flush. `dilocox audit` can repeat these rounds. 0: no states are stored.
    A site with text of its own (`sites.NAME.data`) signs its state but does not store it."""
    states_keep: Annotated[int, Field(ge=0)] = 0
    """Number of the newest rounds whose states are kept; the store may hold one more. States of
    earlier rounds are removed, and these rounds can no longer be audited. 0: all states are kept.
    `record.keep` limits payloads separately."""
    audit_rate: Fraction = 0.05
    """Fraction of each site's rounds with stored states that `dilocox auditor` audits."""

    tee: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the policy file for the machines of the sites ([attestation](attestation.md)),
    which all sites sign with the rest of the run file. Training itself does not use it. If not set,
    the sites agree on no policy."""
    published: str = ""
    """URL to which `dilocox publish --follow --every 1` publishes this run. A site that comes later
    takes its first state from there if that is faster than from a donor. Empty: from a donor."""
    anchor: list[str] = []  # noqa: RUF012 - pydantic copies defaults
    """A command, as a list of words, that publishes signed checkpoints of the log. The coordinator
    runs it in the background for every new checkpoint: once per round and at the end. The command
    reads the checkpoint from its standard input and copies it to a public place. If the command
    fails, the run warns and goes on."""

    @model_serializer(mode="wrap")
    def _without_policy(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `tee` if it is None: manifests of such runs are those of earlier versions."""
        found: dict[str, Any] = usual(self)
        return {name: each for name, each in found.items() if name != "tee" or each is not None}

    @field_validator("published")
    @classmethod
    def _grows(cls, url: str) -> str:
        if url.startswith("zerog"):
            raise ValueError(
                "a URL of 0G Storage names one state of the publication, and a late site needs the "
                "rounds until it enters: publish to a folder or object storage, too"
            )
        return _without_secret(url)

    @field_validator("store")
    @classmethod
    def _open(cls, store: str) -> str:
        return _without_secret(store)

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
                "states_keep limits the states that are kept, but with states_every = 0 no states "
                "are kept: set states_every, or leave states_keep out"
            )
        return self


class MetricsSection(Section):
    """`[metrics]`: where metrics are written. `metrics.jsonl` is always written."""

    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = []  # noqa: RUF012 - pydantic copies defaults
    project: str = "dilocox"


def keeping_problem(
    checkpoint: CheckpointSection,
    evaluation: EvaluationSection,
    record: RecordSection,
    method: str,
) -> str | None:
    """Returns why the run cannot keep what these sections ask for, with the remedy, or None.

    Args:
        checkpoint: `[checkpoint]`.
        evaluation: `[evaluation]`.
        record: `[record]`.
        method: `outer.method`.
    """
    if checkpoint.best and not evaluation.every_rounds:
        return (
            "checkpoint.best needs evaluations, but with evaluation.every_rounds = 0 there are "
            "none while the run trains: set every_rounds, or leave best out"
        )
    if record.states_every and exchanges_gradients(method):
        return (
            f"record.states_every: method {method} exchanges gradients, which are not kept, "
            "so no round can be repeated: set it to 0"
        )
    if record.tee is not None and not record.enabled:
        return "record.tee: evidence of machines is kept in the record: set record.enabled"
    if record.tee is not None and exchanges_gradients(method):
        return (
            f"record.tee: method {method} has no outer steps, by which evidence ages: leave it out"
        )
    return None
