"""Section of the run file about the text and its token files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from dilocox.config.base import Positive, Section
from dilocox.config.data_filter import Filter
from dilocox.config.data_sources import CONVERSATIONS, TEXT_FORMATS, SourceSection, sources_problem

if TYPE_CHECKING:
    from dilocox.config.site import SiteOverride

Packing = Literal["stream", "documents", "none"]
LongDocuments = Literal["cut", "split", "leave_out", "refuse"]


@dataclass(frozen=True)
class RowRules:
    """How the tokens of a split become rows (`dilocox.data.rows`)."""

    length: int
    """Positions of a row."""
    packing: Packing = "stream"
    long_documents: LongDocuments = "cut"


class DataSection(Section):
    """`[data]`: the text, and how it becomes token files."""

    own: bool = False
    """`true`: the run has no text. The sites are [loops of your own](own-loop.md#data) that bring
    their batches and compute their held-out losses. Only `sequence_length` and `tokenizer` may be
    set beside: the run counts its tokens in sequences of that length, and publishes that tokenizer
    with the model."""
    source: str | list[str] | None = None
    """`python-stdlib`, files and folders, or the name of a hub dataset (with `format = "hub"`). In
    folders, links are followed; hidden files and files of other formats are left out. `dilocox data
    show` counts the files that are left out."""
    format: Literal[
        "auto",
        "text",
        "jsonl",
        "csv",
        "parquet",
        "code",
        "hub",
        "chat",
        "instruction",
        "preference",
    ] = "auto"
    """Format of the source. `auto`: by the file names. `jsonl`: JSON objects, one per line or all
    in one array; `.json` files in folders are read with this format and those of conversations.
    `csv`: rows, whose first line names the fields; values are text, and the separator is the most
    frequent one of `, ; | tab` in that line. In folders CSV files are read with this format, and as
    conversations if there are no JSON or Parquet files.
    `chat`: records with a list of messages, in JSON, CSV or Parquet files or in a hub dataset.
    `instruction`: the same with a prompt and a completion. See [fine-tune on
    conversations](fine-tune.md). `preference`: a prompt, a better and a worse answer, see
    [preferences](preferences.md). Text, JSON and CSV files may be compressed (`.gz`, `.zst`)."""
    text_field: str = "text"
    """Field or column that holds the text in JSONL, CSV, Parquet and hub datasets. Records whose
    text is null or missing are left out and counted by `dilocox data show`."""
    messages_field: str = "messages"
    """Format `chat`: field that holds the list of messages in OpenAI's form. Records whose
    messages are null, missing or empty are left out and counted."""
    prompt_field: str | Annotated[list[str], Field(min_length=1)] = "prompt"
    """Format `instruction`: field that holds the prompt, which becomes a user's message. Prompt and
    completion may both be lists of messages. Of several fields, such as `["instruction",
    "input"]`, the texts are joined by an empty line, without those that are missing or empty. Each
    file must have each of the fields at least once."""
    completion_field: str = "completion"
    """Format `instruction`: field that holds the completion, which becomes an assistant's
    message."""
    chat_template: str | None = None
    """Formats `chat` and `instruction`: file with a Jinja chat template. If not set, it is the
    tokenizer's own template. The published model gets the template."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """Formats `chat` and `instruction`: tokens that are learned. `assistant`: messages of the
    assistant (TRL's `assistant_only_loss`) or completions, with the token that ends them. `last`:
    the last message of the assistant in each conversation. `all`: every token."""
    subset: str | None = None
    """Hub datasets: the configuration name."""
    columns: list[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,30}$")]] = Field(
        default=[]
    )
    """Fields of the records that hold a number, such as `["weight"]`. Every token of a record's
    document gets it, and a [loss of your own](rows.md#columns-beside-tokens) reads it."""
    split: str = "train"
    """Hub datasets: the split."""
    revision: str | None = None
    licence: str | None = None
    filter: Filter | None = None
    """Takes only records whose fields have the given values, such as `{ language = "en", stars =
    [4, 5] }`: see [filter records](your-model.md#filter-records)."""
    max_documents: Positive | None = None
    folder: str = "{run}/data"
    """Folder of the token files. `{run}` is the run's folder."""
    tokenizer: str = "train"
    """A local folder, a hub name (`NAME@REVISION` for a branch, tag or commit), or `train` for a
    byte-level BPE trained on the corpus. If the run starts from the weights of `model.path`, the
    default is that model's tokenizer and `train` is refused, since the weights fit no other. With
    `model.handover`, the default is the tokenizer of the earlier run."""
    vocabulary_size: Annotated[int, Field(ge=257)] = 4096
    """Vocabulary size of a trained tokenizer."""
    begin_of_text: bool = True
    """Begin every document with the tokens that the tokenizer puts before a text. The tokenizers of
    Llama, Mistral and Gemma have such tokens; a trained tokenizer has none."""
    sequence_length: Positive = 256
    packing: Packing | None = None
    """Content of a row of `sequence_length` positions. `stream`: documents run into each other and
    see each other. `documents`: whole documents that do not see each other; positions restart, and
    padding that counts nothing fills the row. `none`: one document and padding. The default is
    `documents` with conversations, else `stream`."""
    long_documents: LongDocuments | None = None
    """A document longer than a row, unless `packing` is `stream`. `cut`: its end is left out.
    `split`: it becomes several documents. `leave_out`: it is not trained on. `refuse`: no token
    files are made. The default is `leave_out` with pairs, which are not cut, `cut` with other
    conversations, else `split`."""
    validation_fraction: Annotated[float, Field(gt=0.0, le=0.5)] = 0.02
    validation_source: str | list[str] | None = None
    """Separate held-out text, written like `source`. All of it is held out, and all of `source` is
    trained on. Documents that occur in both are not detected."""
    validation_split: str = "validation"
    """Hub datasets: the split of `validation_source`."""
    validation_filter: Filter | None = None
    """Filter of `validation_source`. If not set, it is `filter`; `{}`: all records are taken."""
    validation_sequences: Positive = 64
    """Largest number of held-out sequences that an evaluation reads."""
    sources: list[SourceSection] | None = None
    """Several sources with weights, instead of `source`: see [`[[data.sources]]`](#datasources)."""

    @model_validator(mode="after")
    def _sources_consistent(self) -> DataSection:
        if self.sources is not None:
            if self.source is not None:
                raise ValueError("source and sources are both set: leave one of them out")
            apart = self.validation_source is not None
            problem = sources_problem(self.sources, self.format, apart)
            if problem is not None:
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _own_consistent(self) -> DataSection:
        given = self.model_fields_set - {"own", *BESIDE_OWN}
        odd = [key for key in sorted(given) if getattr(self, key) != _default_of(key)]
        if self.own and odd:
            raise ValueError(
                f"own = true: the run has no text, and {odd[0]} is about the run's text: leave one "
                "of the two out"
            )
        return self

    @property
    def trained_vocabulary(self) -> int | None:
        """Tokens of the tokenizer that the run trains on its text; None if it trains none."""
        return self.vocabulary_size if self.tokenizer == "train" and not self.own else None

    @property
    def prompt_fields(self) -> list[str]:
        """The fields of which a prompt consists, in their order."""
        return [self.prompt_field] if isinstance(self.prompt_field, str) else self.prompt_field

    @property
    def held_out_filter(self) -> Filter | None:
        """The filter of `validation_source`, or None if all records are taken."""
        own = self.filter if self.validation_filter is None else self.validation_filter
        return own or None

    def of_source(self, source: SourceSection) -> DataSection:
        """Returns this section for one of `sources` alone, with the keys that the source sets."""
        own = source.overrides() | {"source": source.source, "sources": None}
        if self.validation_source is not None:
            own |= {"validation_source": None, "validation_fraction": 0.0}
        return self.model_copy(update=own)

    @property
    def rows(self) -> RowRules:
        """How tokens become rows, with the defaults of `format`."""
        packing: Packing = "documents" if self.has_conversations else "stream"
        long: LongDocuments = "cut" if self.has_conversations else "split"
        if self.format == "preference":
            long = "leave_out"
        return RowRules(self.sequence_length, self.packing or packing, self.long_documents or long)

    @property
    def has_conversations(self) -> bool:
        """Whether the source holds conversations (`CONVERSATIONS`), not text."""
        return self.format in CONVERSATIONS

    @model_validator(mode="after")
    def _filter_consistent(self) -> DataSection:
        if self.validation_filter is not None and not (self.validation_source or self.sources):
            raise ValueError("validation_filter needs validation_source: set it, or leave it out")
        if self.filter and self.format in TEXT_FORMATS:
            raise ValueError(
                f'filter needs records with fields, and format "{self.format}" has none: leave it '
                "out"
            )
        return self

    @model_validator(mode="after")
    def _pairs_consistent(self) -> DataSection:
        if self.format != "preference":
            return self
        kept = {"packing": "documents", "loss_on": "assistant"}
        for key, only in kept.items():
            if getattr(self, key) not in (None, only):
                raise ValueError(
                    f'{key} "{getattr(self, key)}" cannot be used with format "preference", '
                    "whose rows hold both answers of a pair: leave it out"
                )
        if self.long_documents in ("cut", "split"):
            raise ValueError(
                f'long_documents "{self.long_documents}" would cut a pair of answers: set '
                '"leave_out" or "refuse", or leave it out'
            )
        if self.columns:
            raise ValueError('columns cannot be used with format "preference": leave it out')
        return self

    @model_validator(mode="after")
    def _columns_consistent(self) -> DataSection:
        if len(set(self.columns)) < len(self.columns):
            raise ValueError("columns names one column twice: leave it out once")
        formats = {each.format or self.format for each in self.sources or ()} or {self.format}
        wrong = sorted(formats.intersection(("auto", *TEXT_FORMATS)))
        if self.columns and wrong:
            raise ValueError(
                f'columns needs records, and format is "{wrong[0]}": set format to "jsonl", '
                '"csv", "parquet", "hub", "chat" or "instruction", or leave columns out'
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> DataSection:
        if not self.has_conversations:
            given = [
                key for key, default in CONVERSATION_KEYS.items() if getattr(self, key) != default
            ]
            if given:
                raise ValueError(
                    f'{given[0]} needs format = "chat", "instruction" or "preference": set it, or '
                    "leave the key out"
                )
        elif self.format == "chat" and self.tokenizer == "train" and self.chat_template is None:
            raise ValueError(
                "a trained tokenizer has no chat template: set chat_template to a file with one, "
                "or tokenizer to one that has a template"
            )
        return self


BESIDE_OWN = ("sequence_length", "tokenizer")
"""Keys that may be set in a run without text of its own."""


def _default_of(key: str) -> Any:
    return DataSection.model_fields[key].get_default(call_default_factory=True)


def own_data_problem(
    data: DataSection,
    sites: Mapping[str, SiteOverride],
    unsized: bool,
    handed: bool,
    gate: bool,
    tasks: bool,
) -> str | None:
    """Return why a run cannot be without text of its own; None if it can.

    Args:
        data: the section.
        sites: the tables of the sites, by name.
        unsized: whether the model takes its vocabulary's size from the tokenizer.
        handed: whether the run continues the token ranges of another one.
        gate: whether contributions are judged by held-out text.
        tasks: whether anchors are evaluated on tasks, which needs a tokenizer.
    """
    if not data.own:
        return None
    for name, site in sites.items():
        if site.data is not None:
            return f"data.own: the run has no text, and sites.{name}.data names some: leave it out"
        if not site.own_code:
            return (
                f"data.own: the data is known to the sites' own programs, and sites.{name}.own_code"
                " is false: set it to true"
            )
    if unsized:
        return "data.own: the run trains no tokenizer: set vocab_size in model.architecture"
    if handed:
        return "data.own: a handover continues token ranges of text, and the run has none"
    if gate:
        return "data.own: admission.gate judges by held-out text, and the run has none: set it off"
    if tasks and data.tokenizer == "train":
        return (
            "data.own: evaluation.tasks needs a tokenizer: set data.tokenizer to the model's, or "
            "leave the key out"
        )
    return None


CONVERSATION_KEYS = {
    key: DataSection.model_fields[key].default
    for key in ("messages_field", "prompt_field", "completion_field", "chat_template", "loss_on")
}
"""Keys for formats with conversations only, with their defaults."""
