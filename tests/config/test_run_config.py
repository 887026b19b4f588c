"""The run file: what is refused, in which words, and what is resolved."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.methods import METHODS
from dilocox.config.outer import OuterSection
from dilocox.config.run_config import ModelSection, RunConfig, digest_of, load_run, resolve_run
from dilocox.errors import CheckpointError, ConfigError, ModelError
from dilocox.models import load_model_config
from dilocox.models.hf_weights import locate_weights
from dilocox.training.portable_checkpoint import Handover
from dilocox.utils import storage

pytestmark = pytest.mark.waits

BASE = """\
[model.architecture]
model_type = "qwen3"
[data]
source = "python-stdlib"
[site]
stages = 2
batch_size = 8
micro_batch_size = 4
[outer]
rounds = 10
inner_steps = 8
fragments = 2
[sites.paris]
[sites.lyon]
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(BASE, encoding="utf-8")
    return path


REFUSED = [
    # unknown or misspelt keys, with the nearest valid one
    ("site.stage=2", 'site.stage: no such key; did you mean "stages"?'),
    ("outr.rounds=3", 'outr: no such key; did you mean "outer"?'),
    ("sites.paris.batchsize=8", 'sites.paris.batchsize: no such key; did you mean "batch_size"?'),
    ("evaluation.xyz=1", "evaluation.xyz: no such key; known here: every_rounds, prompt"),
    # wrong types: TOML has types, so nothing is converted
    ("site.stages=true", "site.stages: got true, expected a whole number"),
    ('site.stages="8"', 'site.stages: got "8", expected a whole number'),
    ("site.stages=2.0", "site.stages: got 2.0, expected a whole number"),
    ("site.deterministic=1", "site.deterministic: got 1, expected true or false"),
    ("run.name=7", "run.name: got 7, expected a text in quotes"),
    ("sites.paris=3", "sites.paris: got 3, expected a table"),
    ("inner.betas=3", "inner.betas: got 3, expected a list of 2, each a number"),
    ("inner.betas=[0.9]", "inner.betas: got [0.9], expected a list of 2, each a number"),
    ("data.source=3", "expected a text in quotes or a list, each a text in quotes"),
    ("outer.fragments=many", 'outer.fragments: got "many", expected a whole number'),
    ("outer.overlap=[1]", "outer.overlap: got [1], expected one of: "),
    # values out of range, and choices
    ("site.stages=0", "site.stages: got 0, expected a number above 0"),
    ("inner.learning_rate=nan", "inner.learning_rate: got nan, expected a finite number"),
    ("network.port=70000", "network.port: got 70000, expected a number at most 65535"),
    ("outer.momentum=1.0", "outer.momentum: got 1.0, expected a number below 1"),
    ("checkpoint.keep=1", "checkpoint.keep: got 1, expected a number at least 2"),
    ("outer.overlap=later", 'expected one of: "none", "naive", "keep", "eager"'),
    ("outer.method=dialoco", 'got "dialoco", expected one of: "allreduce", "cocktailsgd",'),
    ('metrics.sinks=["tb"]', 'got "tb", expected a list, each one of: "tensorboard", "wandb"'),
    ("run.name=a/b", 'run.name: got "a/b", expected up to 61 letters'),
    ("sites.Paris.batch_size=8", "sites.Paris: not a name; use up to 31 lower-case letters"),
    # keys that do not fit together
    ("site.batch_size=6", "site.batch_size 6 is not divisible into micro-batches: make it a mul"),
    ("site.batch_size=4", "site.batch_size 4 gives 1 micro-batch, schedule"),
    ("sites.paris.batch_size=6", "sites.paris.batch_size 6 is not divisible into micro-batches"),
    ("sites.paris.batch_size=4", 'gives 1 micro-batch, schedule "1f1b" needs at least as many'),
    ("site.schedule=zbv", 'site.schedule "zbv" needs chunks of 2 or more'),
    ("sites.paris.ports=80-x", 'sites.paris.ports "80-x" is not a range: write FIRST-LAST'),
    ("sites.paris.ports=90-80", 'sites.paris.ports "90-80" is not a range: write FIRST-LAST'),
    ("sites.paris.ports=80-80", "holds 1 ports, the site's 2 ranks need one each: widen it"),
    ("outer.min_sites=3", "outer.min_sites 3 is above the 2 sites named"),
    ("outer.delay=99", 'outer.overlap "keep" needs delay from 1 to slots = 8'),
    ("outer.slots=3", "outer.inner_steps 8 is not divisible by slots 3"),
    ("outer.steps=9", "outer: give exactly one of rounds and steps"),
    ("compression.codec=zip", "compression.codec: no codec 'zip'; use one of: none, fp16,"),
    ("compression.codec=4", "compression.codec: got 4, expected a text in quotes"),
    ("compression.codec=top1:1", "compression.codec: in 'top1:1', B is a whole number from 2"),
    ("compression.codec=topk:x", "compression.codec: in 'topk:x', K is a whole number from 1"),
    ("control.adapt=maybe", 'control.adapt: got "maybe", expected one of: "off", "link"'),
    ("control.adapt=effective-rank", "but compression.codec int4 has no rank"),
    ("control.link=fast", 'control.link: got "fast", expected a rate such as "1gbit"'),
    ("control.link=1e9", "control.link: got 1000000000.0, expected a text in quotes"),
    ("control.link=0mbit", 'control.link: the rate "0mbit" carries nothing; give a rate above 0'),
    ("control.link=0.000gbit", 'control.link: the rate "0.000gbit" carries nothing'),
    ("control.link=-1gbit", 'control.link: got "-1gbit", expected a rate such as "1gbit"'),
    ('control.pinned=["slots"]', 'got "slots", expected a list, each one of: "inner_steps"'),
    ("model.path=somewhere", "model: give exactly one of path and architecture"),
    ("record.states_keep=3", "record.states_keep limits the states that are kept"),
    ("record.published=zerog://node:5678", "record.published: a URL of 0G Storage names one state"),
    ("record.published=s3://key:word@bucket", "record.published: the URL holds a password; leave"),
    ("record.published=https://key@host/run", "record.published: the URL holds a user, which may"),
    ("record.published=https://host/run?sig=1", "record.published: the URL holds a query, which"),
    ("network.heartbeat=1000.0", "network.heartbeat 1000 s is above link_timeout 120 s"),
    # overrides that are none
    ("outer.rounds", "--set 'outer.rounds': write it as section.key=value"),
    ("outer=3", "--set 'outer=3': write it as section.key=value"),
    ("outer..rounds=3", "--set 'outer..rounds=3': write it as section.key=value"),
    ("=3", "--set '=3': write it as section.key=value"),
    ("site.stages.x=3", "--set 'site.stages.x=3': stages is a value, not a section"),
]


@pytest.mark.parametrize(("override", "expected"), REFUSED, ids=[case[0] for case in REFUSED])
def test_bad_values_are_refused_in_one_line(run_file: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(run_file, [override])
    text = str(caught.value)
    assert expected in text
    assert "\n" not in text
    # Nothing of the validation library's own words.
    assert "input should" not in text.lower()


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["compression.codec=top1:9", "outer.exchange=reduce"], 'set outer.exchange = "gather"'),
        (["compression.codec=topk:9", "outer.exchange=reduce"], 'set outer.exchange = "gather"'),
        (["model.compile=true", "site.schedule=zbv", "site.chunks=2"], "model.compile: cannot be"),
        (["model.attention=flash_attention_2", "site.precision=fp32"], "computes in 16 bits"),
        (["compression.codec=lowrank", "outer.exchange=reduce"], "lowrank:8 does not support"),
        (
            ["compression.codec=int2", "compression.error_feedback=false"],
            "codec int2 needs compression.error_feedback = true",
        ),
        (
            ["compression.residual_view=0.2", "compression.error_feedback=false"],
            "residual_view needs compression.error_feedback = true",
        ),
        (
            ["outer.method=cocktailsgd", "compression.residual_view=0.2"],
            "residual_view: method cocktailsgd exchanges gradients",
        ),
        (["outer.overlap=naive", "control.adapt=link"], 'set outer.overlap = "keep"'),
        (["outer.method=allreduce", "control.adapt=link"], "method allreduce has nothing to adapt"),
        (["outer.method=allreduce", "outer.overlap=keep"], "there is no pseudo-gradient to land"),
        (["outer.method=cocktailsgd", "outer.delay=2"], "same inner step (0) or in the next (1)"),
        (["outer.method=cocktailsgd", "compression.codec=lowrank"], "lowrank encodes only pseudo-"),
        (["outer.method=sparseloco", "outer.fragments=9"], "fragments 9 is above slots 8"),
    ],
)
def test_what_does_not_go_together_is_refused(
    run_file: Path, sets: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(run_file, sets)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "model: missing; add the table [model]"),
        ("[model]\npath = 'x'\n", "sites: missing; add a table [sites.NAME]"),
        ("[model]\npath = 'x'\n[sites]\n", "name at least one site: add a table [sites.NAME]"),
        ("outer = 3\n", "outer: got 3, expected a table"),
        ("sites = 3\n[model]\npath = 'x'\n", "sites: got 3, expected a table"),
        ("[model]\narchitecture = {}\n[sites.a]\n", "architecture needs model_type, for example"),
        ("[model\n", "not valid TOML: "),
        ("modell = 1\n", 'modell: no such key; did you mean "model"?'),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run file"):
        load_run(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(tmp_path)
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks", "batches", "fits"),
    [
        ("gpipe", 4, 1, 1, True),
        ("1f1b", 4, 1, 3, False),
        ("1f1b", 4, 1, 4, True),
        ("interleaved-1f1b", 2, 2, 3, False),
        ("interleaved-1f1b", 2, 2, 4, True),
        ("interleaved-zero-bubble", 2, 2, 5, False),
        ("zbv", 2, 2, 3, True),
        ("zbv", 4, 2, 3, False),
    ],
)
def test_a_site_may_not_have_a_batch_that_the_schedule_cannot_run(
    schedule: str, stages: int, chunks: int, batches: int, fits: bool
) -> None:
    site = {
        "schedule": schedule,
        "stages": stages,
        "chunks": chunks,
        "batch_size": 2 * 4 * stages,
        "micro_batch_size": 2,
    }
    raw = {
        "model": {"path": "x"},
        "site": site,
        "sites": {"a": {}, "b": {"batch_size": 2 * batches}},
    }
    if fits:
        assert resolve_run(raw).site_batch("b") == 2 * batches
        return
    with pytest.raises(ConfigError, match=rf"sites\.b\.batch_size {2 * batches} "):
        resolve_run(raw)


def test_overrides_are_toml_values_or_bare_words(run_file: Path) -> None:
    config = load_run(
        run_file,
        [
            "outer.rounds=7",
            "inner.learning_rate=1",
            "outer.overlap = none",
            'data.source=["a", "b"]',
            "model.architecture.hidden_size=64",
            "sites.oslo.batch_size=16",
            "run.name=new-name",
        ],
    )
    assert config.outer.rounds == 7
    assert config.inner.learning_rate == 1.0
    assert config.outer.overlap == "none"
    assert config.data.source == ["a", "b"]
    assert config.model.architecture == {"model_type": "qwen3", "hidden_size": 64}
    assert list(config.sites) == ["paris", "lyon", "oslo"]
    assert config.folder == Path("runs/new-name")
    assert config.data_folder == Path("runs/new-name/data")


def test_resolving_leaves_the_callers_values_alone() -> None:
    raw = tomllib.loads(BASE)
    before = tomllib.loads(BASE)
    resolve_run(raw)
    assert raw == before


RAW = st.fixed_dictionaries(
    {
        "run": st.fixed_dictionaries(
            {"name": st.from_regex(r"[a-z][a-z0-9._-]{0,9}", fullmatch=True)}
        ),
        "model": st.just({"architecture": {"model_type": "qwen3", "rope": [1.5, "x", True]}}),
        "outer": st.fixed_dictionaries(
            {"method": st.sampled_from(sorted(METHODS))},
            optional={"rounds": st.integers(1, 99), "learning_rate": st.floats(1e-6, 2.0)},
        ),
        "control": st.fixed_dictionaries(
            {},
            optional={
                "link": st.sampled_from(["1gbit", "2.5mbit", "300kbit"]),
                "step_seconds": st.floats(1e-3, 9.0),
            },
        ),
        "inner": st.fixed_dictionaries(
            {"betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2)}
        ),
        "sites": st.dictionaries(
            st.from_regex(r"[a-z0-9][a-z0-9-]{0,8}", fullmatch=True),
            st.fixed_dictionaries({}, optional={"batch_size": st.sampled_from([4, 16, 64])}),
            min_size=1,
            max_size=4,
        ),
    }
)  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(raw=RAW)
def test_the_resolved_file_reads_back_as_the_same_run(raw: dict[str, Any]) -> None:
    config = resolve_run(raw)
    again = resolve_run(tomllib.loads(config.to_toml()))
    assert again == config
    assert again.digest() == config.digest()


def test_a_run_is_as_long_as_its_rounds_or_its_steps(run_file: Path) -> None:
    assert load_run(run_file).total_steps == 80
    raw = tomllib.loads(BASE)
    del raw["outer"]["rounds"]
    assert resolve_run(raw).total_steps == 80
    raw["outer"]["steps"] = 37
    config = resolve_run(raw)
    assert (config.outer.rounds, config.total_steps) == (None, 37)
    assert resolve_run(tomllib.loads(config.to_toml())) == config


def test_codecs_are_written_in_one_way(run_file: Path) -> None:
    assert load_run(run_file, ["compression.codec=topk"]).compression.codec == "topk:64"


def test_keys_that_the_run_file_sets_are_pinned(run_file: Path) -> None:
    config = load_run(run_file, ["compression.codec=int8", "outer.momentum=0.4"])
    assert config.control.pinned == ["inner_steps", "fragments", "momentum", "codec"]
    # The resolved file sets every key, and says which of them count.
    again = resolve_run(tomllib.loads(config.to_toml()))
    assert again.control.pinned == config.control.pinned
    assert again.digest() == config.digest()
    assert load_run(run_file, ["control.adapt=off"]).control.pinned == []
    chosen = load_run(run_file, ['control.pinned=["delay"]'])
    assert chosen.control.pinned == ["delay"]
    assert chosen.digest() != load_run(run_file).digest()


@pytest.mark.parametrize(
    ("sets", "rate", "measures"),
    [
        ((), None, True),
        (("control.link=1gbit",), 125_000_000, True),
        (("control.link=2.5mbit", "control.step_seconds=0.1"), 312_500, False),
        (("control.link=300kbit", "control.step_seconds=0.1"), 37_500, False),
        (("control.adapt=off",), None, False),
    ],
)
def test_what_is_declared_is_not_measured(
    run_file: Path, sets: tuple[str, ...], rate: int | None, measures: bool
) -> None:
    control = load_run(run_file, sets).control
    assert (control.link_rate, control.measures) == (rate, measures)


def _with(**changes: Any) -> RunConfig:
    raw = tomllib.loads(BASE)
    for path, value in changes.items():
        table = raw
        *parents, key = path.split("__")
        for parent in parents:
            table = table.setdefault(parent, {})
        table[key] = value
    return resolve_run(raw)


@pytest.mark.parametrize(
    "place",
    [
        {"run__folder": "/elsewhere/{name}"},
        {"data__folder": "/tokens"},
        {"site__device": "cpu"},
        {"site__threads": 3},
        {"network__host": "10.0.0.1"},
        {"network__port": 4711},
        {"metrics__sinks": ["tensorboard"]},
        {"sites__lyon__interface": "eth1"},
        {"sites__lyon__advertise": "1.2.3.4"},
        {"sites__lyon__ports": "5000-5009"},
    ],
)
def test_the_digest_ignores_places_on_a_machine(place: dict[str, Any]) -> None:
    assert _with(**place).digest() == _with().digest()


@pytest.mark.parametrize(
    "change",
    [
        {"run__seed": 1},
        {"run__name": "other"},
        {"inner__learning_rate": 2e-3},
        {"outer__rounds": 11},
        {"compression__codec": "int8"},
        {"control__adapt": "off"},
        {"control__link": "1gbit"},
        {"model__architecture__hidden_size": 32},
        {"data__sequence_length": 128},
        {"site__micro_batch_size": 2},
        {"site__precision": "fp32"},
        {"sites__lyon__batch_size": 16},
        {"sites__oslo": {}},
        # Contradictory time-outs cost days: one site must not give up before the others.
        {"network__link_timeout": 30.0},
        {"network__heartbeat": 9.0},
        # Its token ranges then come from a space of its own.
        {"sites__lyon__data": "/private"},
    ],
)
def test_the_digest_knows_what_sites_must_agree_on(change: dict[str, Any]) -> None:
    assert _with(**change).digest() != _with().digest()


class LaterOuter(OuterSection):
    novel: int = 3


class LaterRun(RunConfig):
    outer: LaterOuter


def test_the_digest_stays_when_a_later_version_knows_more_keys() -> None:
    config = _with()
    later = LaterRun.model_validate(config.model_dump())
    assert later.shared()["outer"]["novel"] == 3
    assert later.digest() == config.digest()
    raw = config.model_dump()
    raw["outer"]["novel"] = 4
    assert LaterRun.model_validate(raw).digest() != config.digest()


def test_the_digest_stays_when_a_later_version_has_another_default() -> None:
    # Versions before "auto" had false as the default, and left it out of the digest.
    former = _with(model__compile=False)
    assert former.digest() == digest_of(_with().shared(without_defaults=True))
    assert former.digest() == _with(model__compile="auto").digest()
    assert former.digest() != _with(model__compile=True).digest()


def test_a_run_goes_on_with_the_defaults_that_it_was_begun_with() -> None:
    former, now = _with(model__compile=False), _with()
    assert now.model.compile == "auto"
    assert now.as_begun(former) == former
    assert now.as_begun(now) == now
    assert former.as_begun(now) == former


def test_where_private_text_lies_is_the_sites_own_matter() -> None:
    assert _with(sites__lyon__data="/a").digest() == _with(sites__lyon__data="/b").digest()


def test_a_run_cannot_be_changed_after_it_was_checked() -> None:
    config = _with()
    with pytest.raises(ValueError, match="frozen"):
        config.outer.rounds = 3


@pytest.mark.parametrize(
    ("tables", "steps", "measures"),
    [
        ({}, "by-speed", True),
        ({"control": {"adapt": "off"}}, "equal", False),
        ({"control": {"adapt": "off"}, "sites": {"a": {"speed": 2.0}, "b": {}}}, "by-speed", False),
        ({"control": {"adapt": "off", "steps": "by-speed"}}, "by-speed", True),
        ({"control": {"steps": "equal", "link": "1gbit", "step_seconds": 1.0}}, "equal", False),
        ({"control": {"link": "1gbit", "step_seconds": 1.0}}, "equal", False),
        ({"outer": {"method": "allreduce"}, "sites": {"a": {"speed": 2.0}}}, "equal", False),
        ({"outer": {"method": "diloco"}}, "equal", False),
    ],
)
def test_steps_follow_speed_where_plans_follow_measurements(
    tables: dict[str, Any], steps: str, measures: bool
) -> None:
    raw = {"model": {"architecture": {"model_type": "qwen3"}}, "sites": {"a": {}, "b": {}}}
    config = resolve_run({**raw, **tables})
    assert (config.control.steps, config.measures) == (steps, measures)


def test_methods_whose_sites_step_together_refuse_other_paces() -> None:
    raw: dict[str, Any] = {"model": {"architecture": {"model_type": "qwen3"}}, "sites": {"a": {}}}
    raw |= {"outer": {"method": "cocktailsgd"}, "control": {"steps": "by-speed"}}
    with pytest.raises(ConfigError, match='set steps = "equal"'):
        resolve_run(raw)


def test_a_latency_without_a_link_is_refused() -> None:
    raw: dict[str, Any] = {"model": {"architecture": {"model_type": "qwen3"}}, "sites": {"a": {}}}
    resolve_run({**raw, "control": {"latency": 0.1, "link": "1gbit"}})
    with pytest.raises(ConfigError, match=r"control\.link is not set"):
        resolve_run({**raw, "control": {"latency": 0.1}})


@pytest.mark.parametrize(
    ("tables", "refused"),
    [
        ({"admission": {"gate": True}}, None),
        ({"admission": {"gate": True}, "site": {"stages": 2}}, "judge only the direction"),
        ({"admission": {"gate": True}, "site": {"shards": 2}}, 'admission.aggregation = "clip"'),
        ({"admission": {"gate": True, "aggregation": "clip"}, "site": {"stages": 2}}, None),
        ({"admission": {"scores": True}, "outer": {"method": "allreduce"}}, "exchanges gradients"),
        ({"admission": {"aggregation": "median"}}, None),
        (
            {"admission": {"aggregation": "median"}, "compression": {"codec": "topk:64"}},
            'median" with codec "topk:64": each site sends different values',
        ),
        (
            {"admission": {"aggregation": "trimmed"}, "outer": {"method": "sparseloco"}},
            "the result is nearly zero",
        ),
        ({"admission": {"aggregation": "rfa"}, "compression": {"codec": "topk:64"}}, None),
    ],
)
def test_what_admission_needs(tables: dict[str, Any], refused: str | None) -> None:
    raw: dict[str, Any] = {"model": {"architecture": {"model_type": "qwen3"}}, "sites": {"a": {}}}
    if refused is None:
        resolve_run({**raw, **tables})
        return
    with pytest.raises(ConfigError, match=refused):
        resolve_run({**raw, **tables})


@pytest.mark.parametrize(
    ("model", "data", "tokenizer"),
    [
        ({"architecture": {"model_type": "qwen3"}}, {}, "train"),
        ({"path": "team/tiny"}, {}, "team/tiny"),
        ({"path": "team/tiny", "revision": "v2"}, {}, "team/tiny@v2"),
        ({"path": "team/tiny"}, {"tokenizer": "team/other"}, "team/other"),
        ({"path": "team/tiny"}, {"tokenizer": "train"}, "train"),
        ({"path": "team/tiny", "pretrained": False}, {}, "train"),
        ({"path": "start", "handover": True}, {}, "train"),
    ],
)
def test_pretrained_weights_bring_their_tokenizer(
    model: dict[str, Any], data: dict[str, Any], tokenizer: str
) -> None:
    run = resolve_run({"model": model, "data": data, "sites": {"a": {}}})
    assert run.data.tokenizer == tokenizer


def test_a_byte_order_mark_is_no_statement(run_file: Path) -> None:
    """As Windows' editors write one."""
    run_file.write_bytes(b"\xef\xbb\xbf" + run_file.read_bytes())
    assert load_run(run_file).outer.rounds == 10


def test_a_home_folder_is_expanded_in_every_path(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_run(run_file, ["run.folder=~/runs/{name}", "run.name=t"])
    assert config.folder == tmp_path / "runs" / "t"
    assert config.data_folder == tmp_path / "runs" / "t" / "data"
    assert config.record_store == str(tmp_path / "runs" / "t" / "record" / "store")
    elsewhere = load_run(run_file, ["data.folder=~/tok", "checkpoint.store=~/kept"])
    assert elsewhere.data_folder == tmp_path / "tok"
    assert storage.opened(elsewhere.checkpoint_store)[1] == str(tmp_path / "kept")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 320}')
    assert load_model_config(ModelSection(path="~/model"), None).vocab_size == 320
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        locate_weights("~/model", None)
    with pytest.raises(CheckpointError, match=str(model)):
        Handover.read("~/model")
