"""Evidence is filed with a running coordinator, renewed, and never in the way of anything."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.attested_scene import policy_file
from tests.support.coordinator_driver import run_config
from tests.support.machines import SAID, SNP, policy
from tests.support.served_run import Run

from dilocox.cli.main import main
from dilocox.coordinator.client.enrolment import attest
from dilocox.coordinator.protocol.attestation_messages import AttestReply
from dilocox.coordinator.record_keys import RecordKey, key_file
from dilocox.errors import AttestationError, DilocoxError, JoinError
from dilocox.record.log import statements as s
from dilocox.record.log.attestation_statements import MACHINE, Attestation
from dilocox.record.log.blob_store import Store
from dilocox.record.log.statements import Signer
from dilocox.record.writer.notary import TransparencyLogSink
from dilocox.tools.attestation.collecting import Collector
from dilocox.tools.attestation.evidence import Evidence
from dilocox.tools.attestation.filing import Filing
from dilocox.tools.attestation.machine import judge_machine
from dilocox.tools.attestation.policy import PolicyFile


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Folder of a pretended machine, whose root the tests' policy accepts."""
    from dilocox.tools.attestation.simulated_machine import CHAIN_FILE, KEY_FILE, _pem

    folder = tmp_path / "machine"
    folder.mkdir()
    (folder / CHAIN_FILE).write_text(SNP.certificates)
    (folder / KEY_FILE).write_bytes(_pem(SNP.key))
    return folder


@pytest.fixture
def policy_path(tmp_path: Path) -> Path:
    import tomli_w

    path = tmp_path / "tee.toml"
    found = policy(max_age_rounds=4).model_dump(mode="json", exclude_none=True)
    path.write_text(tomli_w.dumps(found))
    return path


@pytest.fixture
def run(tmp_path: Path, policy_path: Path) -> Iterator[Run]:
    """A served coordinator of a recorded run with a policy, and two sites that have joined."""
    record = {"tee": PolicyFile.read(policy_path).digest}
    settings = {"folder": str(tmp_path / "run")}
    config = run_config("ab", run=settings, record=record)
    notary = TransparencyLogSink.open(config, tmp_path / "coordinator", print)
    found = Run(tmp_path / "coordinator", run=settings, record=record, notary=notary)
    for site in "ab":
        found.keys[site] = RecordKey.kept(key_file(tmp_path / "run", site))
    found.start()["a"].plan(0)
    notary.writer.cover()
    yield found
    found.close()
    notary.close()


def filing(run: Run, site: str, machine: Path, **more: Any) -> Filing:
    more.setdefault("policy", PolicyFile.read(machine.parent / "tee.toml"))
    return Filing(
        lambda text: attest(run.url, run.token(site), run.core.timeouts, text),
        Collector.simulated(machine),
        Store(run.config.record_store),
        Signer.from_hex(run.keys[site].private),
        **more,
    )


def attestations(run: Run) -> list[Attestation]:
    lines = (run.config.folder / "record/statements.jsonl").read_text().splitlines()
    found = [s.opened(each)[0] for each in lines]
    return [Attestation.of(each) for each in found if each.kind == s.ATTESTATION]


def test_evidence_names_what_the_coordinator_says(run: Run, machine: Path) -> None:
    own = filing(run, "a", machine)
    text = own.file(own.asked())
    assert text.endswith("filed in round 0 (SNP, SIMULATED)")
    (found,) = attestations(run)
    assert (found.site, found.format) == ("a", MACHINE)
    evidence = Evidence.from_bytes(own.store.get(found.evidence))
    said = json.loads(evidence.runtime_data)
    assert (said["site"], said["incarnation"]) == ("a", 1)
    assert said["key"] == run.keys["a"].public
    assert said["run"] == own.asked().run


def test_evidence_that_breaks_the_policy_is_not_filed(run: Run, machine: Path) -> None:
    other = policy_file(policy(simulation={"roots": ["0" * 64]}))
    own = filing(run, "a", machine, policy=other)
    reply = own.call(None)
    with pytest.raises(AttestationError, match="its root"):
        own.file(reply)
    with pytest.raises(AttestationError, match="the run file names"):
        own.asked()
    assert attestations(run) == []


def test_without_the_agreed_policy_nothing_is_filed(run: Run, machine: Path) -> None:
    """One piece that breaks the policy would spoil the claim of the whole run."""
    own = filing(run, "a", machine, policy=None)
    with pytest.raises(AttestationError, match="give its file with --policy"):
        own.asked()
    assert attestations(run) == []


def test_a_stranger_and_a_wrong_key_file_nothing(run: Run, machine: Path) -> None:
    with pytest.raises(JoinError, match="token"):
        attest(run.url, f"{run.token('a')[:-4]}0000", run.core.timeouts, None)
    own = replace(filing(run, "a", machine), signer=Signer.from_hex("77" * 32))
    with pytest.raises(JoinError, match="not one of key"):
        own.file(own.asked())
    assert attestations(run) == []


def test_too_many_statements_are_refused(run: Run, machine: Path) -> None:
    own = filing(run, "a", machine)
    reply = own.asked()
    text = own.signer.sign(s.Statement(s.ATTESTATION, {}, {}))
    for _ in range(32):
        with pytest.raises(JoinError, match="of run ''"):
            own.call(text)
    with pytest.raises(JoinError, match="32 attestations"):
        own.file(reply)


class Scripted:
    """A coordinator's answers, one after the other; an error is raised."""

    def __init__(self, *answers: AttestReply | DilocoxError) -> None:
        self.answers = list(answers)
        self.filed: list[str] = []

    def __call__(self, statement: str | None) -> AttestReply:
        if statement is not None:
            self.filed.append(statement)
            return answer(0)
        found = self.answers.pop(0)
        if isinstance(found, DilocoxError):
            raise found
        return found


def answer(round_: int, incarnation: int = 1, over: bool = False) -> AttestReply:
    return AttestReply(
        run="1" * 64, manifest="2" * 64, site="a", incarnation=incarnation, evm=None, policy=None,
        size=9, root="3" * 64, round=round_, over=over,
    )  # fmt: skip


def followed(
    tmp_path: Path, machine: Path, every: int, *answers: AttestReply | DilocoxError,
    clock: Callable[[], float] = lambda: 0.0, **changes: Any,
) -> tuple[list[str], Scripted]:  # fmt: skip
    call, said = Scripted(*answers), list[str]()
    own = Filing(
        call, changes.pop("collector", Collector.simulated(machine)), Store(str(tmp_path / "s")),
        Signer.from_hex("11" * 32),
    )  # fmt: skip
    own.follow(every, 100.0, said.append, sleep=lambda seconds: None, now=clock)
    assert own.filed == len(call.filed)
    return said, call


def test_evidence_is_renewed_by_rounds_and_with_each_start(tmp_path: Path, machine: Path) -> None:
    rounds = [answer(each) for each in (0, 1, 2, 3, 3, 5, 6)]
    again = [answer(6, incarnation=2), answer(7, incarnation=2), answer(9, 2, over=True)]
    said, call = followed(tmp_path, machine, 3, *rounds, *again)
    assert [line.split("round ")[1] for line in said] == ["0", "3", "6", "6", "9"]
    assert len(call.filed) == 5


def test_a_failure_is_said_once_and_tried_again(tmp_path: Path, machine: Path) -> None:
    tries = iter([*[AttestationError("the agent is dead")] * 3, None])
    honest = Collector.simulated(machine)

    def quote(data: bytes) -> Any:
        if (trouble := next(tries)) is not None:
            raise trouble
        return honest.quote(data)

    said, call = followed(
        tmp_path, machine, 3, *[answer(0)] * 5, answer(1, over=True),
        collector=replace(honest, quote=quote),
    )  # fmt: skip
    assert said[0] == "not filed: the agent is dead; it is tried again"
    assert [line.startswith("machine 0 of 1 of a") for line in said] == [False, True]
    assert len(call.filed) == 1


def test_a_coordinator_that_is_away_ends_it_in_the_end(tmp_path: Path, machine: Path) -> None:
    times = iter([0.0, 1.0, 2.0, 50.0, 99.0, 102.0])
    gone = JoinError("no answer")
    said, call = followed(
        tmp_path, machine, 3, answer(0), gone, gone, gone, gone, clock=lambda: next(times)
    )
    assert said[1:] == [
        "not filed: no answer; it is tried again",
        "the coordinator has not answered for 100 s; if the run goes on, start this command again",
    ]
    assert len(call.filed) == 1


def test_a_coordinator_that_answers_is_not_away(tmp_path: Path, machine: Path) -> None:
    """The command is started long before the site joins, and beside an agent that is dead."""
    times = iter(range(0, 10_000, 90))
    waiting = [answer(0, incarnation=0)] * 9
    said, call = followed(
        tmp_path, machine, 3, *waiting, answer(0), answer(1, over=True),
        clock=lambda: next(times),
    )  # fmt: skip
    assert said[0] == "not filed: site a has not joined the run yet: join first; it is tried again"
    assert len(said) == 2
    assert len(call.filed) == 1


def test_a_start_in_the_last_rounds_is_attested_at_the_end(tmp_path: Path, machine: Path) -> None:
    said, call = followed(tmp_path, machine, 9, answer(0), answer(3, incarnation=2, over=True))
    assert len(call.filed) == 2
    assert said[1].startswith("machine 0 of 1 of a: evidence ")


def test_rounds_that_pass_quickly_are_looked_at_often(tmp_path: Path, machine: Path) -> None:
    """Else more rounds than the policy allows could pass between two looks."""
    pauses: list[float] = []
    own = Filing(
        Scripted(*map(answer, range(6)), *[answer(6)] * 4, answer(7, over=True)),
        Collector.simulated(machine), Store(str(tmp_path / "s")), Signer.from_hex("11" * 32),
    )  # fmt: skip
    own.follow(100, 1000.0, lambda text: None, sleep=pauses.append, now=lambda: 0.0)
    assert pauses == [1, 1, 1, 1, 1, 1, 1, 2, 4, 8]


def test_another_policy_than_the_agreed_one_ends_it_at_once(tmp_path: Path, machine: Path) -> None:
    own = Filing(
        Scripted(answer(0).model_copy(update={"policy": "9" * 64, "incarnation": 0})),
        Collector.simulated(machine), Store(str(tmp_path / "s")), Signer.from_hex("11" * 32),
        policy_file(),
    )  # fmt: skip
    with pytest.raises(AttestationError, match="the run file names 999999999999"):
        own.follow(3, 100.0, print, sleep=lambda seconds: None)


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["attest", *map(str, words)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_files_evidence(
    run: Run, machine: Path, tmp_path: Path, policy_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text(run.token("b"))
    place = ["--coordinator", f"127.0.0.1:{run.port}", "--token-file", token]
    words = [tmp_path / "run", "--site", "b", "--simulate", machine, *place]
    assert command(*words) == 1
    assert "give its file with --policy" in capsys.readouterr().err
    words += ["--policy", policy_path]
    assert command(*words, "--node", 1, "--nodes", 2) == 0
    assert "machine 1 of 2 of b: evidence " in capsys.readouterr().out
    (found,) = attestations(run)
    assert found.machine is not None
    assert (found.machine.node, found.machine.nodes) == (1, 2)
    assert command(*words, "--follow", "--every", 5) == 1
    assert "--every 5: the policy allows 4 rounds" in capsys.readouterr().err
    random = tmp_path / "random"
    random.write_text("0708\n")
    assert command(*words, "--randomness", random) == 0
    assert attestations(run)[1].machine is not None
    assert attestations(run)[1].machine.randomness == "0708"  # type: ignore[union-attr]
    random.write_text("?")
    assert command(*words, "--randomness", random) == 1
    assert "not hex digits" in capsys.readouterr().err
    assert run.keys["b"].private not in capsys.readouterr().out


def test_a_pretended_machine_comes_with_its_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert command("--simulate", tmp_path / "machine") == 0
        digest = PolicyFile.read(tmp_path / "machine/tee.toml").digest
        assert f'record.tee = "{digest}"' in capsys.readouterr().out
    own = Collector.simulated(tmp_path / "machine").collect(SAID.to_bytes())
    rules = PolicyFile.read(tmp_path / "machine/tee.toml").policy
    assert judge_machine(own, rules, datetime.datetime.now(datetime.UTC)).simulated
    assert command() == 1
    assert "name the site's run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--node", "1"], "--node 1: give a number from 0 to below --nodes"),
        (["--every", "2"], "--every is for --follow"),
        (["--follow"], "--follow: give --policy"),
        (["--follow", "--every", "0"], "give a number of rounds"),
        (["--manifest", "x"], "--manifest is for --gpus"),
        (["--token-file", "x"], "--token-file needs --coordinator"),
        ([], "join with the site first, or name its key with --key-file"),
    ],
)
def test_what_contradicts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert command(tmp_path / "run", "--site", "a", *words) == 1
    assert reason in capsys.readouterr().err


def test_a_folder_without_a_coordinator_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RecordKey.kept(key_file(tmp_path, "a"))
    assert command(tmp_path, "--site", "a") == 1
    assert "not the folder of a running coordinator that knows site a" in capsys.readouterr().err
    assert command(tmp_path, "--site", "a", "--coordinator", "x") == 1
    assert "not an address" in capsys.readouterr().err
