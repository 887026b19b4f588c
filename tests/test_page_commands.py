"""Every command that README, tutorial and results quote is known to the tests."""

from __future__ import annotations

from tests.support.page_commands import commands, known


def test_every_command_is_known() -> None:
    unknown = [line for line in commands() if line not in known()]
    assert unknown == [], "run these in a test, then list them in tests/support/page_commands.py"
