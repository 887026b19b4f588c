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
    sent: dict[tuple[str, int], dict[str, str]] = {}
    verdicts: list[dict[str, Any]] = []
    resumes: list[int] = []
    run: dict[str, Any] = {}
    lines = (folder / "record" / "statements.jsonl").read_text().splitlines()[:size]
    for number, line in enumerate(lines):
        statement = json.loads(base64.b64decode(json.loads(line)["payload"]))
        kind, said = statement["predicateType"], statement["predicate"]
        subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        if "run-manifest" in kind:
            run = said["config"]
        elif ":contribution:" in kind:
            places = sent.setdefault((said["exchange_key"], said["attempt"]), {})
            places[f"{said['site']}/{said['shard']}"] = subjects["payload"]
        elif "outer-step" in kind:
            key = said["exchange_key"]
            first = steps[key]["at"] if key in steps else number
            steps[key] = {**said, "paid": subjects, "at": first}
        elif ":resume:" in kind:
            resumes.append(number)
            steps = {key: each for key, each in steps.items() if each["tick"] <= said["tick"]}
            sent = {place: each for place, each in sent.items() if place[0] in steps}
        elif "audit-verdict" in kind:
            verdicts.append({**said, "file": subjects["verdict"]})
    tokens: dict[str, Fraction] = {}
    strange = {said["round"] for said in steps.values() if not possible(run, said)}
    strange |= late_rounds(run, steps) | torn_rounds(steps)
    for key, said in steps.items():
        train = said["kind"] == "train" and said["round"] not in strange
        signed = sent.get((key, said["attempt"]), {}).items()
        for site in said["set"] if train else []:
            own = {(f"{site}/{n}", said["paid"].get(f"{site}/{n}"))
                   for n in range(run["site"]["shards"])}  # fmt: skip
            shares = said["shares"].get(site, [[1]])
            counts = any(part == [] or max(part) > 0 for part in shares)
            if own <= set(signed) and counts and not refused(run, said, site, resumes, verdicts):
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


def refused(run: Any, step: Any, site: str, resumes: list[int], verdicts: list[Any]) -> bool:
    """An auditor's newest verdict on the site's round is bad, and it has seen this exchange.

    It has not if the exchange was made only after a resume that the auditor had not seen.
    """
    newest: dict[str, tuple[int, str]] = {}
    files: set[tuple[str, str]] = set()
    for said in verdicts:
        auditor = said["auditor"]
        mine = (said["site"], said["round"]) == (site, step["round"])
        if not mine or auditor not in run["settlement"]["auditors"]:
            continue
        after = [each for each in resumes if each >= said["seen"]]
        if (after and step["at"] > after[0]) or (auditor, said["file"]) in files:
            continue
        files.add((auditor, said["file"]))
        if auditor not in newest or said["seen"] >= newest[auditor][0]:
            newest[auditor] = (said["seen"], said["verdict"])
    return any(verdict in ("MISMATCH", "FAIL") for _, verdict in newest.values())


def possible(run: Any, said: Any) -> bool:
    """No sequence number is read twice, and nobody reads more than its batches.

    The exchange is of a stage that there is, and says of all its sites what they have read.
    """
    if not said["exchange_key"].startswith("outer/") or said["stage"] >= run["site"]["stages"]:
        return False
    if set(said["set"]) - set(said["ranges"]) or set(said["set"]) - set(said["spaces"]):
        return False
    numbers: list[tuple[str, int]] = []
    for site, ranges in said["ranges"].items():
        own = [(said["spaces"][site], n) for start, count in ranges
               for n in range(start, start + count)]  # fmt: skip
        if len(own) > run["site"]["batch_size"] * said["inner_steps"]:
            return False
        numbers += own
    return len(numbers) == len(set(numbers))


def torn_rounds(steps: Any) -> set[int]:
    """Rounds that are cut into fragments in two ways."""
    pairs = {(said["round"], said["fragments"]) for said in steps.values()
             if said["kind"] == "train"}  # fmt: skip
    rounds = [number for number, _ in pairs]
    return {number for number in rounds if rounds.count(number) > 1}


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
