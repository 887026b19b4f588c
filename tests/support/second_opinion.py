"""What sites have earned, computed a second time: no code is shared with `dilocox chain`."""

from __future__ import annotations

import base64
import json
from fractions import Fraction
from pathlib import Path
from typing import Any


def second_opinion(folder: Path, size: int) -> dict[str, int]:
    """Wei by account after the first `size` statements, from the plain text of the log alone."""
    steps: dict[str, Any] = {}
    verdicts: list[dict[str, Any]] = []
    plans: dict[int, Any] = {}
    resumes: list[int] = []
    run: dict[str, Any] = {}
    lines = (folder / "record" / "statements.jsonl").read_text().splitlines()[:size]
    for number, line in enumerate(lines):
        statement = json.loads(base64.b64decode(json.loads(line)["payload"]))
        kind, said = statement["predicateType"], statement["predicate"]
        subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        if "run-manifest" in kind:
            run = said["config"]
        elif "outer-step" in kind:
            steps[said["exchange_key"]] = {**said, "paid": subjects, "at": number}
        elif ":plan:" in kind:
            plans[said["round"]] = said["plan"]
        elif ":resume:" in kind:
            resumes.append(number)
            steps = {key: each for key, each in steps.items() if each["tick"] <= said["tick"]}
            plans = {n: each for n, each in plans.items() if each["first_tick"] <= said["tick"]}
        elif "audit-verdict" in kind:
            verdicts.append({**said, "file": subjects["verdict"]})
    refused = refused_of(run, steps, plans, resumes, verdicts)
    tokens: dict[str, Fraction] = {}
    strange = {said["round"] for said in steps.values() if not possible(run, said)}
    strange |= late_rounds(run, steps)
    for said in steps.values():
        train = said["kind"] == "train" and said["round"] not in strange
        for site in said["set"] if train else []:
            shards = range(run["site"]["shards"])
            sent = {f"{site}/{shard}" for shard in shards} <= set(said["paid"])
            shares = said["shares"].get(site, [[1]])
            counts = any(own == [] or max(own) > 0 for own in shares)
            if sent and counts and (site, said["round"]) not in refused:
                read = sum(count for _, count in said["ranges"][site])
                read *= run["data"]["sequence_length"]
                parts = run["site"]["stages"] * said["fragments"]
                tokens[site] = tokens.get(site, Fraction(0)) + Fraction(read, parts)
    wei: dict[str, int] = {}
    terms = run["settlement"]
    for site, paid_for in tokens.items():
        if site in terms["accounts"]:
            who = terms["accounts"][site].lower()
            wei[who] = wei.get(who, 0) + int(paid_for * terms["price"] * 1000)
    return wei


def refused_of(
    run: Any, steps: Any, plans: Any, resumes: list[int], verdicts: list[Any]
) -> set[tuple[str, int]]:
    """(site, round) whose newest standing verdict of an auditor of the run file is bad."""
    newest: dict[tuple[str, str, int], tuple[int, str]] = {}
    files: set[tuple[str, str, int, str]] = set()
    for said in verdicts:
        where = (said["auditor"], said["site"], said["round"])
        after = [each for each in resumes if each >= said["seen"]]
        if after:
            own = [each for each in steps.values() if each["round"] == said["round"]]
            due = plans[said["round"]]["fragments"] if said["round"] in plans else 10_000
            if len(own) < due * run["site"]["stages"] or any(e["at"] > after[0] for e in own):
                continue
        if (*where, said["file"]) in files:
            continue
        files.add((*where, said["file"]))
        if where not in newest or said["seen"] >= newest[where][0]:
            newest[where] = (said["seen"], said["verdict"])
    return {
        (site, number)
        for (auditor, site, number), (_, verdict) in newest.items()
        if auditor in run["settlement"]["auditors"] and verdict in ("MISMATCH", "FAIL")
    }


def possible(run: Any, said: Any) -> bool:
    """No sequence number is read twice, and nobody reads more than its batches."""
    numbers: list[tuple[str, int]] = []
    for site, ranges in said["ranges"].items():
        own = [(said["spaces"][site], n) for start, count in ranges
               for n in range(start, start + count)]  # fmt: skip
        if len(own) > run["site"]["batch_size"] * said["inner_steps"]:
            return False
        numbers += own
    return len(numbers) == len(set(numbers))


def late_rounds(run: Any, steps: Any) -> set[int]:
    """Rounds after the run file's last inner step."""
    lengths: dict[int, int] = {}
    odd: set[int] = set()
    for said in steps.values():
        if lengths.setdefault(said["round"], said["inner_steps"]) != said["inner_steps"]:
            odd.add(said["round"])
    planned = run["outer"]["rounds"] * run["outer"]["inner_steps"]
    return odd | {
        number for number in lengths
        if sum(length for n, length in lengths.items() if n <= number) > planned
    }  # fmt: skip
