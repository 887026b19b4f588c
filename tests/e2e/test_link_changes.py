"""The controller on a real link that becomes slower, and faster again, while the run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dilocox.config.codec_spec import parse_spec
from dilocox.tools.testbed.testbed import unsupported_reason
from tests.support.harness import write_corpus

REASON = unsupported_reason()
pytestmark = [pytest.mark.alone, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
LIMIT = 600.0
WITHIN = 5
"""Plans are those of the rounds reported when a link changed, plus: 1 round that was going on, 1
whose landings were still of exchanges from before, 1 that is the first to be measured, and 2 until
a plan may look at it."""
DENSE = ["top1", "topk", "int2", "int4", "int8", "none"]
"""Codecs by their bytes; within the first by what is kept."""


def density(plan: dict[str, Any]) -> tuple[int, int]:
    """How much a plan sends, to be compared."""
    spec = parse_spec(plan["codec"])
    return DENSE.index(spec.kind), spec.number if spec.kind == "topk" else 0


@pytest.mark.slow
def test_plans_follow_the_link_two_rounds_after_it_was_measured_and_rest_in_between(
    tmp_path: Path,
) -> None:
    corpus = str(write_corpus(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.link_run", str(tmp_path), corpus, "60mbit", "1mbit",
         "6", "15"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    plans = found["plans"]
    said = "\n".join(f"{p['round']}: {p['codec']} ({p['reason']})" for p in plans)
    slower, faster = found["changed"]
    course = [density(in_force(plans, number)) for number in range(found["rounds"])]
    # int4 takes 0.1 s of a round's 4 s on the fast link, 4.2 s on the slow one.
    before, after, last = course[slower], course[slower + WITHIN], course[faster + WITHIN]
    assert before >= (DENSE.index("int4"), 0), said
    assert after < (DENSE.index("int4"), 0), said
    assert last >= (DENSE.index("int4"), 0), said
    # No swinging: once it has followed, it goes on in that direction or stays.
    down, up = course[slower + WITHIN : faster + 1], course[faster + WITHIN :]
    assert len(up) >= 3
    assert down == sorted(down, reverse=True), said
    assert up == sorted(up), said
    assert len(set(course)) <= 5, said


def in_force(plans: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """The plan of round `number`: only those that differ from the one before are recorded."""
    return [plan for plan in plans if plan["round"] <= number][-1]
