"""Commands that README, tutorial and results quote, and where each of them is run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOIN = (
    "dilocox join HOST:29400 --site paris --run-file examples/two-sites.toml"
    " --token-file TOKEN_FILE"
)
PLANS = {
    "two-offices-0.6b": "--gpu l40s:1",
    "two-offices-7b": "--gpu h100-80g:8",
    "two-offices-32b": "--gpu h100-80g:8x4",
    "qwen1.5-107b": "--gpu a800-40g:8x10",
}
"""Run files of docs/sizes.md, and what each site has there."""
PAGES = ("README.md", "docs/measured.md", "docs/results.md", "docs/sizes.md", "docs/tutorial.md")
TWO_MACHINES = (
    "dilocox data prepare examples/two-machines.toml",
    "ssh OTHER mkdir -p dilocox/runs/two-machines",
    "scp -r runs/two-machines/data OTHER:dilocox/runs/two-machines/",
    "dilocox coordinator examples/two-machines.toml",
    "scp runs/two-machines/coordinator/tokens/lyon OTHER:dilocox/token",
    "dilocox join HOST:29400 --site lyon --run-file examples/two-machines.toml --token-file token",
    "dilocox join HOST:29400 --site paris --run-file examples/two-machines.toml"
    " --token-file runs/two-machines/coordinator/tokens/paris",
    "dilocox status runs/two-machines",
    "dilocox verify runs/two-machines",
)
"""The tutorial's last part, in its order; `test_two_machines` runs them."""
QUALITY = "python -m benchmarks.quality --regime paper --sites 4 --iid no --only core"
RUN_ELSEWHERE = {
    "make test": "is what runs this",
    ". .venv/bin/activate": "a shell's own command",
    "make setup": "the first thing that `make quickstart` does",
    "dilocox plan": "below, with what it is asked",
    "dilocox audit": "tests/tools/audit",
    "dilocox serve": "tests/tools/serving",
    "dilocox handover": "tests/e2e/test_handover.py",
    "dilocox export --release": "tests/tools/release",
    "dilocox status RUN_FOLDER": "tests/tools/report/test_status.py",
    "dilocox publish RUN_FOLDER --to DIR": "tests/tools/release/test_publish.py",
    "python -m benchmarks.single_site --pairs 16": "tests/benchmarks",
    "python -m benchmarks.single_site --own-loop --pairs 30": "tests/benchmarks",
    "python -m benchmarks.single_site --own-loop --threads 1 --pairs 22": "tests/benchmarks",
    "python -m benchmarks.evidence.texts DIR": "tests/benchmarks",
    "python -m benchmarks.evidence --texts DIR --wikitext DIR --json FILE": "tests/benchmarks",
    "python -m benchmarks.finetune --model DIR --wikitext DIR --modes lora": "tests/benchmarks",
    "python -m benchmarks.overlap --quick": "tests/benchmarks",
    "python -m benchmarks.time_to_loss --second --texts DIR --json NEW.json": "tests/benchmarks",
    "python -m benchmarks.time_to_loss --texts DIR --json NEW.json": "tests/benchmarks",
    "python -m benchmarks.wan --ratio 400 --sites 2 --json NEW.json": "tests/benchmarks",
    "python -m benchmarks.wan --ratio 400 --sites 4 --json NEW.json": "tests/benchmarks",
    "python -m benchmarks.wan --docs docs/measured.md": "tests/benchmarks",
    "python -m benchmarks.wan.beside --work 0.005 --json NEW.json": "tests/benchmarks",
    "python -m benchmarks.wan.beside --work 0.005 --blocks 6 --allreduce 2 --json NEW.json": (
        "tests/benchmarks"
    ),
    "python -m benchmarks.wan.beside --batch 32 --width 256 --allreduce 2 --json NEW.json": (
        "tests/benchmarks"
    ),
    "python -m benchmarks.wan.beside --ratio 40 --blocks 2 --json NEW.json": "tests/benchmarks",
    "python -m benchmarks.wan.beside --ratio 4000 --batch 4 --blocks 2 --json NEW.json": (
        "tests/benchmarks"
    ),
    QUALITY: "tests/benchmarks",
    "python -m benchmarks.gpu --minutes 9 --json FILE": "tests/benchmarks",
    "python scripts/draw_measured.py": "tests/test_docs.py",
    "python -m benchmarks.codecs": "tests/benchmarks",
    "python -m benchmarks.latency": "tests/benchmarks",
    "python -m benchmarks.exchange": "tests/benchmarks",
    "python -m benchmarks.outer_cost": "tests/benchmarks",
    "python -m benchmarks.record --pairs 3 --rounds 14": "tests/benchmarks",
    "python -m benchmarks.attacks": "tests/benchmarks",
    "python -m benchmarks.uneven --inner-steps 40 --rounds 8": "tests/benchmarks",
    "python -m benchmarks.chaos --parts 9": "tests/benchmarks",
    "python -m benchmarks.published_grid --json NEW.json": "tests/benchmarks",
    "python -m benchmarks.long_run --rounds 10000": "tests/benchmarks",
    "python -m pytest tests/e2e/test_wire_bytes.py": "itself",
    "python -m pytest tests/e2e/test_resume.py": "itself",
    "python -m pytest tests/e2e/test_engine.py": "itself",
    "python -m pytest tests/e2e/test_rejoin.py": "itself",
}


def commands() -> list[str]:
    """Commands of README, results and sizes: sh blocks, code spans that begin like a command."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    lines = [
        line.split("#")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    spans = re.findall(r"`((?:python|make|dilocox) [^`]+)`", prose)
    return [line.removeprefix(".venv/bin/") for line in [*lines, *spans] if line]


def plan_command(name: str) -> str:
    """The command of docs/sizes.md for a run file."""
    return f"dilocox plan examples/{name}.toml {PLANS[name]} --link 1gbit"


def known() -> list[str]:
    """Commands that some test runs, or whose program it tests."""
    return [
        "make quickstart",
        'dilocox generate runs/quickstart --prompt "def main():"',
        "dilocox coordinator examples/two-sites.toml",
        "dilocox verify runs/quickstart",
        "dilocox report runs/quickstart",
        *map(plan_command, PLANS),
        JOIN,
        *TWO_MACHINES,
        *RUN_ELSEWHERE,
    ]
