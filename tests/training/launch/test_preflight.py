"""What is refused before any process starts; and that a refused start changes nothing."""

from __future__ import annotations

import copy
import errno
import fcntl
import hashlib
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dilocox import api
from dilocox.config.adapter import AdapterSection
from dilocox.config.base import Section
from dilocox.config.model import ModelSection
from dilocox.config.run_config import RunConfig
from dilocox.data import TokenFiles, prepare
from dilocox.errors import ConfigError, DataError, ModelError, TrainingError
from dilocox.inner import memory
from dilocox.training.builder import Hooks, ModelPlan
from dilocox.training.launch import (
    capacity_check,
    coordinator_check,
    coordinator_process,
    data_check,
    local,
    model_check,
    preflight,
    run_folder,
    standby,
)
from dilocox.training.launch.headline import headline
from dilocox.utils.storage import nearest_existing
from tests.data.chats import write_records
from tests.data.flagged import write_flagged
from tests.support.architectures import ARCHITECTURES, ROUTED
from tests.support.base_model import write_base
from tests.support.other_user import error_of_nobody
from tests.support.process_starts import ARCHITECTURE, config, prepared, refusal, write_text

pytestmark = pytest.mark.waits

GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
"""Transformers builds it with eager attention alone."""
BALANCED = {**ARCHITECTURES["qwen3_moe"], "vocab_size": 300, "output_router_logits": True}
UNBALANCED = {**ROUTED, "vocab_size": 300, "output_router_logits": True}
"""The type has no load-balancing loss."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and token files, shared by the tests of this module."""
    return prepared(tmp_path_factory.mktemp("preflight"))


def begun(root: Path, **sections: Any) -> RunConfig:
    """A run that has written something."""
    run = config(root, **sections)
    run.folder.mkdir()
    (run.folder / "run.toml").write_text(run.to_toml(), encoding="utf-8")
    (run.folder / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    for folder in (
        "checkpoints/tick-00000008", "model", "coordinator", "model-best", "model-tick-00000008",
    ):  # fmt: skip
        (run.folder / folder).mkdir(parents=True)
        (run.folder / folder / "file").write_text(folder, encoding="utf-8")
    return run


def content(folder: Path) -> dict[str, str]:
    """Every file below a folder, by its digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- the folder ---


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    run = config(tmp_path)
    assert run_folder.claim_folder(run, resume=False) == run.folder
    assert run.folder.is_dir()
    assert not list(run.folder.iterdir())


def test_a_folder_with_a_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    run = begun(tmp_path)
    before = content(run.folder)
    text = refusal(run_folder.claim_folder, run, resume=False)
    assert text.startswith(f"{run.folder}: holds a run already; add --resume to go on, --overwrite")
    assert content(run.folder) == before


def test_resuming_another_run_names_the_key_that_differs(tmp_path: Path) -> None:
    run = begun(tmp_path)
    before = content(run.folder)
    other = config(tmp_path, inner={"learning_rate": 0.5})
    text = refusal(run_folder.claim_folder, other, resume=True)
    assert "was started with inner.learning_rate = 0.001, but the run file has 0.5" in text
    text = refusal(run_folder.claim_folder, config(tmp_path, sites={"oslo": {}}), resume=True)
    assert "was started with other sites" in text
    # Places may change: a resumed run may be given more threads or another port.
    moved = config(tmp_path, site={"threads": 2}, network={"port": 4711})
    run_folder.claim_folder(moved, resume=True)
    assert content(run.folder) == before


def test_a_run_of_an_older_version_goes_on_as_it_was_begun(tmp_path: Path) -> None:
    run = begun(tmp_path)
    path = run.folder / "run.toml"
    path.write_text(path.read_text().replace("moments = true\n", ""))
    text = refusal(run_folder.claim_folder, run, resume=True)
    assert "compression.moments = false, but the run file has true; resume with --set" in text
    run_folder.claim_folder(config(tmp_path, compression={"moments": False}), resume=True)


@pytest.mark.parametrize("start", ["train", "coordinator"])
def test_a_run_from_before_a_new_default_goes_on_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    begun(tmp_path, model={"architecture": ARCHITECTURE, "compile": False})
    run, taken = config(tmp_path), []

    def take(config: RunConfig, wait_for: int | None = None) -> None:
        taken.append(config.model.compile)
        raise ConfigError("as far as this test goes")

    def begin() -> None:
        if start == "train":
            local.train_here(run, Hooks(), resume=True, overwrite=False, debug=False)
        file = tmp_path / "run.toml"
        coordinator_process.coordinate(run, run_file=file, overrides=[], wait_for=None, resume=True)

    monkeypatch.setattr(preflight, "check_coordinator", take)
    refusal(begin)
    assert taken == [False], "the record of the run says that it is not compiled"


@pytest.mark.parametrize("damage", ["not [toml", "[outer]\nrounds = 'x'\n"])
def test_a_damaged_run_file_in_the_folder(tmp_path: Path, damage: str) -> None:
    run = begun(tmp_path)
    (run.folder / "run.toml").write_text(damage, encoding="utf-8")
    assert str(run.folder / "run.toml") in refusal(run_folder.claim_folder, run, resume=True)


def test_nothing_to_resume(tmp_path: Path) -> None:
    run = config(tmp_path)
    assert "no run to resume" in refusal(run_folder.claim_folder, run, resume=True)
    assert not run.folder.exists()


def test_overwriting_takes_the_run_away_and_nothing_else(tmp_path: Path) -> None:
    run = begun(tmp_path, data={"folder": "{run}/my-tokens"})
    (run.folder / "my-tokens").mkdir()
    (run.folder / "my-tokens" / "manifest.json").write_text("{}", encoding="utf-8")
    (run.folder / "notes.txt").write_text("keep me", encoding="utf-8")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x", encoding="utf-8")
    (run.folder / "logs").symlink_to(outside)
    run_folder.check_folder(run, resume=False, overwrite=True)
    assert (run.folder / "run.toml").exists(), "the check alone takes nothing away"
    run_folder.claim_folder(run, resume=False, overwrite=True)
    assert sorted(e.name for e in run.folder.iterdir()) == ["my-tokens", "notes.txt"]
    assert (outside / "file").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"model": ModelSection(path="{run}/model")},
        {"adapter": AdapterSection(path="{run}/model-best")},
        {"adapter": AdapterSection(handover="{run}/elsewhere/../model")},
    ],
)
def test_overwriting_takes_away_nothing_that_the_run_reads(
    tmp_path: Path, change: dict[str, Section]
) -> None:
    run = begun(tmp_path)
    for name in ("model", "model-best", "mine", "elsewhere"):
        (run.folder / name).mkdir(exist_ok=True)
        (run.folder / name / "weights").touch()
    ((part, section),) = change.items()
    ((key, named),) = ((k, v) for k, v in section if isinstance(v, str) and "{run}" in v)

    def reading(place: str) -> RunConfig:
        return run.model_copy(update={part: section.model_copy(update={key: place})})

    before, place = content(run.folder), named.replace("{run}", str(run.folder))
    text = refusal(run_folder.check_folder, reading(place), resume=False, overwrite=True)
    assert text.startswith(f"{part}.{key} {place}: --overwrite would remove it")
    assert content(run.folder) == before
    run_folder.check_folder(reading(f"{run.folder}/mine"), resume=False, overwrite=True)


@pytest.mark.parametrize("options", [{"resume": True}, {"resume": False, "overwrite": True}])
def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path, options: dict[str, bool]) -> None:
    run = begun(tmp_path)
    with (run.folder / "coordinator" / "coordinator.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = content(run.folder)
        assert "its run is going on right now" in refusal(run_folder.claim_folder, run, **options)
        assert content(run.folder) == before
    run_folder.claim_folder(run, **options)


def test_files_of_no_run_are_not_mixed_with_one(tmp_path: Path) -> None:
    run = config(tmp_path)
    run.folder.mkdir()
    (run.folder / "thesis.tex").write_text("x", encoding="utf-8")
    text = refusal(run_folder.claim_folder, run, resume=False)
    assert "holds files that no run has written (thesis.tex)" in text


def test_token_files_that_were_prepared_before_are_no_hindrance(tmp_path: Path) -> None:
    run = config(tmp_path, data={"folder": "{run}/tokens/first"})
    (run.folder / "tokens" / "first").mkdir(parents=True)
    (run.folder / ".tokens.partial-host-1").mkdir()
    run_folder.claim_folder(run, resume=False)


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    text = refusal(run_folder.claim_folder, config(tmp_path / "file"), resume=False)
    assert "cannot be written to (Not a directory); choose another run.folder" in text
    (tmp_path / "run").write_text("x", encoding="utf-8")
    text = refusal(run_folder.claim_folder, config(tmp_path), resume=False)
    assert "cannot be written to (Not a directory)" in text


@pytest.mark.parametrize("name", ["run", "file"])
def test_a_coordinator_or_standby_at_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x", encoding="utf-8")
    run = config(tmp_path / name if name == "file" else tmp_path, "run", network={"port": 7777})
    refused = f"{run.folder}: cannot be written to (Not a directory); choose another run.folder"
    said = refusal(
        coordinator_process.coordinate,
        run, run_file=Path("run.toml"), overrides=[], wait_for=None, resume=False,
    )  # fmt: skip
    assert said == refused
    assert refusal(standby.follow, run, "127.0.0.1:7777", print) == refused


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that its owner alone, and root, may enter."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


@pytest.mark.parametrize("below", ["", "runs"])
def test_a_folder_below_one_that_may_not_be_entered(closed: Path, below: str) -> None:
    """Every command says so in one line, before it does anything else."""
    run = config(closed / below, "run", network={"port": 7777})
    refused = (
        f"TrainingError: {run.folder}: cannot be written to (Permission denied); choose another "
        "run.folder"
    )
    calls: list[Callable[[], object]] = [
        lambda: run_folder.check_folder(run, resume=False),
        lambda: run_folder.check_folder(run, resume=True),
        lambda: run_folder.claim_folder(run, resume=False, overwrite=True),
        lambda: run_folder.check_writable(run.folder),
        lambda: run_folder.check_reachable(run.folder),
        lambda: coordinator_process.coordinate(
            run, run_file=Path("run.toml"), overrides=[], wait_for=None, resume=False
        ),
        lambda: standby.follow(run, "127.0.0.1:7777", print),
        lambda: api._with_permission(run, replaced=False, resume=True),
        lambda: preflight._check_places(run, preflight.Role("train")),
        lambda: preflight._check_places(run, preflight.Role("join", site="paris")),
    ]
    assert [error_of_nobody(call) for call in calls] == [refused] * len(calls)
    place = error_of_nobody(lambda: pytest.fail(str(nearest_existing(run.folder))))
    # Of pytest's own folders nobody may enter some either.
    assert Path(place.removeprefix("Failed: ")) in (closed, *closed.parents)


def test_a_site_beside_the_coordinator_of_another_user() -> None:
    # Not pytest's folder, which only root may enter if root runs the tests.
    with tempfile.TemporaryDirectory() as root:
        run = config(Path(root), "run")
        coordinator = run.folder / "coordinator"
        coordinator.mkdir(parents=True)
        for folder, mode in ((Path(root), 0o755), (run.folder, 0o777), (coordinator, 0)):
            folder.chmod(mode)
        assert error_of_nobody(lambda: run_folder.check_writable(run.folder)) == ""
        role = preflight.Role("join", site="paris")
        said = error_of_nobody(lambda: preflight._check_places(run, role))
        coordinator.chmod(0o700)
    assert said == (
        f"TrainingError: {run.folder}: cannot be written to (Permission denied); choose another "
        "run.folder"
    )


def test_an_earlier_run_of_another_user_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(run_folder.shutil, "rmtree", refuse)
    text = refusal(run_folder.claim_folder, run, resume=False, overwrite=True)
    assert text.endswith("cannot be written to (Permission denied); choose another run.folder")


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever runs the tests may be allowed everything: the file system says no here.
    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(run_folder.tempfile, "TemporaryFile", refuse)
    text = refusal(run_folder.claim_folder, config(tmp_path), resume=False)
    assert "cannot be written to (Read-only file system); choose another run.folder" in text


# --- the coordinator's address ---


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = config(tmp_path, network={"port": port})
        text = refusal(coordinator_check.check_coordinator, run)
        assert text.startswith(f"network.port {port} on 127.0.0.1: cannot be listened on (")
        assert "choose another network.port (0 takes a free one)" in text
    coordinator_check.check_coordinator(run)


def test_an_address_that_is_not_of_this_machine(tmp_path: Path) -> None:
    run = config(tmp_path, network={"host": "192.0.2.1"})
    assert "network.port 0 on 192.0.2.1: cannot" in refusal(
        coordinator_check.check_coordinator, run
    )


@pytest.mark.parametrize("count", [-1, 0, 3])
def test_wait_for_out_of_range(tmp_path: Path, count: int) -> None:
    text = refusal(coordinator_check.check_coordinator, config(tmp_path), wait_for=count)
    assert text == (
        f"--wait-for {count}: give a number of sites from outer.min_sites = 1 to the 2 of the "
        "run file"
    )
    coordinator_check.check_coordinator(config(tmp_path), wait_for=2)


# --- the model ---


@pytest.mark.parametrize(
    ("change", "kind", "expected"),
    [
        ({"site": {"stages": 5, "batch_size": 16}}, ModelError, "= 5 is above the model's 4 lay"),
        (
            {"model": {"architecture": {**ARCHITECTURE, "hiden_size": 3}}},
            ModelError,
            'model.architecture.hiden_size: "qwen3" has no such key; did you mean "hidden_size"?',
        ),
        (
            {"model": {"architecture": {**ARCHITECTURE, "model_type": "qwem3"}}},
            ModelError,
            'no model type "qwem3" in transformers; did you mean',
        ),
        (
            {"model": {"architecture": {"model_type": "gpt2"}}},
            ModelError,
            "has no pipeline plan (base_model_pp_plan)",
        ),
        (
            {"model": {"architecture": GEMMA2}},
            ModelError,
            'attention "sdpa" does not support; set model.attention = "eager"',
        ),
        (
            {"model": {"architecture": {**ARCHITECTURE, "vocab_size": 200}}},
            ModelError,
            "the tokenizer has 270 tokens, the model's vocabulary 200",
        ),
        (
            {"model": {"architecture": UNBALANCED}},
            ModelError,
            'type "glm4_moe" has no load-balancing loss in transformers; set output_router_logits',
        ),
        (
            {"model": {"architecture": BALANCED}},
            ConfigError,
            "load-balancing loss, which depends on the routers of all layers: set site.stages = 1",
        ),
        (
            {"model": {"architecture": BALANCED, "compile": True}, "site": {"stages": 1}},
            ConfigError,
            "compiled layers do not record what it needs: set model.compile = false",
        ),
        (
            {"data": {"sequence_length": 65}},
            ConfigError,
            "data.sequence_length 65 is above the model's max_position_embeddings 64",
        ),
        (
            {"outer": {"fragments": 60, "inner_steps": 60}},
            ConfigError,
            "outer.fragments: a stage of",
        ),
        (
            {"model": {"architecture": None, "path": "./no-such-folder"}},
            ModelError,
            "model.path ./no-such-folder: no usable configuration there",
        ),
    ],
)
def test_models_that_cannot_be_trained_so(
    tmp_path: Path, change: dict[str, Any], kind: type[Exception], expected: str
) -> None:
    run = config(tmp_path, **change)
    with pytest.raises(kind) as caught:
        model_check.check_model(run)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "the check writes nothing"


def test_a_good_model(tmp_path: Path) -> None:
    model_check.check_model(config(tmp_path))


def test_a_loop_of_the_users_own_may_balance_the_load_of_experts(tmp_path: Path) -> None:
    for architecture in (BALANCED, UNBALANCED):
        run = config(tmp_path, model={"architecture": architecture})
        model_check.check_model(run, own_loop=True)


def test_the_load_of_experts_is_balanced_beside_the_built_in_loss_alone(tmp_path: Path) -> None:
    run = config(tmp_path, model={"architecture": BALANCED}, site={"stages": 1})
    model_check.check_model(run)
    with pytest.raises(ConfigError, match="added to the built-in loss of text alone"):
        model_check.check_model(run, own_loss=True)


# --- the tokenizer ---


def test_a_good_run(place: Path) -> None:
    preflight.check_run(config(place), 270, sites_here=2)


def test_a_run_that_admits_by_stake_is_started_in_parts(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = "0x" + "11" * 20
    terms = {
        "price": 1, "accounts": {"paris": account, "lyon": account}, "chain": 7,
        "contract": account, "owner": account, "admission": "stake",
    }  # fmt: skip
    run = config(place, settlement=terms)
    for command in ("train", "lab"):
        with pytest.raises(ConfigError, match="use dilocox coordinator and dilocox join"):
            preflight.check_stakes(run, command)
    preflight.check_stakes(run, "join")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dilocox\[chain\]'"):
        preflight.check_stakes(run, "coordinator")
    preflight.check_stakes(config(place), "coordinator")


def test_missing_and_empty_data(tmp_path: Path) -> None:
    run = config(tmp_path)
    text = refusal(prepare, run.data, run.data_folder, 0)
    assert "data.source" in text
    assert "no such file or folder" in text
    (tmp_path / "text").mkdir()
    assert "no file with text" in refusal(prepare, run.data, run.data_folder, 0)
    (tmp_path / "text" / "a.txt").write_text("", encoding="utf-8")
    assert "no text in the sources" in refusal(prepare, run.data, run.data_folder, 0)
    assert "no token files here" in refusal(preflight.check_run, run, 270, sites_here=2)


@pytest.mark.parametrize("own", [False, True])
def test_a_batch_above_the_sequences_there_are(place: Path, own: bool) -> None:
    sites = {"lyon": {"batch_size": 40000}} if own else {}
    site = {} if own else {"batch_size": 40000}
    run = config(place, site=site, sites=sites)
    text = refusal(preflight.check_run, run, 270, sites_here=2)
    key = "sites.lyon.batch_size" if own else "site.batch_size"
    assert text.startswith(f"{key} 40000 is above the ")
    assert "lower it or data.sequence_length, or give more text" in text
    # A dataset of the user's own is as long as it likes.
    preflight.check_run(run, 270, sites_here=2, own_dataset=True)


def private(place: Path, folder: str, **data: Any) -> RunConfig:
    """A run whose site lyon has text of its own, prepared as `data` says."""
    if not (place / folder).exists():
        write_text(place / f"{folder}-text", 5)
        section = config(place, data={"source": str(place / f"{folder}-text"), **data}).data
        prepare(section, place / folder, 0)
    return config(place, sites={"lyon": {"data": str(place / folder)}})


def test_private_text_with_the_runs_tokenizer(place: Path) -> None:
    tokenizer = str(TokenFiles.open(place / "tokens").tokenizer_folder)
    run = private(place, "same", tokenizer=tokenizer)
    preflight.check_run(run, 270, sites_here=2)


def test_private_text_that_is_missing_is_named_with_its_key(place: Path) -> None:
    run = config(place, sites={"lyon": {"data": str(place / "none")}})
    text = refusal(preflight.check_run, run, 270, sites_here=2)
    assert text.startswith(f"sites.lyon.data: {place / 'none'}")


def test_private_text_with_another_vocabulary(place: Path) -> None:
    run = private(place, "larger", vocabulary_size=275)
    text = refusal(preflight.check_run, run, 270, sites_here=2)
    assert text.startswith(f"sites.lyon.data {place / 'larger'}: its vocabulary_size is 275, the")
    assert f'prepare it with data.tokenizer = "{place / "tokens" / "tokenizer"}"' in text


def test_private_text_with_another_tokenizer_of_the_same_size(place: Path) -> None:
    run = private(place, "other")
    with pytest.raises(DataError, match="made with another tokenizer than the run's"):
        data_check.check_data(run, TokenFiles.open(place / "tokens"), ["lyon"])
    # The other site does not have lyon's files, and need not.
    shutil.rmtree(place / "other")
    data_check.check_data(run, TokenFiles.open(place / "tokens"), ["paris"])
    preflight.check_run(run, 270, sites_here=1)


def test_private_conversations_that_are_learned_in_another_way(place: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n}?", "completion": f" {n} is a number."} for n in range(40)]
    source = write_records(tmp_path / "pairs.jsonl", pairs)
    tokenizer = str(TokenFiles.open(place / "tokens").tokenizer_folder)
    made = {}
    for loss_on in ("assistant", "all"):
        data = {"source": str(source), "format": "instruction", "tokenizer": tokenizer}
        section = config(place, data=data | {"loss_on": loss_on, "sequence_length": 64}).data
        made[loss_on] = prepare(section, tmp_path / loss_on, 0)
    run = config(place, sites={"lyon": {"data": str(tmp_path / "all")}})
    text = refusal(data_check.check_data, run, made["assistant"], ["lyon"])
    assert text == (
        f"sites.lyon.data {tmp_path / 'all'}: made with loss_on 'all', the run's data with "
        "'assistant'; prepare it with the run's [data] keys"
    )


def test_private_conversations_beside_pairs_are_named_by_their_format(
    place: Path, tmp_path: Path
) -> None:
    """Not by the column of pairs, which no key of the run file gives."""
    pairs = [{"prompt": f"{n}?", "completion": f" {n} is a number."} for n in range(40)]
    source = write_records(tmp_path / "pairs.jsonl", pairs)
    tokenizer = str(TokenFiles.open(place / "tokens").tokenizer_folder)
    data = {"source": str(source), "format": "instruction", "tokenizer": tokenizer}
    own = prepare(config(place, data=data | {"sequence_length": 64}).data, tmp_path / "own", 0)
    of_pairs = copy.copy(own)
    of_pairs.column_names = ["reference"]
    told = own.content["conversations"] | {"format": "preference"}
    of_pairs.content = own.content | {"conversations": told}
    run = config(place, sites={"lyon": {"data": str(tmp_path / "own")}})
    text = refusal(data_check.check_data, run, of_pairs, ["lyon"])
    assert "made with format 'instruction', the run's data with 'preference'" in text


def test_a_tokenizer_larger_than_the_models_vocabulary(place: Path) -> None:
    run = config(place, model={"architecture": {**ARCHITECTURE, "vocab_size": 269}})
    with pytest.raises(
        ModelError, match="the tokenizer has 270 tokens, the model's vocabulary 269"
    ):
        preflight.check_run(run, 270, sites_here=2)


# --- the machine ---


def test_too_little_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_check, "available_memory", lambda: 1000)
    text = refusal(preflight.check_run, config(place), 270, sites_here=2)
    assert text.startswith("2 sites here need ")
    assert "use a smaller model, or put the sites on machines of their own" in text


def test_attention_that_is_not_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks alone would find out, after the text was prepared and the site had enrolled."""
    run = config(place, model={"attention": "flash_attention_2"})
    assert "needs a GPU, ranks here have none" in refusal(model_check.check_model, run)
    monkeypatch.setattr(model_check, "ranks_use_gpu", lambda _: True)
    monkeypatch.setattr(model_check.importlib.util, "find_spec", lambda name: None)
    assert "needs the package flash-attn" in refusal(model_check.check_model, run)
    monkeypatch.setattr(model_check.importlib.util, "find_spec", lambda name: object())
    model_check.check_model(run)


def test_too_little_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(capacity_check.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(
        ConfigError, match=r"need 0\.0 GiB, 0\.0 GiB are free; lower checkpoint\.ke"
    ):
        preflight.check_run(config(place), 270, sites_here=2)


def test_of_a_site_on_several_machines_each_holds_its_ranks(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(place, site={"stages": 2, "shards": 2, "batch_size": 8})
    asked: list[list[int]] = []
    monkeypatch.setattr(
        memory, "host_problem", lambda _run, parameters, *_: asked.append(parameters)
    )
    for ranks in (None, 4, 3, 1):
        preflight.check_run(run, 270, sites_here=1, ranks_here=ranks)
    whole, every, three, one = asked
    assert whole == every
    assert three == [whole[0], whole[1] // 2]
    assert one == [whole[0] // 2, 0]


@pytest.mark.parametrize(("keep", "bounded"), [("all", False), ("auto", False), (20, True)])
def test_free_memory_is_judged_with_what_a_bounded_record_copies(
    place: Path, keep: str | int, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(memory, "host_problem", lambda *given: asked.append(given[5]))
    preflight.check_run(config(place, record={"keep": keep}), 270, sites_here=2)
    assert asked == [bounded]


@pytest.mark.parametrize(("native", "width"), [(True, 2), (False, 4)])
def test_memory_is_judged_in_the_data_type_that_auto_takes_here(
    place: Path, tmp_path: Path, native: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto" and no instructions for bf16, a frozen base has 4 bytes per parameter."""
    asked: list[tuple[RunConfig, list[tuple[int, int]]]] = []
    monkeypatch.setattr("dilocox.inner.device.cpu_multiplies_bf16", lambda: native)
    monkeypatch.setattr(memory, "host_problem", lambda *given: asked.append((given[0], given[6])))
    base = str(write_base(tmp_path / "base"))
    run = config(
        place,
        model={"path": base, "architecture": None, "pretrained": True},
        adapter={"kind": "lora", "rank": 2, "alpha": 4},
        site={"device": "cpu", "stages": 1},
    )
    plan = ModelPlan.of(run, 272)
    capacity_check.check_capacity(run, plan, [plan.trained], sites_here=1)
    ((judged, frozen),) = asked
    assert judged.site.precision == {2: "bf16", 4: "fp32"}[width]
    assert sum(divided for divided, _ in frozen) == width * (plan.parameters - plan.trained)


def test_free_memory_is_a_number_of_bytes() -> None:
    available = capacity_check.available_memory()
    assert available is None or 2**20 < available < 2**50


@pytest.mark.parametrize("section", ["checkpoint", "record"])
def test_a_store_behind_a_url_with_colons_is_refused(
    place: Path, tmp_path: Path, section: str
) -> None:
    """A folder with colons is one like any other; a URL with them names two places to fsspec."""
    colons = {"folder": str(place / "exp::1")}
    preflight.check_run(config(place, run=colons), 270, sites_here=2)
    run = config(place, **{section: {"store": "memory://exp::1/store"}})
    text = refusal(preflight.check_run, run, 270, sites_here=2)
    assert text.startswith(f"{section}.store memory://exp::1/store: cannot be opened (fsspec takes")
    run = config(place, run=colons, **{section: {"store": "file://{run}/store"}})
    assert f"{section}.store file://{run.folder}/store" in refusal(
        preflight.check_run, run, 270, sites_here=2
    )


def test_a_full_start_that_is_refused_late_loses_nothing(place: Path, tmp_path: Path) -> None:
    """With --overwrite: whatever is refused before `claim_folder`, the earlier run is whole."""
    run = begun(tmp_path)
    before = content(run.folder)
    bad = config(
        tmp_path,
        site={"stages": 4, "chunks": 1, "batch_size": 16},
        outer={"fragments": 99, "inner_steps": 99},
    )
    run_folder.check_folder(bad, resume=False, overwrite=True)
    coordinator_check.check_coordinator(bad)
    with pytest.raises(ConfigError, match=r"outer\.fragments"):
        model_check.check_model(bad)
    assert content(run.folder) == before


def test_private_data_with_flags_needs_shared_data_with_flags(place: Path) -> None:
    files = TokenFiles.open(place / "tokens")
    documents = [([1, 2, 3], [0, 1, 1])] * 40
    write_flagged(place / "flagged", files, documents, documents)
    run = config(place, sites={"lyon": {"data": str(place / "flagged")}})
    message = (
        "has tokens that do not count as labels, but the run's data is text, all of which counts"
    )
    with pytest.raises(DataError, match=message):
        data_check.check_data(run, files, ["lyon"])


def test_a_model_whose_documents_see_each_other_is_refused(place: Path) -> None:
    model = {"architecture": {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 4,
                              "num_attention_heads": 4, "ffn_dim": 48}}  # fmt: skip
    packed = {"packing": "documents"}
    with pytest.raises(ModelError, match=r'data\.packing: "documents" cannot be used with model'):
        model_check.check_model(config(place, model=model, data=packed))
    model_check.check_model(config(place, model=model, data={"packing": "none"}))


def test_the_headline_says_how_full_rows_are(place: Path) -> None:
    files = TokenFiles.open(place / "tokens")
    assert "rows: " not in headline(config(place), files)
    text = headline(config(place, data={"packing": "documents"}), files)
    assert re.search(r"\nrows: documents, \d+ positions: [\d,]+ rows, \d+\.\d % of their", text)


def test_the_headline_says_what_is_trained(place: Path) -> None:
    text = headline(config(place), TokenFiles.open(place / "tokens"))
    assert text.startswith("run run: qwen3, ")
    assert "2 sites x 2 stages x 1 shard" in text
    assert "vocabulary 270" in text


def test_the_headline_says_how_many_records_were_left_out(place: Path) -> None:
    files = TokenFiles.open(place / "tokens")
    assert "records left out" not in headline(config(place), files)
    files.manifest["made_with"]["without_text"] = [1200, 3]
    assert "; 1,203 records left out (dilocox data show)\n" in headline(config(place), files)
    files.manifest["made_with"]["left_out"] = [{".pdf": 2}]
    said = "; 2 files and 1,203 records left out (dilocox data show)\n"
    assert said in headline(config(place), files)


def test_errors_of_the_folder_are_of_the_right_kind(tmp_path: Path) -> None:
    with pytest.raises(TrainingError):
        run_folder.check_folder(config(tmp_path), resume=True)
    assert memory.GIB == 2**30


# --- all of it, by the function that starts a run ---


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"site": {"stages": 5, "batch_size": 20}}, "is above the model's 4 layers"),
        ({"site": {"batch_size": 40000}}, "site.batch_size 40000 is above the"),
        ({"data": {"sequence_length": 65}}, "above the model's max_position_embeddings 64"),
        ({"data": {"source": "/nowhere/at-all"}}, "data.source"),
        ({"network": {"host": "192.0.2.1"}}, "cannot be listened on"),
        ({"metrics": {"sinks": ["wandb"]}}, "wandb is not installed"),
        ({"run": {"folder": "/proc/{name}"}}, "cannot be written to"),
        ({"sites": {"lyon": {"data": "/nowhere"}}}, "/nowhere: no token files here"),
    ],
)
def test_a_start_is_refused_before_any_process_of_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], expected: str
) -> None:
    start = local.processes.start
    started = []

    def watched(*arguments: Any, name: str) -> Any:
        started.append(name)
        return start(*arguments, name=name)

    monkeypatch.setattr(local.processes, "start", watched)
    monkeypatch.setattr(coordinator_check, "check_sinks", _without_wandb)
    if expected == "data.source":
        change["data"]["folder"] = str(place / "never")
    run = config(place, "refused", **change)
    text = refusal(local.train_here, run, Hooks(), resume=False, overwrite=False, debug=False)
    assert expected in text
    assert set(started) <= {"_prepare"}
    # The same name can be used for the next try.
    assert not (run.folder / "run.toml").exists()


def _without_wandb(run: RunConfig) -> None:
    if "wandb" in run.metrics.sinks:
        raise ConfigError("metrics.sinks: wandb is not installed; run: pip install wandb")
