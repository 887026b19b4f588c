"""What of the record is refused before any process starts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dilocox import preflight
from dilocox.assembly import Blueprint
from dilocox.data import prepare
from dilocox.errors import ConfigError, RecordError
from dilocox.payloads import model_shapes
from tests.test_preflight import config, write_text


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and token files."""
    root = tmp_path_factory.mktemp("room")
    write_text(root / "text", 0)
    run = config(root)
    prepare(run.data, run.data_folder, run.run.seed)
    return root


def test_too_little_disk_for_the_record(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room for checkpoints and model, not for all payloads of many rounds."""
    many = config(prepared, outer={"rounds": 10**6}, compression={"codec": "none"})
    few = config(prepared, compression={"codec": "none"})
    blueprint = Blueprint.of(few, 270)
    parameters = sum(preflight._check_blueprint(few, blueprint))
    needed = preflight.record_bytes(few, blueprint, parameters)
    # theta_0, and three times (two rounds and the flush) two sites' payloads, dense and a little
    # more: tensors start at whole blocks of 128 values, and every frame has a header.
    shapes = model_shapes(few, blueprint)
    dense = 4 * sum(math.prod(shape) for stage in shapes for shape in stage.values())
    assert 4 * parameters + 6 * dense <= needed < 4 * parameters + 6.6 * dense

    # A state of every fourth round of 10, at both sites.
    ten = {"outer": {"rounds": 10}, "compression": {"codec": "none"}}
    without = preflight.record_bytes(config(prepared, **ten), blueprint, parameters)
    kept = config(prepared, **ten, record={"states_every": 4})
    assert preflight.record_bytes(kept, blueprint, parameters) - without == 3 * 2 * 32 * parameters
    # The newest, and the one that is being written before an older one goes.
    newest = config(prepared, **ten, record={"states_every": 4, "states_keep": 1})
    assert (
        preflight.record_bytes(newest, blueprint, parameters) - without == 2 * 2 * 32 * parameters
    )

    class Usage:
        free = 10**9

    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: Usage)
    preflight.check_run(few, 270, sites_here=2)
    with pytest.raises(ConfigError, match=r"the run's record will need .* record\.enabled = false"):
        preflight.check_run(many, 270, sites_here=2)
    preflight.check_run(
        config(prepared, outer={"rounds": 10**6}, record={"enabled": False}), 270, sites_here=2
    )


def test_an_unknown_store_is_refused_before_the_start(prepared: Path) -> None:
    with pytest.raises(RecordError, match=r"record\.store nosuch://x"):
        preflight.check_run(config(prepared, record={"store": "nosuch://x"}), 270, sites_here=2)
