"""One file of a public run is changed: which claim says so, and does its line name the file.

Over chain, bundles, evidence and availability pieces. Who changes the log holds its key, and signs
it anew. What a chain's server may lie about is in `settlement/test_chain_tamperings.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("web3")

from tests.support.chains import Chain, in_process
from tests.support.older_record import log_key, resign
from tests.support.public_run import PublicRun
from tests.support.record_scene import SIGNERS

from dilocox.record.bundles.publication import INDEX
from dilocox.record.log import statements as s
from dilocox.record.log.attestation_statements import Attestation
from dilocox.record.log.blob_store import piece_path
from dilocox.record.log.custody import Custody
from dilocox.record.log.transparency_log import PUBLIC, read_log
from dilocox.record.verify.signed_cuts import read_cuts
from dilocox.tools.settlement import ledger, run_on_chain

Change = Callable[[PublicRun], object]
Verdicts = dict[str, str]
FAIL, NOT_RUN = "FAIL", "NOT_RUN"


@pytest.fixture(scope="module")
def chain() -> Chain:
    return in_process()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, chain: Chain) -> PublicRun:
    return PublicRun.make(tmp_path_factory.mktemp("public") / "whole", chain)


def chain_file(run: PublicRun, **said: Any) -> None:
    run.chain_file.write_text(json.dumps({**json.loads(run.chain_file.read_text()), **said}))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x" * 200_000)


def of_kind(entries: list[str], kind: str) -> list[int]:
    return [n for n, entry in enumerate(entries) if s.opened(entry)[0].kind == kind]


def without(kind: str, number: int) -> Change:
    """The log loses the statement of this number, from 0, of a kind."""
    return lambda run: resign(
        run.folder, lambda entries: entries.pop(of_kind(entries, kind)[number])
    )


def altered(
    kind: str, change: Callable[[dict[str, Any], dict[str, str]], object], signer: str = ""
) -> Change:
    """The last statement of a kind says something else, signed by a site, or by the log's key.

    `change` is given predicate and subjects.
    """

    def within(run: PublicRun, entries: list[str]) -> None:
        number = of_kind(entries, kind)[-1]
        found = s.opened(entries[number])[0]
        said = json.loads(json.dumps(dict(found.predicate)))
        subjects = dict(found.subjects)
        change(said, subjects)
        own = SIGNERS[signer] if signer else s.Signer(log_key(run.folder))
        entries[number] = own.sign(s.Statement(kind, subjects, said))

    return lambda run: resign(run.folder, lambda entries: within(run, entries))


def swapped(run: PublicRun) -> None:
    """Two payloads' commitments change their places in the log: all signatures stay good."""

    def within(entries: list[str]) -> None:
        first, second = of_kind(entries, s.COMMITMENT)[:2]
        entries[first], entries[second] = entries[second], entries[first]

    resign(run.folder, within)


def bundle(run: PublicRun, number: int = 0) -> Path:
    return run.public / run.index.bundles[number].name


def index(change: Callable[[list[str]], object]) -> Change:
    """The lines of the index are changed."""

    def within(run: PublicRun) -> None:
        lines = (run.public / INDEX).read_text().splitlines(keepends=True)
        change(lines)
        (run.public / INDEX).write_text("".join(lines))

    return within


def index_of_another_key(run: PublicRun) -> None:
    """A stranger publishes the same bundles under a key of his own."""
    found = run.index
    found.log = replace(found.log, public=bytes.fromhex(SIGNERS["a"].public))
    bundles, found.bundles, found.lines = found.bundles, [], []
    for each in bundles:
        found.add(each, SIGNERS["a"])
    (run.public / INDEX).write_text(found.text)


def evidence(run: PublicRun, site: str = "b") -> Path:
    entries = read_log(run.folder / "record").entries
    said = [s.opened(entry)[0] for entry in entries]
    (found,) = (each for each in map(Attestation.of, [x for x in said if x.kind == s.ATTESTATION])
                if each.site == site)  # fmt: skip
    return run.folder / "record/store/sha256" / found.evidence[:2] / found.evidence[2:]


def piece(run: PublicRun, site: str = "b", of: str = "b", number: int = 0) -> Path:
    """The file of a site's store with the piece that is `of`'s, of cut `number`."""
    signed = read_cuts(run.folder).cuts[number]
    return run.root / site / piece_path(signed.root, "abc".index(of))


def other_root(said: dict[str, Any], subjects: dict[str, str]) -> None:
    own = Custody.of(s.Statement(s.CUSTODY, subjects, said))
    held = tuple(replace(each, root="7" * 64) for each in own.held)
    other = replace(own, held=held).statement(said["run"])
    said.update(other.predicate)
    subjects.update(other.subjects)


class Case(NamedTuple):
    change: Change
    expected: Verdicts
    """Verdicts that are others than before the change."""
    reason: str
    """Part of the line of the first of them."""


ABSENT = "absent"
"""Of a claim that a run has by its run file, which the reader cannot trust now."""
UNASKED = {"anchors": NOT_RUN, "stakes": NOT_RUN}
CUT = {"attestations": FAIL, "anchors": FAIL}
GONE = {
    **dict.fromkeys(("attestations", "anchors", "pieces"), NOT_RUN),
    **dict.fromkeys(("availability", "stakes"), ABSENT),
}
UNREAD = {
    "bundles": FAIL,
    **dict.fromkeys(("log", "signatures", "run-file", "payloads"), NOT_RUN),
    **dict.fromkeys(("code", "data", "start", "metrics"), ABSENT), **GONE,
}  # fmt: skip
UNSIGNED = {
    "signatures": FAIL, **dict.fromkeys(("run-file", "payloads", "code"), NOT_RUN), **GONE,
}  # fmt: skip
PIECES = {"pieces": FAIL}
OF_FOLDER: dict[str, Case] = {
    "nothing": Case(lambda run: None, {}, ""),
    "one piece is gone, which two others replace": Case(lambda run: piece(run).unlink(), {}, ""),
    # The chain.
    "chain.json names another contract": Case(
        lambda run: chain_file(run, contract="0x" + "55" * 20), UNASKED, "the chain"),
    "chain.json names another owner": Case(
        lambda run: chain_file(run, owner="0x" + "55" * 20), UNASKED, "is not registered"),
    "chain.json names another log": Case(
        lambda run: chain_file(run, log="44" * 32), UNASKED, "is not registered"),
    "chain.json names another chain": Case(
        lambda run: chain_file(run, chain=5), UNASKED, "the run of chain 5"),
    "chain.json names a later block": Case(
        lambda run: chain_file(run, block=10**6), UNASKED, "since block 1000000"),
    "chain.json is cut": Case(
        lambda run: cut_in_half(run.chain_file), {"refused": FAIL}, "chain.json: not a file of"),
    "the log is cut back behind a head": Case(
        lambda run: resign(run.folder, cut_back),
        {"anchors": FAIL, "availability": NOT_RUN}, "it was cut back"),
    "statements change their places": Case(
        swapped, {"anchors": FAIL}, "is not a prefix of this log"),
    "an enrolment loses its account's signature": Case(
        altered(s.ENROLMENT, lambda said, _: said.pop("stake")), {"stakes": FAIL, **CUT},
        "no account vouches"),
    # Evidence.
    "evidence has another byte": Case(
        lambda run: flip(evidence(run)), {"attestations": FAIL},
        "{evidence}: holds other bytes than its name says"),
    "evidence is cut": Case(
        lambda run: cut(evidence(run)), {"attestations": FAIL}, "holds other bytes"),
    "evidence is gone": Case(
        lambda run: evidence(run).unlink(), {"attestations": NOT_RUN}, "name site b's store"),
    "evidence of another site lies in its place": Case(
        lambda run: shutil.copy(evidence(run, "a"), evidence(run)), {"attestations": FAIL},
        "machine 0 of 1 of b"),
    "the log loses a site's evidence": Case(
        without(s.ATTESTATION, 2), CUT, "no evidence of c for its rounds 0 to 2"),
    "a site files its evidence for another moment": Case(
        altered(s.ATTESTATION, lambda said, _: said.update(root="7" * 64), "c"), CUT,
        "of c: it names a moment that this log never had"),
    "a site files its evidence for another start": Case(
        altered(s.ATTESTATION, lambda said, _: said.update(incarnation=7), "c"), CUT,
        "of c: it is of another start of the site"),
    "the log's holder exchanges a site's evidence": Case(
        altered(s.ATTESTATION, lambda _, subjects: subjects.update(evidence="7" * 64)), UNSIGNED,
        "statement 9: the signature is not one of key"),
    "the reader's policy has a space more": Case(
        lambda run: (run.root / "tee.toml").write_bytes(
            (run.root / "tee.toml").read_bytes() + b" "),
        {"attestations": FAIL}, "the sites agreed on"),
    # Pieces.
    "a piece has another byte": Case(lambda run: flip(piece(run)), PIECES, "piece 1 of outer"),
    "a piece is cut": Case(lambda run: cut(piece(run)), PIECES, "piece 1 of outer"),
    "a piece is longer": Case(lambda run: lengthen(piece(run)), PIECES, "piece 1 of outer"),
    "a piece is empty": Case(
        lambda run: piece(run).write_bytes(b""), PIECES, "piece 1 of outer"),
    "a site's piece lies in the place of another's": Case(
        lambda run: shutil.copy(piece(run, "a", "a"), piece(run)), PIECES,
        "piece 0 lies in the place of piece 1"),
    "a piece of another cut lies in its place": Case(
        lambda run: shutil.copy(piece(run, number=1), piece(run)), PIECES, "piece 1 of outer"),
    "a site signs another root of its piece": Case(
        altered(s.CUSTODY, other_root, "c"), {"availability": FAIL},
        "sites have signed different pieces of the same payloads"),
    "the log's holder signs for a site's piece": Case(
        altered(s.CUSTODY, other_root), UNSIGNED, "signature is not one of key"),
    "a site says that fewer pieces suffice": Case(
        altered(s.CUSTODY, lambda said, _: said.update(needed=1), "c"), {"availability": FAIL},
        "custody of c: 1 of 3 pieces, not 2 of 3"),
    "a site says that it holds another site's piece": Case(
        altered(s.CUSTODY, lambda said, _: said.update(index=0), "c"), {"availability": FAIL},
        "custody of c: piece 0 is not that of c"),
    # The run file.
    "run.toml says another number of steps": Case(
        lambda run: replaced(run.folder / "run.toml", "inner_steps = 4", "inner_steps = 5"),
        {"run-file": FAIL}, "run.toml"),
}  # fmt: skip
OF_BUNDLES: dict[str, Case] = {
    "nothing": Case(lambda run: None, {}, ""),
    "a bundle has another byte": Case(
        lambda run: flip(bundle(run)), UNREAD, "{bundle} has other bytes than were published"),
    "a bundle is cut": Case(lambda run: cut(bundle(run)), UNREAD, "{bundle} has other bytes"),
    "a bundle is longer": Case(lambda run: lengthen(bundle(run)), UNREAD, "{bundle} has other"),
    "a bundle is gone": Case(
        lambda run: bundle(run).unlink(), UNREAD, "{bundle}: was published, but is not there"),
    "a bundle lies in the place of another": Case(
        lambda run: shutil.copy(bundle(run, 1), bundle(run)), UNREAD, "{bundle} has other bytes"),
    "the index loses its first line": Case(
        index(lambda lines: lines.pop(0)), UNREAD, "its line 1 does not follow"),
    "the index loses its last line, so a head of the chain": Case(
        index(lambda lines: lines.pop()), {"anchors": FAIL}, "it was cut back"),
    "the index has a line twice": Case(
        index(lambda lines: lines.append(lines[-1])), UNREAD, "its line 3 does not follow"),
    "the index changes its lines' order": Case(
        index(lambda lines: lines.reverse()), UNREAD, "its line 1 does not follow"),
    "the index is cut within a line": Case(
        lambda run: cut(run.public / INDEX), UNREAD, "its last line was cut short"),
    "the index is that of another key": Case(
        index_of_another_key, UNREAD, "publication.jsonl: it is of log"),
    "chain.json names another owner": OF_FOLDER["chain.json names another owner"],
    "a piece has another byte": OF_FOLDER["a piece has another byte"],
}  # fmt: skip


def cut_in_half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def cut_back(entries: list[str]) -> None:
    """Beyond the newest head of the chain, which ends with the last round but one."""
    del entries[of_kind(entries, s.STEP)[3] + 1 :]


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "bundled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["folder", "bundles"]
)
def test_each_tampering_is_named_by_its_claim(
    whole: PublicRun, chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundled: bool
) -> None:
    for module in (ledger, run_on_chain):
        monkeypatch.setattr(module, "connect", lambda url: chain.web3)
    key = (whole.folder / "record" / PUBLIC).read_text().strip()
    before = whole.seen(key, bundled)
    for claim in ("log", "signatures", "payloads", "availability", "anchors", "stakes", "pieces"):
        assert before.verdicts[claim] == "PASS", before.reasons[claim]
    assert before.verdicts["attestations"] == "SIMULATED"
    cases = OF_BUNDLES if bundled else OF_FOLDER
    found, lines = {}, {}
    for number, (name, case) in enumerate(cases.items()):
        run = whole.copy(tmp_path / f"case-{number}")
        names = {"evidence": evidence(run).name, "bundle": bundle(run).name}
        case.change(run)
        seen = run.seen(key, bundled)
        now = seen.verdicts
        known = now if "refused" in now else {**before.verdicts, **now}
        told = {claim: now.get(claim, ABSENT) for claim in known}
        found[name] = {each: now for each, now in told.items() if now != before.verdicts.get(each)}
        line = seen.reasons[next(iter(case.expected), "log")]
        if case.reason.format(**names) not in line:
            lines[name] = line
    assert lines == {}
    assert found == {name: case.expected for name, case in cases.items()}


def test_there_are_enough_tamperings_of_each_kind() -> None:
    assert len(OF_FOLDER.keys() | OF_BUNDLES.keys()) >= 24
