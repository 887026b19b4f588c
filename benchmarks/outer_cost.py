"""Measures the processor time of exchanges as a share of training, with the controller's plans.

Two sites of one rank and one thread each train on this machine with a timeline (`--trace`), once
per declared link. The sites measure the time of a step and of exchange work, and the controller
chooses codec, H, F and delay accordingly. The figures come from the timelines, per round and site,
after the plan has settled. They are processor times, which a busy machine changes less than
wall-clock times:

- `encode` and `decode` (with averaging the payloads of all sites),
- `boundaries`: pseudo-gradients, landings, outer step and overlap rule, in the training thread,
- `transfer`: sending and receiving payloads,
- `rest`: votes, frames, digests of the anchor, reports, plans,

and their sum (`outer_ms`), also as a `share` of the inner steps' processor time. `counted_ms` is
the part that sites reported to the controller, which keeps it below `control.work` of a round's
wall-clock time. `tokens_per_parameter` is the tokens of a round per site and parameter. Exchange
work costs the same per parameter for any batch, so a larger batch lowers the share in proportion.

`state_bytes` are the bytes per parameter of anchor, momentum, reference and residual, between
exchanges. `outer.device` says whether they are in the host's memory or beside the model. The inner
state of AdamW takes 16 bytes beside it.

It takes a quarter of an hour on two cores, five minutes with --quick.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from dilocox.config.run_config import load_run
from dilocox.inner.memory import outer_bytes_per_parameter
from dilocox.models import count_parameters, load_model_config

LINKS = ("1gbit", "100mbit", "20mbit", "5mbit")
QUICK_LINKS = ("100mbit", "5mbit")
SITES = ("paris", "lyon")
BATCH, LENGTH = 8, 256
STEPS, QUICK_STEPS = 240, 120
"""Inner steps of a run, full and with --quick. The controller leaves at least eight rounds in a
run, whatever exchanges cost. So the run must have room for eight rounds of the length that it would
choose: 30 steps or 12 steps."""
SETTLED = 4
"""Rounds until plans have settled. A plan follows from measurements of two rounds before."""
LIMIT = 900.0
"""Seconds after which a run is aborted."""
PARTS = {
    "encode": "encode",
    "decode and average": "decode",
    "check frames": "rest",
    "boundary": "boundaries",
    "landing": "boundaries",
    "send": "transfer",
    "receive": "transfer",
    "account": "rest",
    "report": "rest",
    "ask for plan": "rest",
}
"""Part by span of the timeline. No span lies inside another span of this list."""
WITHIN = ("encode", "decode and average", "check frames")
"""Spans inside an `exchange` span. Other CPU time of the `exchange` span counts as `rest`."""


def run_file(root: Path, link: str, steps: int) -> Path:
    """Write the run file of a case and return its path."""
    content = {
        "run": {"name": f"outer-{link}", "folder": str(root / "{name}")},
        "model": {
            "architecture": {
                "model_type": "qwen3",
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "max_position_embeddings": LENGTH,
                "tie_word_embeddings": True,
            }
        },
        "data": {
            "source": "python-stdlib",
            "folder": str(root / "data"),
            "vocabulary_size": 2048,
            "sequence_length": LENGTH,
            "max_documents": 200,
            "validation_sequences": 8,
        },
        "site": {"batch_size": BATCH, "micro_batch_size": 8, "threads": 1, "device": "cpu"},
        "outer": {"steps": steps},
        "control": {"link": link},
        "checkpoint": {"every_rounds": 0},
        "evaluation": {"completion_tokens": 0},
        "sites": {site: {} for site in SITES},
    }
    return common.write_run_file(root, link, content)


def rounds_of(trace: Mapping[str, Any]) -> dict[tuple[int, int], dict[str, float]]:
    """Return CPU milliseconds by part, and of the inner steps (`inner`), by (process, round).

    A round lasts from its mark to the next mark of the same process. Time after the last mark (the
    flush) is not counted.
    """
    events = trace["traceEvents"]
    marks: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "i" and event["name"].startswith("round "):
            marks[event["pid"]].append((event["ts"], int(event["name"].split()[1])))
    found: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event["ph"] != "X":
            continue
        begun = sorted(marks[event["pid"]])
        earlier = [number for moment, number in begun if moment <= event["ts"]]
        if not earlier or earlier[-1] == begun[-1][1]:
            continue
        parts = found[event["pid"], earlier[-1]]
        name, spent = event["name"], event.get("tdur", 0.0) / 1000
        if name == "inner step":
            parts["inner"] += spent
        elif name == "exchange":
            parts["rest"] += spent
        elif name in PARTS:
            parts[PARTS[name]] += spent
            if name in WITHIN:
                parts["rest"] -= spent
    return found


def row(link: str, records: Sequence[Mapping[str, Any]], trace: Mapping[str, Any],
        parameters: int, state_bytes: int, fragments: int) -> common.Row:  # fmt: skip
    """Return medians over sites and rounds.

    Only rounds from `SETTLED` on that had the most frequent plan count. Raises `ValueError` if
    there are none.
    """
    plans = [record for record in records if record["kind"] == "plan"]
    settled = {key: found for key, found in rounds_of(trace).items() if key[1] >= SETTLED}
    if not settled:
        raise ValueError(f"{link}: no round after the first {SETTLED}; give it more steps")
    in_force = {
        key: max(n for n, plan in enumerate(plans) if plan["round"] <= key[1]) for key in settled
    }
    chosen = statistics.mode(in_force.values())
    plan = plans[chosen]
    rounds = [found for key, found in settled.items() if in_force[key] == chosen]
    parts = {
        name: statistics.median(found[name] for found in rounds)
        for name in ("inner", "encode", "decode", "boundaries", "transfer", "rest")
    }
    outer = [sum(found.values()) - found["inner"] for found in rounds]
    share = [spent / found["inner"] for spent, found in zip(outer, rounds, strict=True)]
    chosen_rounds = {number for (_, number), n in in_force.items() if n == chosen}
    counted = [
        1000 * record["exchange_work_seconds"]
        for record in records
        if "exchange_work_seconds" in record and record["round"] in chosen_rounds
    ]
    return {
        "link": link,
        "codec": plan["codec"],
        "inner_steps": plan["inner_steps"],
        "fragments": fragments,
        "delay": plan["delay"],
        "tokens_per_parameter": round(plan["inner_steps"] * BATCH * LENGTH / parameters, 4),
        **{f"{name}_ms": round(spent, 2) for name, spent in parts.items()},
        "outer_ms": round(statistics.median(outer), 2),
        "counted_ms": round(statistics.median(counted), 2) if counted else None,
        "share": round(statistics.median(share), 5),
        "share_worst": round(max(share), 5),
        "state_bytes": state_bytes,
        "rounds": len(rounds) // len(SITES),
    }


def measure(root: Path, link: str, steps: int) -> common.Row:
    """Train a run, and return its row.

    Raises `RuntimeError` with the output of a failed run, or if the run has not ended after
    `LIMIT` seconds. Raises `ValueError` as `row`.
    """
    path = run_file(root, link, steps)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dilocox", "train", str(path), "--trace", "--overwrite"],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{link}: training has not ended after {LIMIT:g} s") from None
    if done.returncode:
        raise RuntimeError(f"{link}: training failed\n{done.stdout}{done.stderr}")
    config = load_run(path)
    folder = root / config.run.name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open(encoding="utf-8")]
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    parameters = count_parameters(load_model_config(config.model, config.data.vocabulary_size))
    return row(
        link, records, trace, parameters, outer_bytes_per_parameter(config), config.outer.fragments
    )


COLUMNS = {
    "link": "s",
    "codec": "s",
    "inner_steps": "d",
    "fragments": "d",
    "tokens_per_parameter": ".3f",
    "inner_ms": ",.0f",
    "encode_ms": ".1f",
    "decode_ms": ".1f",
    "boundaries_ms": ".1f",
    "transfer_ms": ".1f",
    "rest_ms": ".1f",
    "counted_ms": ".1f",
    "share": ".2%",
    "share_worst": ".2%",
    "state_bytes": "d",
}


def main() -> int:
    """Measure, print and write. Returns the exit code."""
    options = common.parser(__doc__ or "").parse_args()
    common.end_on_signals()
    on = common.machine()
    root = Path(tempfile.mkdtemp(prefix="dilocox-outer-cost-"))
    rows, code = [], 0
    try:
        for link in QUICK_LINKS if options.quick else LINKS:
            rows.append(measure(root, link, QUICK_STEPS if options.quick else STEPS))
            common.say(common.table(rows[-1:], COLUMNS).splitlines()[1])
    except (RuntimeError, ValueError) as error:
        # Results measured before the failure are kept.
        common.say(f"outer_cost: {error}")
        code = 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if rows:
        print(common.table(rows, COLUMNS))
    if options.json and rows:
        about = {"batch": BATCH, "sequence_length": LENGTH, "sites": len(SITES)}
        common.write_json(options.json, "outer_cost", on, about, rows)
    return code


if __name__ == "__main__":
    sys.exit(main())
