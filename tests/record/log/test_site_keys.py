"""Another key of a name is refused by who reads the record, or is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.coordinator.identity import OPERATOR
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.record_keys import RecordKey
from dilocox.coordinator.server.refusals import Caller
from dilocox.errors import RecordError
from dilocox.record.log.signed_note import NoteKey
from dilocox.record.log.site_keys import SiteKeys
from dilocox.record.verify.counts import told_signers
from dilocox.record.verify.run_history import RunHistory, read_history
from tests.support.record_scene import KEYS, Scene

OTHER = RecordKey.of("09" * 32)


def course_of(scene: Scene) -> RunHistory:
    scene.notary.cover()
    scene.notary.close()
    writer = scene.notary.writer
    lines = (scene.config.folder / "record" / "statements.jsonl").read_text().splitlines()
    return read_history(lines, NoteKey.parse(str(writer.public)))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    made = Scene(tmp_path)
    made.enrol()
    made.driver.leave("b")
    return made


def test_a_site_that_comes_back_with_its_key_is_nothing_to_say(scene: Scene) -> None:
    scene.driver.enrol("b", KEYS["b"])
    keys = course_of(scene).keys
    assert keys.kept
    assert keys.known["b"] == [KEYS["b"].public]


def test_what_the_operator_lets_in_is_named(scene: Scene) -> None:
    request = m.StandingRequest(site="b", change="forget-key")
    scene.driver.core.standings.change(request, Caller(OPERATOR, 0))
    scene.driver.enrol("b", OTHER)
    course = course_of(scene)
    assert course.keys.known["b"] == [KEYS["b"].public, OTHER.public]
    assert "b with 2 keys" in told_signers(course)


def test_a_key_that_nothing_lets_in_is_refused(scene: Scene) -> None:
    """A coordinator that signs in a site's name with a key of its own."""
    scene.driver.core.state.sites["b"].standing.bound = False
    scene.driver.enrol("b", OTHER)
    with pytest.raises(RecordError, match=f"site b enrols with the key {OTHER.public[:12]}, and"):
        course_of(scene)


def test_in_older_records_each_start_has_a_new_key() -> None:
    keys = SiteKeys()
    for key in "123":
        keys.enrolled("a", key)
    assert keys.known == {"a": ["1", "2", "3"]}
