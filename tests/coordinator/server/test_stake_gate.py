"""A run that admits by stake: a chain that does not answer delays newcomers, and nobody else."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.coordinator.client.enrolment import Applicant, enrol
from dilocox.coordinator.protocol.messages import StakeProof
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.record_keys import RecordKey
from dilocox.coordinator.server import stake_gate
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.stake_gate import StakeGate
from dilocox.errors import ConfigError, RetryLaterError
from dilocox.record.log import statements as s
from tests.support.coordinator_driver import VERSIONS, Clock, run_config
from tests.support.record_scene import KEYS, Scene
from tests.support.served_run import Run

PLACE = {"chain": 7, "contract": "0x" + "22" * 20, "owner": "0x" + "33" * 20}
ACCOUNTS = {name: "0x" + f"{number:02x}" * 20 for number, name in enumerate("abc", 1)}
TERMS = {"price": 1, "accounts": ACCOUNTS, "admission": "stake", **PLACE}
PROOF = StakeProof(expiry=10**10, signature="ab" * 65)

SAYS = "import json, sys; print(json.dumps({'staked': %s, 'reason': 'it says so'}))"
DEAD = "import sys; sys.exit('dilocox: isStaked: the chain\\'s server failed: refused')"
HANGING = "import time; time.sleep(600)"


class Scenery:
    """A coordinator of a run that admits by stake, whose chain is a Python program."""

    def __init__(self, folder: Path, program: str, patience: float = 60.0) -> None:
        self.scene = Scene(folder, settlement=TERMS)
        self.told: list[str] = []
        self.clock = Clock()
        self.core = self.scene.driver.core
        assert self.core.stakes is not None
        self.gates: list[StakeGate] = []
        self.says(program, patience)

    def says(self, program: str, patience: float = 60.0) -> None:
        """From now on, the chain is this program."""
        command = (sys.executable, "-c", program)
        gate = StakeGate(command, self.told.append, patience=patience, now=self.clock)
        self.gates.append(gate)
        self.core.stakes = gate

    def enrol(self, site: str, proof: StakeProof | None = PROOF) -> None:
        self.scene.driver.enrol(site, KEYS[site], stake=proof)

    def enrol_at_last(self, site: str) -> str:
        """Enrol; if the chain has not answered, again after its answer. Return the refusal."""
        for _ in range(2):
            try:
                self.enrol(site)
            except Refused as why:
                if why.kind != "stake":
                    return f"{why.kind}: {why}"
                self.answered()
                last = f"{why.kind}: {why}"
            else:
                return ""
        return last

    def answered(self) -> None:
        until = time.monotonic() + 60
        while self.gates[-1]._busy:
            assert time.monotonic() < until
            time.sleep(0.005)


def test_a_run_without_it_asks_nobody_and_keeps_its_statements(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.driver.core.stakes is None
    scene.enrol()
    said = [s.opened(entry)[0] for entry in scene.entries()]
    enrolments = [each.predicate for each in said if each.kind == s.ENROLMENT]
    assert len(enrolments) == 3
    assert all("stake" not in each for each in enrolments)


def test_a_site_with_a_stake_joins_and_its_signature_is_in_the_record(tmp_path: Path) -> None:
    town = Scenery(tmp_path, SAYS % True)
    with pytest.raises(Refused, match="admits by stake") as caught:
        town.enrol("a", None)
    assert caught.value.kind == "join"
    with pytest.raises(Refused, match="is being looked up on the chain") as caught:
        town.enrol("a")
    assert caught.value.kind == "stake"
    town.answered()
    town.enrol("a")
    said = [s.opened(entry)[0] for entry in town.scene.entries()]
    (found,) = (each.predicate for each in said if each.kind == s.ENROLMENT)
    assert found["stake"] == PROOF.model_dump()
    assert town.told == []


def test_a_site_without_a_stake_is_refused_for_good(tmp_path: Path) -> None:
    town = Scenery(tmp_path, SAYS % False)
    assert town.enrol_at_last("a") == "join: site a: it says so"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (DEAD, "the chain's server failed: refused"),
        ("print('[]')", "list indices"),
        ("print('nonsense')", "Expecting value"),
        (SAYS % "'yes'", "staked"),
        ("import sys; sys.exit(3)", "ended with 3"),
    ],
)
def test_a_dead_or_lying_server_delays_newcomers_alone(
    tmp_path: Path, program: str, reason: str
) -> None:
    town = Scenery(tmp_path, SAYS % True)
    assert town.enrol_at_last("a") == ""
    town.says(program)
    for _ in range(3):
        assert "its stake cannot be looked up now" in town.enrol_at_last("b")
        town.clock.time += stake_gate.SOON + 1
    assert len(town.told) == 1, "one line said"
    assert reason in town.told[0]
    # A site that was in the run joins again at once, by the signature that the record has.
    town.scene.driver.leave("a")
    town.enrol("a")
    # The server is back: the newcomer joins, and a new failure is told again.
    town.says(SAYS % True)
    assert town.enrol_at_last("b") == ""


def test_a_hanging_server_holds_up_no_call_of_the_coordinator(tmp_path: Path) -> None:
    town = Scenery(tmp_path, HANGING)
    for _ in range(20):
        # An answer at all shows that the call has not waited for the ten minutes of the chain.
        with pytest.raises(Refused, match="is being looked up"):
            town.enrol("a")
    town.core.close()
    town.says(HANGING, patience=0.2)
    assert "cannot be looked up now" in town.enrol_at_last("a")
    assert "no answer for 0.2 s" in town.told[0]


def test_the_end_of_a_run_ends_a_hanging_look(tmp_path: Path) -> None:
    town = Scenery(tmp_path, HANGING)
    with pytest.raises(Refused):
        town.enrol("a")
    gate = town.gates[-1]
    until = time.monotonic() + 60
    while gate._asking is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    begun = time.monotonic()
    town.core.close()
    town.answered()
    assert time.monotonic() - begun < 30


def test_an_answer_is_asked_for_again_when_it_is_old(tmp_path: Path) -> None:
    """A site whose stake was taken is not let in again for ever."""
    town = Scenery(tmp_path, SAYS % True)
    assert town.enrol_at_last("a") == ""
    town.scene.driver.leave("a")
    town.gates[-1]._command = (sys.executable, "-c", SAYS % False)
    town.clock.time += stake_gate.FRESH - 1
    town.enrol("a")
    town.scene.driver.leave("a")
    town.clock.time += 2
    # It was in the run before, so it is let in at once, while its stake is looked up.
    town.enrol("a")
    town.answered()
    town.scene.driver.leave("a")
    with pytest.raises(Refused, match="it says so"):
        town.enrol("a")


def test_a_site_waits_for_the_answer_and_says_so_once(tmp_path: Path) -> None:
    """Over TLS, as `dilocox join` does."""
    run, said = Run(tmp_path), list[str]()
    slow = "import time; time.sleep(1); " + SAYS % True
    run.core.stakes = StakeGate((sys.executable, "-c", slow), said.append)
    try:
        applicant = Applicant("a", run.config.digest(), 1, 1, VERSIONS, stake=PROOF)
        token = run.core.tokens.of("a")
        times = replace(Timeouts.derive(run.config.network), retry=0.05, retry_most=0.1)
        key = RecordKey.new()
        _, reply = enrol(
            run.url, str(token), applicant, timeouts=times, record_key=key, say=said.append
        )
        assert reply.incarnation == 1
        assert said == ["site a: its stake is being looked up on the chain; the site asks again"]
        run.core.stakes = StakeGate((sys.executable, "-c", DEAD), said.append)
        other = replace(applicant, site="b")
        with pytest.raises(RetryLaterError, match="its stake"):
            enrol(
                run.url, str(run.core.tokens.of("b")), other, record_key=RecordKey.new(),
                timeouts=replace(times, rejoin=0.2),
            )  # fmt: skip
    finally:
        run.close()


def test_a_run_file_names_an_account_of_every_site_that_must_stake() -> None:
    for section, said in (
        ({**TERMS, "accounts": {"a": ACCOUNTS["a"]}}, "site b has no account"),
        ({"price": 1, "accounts": ACCOUNTS, "admission": "stake"}, "name chain, contract and"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_config(settlement=section)
