"""Nodes that an indexer names keep parts of each file, and together they keep all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("web3")
pytest.importorskip("eth_tester")
pytest.importorskip("sha3")

from eth_account.signers.local import LocalAccount
from tests.support.bundled_run import verdicts, verified
from tests.support.skips import need
from tests.support.zerog_network import Indexer, RefusedCallError, RpcServer, StorageNode
from tests.support.zerog_scene import Cut, Network

from dilocox.errors import RecordError
from dilocox.record.bundles.zerog_node import ZerogUrl, is_zerog
from dilocox.tools.storage import bundle_file
from dilocox.tools.storage.follow import publish_once

need("zg_storage")
pytestmark = pytest.mark.waits


@pytest.fixture
def shards(network: Network) -> Iterator[tuple[Indexer, dict[str, Cut], str]]:
    """An indexer with three nodes: two halves, and the first half once more; and its URL."""
    nodes, servers, cuts = {}, [], {}
    for shard in ((0, 2), (1, 2), (0, 2)):
        node = StorageNode(network.flow, shard)
        cut = Cut(node.call)
        servers.append(RpcServer(cut))
        url = f"http://127.0.0.1:{servers[-1].port}"
        nodes[url], cuts[url] = node, cut
    indexer = Indexer(nodes)
    servers.append(RpcServer(indexer.call))
    yield indexer, cuts, f"zerog://127.0.0.1:{servers[-1].port}"
    for each in servers:
        each.close()


def test_nodes_of_an_indexer_share_the_segments(
    run: Path, network: Network, who: LocalAccount, monkeypatch: pytest.MonkeyPatch,
    shards: tuple[Indexer, dict[str, Cut], str],
) -> None:  # fmt: skip
    monkeypatch.setattr(bundle_file, "PART_SIZE", 2**19)
    # A bundle of several segments, as the run's model is larger now.
    (run / "model" / "more.bin").write_bytes(bytes(range(256)) * 5000)
    indexer, cuts, url = shards
    first, second, again = indexer.nodes.values()
    publish_once(found := network.publisher(run, who, url=url))
    place = found.place.published
    assert verdicts(verified(place))["bundles"] == "PASS"
    assert len(network.submissions(who)) == found.bundles + 1
    largest = max(first.files, key=lambda sequence: first.files[sequence].size)
    for node, other in ((first, second), (again, second)):
        mine, its = (each.files[largest].segments.keys() for each in (node, other))
        assert len(mine) >= 2
        assert len(its) >= 2
        assert not mine & its
    # One of the nodes with the same half dies, then the other one.
    urls = list(indexer.nodes)
    cuts[urls[0]].left = 0
    assert verdicts(verified(place, seconds=1.0))["bundles"] == "PASS"
    cuts[urls[2]].left = 0
    with pytest.raises(RecordError, match="cannot be"):
        verified(place, seconds=1.0)
    # Nodes that lack a half are not used, nor is anything paid.
    (run / "summary.json").write_text('{"reason": "finished"}')
    indexer.nodes = {each: indexer.nodes[each] for each in (urls[0], urls[2])}
    with pytest.raises(RecordError, match="names no nodes that take files and keep all parts"):
        publish_once(network.publisher(run, who, url=url))
    assert len(network.submissions(who)) == found.bundles + 1


def test_urls() -> None:
    root = "ab" * 32
    for text, node, named in (
        ("zerog://node:5678", "http://node:5678", ""),
        ("zerog+https://node/", "https://node", ""),
        (f"zerog://{root}@[::1]:5678", "http://[::1]:5678", root),
        (f"zerog://0x{root}@10.0.0.1", "http://10.0.0.1", root),
    ):
        url = ZerogUrl.parse(text)
        assert (url.node, url.root) == (node, named)
        assert ZerogUrl.parse(url.at(root)).root == root
        assert is_zerog(text)
    for text in ("zerog", "file:///zerog", "zerog:/x", "s3://zerog"):
        assert not is_zerog(text)
    for text in (
        "zerog://",
        "zerog://a b",
        "zerog://node/path",
        "zerog://node?x",
        f"zerog://{root[1:]}@node",
    ):
        with pytest.raises(RecordError, match="not a URL of 0G Storage"):
            ZerogUrl.parse(text)
    with pytest.raises(RecordError, match="holds a password") as refused:
        ZerogUrl.parse("zerog://user:geheim@node")
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize(
    "said", [["x"], [{"url": "file:///etc", "config": {"shardId": 0, "numShard": 1}}], 7,
             [{"url": "http://a", "config": {"shardId": 2, "numShard": 1}}]],
)  # fmt: skip
def test_an_indexer_that_says_something_else_is_one_line(said: Any) -> None:
    def answer(method: str, params: list[Any]) -> Any:
        if not method.startswith("indexer"):
            raise RefusedCallError("Method not found")
        return said

    server = RpcServer(answer)
    with pytest.raises(RecordError, match="an answer of another form"):
        verified(f"zerog://{'ab' * 32}@127.0.0.1:{server.port}")
    server.close()
