"""What makes a handover impossible is said before the text is read, wherever that can be known."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.handover import MOMENTUM
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.server.ledger import Ledger
from dilocox.data import TokenFiles, prepare
from dilocox.errors import ConfigError
from dilocox.training.builder import Hooks
from dilocox.training.launch import data_check, local, preflight
from dilocox.training.launch.tokenizer_check import check_tokenizer
from dilocox.training.portable_checkpoint import (
    HandedAdapters,
    Handover,
    check_handed_momentum,
    check_handover,
)
from tests.support.process_starts import ARCHITECTURE, config, prepared, refusal, write_text

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, token files, and in `start` what a run with a tokenizer of 270 tokens handed over."""
    root = prepared(tmp_path_factory.mktemp("handover"))
    from transformers import CONFIG_MAPPING

    keys = {key: value for key, value in ARCHITECTURE.items() if key != "model_type"}
    CONFIG_MAPPING["qwen3"](**keys, vocab_size=400).save_pretrained(root / "start")
    files = TokenFiles.open(root / "tokens")
    for file in files.tokenizer_folder.iterdir():
        shutil.copyfile(file, root / "start" / file.name)
    (root / "start" / MOMENTUM).write_bytes(b"momentum")
    Handover(
        run="old", tick=3, steps=4, seed=0, sequence_length=16, data_digest=files.digest,
        momentum=hashlib.sha256(b"momentum").hexdigest(), ledger=Ledger().to_json(),
    ).write(root / "start")  # fmt: skip
    return root


def going_on(place: Path, start: Path | None = None, **sections: Any) -> RunConfig:
    """A run that goes on from `start`."""
    begins = {"architecture": None, "path": str(start or place / "start"), "handover": True}
    model = {**begins, **sections.pop("model", {})}
    return config(place, "new", model=model, **sections)


def started(run: RunConfig, monkeypatch: pytest.MonkeyPatch, as_site: bool = False) -> str:
    """Why a start of `run`, or of one of its sites, is refused before text is read."""

    def later(*_: object, **__: object) -> None:
        raise AssertionError("the text is prepared")

    monkeypatch.setattr(preflight, "fetch_weights", lambda *_: None)
    monkeypatch.setattr(preflight, "prepare_data", later)
    if as_site:
        role = preflight.Role("join", site="paris", url="https://localhost:1")
        return refusal(preflight.check, run, role)
    return refusal(local.train_here, run, Hooks(), resume=False, overwrite=False, debug=False)


@pytest.mark.parametrize("as_site", [False, True])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"run": {"seed": 1}}, "model.handover: run.seed is 1, but run old had 0; token ranges"),
        ({"data": {"sequence_length": 8}}, "data.sequence_length is 8, but run old had 16; token"),
        ({"outer": {"rounds": 1}}, "4 inner steps in all, and run old has taken 4 already;"),
        (
            {"outer": {"method": "allreduce", "fragments": 1}},
            "model.handover: method allreduce exchanges gradients and has no outer state",
        ),
        (
            {"data": {"vocabulary_size": 300}},
            'data.tokenizer "train": would give 300 tokens (data.vocabulary_size), the tokenizer '
            "of run old has 270",
        ),
        (
            {"model": {"attention": "flash_attention_2"}, "site": {"precision": "bf16"}},
            'model.attention: "flash_attention_2" needs a GPU, ranks here have none',
        ),
    ],
)
def test_what_needs_no_text_is_asked_before_it_is_read(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    expected: str,
    as_site: bool,
) -> None:
    change.setdefault("data", {}).setdefault("folder", str(place / "not-yet"))
    assert expected in started(going_on(place, **change), monkeypatch, as_site)
    assert not (place / "not-yet").exists()


def test_damaged_momentum_is_found_before_text_is_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Path(shutil.copytree(place / "start", tmp_path / "start"))
    (start / MOMENTUM).write_bytes(b"other")
    assert "missing or changed" in started(going_on(place, start), monkeypatch)


def test_a_mount_point_is_refused_before_weights_are_fetched(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == tmp_path / "disk")
    run = config(place, "new", data={"folder": str(tmp_path / "disk")})
    assert "is a mount point" in started(run, monkeypatch)


def test_preparing_alone_asks_for_the_tokenizer_too(place: Path, tmp_path: Path) -> None:
    other = going_on(place, data={"vocabulary_size": 300})
    text = refusal(check_tokenizer, other)
    assert "set data.tokenizer as in the run.toml of run old" in text
    assert "or data.vocabulary_size = 270 if that run trained its own tokenizer" in text
    check_tokenizer(going_on(place))
    # A tokenizer that is named is one that somebody chose; one that is not there cannot be asked.
    named = {"vocabulary_size": 300, "tokenizer": str(place / "start")}
    check_tokenizer(going_on(place, data=named))
    bare = Path(shutil.copytree(place / "start", tmp_path / "bare"))
    unknown = going_on(place, bare, data={"vocabulary_size": 300})
    (bare / "tokenizer.json").write_text("{")
    assert "copy the folder again" in refusal(check_tokenizer, unknown)
    (bare / "tokenizer.json").unlink()
    check_tokenizer(unknown)


def test_a_run_that_can_go_on(place: Path) -> None:
    run = going_on(place)
    check_handover(run)
    check_handed_momentum(run)
    data_check.check_handed_data(run, TokenFiles.open(run.data_folder))


def test_other_token_files_are_refused_with_the_likely_cause(place: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", 5)
    tokenizer = str(place / "tokens" / "tokenizer")
    for name, options, cause in (
        ("trained", {}, 'most likely data.tokenizer, here "train", differed in that run'),
        (
            "loaded",
            {"tokenizer": tokenizer},
            "knows the same tokens, so most likely data.sour",
        ),
    ):
        data = {"source": str(text), "folder": str(tmp_path / name), **options}
        run = going_on(place, data=data)
        prepare(run.data, run.data_folder, run.run.seed)
        said = refusal(preflight.check_run, run, 270, sites_here=2)
        assert said.startswith("model.handover: the token files' digest is ")
        assert cause in said
        assert "copy that run's data folder" in said


def test_adapters_are_gone_on_from_with_the_same_settings_alone(tmp_path: Path) -> None:
    settings = {
        "kind": "lora", "rank": 4, "alpha": 32.0, "targets": "all-linear", "use_rslora": False,
        "freeze_a": False,
    }  # fmt: skip
    whole = Handover(
        run="old", tick=3, steps=4, seed=0, sequence_length=16, data_digest="d", momentum="m",
        ledger=Ledger().to_json(),
    )  # fmt: skip
    whole.write(tmp_path)
    assert "adapters" not in (tmp_path / "handover.json").read_text()
    about = HandedAdapters(weights="w", base="b", settings=settings)
    handed = whole.model_copy(update={"adapters": about})
    handed.write(tmp_path)
    assert Handover.read(tmp_path) == handed

    def run(adapter: dict[str, Any] | None, **model: Any) -> RunConfig:
        raw: dict[str, Any] = {"model": {"path": "base", **model}, "outer": {"rounds": 9},
                               "data": {"sequence_length": 16}, "sites": {"paris": {}}}  # fmt: skip
        return resolve_run(raw if adapter is None else {**raw, "adapter": adapter})

    same = run({"rank": 4, "dropout": 0.5, "handover": "start"})
    handed.check_run(same)
    handed.check_base(same, "b")
    for refused, said in (
        (lambda: handed.check_run(run({"rank": 8, "handover": "start"})), "adapter.rank: 8, but"),
        (lambda: handed.check_run(run({"rank": 4, "freeze_a": True, "handover": "start"})),
         "adapter.freeze_a: True, but run old had False"),
        (lambda: handed.check_run(run(None, handover=True)), "handed over adapters alone"),
        (lambda: whole.check_run(same), "run old trained no adapters"),
        (lambda: handed.check_base(same, "c"), "but run old trained its adapters on b"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            refused()
