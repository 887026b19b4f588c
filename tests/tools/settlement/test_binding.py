"""A run's log is bound to one contract, and nothing is sent to another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("web3")

from tests.support.chains import ETHER, Chain
from tests.support.ledger_scene import deployed

from dilocox.cli.main import main
from dilocox.config.run_config import digest_of
from dilocox.errors import SettlementError
from dilocox.tools.settlement.artifact import load_artifact
from dilocox.tools.settlement.contract_code import check_code, expected_code
from dilocox.tools.settlement.ledger import Ledger

from .test_amounts import PRICE, scene_with
from .test_chain_command import Town, town  # noqa: F401 - a fixture


def test_the_code_of_a_deployed_contract_is_known_to_the_byte(chain: Chain, address: str) -> None:
    code, number = bytes(chain.web3.eth.get_code(address)), chain.web3.eth.chain_id
    assert code == expected_code(number, address)
    assert code != expected_code(number + 1, address)
    assert code != expected_code(number, "0x" + "11" * 20)
    check_code(Ledger(chain.web3, address))


def test_a_contract_with_other_code_or_none_is_refused(chain: Chain, address: str) -> None:
    """One byte of the code is changed, or the domain is another contract's."""
    code = chain.web3.eth.get_code(address)
    domain = load_artifact().immutables["_cachedDomainSeparator"][0]
    for place in (100, domain):
        other = bytearray(code)
        other[place] ^= 1
        # A constructor of 12 bytes returns the rest.
        init = bytes.fromhex(f"61{len(other):04x}600c60003961{len(other):04x}6000f3")
        # PUSH2 size, PUSH1 12, PUSH1 0, CODECOPY, PUSH2 size, PUSH1 0, RETURN: 14 bytes.
        init = init.replace(b"\x60\x0c", bytes([0x60, 14]), 1)
        foreign = chain.pay(data=init + bytes(other))["contractAddress"]
        assert bytes(chain.web3.eth.get_code(foreign)) == bytes(other)
        with pytest.raises(SettlementError, match="not the contract RunLedger of this dilocox"):
            check_code(Ledger(chain.web3, foreign))
    with pytest.raises(SettlementError, match="no contract on chain"):
        check_code(Ledger(chain.web3, "0x" + "22" * 20))


def test_nothing_is_sent_to_another_contract(town: Town) -> None:  # noqa: F811
    town.register()
    path = town.folder / "settlement/chain.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "contract": town.accounts["c"]}))
    town.chain.pay(to=town.accounts["owner"], value=ETHER)
    before = town.balance("owner")
    for action in (
        ("stake", "--amount", 1), ("leave",), ("fund", "--amount", 1), ("anchor",), ("settle",),
        ("claim",), ("close",), ("reclaim",), ("dispute", "--veto", "--votes", "votes"),
    ):  # fmt: skip
        assert "no contract on chain" in town.run(*action, code=1)
    assert "no contract on chain" in town.run("commit", "--site", "a", key="a", code=1)
    assert town.balance("owner") == before


def test_a_site_says_how_much_it_stakes(
    town: Town,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The contract that the owner names may ask for everything that the site has."""
    town.register()
    assert "asks for a stake of 1 coins: give it with --amount" in town.run("stake", code=1)
    said = town.run("stake", "--amount", "0.5", key="a", code=1)
    assert "asks for a stake of 1 coins, more than --amount, 0.5 coins: nothing was staked" in said
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return "y" if len(asked) > 1 else ""

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    assert "nothing was staked" in town.run("stake", key="a")
    assert "staked, 1 coins" in town.run("stake", key="a")
    assert asked[0].startswith(f"contract {town.contract} on chain ")
    assert "staked, 3 coins" in town.run("stake", "--amount", 3, key="a")
    assert f"{town.accounts['a']}: stake 3 coins" in town.run(
        "status", "--account", town.accounts["a"]
    )


def test_a_site_compares_its_run_file_before_it_stakes(town: Town) -> None:  # noqa: F811
    town.register()
    own, other = town.root / "own.toml", town.root / "other.toml"
    own.write_text(town.scene.config.to_toml())
    other.write_text(own.read_text().replace(f"price = {PRICE}", f"price = {PRICE - 1}"))
    stake = ("stake", "--amount", 1, "--run-file")
    assert "was registered with the run file" in town.run(*stake, other, key="a", code=1)
    said = town.run(*stake, own, key="a")
    assert "names no contract, so this log can be registered in others" in said
    assert "staked, 1 coins" in said


def bound(town: Town, **place: object) -> None:  # noqa: F811
    """Let the town have a run whose run file names a place; `place` changes it."""
    town.deploy()
    sites = {name: town.accounts[name] for name in "abc"}
    said = {"chain": town.chain.web3.eth.chain_id, "contract": town.contract.lower(),
            "owner": town.accounts["owner"], **place}  # fmt: skip
    root = town.root / f"bound {len(list(town.root.iterdir()))}"
    town.scene = scene_with(root, accounts=sites, price=PRICE, **said)
    town.scene.notary.writer.cover()
    town.folder = town.scene.config.folder


def claim(
    name: str, folder: Path, chain: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    """Verdict and reason of a claim of `dilocox verify --chain`."""
    with pytest.raises(SystemExit):
        main(["verify", str(folder), "--json", "--chain", str(chain)])
    claims = json.loads(capsys.readouterr().out)["claims"]
    (found,) = (each for each in claims if each["name"] == name)
    return found["verdict"], found["reason"]


def test_a_log_is_registered_in_the_place_of_its_run_file_alone(
    town: Town,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    bound(town, owner=town.accounts["a"])
    assert "the run file names the owner" in town.run("register", *town.terms, code=1)
    bound(town)
    assert "names no contract" not in town.run("register", *town.terms)
    town.run("stake", "--amount", 1)
    town.scene.notary.close()
    town.run("anchor")
    (town.folder / "run.toml").write_text(town.scene.config.to_toml())
    own = town.folder / "settlement"
    verdict, reason = claim("anchors", town.folder, town.folder, capsys)
    assert (verdict, "names no contract" in reason) == ("PASS", False), reason
    # The owner registers the log in a second contract, for another audience.
    second = deployed(town.chain)
    path = own / "chain.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "contract": second}))
    assert "the run file names the contract" in town.run("anchor", code=1)
    log, manifest = bytes.fromhex(said["log"]), bytes.fromhex(digest_of(town.scene.config.shared()))
    Ledger(town.chain.web3, second, town.key("owner")).send(
        "register", log, manifest, 5, 1, b"\1" * 32, 1
    )
    verdict, reason = claim("anchors", town.folder, path, capsys)
    assert verdict == "FAIL"
    assert reason.endswith("the log was registered in a second place")
