"""Sites with text of their own hold the shared token files too: they must be those of the others.

The tokenizer comes from them, and the held-out text.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.server.refusals import Refused
from tests.support.coordinator_driver import Driver, replayed, run_config

pytestmark = pytest.mark.waits


def private(*sites: str) -> RunConfig:
    """A run of the sites a and b, of which those named have text of their own."""
    raw = run_config("ab").model_dump(mode="json", exclude_none=True)
    for name in sites:
        raw["sites"][name]["data"] = f"own-{name}"
    return resolve_run(raw)


@pytest.mark.parametrize("own", [("a", "b"), ("a",), ("b",)])
def test_other_shared_token_files_are_refused(tmp_path: Path, own: tuple[str, ...]) -> None:
    driver = Driver(tmp_path, private(*own))
    driver.enrol("a", data_digest="1" * 64)
    with pytest.raises(Refused, match=r"token files.* differ from the first") as refused:
        driver.enrol("b", data_digest="2" * 64)
    assert refused.value.kind == "join"
    assert ("sites.b.data" in str(refused.value)) == ("b" in own)
    assert driver.core.state.live == ["a"]
    driver.enrol("b", data_digest="1" * 64)
    assert replayed(driver).data_digest == "1" * 64
    driver.core.close()


def test_who_says_nothing_of_its_files_is_not_compared(tmp_path: Path) -> None:
    driver = Driver(tmp_path, private("a", "b"))
    driver.enrol("a")
    assert driver.enrol("b", data_digest="2" * 64).incarnation == 1
    driver.core.close()
