"""A name keeps the key that its site has first joined with."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from dilocox.coordinator.identity import write_private
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.record_keys import RecordKey, key_file
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.refusals import Refused
from dilocox.errors import JoinError
from tests.coordinator.server.test_name_standing import change
from tests.support.coordinator_driver import Driver

pytestmark = pytest.mark.waits

HONEST, THIEF = RecordKey.of("01" * 32), RecordKey.of("02" * 32)
OTHER = f"site b: its key is {THIEF.public[:12]}, not {HONEST.public[:12]} with which it joined"


def test_who_has_stolen_a_token_cannot_take_the_name_of_a_site_that_is_away(
    driver: Driver,
) -> None:
    driver.enrol("a", RecordKey.new())
    driver.enrol("b", HONEST)
    driver.leave("b")
    for go_on in (lambda: None, driver.reopen):
        go_on()
        with pytest.raises(Refused, match=OTHER) as refused:
            driver.enrol("b", THIEF)
        assert refused.value.kind == "join"
        assert "dilocox leave RUN_FOLDER --site b --forget-key" in str(refused.value)
        with pytest.raises(Refused, match="site b: its key is none, not"):
            driver.enrol("b")
        with pytest.raises(Refused, match="does not prove that it holds its key"):
            driver.enrol("b", record_key=HONEST.public)
        with pytest.raises(Refused, match="the proof that it holds its key is wrong"):
            driver.enrol("b", THIEF, record_key=HONEST.public)
    # The site itself, which has crashed, comes back with what lies in its folder.
    assert driver.enrol("b", HONEST).incarnation == 2


def test_a_proof_is_for_one_request_of_one_site(driver: Driver) -> None:
    """What another site, or another run's coordinator, has seen is worth nothing."""
    driver.enrol("b", HONEST)
    driver.leave("b")
    fingerprint = driver.core.authority.fingerprint
    for proof in (
        HONEST.prove("b", fingerprint, "another request"),
        HONEST.prove("a", fingerprint, driver_csr(driver)),
        HONEST.prove("b", "0" * 64, driver_csr(driver)),
    ):
        with pytest.raises(Refused, match="the proof that it holds its key is wrong"):
            driver.enrol("b", record_key=HONEST.public, record_proof=proof)


def test_a_site_whose_disk_is_lost_comes_back_by_the_operators_word(driver: Driver) -> None:
    driver.enrol("b", HONEST)
    driver.leave("b")
    assert "with another key, once" in change(driver, "b", "forget-key")
    with pytest.raises(Refused, match="site b: is bound to no key"):
        change(driver, "b", "forget-key")
    driver.reopen()
    assert driver.enrol("b", THIEF).incarnation == 2
    feed = [text for _, _, _, text in driver.core.state.feed]
    assert "b may join with another key, by the operator's word" in feed
    assert feed[-1] == "b enrolled again (incarnation 2), with another key than before"
    # From now on that one is its key.
    driver.leave("b")
    with pytest.raises(Refused, match=f"its key is {HONEST.public[:12]}, not {THIEF.public[:12]}"):
        driver.enrol("b", HONEST)
    change(driver, "b", "ban")
    change(driver, "b", "unban")
    assert driver.enrol("b", HONEST).incarnation == 3


def test_a_resume_changes_no_key(driver: Driver) -> None:
    keys = {site: RecordKey.new() for site in "abc"}
    for site, key in keys.items():
        driver.enrol(site, key)
        driver.beat(site)
    for site in "abc":
        driver.ready(site)
    driver.plan(0, "a")
    for site in "abc":
        driver.write_checkpoint(site, 2, 0, 2)
    driver.core.departures.stop(m.StopRequest(reason="pause"))
    driver.core.resume()
    with pytest.raises(Refused, match="site b: its key is"):
        driver.enrol("b", THIEF)
    assert [driver.enrol(site, key).incarnation for site, key in keys.items()] == [2, 2, 2]


def test_a_log_from_before_there_were_keys_is_gone_on_with() -> None:
    old = {"time": 1.0, "site": "b", "incarnation": 1, "request": "", "certificate": "",
           "versions": {}, "data_digest": None}  # fmt: skip
    event = e.Event.decode("Enrolled", old)
    assert isinstance(event, e.Enrolled)
    assert event.key == ""


def test_the_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = key_file(tmp_path / "run", "lyon")
    assert path == tmp_path / "run" / "private" / "lyon.key"
    found: list[RecordKey] = []
    threads = [
        threading.Thread(target=lambda: found.append(RecordKey.kept(path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    assert RecordKey.kept(path) == found[0]
    assert [p.stat().st_mode & 0o077 for p in (path, path.parent)] == [0, 0]
    assert list(path.parent.iterdir()) == [path]
    path.write_text("rubbish")
    with pytest.raises(JoinError, match="is not a key of a site; restore it, or remove it and"):
        RecordKey.kept(path)
    with pytest.raises(JoinError, match=r"cannot be used \(File exists\); make its folder"):
        RecordKey.kept(path / "below")


def driver_csr(driver: Driver) -> str:
    from tests.support.coordinator_driver import CSR

    return CSR + "\n" * sum(driver.incarnations.values())


def test_a_full_disk_leaves_no_part_of_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_private(tmp_path / "key", b"secret")
    assert not list(tmp_path.iterdir())
