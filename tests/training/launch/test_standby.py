"""What a standby refuses before it follows or takes over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilocox.cli.main import main
from dilocox.config.run_config import RunConfig
from dilocox.coordinator.identity import Authority
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.event_log import EventLog
from dilocox.coordinator.server.generations import MARKER, Generations, refuse_standby
from dilocox.errors import ConfigError, JoinError, TrainingError
from dilocox.record.writer.one_writer import held
from dilocox.training.launch.coordinator_process import serve_run
from dilocox.training.launch.standby import follow, take_over
from tests.support.coordinator_driver import run_config

pytestmark = pytest.mark.waits


def config_of(folder: Path, port: int = 1) -> RunConfig:
    config = run_config(run={"folder": str(folder)})
    network = config.network.model_copy(
        update={"port": port, "heartbeat": 0.2, "link_timeout": 5.0}
    )
    return config.model_copy(update={"network": network})


def with_keys(folder: Path) -> Path:
    own = folder / "coordinator"
    Authority(own, ["127.0.0.1"])
    for name in ("token-secret", "record-key"):
        (own / name).write_text("11" * 32)
    return own


class EndedError(Exception):
    """The operator ends the command."""


def with_event(own: Path) -> None:
    log = EventLog(own)
    log.append(e.Created(1.0, "digest", "run"))
    log.close()


def test_a_standby_that_could_not_take_over_is_refused(tmp_path: Path) -> None:
    def told(config: RunConfig, address: str = "127.0.0.1:1") -> None:
        follow(config, address, lambda line: None)

    with pytest.raises(ConfigError, match=r"network\.port: sites must know"):
        told(config_of(tmp_path, port=0))
    with pytest.raises(ConfigError, match=r"lacks authority\.pem, server\.pem, operator\.json"):
        told(config_of(tmp_path))
    own = with_keys(tmp_path)
    with pytest.raises(JoinError, match="not an address"):
        told(config_of(tmp_path), "nowhere")
    with held(own), pytest.raises(TrainingError, match="a process uses this folder"):
        told(config_of(tmp_path))
    # The folder of a coordinator is no standby's.
    with_event(own)
    with pytest.raises(TrainingError, match="the log of a coordinator, not of a standby"):
        told(config_of(tmp_path))


def test_a_standby_that_was_never_answered_is_started_again(tmp_path: Path) -> None:
    with_keys(tmp_path)

    def end(line: str) -> None:
        assert line.endswith("--take-over --gone in place of --standby-of")
        raise EndedError

    for _ in range(2):
        with pytest.raises(EndedError):
            follow(config_of(tmp_path), "127.0.0.1:1", end)
    with pytest.raises(TrainingError, match="is not the folder of a standby that has followed"):
        take_over(config_of(tmp_path), True, lambda line: None)


def test_nobody_takes_over_by_mistake(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(TrainingError, match="is not the folder of a standby"):
        take_over(config, True, lambda line: None)
    own = with_keys(tmp_path)
    refuse_standby(own)
    (own / MARKER).write_text(json.dumps({"of": "127.0.0.1:1", "generation": 1}))
    with pytest.raises(TrainingError, match="is the folder of a standby"):
        refuse_standby(own)
    with pytest.raises(TrainingError, match="is the folder of a standby"):
        serve_run(
            config, tmp_path, None, resume=False, wait_for=None,
            emit=lambda record: None, on_ready=lambda endpoint: None,
        )  # fmt: skip
    with pytest.raises(TrainingError, match=r"no answer .* add --gone"):
        take_over(config, False, lambda line: None)
    with pytest.raises(TrainingError, match="this standby has no event of the run yet"):
        take_over(config, True, lambda line: None)
    with_event(own)
    # On a free port no site would find it, and the first would have ended by then.
    with pytest.raises(ConfigError, match=r"network\.port: sites must know"):
        take_over(config_of(tmp_path, port=0), True, lambda line: None)
    assert Generations(own).current == 1
    said: list[str] = []
    take_over(config, True, said.append)
    assert said[0].endswith("does not answer; you say that it has ended")
    # Of three sites one is enough to go on: the operator is told what a mistake would do.
    assert "outer.min_sites is" in said[1]
    assert (Generations(own).begun, (own / MARKER).exists()) == ([0, 1], False)


def test_options_that_contradict_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model.architecture]\nmodel_type = "qwen3"\n[sites.a]\n[sites.b]\n')
    for words, reason in (
        (["--gone"], "--gone: is for --take-over"),
        (["--standby-of", "a:1", "--resume"], "--standby-of follows a coordinator"),
        (["--standby-of", "a:1", "--take-over"], "--standby-of follows a coordinator"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["coordinator", str(path), *words])
        assert end.value.code == 1
        assert reason in capsys.readouterr().err
