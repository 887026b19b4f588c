"""What of the record is refused before any process starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.run_config import RunConfig
from dilocox.data import prepare
from dilocox.errors import ConfigError, RecordError
from dilocox.models import count_parameters
from dilocox.training.builder import ModelPlan
from dilocox.training.launch import capacity_check, preflight
from dilocox.training.launch.model_check import check_blueprint
from dilocox.training.payload_sizes import model_shapes
from dilocox.training.record_volume import payload_bytes, record_bytes, record_line
from dilocox.utils.formatting import size
from tests.training.launch.test_preflight import config, write_text


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
    blueprint = ModelPlan.of(few, 270)
    parameters = sum(check_blueprint(few, blueprint))
    needed = record_bytes(few, blueprint, parameters)
    # theta_0, and three times (two rounds and the flush) two sites' payloads, dense and a little
    # more: tensors start at whole blocks of 128 values, and every frame has a header.
    shapes = model_shapes(few, blueprint)
    dense = 4 * sum(math.prod(shape) for stage in shapes for shape in stage.values())
    assert 4 * parameters + 6 * dense <= needed < 4 * parameters + 6.6 * dense

    # A state of every fourth round of 10, at both sites.
    ten = {"outer": {"rounds": 10}, "compression": {"codec": "none"}}
    without = record_bytes(config(prepared, **ten), blueprint, parameters)
    kept = config(prepared, **ten, record={"states_every": 4})
    assert record_bytes(kept, blueprint, parameters) - without == 3 * 2 * 32 * parameters
    # The newest, and the one that is being written before an older one goes.
    newest = config(prepared, **ten, record={"states_every": 4, "states_keep": 1})
    assert record_bytes(newest, blueprint, parameters) - without == 2 * 2 * 32 * parameters

    class Usage:
        free = 10**9

    monkeypatch.setattr(capacity_check.shutil, "disk_usage", lambda _: Usage)
    preflight.check_run(few, 270, sites_here=2)
    with pytest.raises(ConfigError, match=r"the run's record will need .* record\.enabled = false"):
        preflight.check_run(many, 270, sites_here=2)
    preflight.check_run(
        config(prepared, outer={"rounds": 10**6}, record={"enabled": False}), 270, sites_here=2
    )


def test_an_unknown_store_is_refused_before_the_start(prepared: Path) -> None:
    with pytest.raises(RecordError, match=r"record\.store nosuch://x"):
        preflight.check_run(config(prepared, record={"store": "nosuch://x"}), 270, sites_here=2)


def test_nothing_is_refused_for_what_the_controller_would_not_send(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the link it chooses smaller payloads and longer rounds than the run file begins with."""
    long = {"outer": {"rounds": 10**5}}
    fixed = config(prepared, **long, compression={"codec": "none"})
    by_link = config(prepared, **long, control={"adapt": "link", "pinned": []})
    blueprint = ModelPlan.of(fixed, 270)
    parameters = sum(check_blueprint(fixed, blueprint))
    most, least = (record_bytes(each, blueprint, parameters) for each in (fixed, by_link))
    assert least < most / 20

    class Usage:
        free = (least + most) // 2

    monkeypatch.setattr(capacity_check.shutil, "disk_usage", lambda _: Usage)
    monkeypatch.setattr(capacity_check.memory, "disk_bytes", lambda *_: 0)
    preflight.check_run(by_link, 270, sites_here=2)
    with pytest.raises(ConfigError, match=r"the run's record will need"):
        preflight.check_run(fixed, 270, sites_here=2)


def test_a_bound_bounds_what_the_record_needs(prepared: Path) -> None:
    many = {"outer": {"rounds": 10**6}, "compression": {"codec": "none"}}
    whole, rounds, budget = (
        config(prepared, **many, record={"keep": keep}) for keep in ("auto", 8, "10MB")
    )
    blueprint = ModelPlan.of(whole, 270)
    parameters = sum(check_blueprint(whole, blueprint))
    assert record_bytes(budget, blueprint, parameters) <= 4 * parameters + 2 * 10**7
    # 8 rounds in windows of 2, two of which may be under way; 5 states of 8 bytes per parameter.
    (payload,) = payload_bytes(rounds, blueprint, ["none"])
    expected = 4 * parameters + 2 * (12 * payload + 5 * 8 * parameters)
    assert record_bytes(rounds, blueprint, parameters) == expected
    assert record_bytes(whole, blueprint, parameters) > 1000 * expected


def test_a_budget_that_holds_no_states_is_refused(prepared: Path) -> None:
    small = config(prepared, record={"keep": "100kB"})
    with pytest.raises(ConfigError, match=r'record\.keep = "100kB": holds too few states'):
        preflight.check_run(small, 270, sites_here=2)


FOUR: dict[str, Any] = {name: {} for name in ("lyon", "oslo", "paris", "rome")}


def test_a_budget_whose_quarter_holds_no_round_is_refused(prepared: Path) -> None:
    """Two windows always stay: with larger rounds there would be more than the budget."""
    dense = {"compression": {"codec": "none"}, "sites": FOUR}
    run = config(prepared, **dense)
    blueprint = ModelPlan.of(run, 270)
    parameters = count_parameters(blueprint.hf_config)
    (payload,) = payload_bytes(run, blueprint, ["none"])
    least = 4 * (4 * payload + 8 * parameters)
    assert least > 64 * parameters + 10**6, "a budget that holds eight states"

    def keeping(keep: str, **sections: Any) -> RunConfig:
        return config(prepared, **{**dense, **sections}, record={"keep": keep})

    needed = -(-least // 10**6)
    preflight.check_run(keeping(f"{needed}MB"), 270, sites_here=4)
    with pytest.raises(ConfigError) as caught:
        preflight.check_run(keeping(f"{needed - 1}MB"), 270, sites_here=4)
    assert str(caught.value) == (
        f'record.keep = "{needed - 1}MB": a round\'s payloads take {size(4 * payload)} at each '
        "site, and a quarter of the budget must hold them and a state; give at least "
        f'"{needed}MB", a number of rounds, or "all"'
    )
    # What the controller may send counts with the least.
    by_link = {"control": {"adapt": "link", "pinned": []}}
    preflight.check_run(keeping(f"{needed - 1}MB", **by_link), 270, sites_here=4)
    preflight.check_run(config(prepared, **dense, record={"keep": 1}), 270, sites_here=4)
    off = {"keep": f"{needed - 1}MB", "enabled": False}
    preflight.check_run(config(prepared, **dense, record=off), 270, sites_here=4)


def test_auto_is_never_refused_and_says_what_large_rounds_take(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = {"compression": {"codec": "none"}, "sites": FOUR}
    run = config(prepared, outer={"rounds": 10**6}, **dense)
    blueprint = ModelPlan.of(run, 270)
    parameters = count_parameters(blueprint.hf_config)
    (payload,) = payload_bytes(run, blueprint, ["none"])
    monkeypatch.setattr("dilocox.record.writer.windows.WHOLE_BELOW", 0)
    monkeypatch.setattr("dilocox.record.writer.windows.AUTO_BYTES", 0)
    monkeypatch.setattr("dilocox.record.writer.windows.AUTO_BYTES_PER_PARAMETER", 64)
    preflight.check_run(run, 270, sites_here=4)
    most = 3 * (4 * payload + 8 * parameters)
    assert most > 64 * parameters
    assert record_bytes(run, blueprint, parameters) == 4 * parameters + most // 4 * 4
    assert f"the newest {size(most)} stay" in record_line(run, blueprint, parameters)


def test_the_start_says_what_the_record_will_be(prepared: Path) -> None:
    def line(**sections: Any) -> str:
        run = config(prepared, **sections)
        return record_line(run, ModelPlan.of(run, 270), 10**10)

    (payload,) = payload_bytes(config(prepared), ModelPlan.of(config(prepared), 270), ["int4"])
    of_round = f"record: {size(2 * payload)} a round and site with codec int4, "
    codec = {"compression": {"codec": "int4"}}
    assert line(**codec) == (
        of_round + "21.6 TB a day at most for each Gbps of a site's uplink; the newest 800.0 GB "
        "stay (record.keep)"
    )
    declared = {"adapt": "link", "link": "100mbit"}
    assert line(**codec, control=declared, record={"keep": 5}) == (
        of_round + "2.2 TB a day at most over control.link = 100mbit; the newest 5 rounds stay "
        "(record.keep)"
    )
    timed = {"adapt": "link", "step_seconds": 2.0}
    days = 86400 / (2 * config(prepared).outer.inner_steps)
    assert line(**codec, control=timed, record={"keep": "all"}) == (
        of_round
        + f"{size(2 * payload * days)} a day at control.step_seconds; the whole record stays"
    )


# --- pieces of payloads -----------------------------------------------------------------------


def test_pieces_take_room_beside_payloads_or_instead_of_them(prepared: Path) -> None:
    sites: dict[str, Any] = {"sites": {name: {} for name in "abcd"}}
    plain = config(prepared, **sites)
    cut = config(prepared, **sites, availability={"needed": 2})
    spared = config(prepared, **sites, availability={"needed": 2, "keep_whole": False})
    blueprint = ModelPlan.of(plain, 270)
    parameters = sum(check_blueprint(plain, blueprint))
    whole, beside, instead = (
        record_bytes(each, blueprint, parameters) - 4 * parameters for each in (plain, cut, spared)
    )
    assert (beside, instead) == (whole * 3 // 2, whole // 2)
    assert record_line(plain, blueprint, parameters).endswith("; the whole record stays")
    assert "for this site's pieces; the whole record" in record_line(cut, blueprint, parameters)
    assert "nothing else of rounds" in record_line(spared, blueprint, parameters)


def test_a_site_without_the_package_is_told_before_any_process_starts(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites: dict[str, Any] = {"sites": {name: {} for name in "abcd"}}
    cut = config(prepared, **sites, availability={})
    preflight.check_run(cut, 270, sites_here=4)
    monkeypatch.setattr(capacity_check.erasure, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'dilocox\[availability\]'"):
        preflight.check_run(cut, 270, sites_here=4)
    preflight.check_run(config(prepared, **sites), 270, sites_here=4)
