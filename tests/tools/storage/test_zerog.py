"""A run is published into 0G Storage and verified from there; nothing is paid twice.

The contracts are the genuine ones, on a chain in this process and on anvil. The storage node is an
emulator (`tests/support/zerog_network.py`).
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("web3")
pytest.importorskip("eth_tester")
pytest.importorskip("sha3")

from eth_account.signers.local import LocalAccount
from tests.support.bundled_run import verdicts, verified
from tests.support.chains import MOST_GAS, account_of
from tests.support.fault_proxy import FaultProxy
from tests.support.skips import need
from tests.support.zerog_network import (
    PRICE,
    RefusedCallError,
)
from tests.support.zerog_scene import MOST, Network

from dilocox.cli.main import main
from dilocox.errors import RecordError
from dilocox.record.bundles import place as place_module
from dilocox.record.bundles.fetch import fetched, open_bundles
from dilocox.record.bundles.place import AT_ONCE
from dilocox.record.bundles.publication import INDEX, Bundle, Publication
from dilocox.record.bundles.zerog_root import tree_of
from dilocox.record.log import statements as s
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.tools.settlement import keystore, ledger, resending
from dilocox.tools.settlement.journal import Journal
from dilocox.tools.storage import bundle_file, zerog_flow
from dilocox.tools.storage.follow import publish_once, publish_to_the_end
from dilocox.tools.storage.run_source import RunSource
from dilocox.tools.storage.uplink import Uplink
from dilocox.tools.storage.zerog_flow import Flow

need("zg_storage")
pytestmark = pytest.mark.waits
PASSWORD = "correct horse 4711"


def without_blocks(network: Network, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the chain make no blocks, and publishers soon give up. Returns the chain's tester."""
    monkeypatch.setattr(ledger, "PATIENCE", 0.2)
    monkeypatch.setattr(resending, "PATIENCE", 0.2)
    tester = network.chain.web3.provider.ethereum_tester  # type: ignore[union-attr]
    tester.disable_auto_mine_transactions()
    return tester


def same_claims(run: Path, url: str) -> None:
    report, own = verified(url), verify(Places(run), lambda what, share: None)
    found = verdicts(report)
    assert found.pop("bundles") == "PASS"
    assert found == verdicts(own)
    assert found["replay"] == found["payloads"] == found["model"] == "PASS"


@pytest.mark.parametrize(
    "network", ["eth-tester", pytest.param("anvil", marks=pytest.mark.slow)], indirect=True
)
def test_a_run_is_verified_from_0g_storage_alone(
    run: Path, network: Network, who: LocalAccount
) -> None:
    before = network.balance(who)
    first = network.publisher(run, who)
    publish_once(first)
    url = first.place.published
    same_claims(run, url)
    assert len(network.submissions(who)) == first.bundles + 1 == 4
    paid = before - network.balance(who)
    assert paid > 0
    again = network.publisher(run, who)
    publish_once(again)
    assert (again.bundles, again.size, again.place.published) == (0, 0, url)
    # The folder with what was paid is lost: the chain tells.
    shutil.rmtree(run / "coordinator" / "zerog")
    third = network.publisher(run, who)
    publish_once(third)
    assert (third.bundles, third.size, third.place.published) == (3, 0, url)
    assert before - network.balance(who) == paid
    assert network.node.calls.count("zgs_uploadSegmentsByTxSeq") == 4
    (run / "summary.json").write_text('{"reason": "finished"}')
    publish_once(later := network.publisher(run, who))
    assert later.place.published != url
    assert len(network.submissions(who)) == 6
    same_claims(run, later.place.published)
    assert verdicts(verified(url))["bundles"] == "PASS"  # an older index stays
    key, journal = who.key.hex()[2:], next((run / "coordinator").rglob("journal-*"))
    assert key not in "".join([*network.said, journal.read_text()])


@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_cut_costs_nothing_twice(
    run: Path, network: Network, who: LocalAccount, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node and chain's server end connections after some calls; each time a new process goes on."""
    monkeypatch.setattr(ledger, "PATIENCE", 0.5)
    network.rpc.after = network.asked.after = after
    said: list[str] = []
    for step in range(200):
        network.rpc.left, network.asked.left = 17 + step % 11, 4 + step % 4
        found = network.publisher(run, who)
        try:
            publish_once(found)
        except RecordError as error:
            said.append(str(error))
            continue
        break
    assert len(said) > 10
    assert "\n" not in "".join(said)
    network.rpc.left = network.asked.left = None
    same_claims(run, found.place.published)
    roots = [bytes(each["args"]["identity"]) for each in network.submissions(who)]
    assert len(roots) == len(set(roots)) == 4


def test_a_transaction_that_waits_for_a_block_is_not_sent_as_another(
    run: Path, network: Network, who: LocalAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    tester = without_blocks(network, monkeypatch)
    for _ in range(3):
        with pytest.raises(RecordError, match="the chain's server failed"):
            publish_once(network.publisher(run, who))
    (journal,) = (run / "coordinator").rglob("journal-*")
    assert journal.read_text().count('"signed"') == 1
    tester.enable_auto_mine_transactions()
    publish_once(network.publisher(run, who))
    assert len(network.submissions(who)) == 4


def test_a_transaction_with_a_late_block_is_paid_once_though_events_lag(
    run: Path, network: Network, who: LocalAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receipt is there, and neither the index of events nor the node has seen its block."""
    tester = without_blocks(network, monkeypatch)
    with pytest.raises(RecordError, match="the chain's server failed"):
        publish_once(network.publisher(run, who))
    tester.enable_auto_mine_transactions()
    network.node.behind = True
    network.rpc.change = lambda method, said: [] if method == "eth_getLogs" else said
    for _ in range(2):
        with pytest.raises(RecordError, match="does not know transaction"):
            publish_once(network.publisher(run, who))
        # A crash before the note of what was submitted.
        next((run / "coordinator").rglob("files.jsonl")).unlink()
    network.node.behind, network.rpc.change = False, lambda method, said: said
    publish_once(network.publisher(run, who))
    assert len(network.submissions(who)) == 4


def test_an_upload_goes_on_where_it_was_cut(
    network: Network, who: LocalAccount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_file, "PART_SIZE", 2**18)
    data = bytes(7 * i & 255 for i in range(2**18)) * 40 + b"end"
    step = 2**18

    def store() -> int:
        place = network.destination(tmp_path, who)
        place._opened()
        pieces = lambda: (data[at : at + step] for at in range(0, len(data), step))  # noqa: E731
        return place._store("data", tree_of(data), pieces, Uplink(None))[1]

    network.asked.left = 20
    with pytest.raises(RecordError, match="cannot be written"):
        store()
    network.asked.left = None
    (file,) = network.node.files.values()
    had = len(file.segments)
    assert 10 < had < 20
    assert store() <= len(data) - (had - 2 * AT_ONCE) * step
    assert file.whole
    assert len(network.submissions(who)) == 1
    # Another order: the node lacks the first segments, and has the last ones.
    del file.segments[0]
    assert store() >= step
    assert file.whole
    assert store() == 0


@pytest.mark.parametrize("victim", ["node", "rpc"])
@pytest.mark.parametrize(
    "mode",
    [
        "dead",
        "wrong",
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("silent", "nonsense")),
    ],
)
def test_publishing_goes_on_when_a_server_is_back(
    run: Path, network: Network, who: LocalAccount, victim: str, mode: Any,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ledger, "RPC_SECONDS", 0.5)
    monkeypatch.setattr(place_module, "SLOWEST", 10**9)
    proxy, port = FaultProxy(network.ports[victim]), network.ports[victim]
    if mode == "nonsense":
        proxy.lead_to(request.getfixturevalue("nonsense_port"))
    elif mode == "wrong":
        server = network.asked if victim == "node" else network.rpc
        server.change = lambda method, said: ["something else"]
    else:
        proxy.become(mode)
    places = {"node": {"url": f"zerog://127.0.0.1:{proxy.port}"},
              "rpc": {"rpc": f"http://127.0.0.1:{proxy.port}"}}[victim]  # fmt: skip
    lines: list[str] = []

    def sleep(seconds: float) -> None:
        if len(lines) == 1:
            proxy.become("pass")
            proxy.lead_to(port)
            network.asked.change = network.rpc.change = lambda method, said: said

    try:
        found = network.publisher(run, who, **places)
        publish_to_the_end(found, lines.append, sleep)
        assert [line[:24] for line in lines] == [
            "dilocox: not published: ",
            "dilocox: publishing goes",
        ]
        assert "\n" not in lines[0]
        assert len(network.submissions(who)) == 4
        same_claims(run, found.place.published)
    finally:
        proxy.close()


def test_a_dead_node_says_nothing_about_the_run(
    run: Path, network: Network, who: LocalAccount
) -> None:
    publish_once(found := network.publisher(run, who))
    for mode in ("dead", "silent"):
        proxy = FaultProxy(network.ports["node"])
        proxy.become(mode)  # type: ignore[arg-type]
        url = found.place.published.rpartition(":")[0] + f":{proxy.port}"
        with pytest.raises(RecordError, match=r"shards: cannot be read \([A-Z]?[a-z ]") as failed:
            verified(url, seconds=0.3)
        assert "\n" not in str(failed.value)
        proxy.close()


def other_byte(said: str) -> str:
    data = bytearray(base64.b64decode(said))
    data[3] ^= 1
    return base64.b64encode(data).decode()


def test_a_node_with_other_bytes_is_found(run: Path, network: Network, who: LocalAccount) -> None:
    publish_once(found := network.publisher(run, who))
    url = found.place.published
    roots = [each.root for each in network.node.files.values()]

    def lying(about: str, lie: Callable[[Any], Any]) -> None:
        own = network.node.call

        def answer(method: str, params: list[Any]) -> Any:
            said = own(method, params)
            return lie(said) if method == "zgs_downloadSegment" and params[0] == about else said

        network.asked._answer = answer

    for number, root in enumerate(roots[:3]):
        for lie, why in ((other_byte, "has other bytes"), (lambda said: None, "is not there")):
            lying(root, lie)
            report = verified(url)
            assert report.findings[0].verdict == "FAIL"
            assert f"bundles/{number:06d}" in report.findings[0].reason
            assert why in report.findings[0].reason
    lying(roots[3], other_byte)
    with pytest.raises(RecordError, match="other bytes than the root stands for"):
        verified(url)
    lying(roots[3], lambda said: said * 2)
    with pytest.raises(RecordError, match="another form"):
        verified(url)


def test_a_bundle_with_another_root_is_found(
    run: Path, network: Network, who: LocalAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher itself has named a root that is not the bundle's."""
    publish_once(network.publisher(run, who))
    text = next((run / "coordinator").rglob(INDEX)).read_text()
    first = Publication.parse(text).bundles[0]
    assert first.zerog is not None
    wrong = replace(first, zerog=replace(first.zerog, root="ab" * 32))

    class Told:
        url = "zerog://told"
        reader = open_bundles(network.destination(run, who).access.url.at("00" * 32))

        def get_index(self) -> bytes:
            log = RunSource(run)
            index = Publication(log.log, log.run())
            index.add(wrong, s.Signer(log.private))
            return index.text.encode()

        def get_part(self, bundle: Bundle, number: int) -> bytes:
            return self.reader.get_part(first, number)

    with fetched(Told(), None) as found:
        assert "another root in 0G Storage" in found.fault


def test_nothing_is_paid_if_node_and_chain_contradict_each_other(
    run: Path, network: Network, who: LocalAccount
) -> None:
    """The chain's server hides submissions."""
    publish_once(network.publisher(run, who))
    shutil.rmtree(run / "coordinator" / "zerog")
    network.rpc.change = lambda method, said: [] if method == "eth_getLogs" else said
    with pytest.raises(RecordError, match="nothing is paid twice"):
        publish_once(network.publisher(run, who))
    network.rpc.change = lambda method, said: said
    assert len(network.submissions(who)) == 4


def test_a_server_that_gives_few_blocks_is_searched_in_parts(
    run: Path, network: Network, who: LocalAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LEAST_BLOCKS", 2)
    publish_once(network.publisher(run, who))
    shutil.rmtree(run / "coordinator" / "zerog")
    own = network.rpc._answer

    def answer(method: str, params: list[Any]) -> Any:
        if method == "eth_getLogs":
            begin, end = (int(params[0][each], 16) for each in ("fromBlock", "toBlock"))
            if end - begin >= 3:
                raise RefusedCallError("query exceeds max block range")
        return own(method, params)

    network.rpc._answer = answer
    publish_once(found := network.publisher(run, who))
    assert (found.bundles, found.size) == (3, 0)
    shutil.rmtree(run / "coordinator" / "zerog")
    monkeypatch.setattr(zerog_flow, "MOST_SEARCHES", 2)
    with pytest.raises(RecordError, match=r"gives .* blocks at once; name another server"):
        publish_once(network.publisher(run, who))
    assert len(network.submissions(who)) == 4


def test_costs_have_a_limit(run: Path, network: Network, who: LocalAccount) -> None:
    with pytest.raises(RecordError, match=r"coins, more than .*: allow it with --most-fee"):
        publish_once(network.publisher(run, who, fee=352 * PRICE - 1))
    with pytest.raises(RecordError, match="fee of a transaction could reach"):
        publish_once(network.publisher(run, who, fee=352 * PRICE))
    assert network.submissions(who) == []
    poor = account_of("nobody")
    with pytest.raises(RecordError) as refused:
        publish_once(network.publisher(run, poor))
    assert "\n" not in str(refused.value)


def test_a_replaced_payment_keeps_to_the_limit_with_its_storage(
    run: Path, network: Network, who: LocalAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fee has become too low, and the higher one fits the limit without the storage alone."""
    tester = without_blocks(network, monkeypatch)
    with pytest.raises(RecordError, match="the chain's server failed"):
        publish_once(network.publisher(run, who))
    (path,) = (run / "coordinator").rglob("journal-*")
    (first,) = Journal(path).sent()
    eth = network.chain.web3.eth
    gas, tip, base = MOST_GAS, int(eth.max_priority_fee), 5 * 10**9
    higher = first.higher(who, base, tip, MOST)
    assert first.value
    assert higher is not None
    most = gas * int.from_bytes(higher._fields[3])
    network.rpc.change = lambda method, said: (
        {**said, "baseFeePerGas": hex(base)} if method == "eth_getBlockByNumber" else said
    )
    for fee in (first.value // 2, most, most + first.value - 1):
        with pytest.raises(RecordError, match="fee of a transaction could reach"):
            publish_once(network.publisher(run, who, fee=fee))
    assert [each.hash for each in Journal(path).sent()] == [first.hash]
    with pytest.raises(RecordError):  # its block does not come
        publish_once(network.publisher(run, who, fee=most + first.value))
    assert [each.hash for each in Journal(path).sent()] == [first.hash, higher.hash]
    network.rpc.change = lambda method, said: said
    tester.enable_auto_mine_transactions()
    publish_once(network.publisher(run, who))
    assert len(network.submissions(who)) == 4


def test_a_node_that_has_dropped_a_file_is_named(
    run: Path, network: Network, who: LocalAccount
) -> None:
    publish_once(network.publisher(run, who))
    next((run / "coordinator").rglob(INDEX)).unlink()
    network.asked.change = lambda method, said: (
        {**said, "pruned": True} if method == "zgs_getFileInfo" else said
    )
    with pytest.raises(RecordError, match="has not all of bundles/000000-"):
        publish_once(network.publisher(run, who))
    assert len(network.submissions(who)) == 4


def test_a_node_that_is_behind_is_named(run: Path, network: Network, who: LocalAccount) -> None:
    network.node.behind = True
    with pytest.raises(RecordError, match=r"does not know transaction [0-9a-f]{64} after"):
        publish_once(network.publisher(run, who))
    network.node.behind = False
    publish_once(found := network.publisher(run, who))
    assert len(network.submissions(who)) == 4
    assert verdicts(verified(found.place.published))["bundles"] == "PASS"


def test_a_node_with_a_part_of_each_file_is_refused(
    run: Path, network: Network, who: LocalAccount
) -> None:
    network.asked.change = lambda method, said: (
        {"shardId": 1, "numShard": 4} if method == "zgs_getShardConfig" else said
    )
    with pytest.raises(RecordError, match="keeps part 1 of 4 of each file; name an indexer"):
        publish_once(network.publisher(run, who))
    network.asked.change = lambda method, said: said
    found = network.destination(run, who)
    found._flow = Flow(found._flow.web3, who.address, who, MOST)
    with pytest.raises(RecordError, match="price of storage"):
        found.read_index("")


def code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_the_commands(
    run: Path, network: Network, who: LocalAccount, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "password").write_text(PASSWORD + "\n")
    (tmp_path / "password").chmod(0o600)
    key = tmp_path / "payer.key"
    network.chain.pay(to=keystore.create_key(key, PASSWORD, rounds=2), value=10**18)
    to = f"zerog://127.0.0.1:{network.ports['node']}"
    chain = ["--rpc", network.chain_url, "--contract", network.flow.address]
    pays = ["--key", str(key), "--password-file", str(tmp_path / "password")]
    for wrong, why in (
        (["--to", to, *chain], "--key: is missing"),
        (["--to", to, *pays, *chain[:2]], "--contract: is missing"),
        (["--to", to.replace("//", f"//{'0' * 64}@"), *chain, *pays], "leave the root out"),
        (["--to", "zerog://", *chain, *pays], "not a URL of 0G Storage"),
        (["--to", f"file://{tmp_path}/x", *pays], "is for --to zerog"),
        (["--to", str(tmp_path / "x"), *chain], "is for --to zerog"),
        (["--to", to, "--contract", "0x1", "--rpc", "http://localhost:1", *pays], "40 hex digits"),
    ):
        assert code_of("publish", str(run), *wrong) == 1, wrong
        assert why in capsys.readouterr().err
    assert code_of("publish", str(run), "--to", to, *chain, *pays) == 0
    said = capsys.readouterr()
    line = said.out.splitlines()[-1]
    assert line.startswith("how to check it: dilocox verify zerog://")
    assert code_of("verify", line.split()[-1]) == 3  # the run file of this old run is no claim
    assert "bundles" in (shown := capsys.readouterr().out)
    secret = keystore.load_key(key, PASSWORD).key.hex()[2:]
    kept = [each.read_text() for each in (run / "coordinator" / "zerog").rglob("*.jsonl")]
    assert not any(each in text for each in (secret, PASSWORD)
                   for text in [said.out, said.err, shown, *kept])  # fmt: skip
    key.chmod(0o644)
    assert code_of("publish", str(run), "--to", to, *chain, *pays) == 1
    assert "chmod 600" in capsys.readouterr().err
    for url, why in ((to, "names no index"), ("zerog://x/y", "not a URL of 0G Storage")):
        assert code_of("verify", url) == 1
        assert why in capsys.readouterr().err
