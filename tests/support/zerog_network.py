"""0G Storage on this machine: its genuine contracts, and a storage node that reads their events.

The contracts are those of the wheel zg-storage. The node answers the calls of JSON-RPC that
publishing and reading use. Its proofs are checked by the code of the same wheel, not by dilocox.

    python -m tests.support.zerog_network ADDRESS

starts a chain, the contracts and a node in a process of its own, gives the account at ADDRESS
coins, and prints one line of JSON with their places.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import sha3
from web3 import Web3

from tests.support.chains import ETHER, Chain, in_process

CHUNK, SEGMENT_CHUNKS = 256, 1024
PRICE = 10**9
"""Wei for a chunk."""


def wheel() -> Path:
    """Folder of the installed package zg_storage, which is not imported."""
    spec = importlib.util.find_spec("zg_storage")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def reference() -> ModuleType:
    """The wheel's own code for roots."""
    path = wheel() / "utils" / "__init__.py"
    spec = importlib.util.spec_from_file_location("zg_storage_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def deploy_flow(chain: Chain) -> Any:
    """Deploy FixedPriceFlow with its market and reward; return the contract."""
    owner = chain.web3.eth.accounts[0]

    def deployed(name: str, *arguments: Any) -> Any:
        found = json.loads((wheel() / "storage-contracts-abis" / f"{name}.json").read_text())
        code = chain.web3.eth.contract(abi=found["abi"], bytecode=found["bytecode"])
        receipt = sent(code.constructor(*arguments))
        return chain.web3.eth.contract(address=receipt["contractAddress"], abi=found["abi"])

    def sent(call: Any) -> Any:
        hash_ = call.transact({"from": owner, "gas": 8_000_000})
        receipt = chain.web3.eth.wait_for_transaction_receipt(hash_)
        assert receipt["status"] == 1
        return receipt

    reward, market = deployed("DummyReward"), deployed("FixedPrice")
    flow = deployed("FixedPriceFlow", 0)
    sent(market.functions.initialize(PRICE, flow.address, reward.address))
    sent(flow.functions.initialize(market.address, 10**6))
    return flow


class RefusedCallError(Exception):
    """A node refuses a call."""


@dataclass
class StoredFile:
    """A file that was submitted."""

    root: str
    size: int
    sequence: int
    start: int
    shard: tuple[int, int] = (0, 1)
    segments: dict[int, bytes] = field(default_factory=dict)

    def kept(self, number: int) -> bool:
        """Whether the node keeps a segment."""
        return (self.start // SEGMENT_CHUNKS + number) % self.shard[1] == self.shard[0]

    @property
    def whole(self) -> bool:
        count = -(-self.size // (CHUNK * SEGMENT_CHUNKS))
        return all(number in self.segments for number in range(count) if self.kept(number))


class StorageNode:
    """A storage node that keeps everything, or a part of all segments, in memory."""

    def __init__(self, flow: Any, shard: tuple[int, int] = (0, 1)) -> None:
        """`flow`: the contract whose events it reads. `shard`: number and count of the parts."""
        self._flow, self._from, self.shard = flow, 0, shard
        self._lock = threading.Lock()
        self.files: dict[int, StoredFile] = {}
        self.behind = False
        """True while the node does not see new blocks."""
        self.calls: list[str] = []
        self.twice = 0
        """Number of segments that were uploaded though the node had them."""
        self.check = True
        """False: segments are not compared with their roots."""

    def call(self, method: str, params: list[Any]) -> Any:
        """Answer a call."""
        with self._lock:
            self.calls.append(method)
            if not self.behind and method != "zgs_uploadSegmentsByTxSeq":
                self._read_events()
        match method:
            case "zgs_getStatus":
                return {"connectedPeers": 0, "nextTxSeq": len(self.files)}
            case "zgs_getShardConfig":
                return {"shardId": self.shard[0], "numShard": self.shard[1]}
            case "zgs_getFileInfo":
                return self._info(self._newest(params[0]))
            case "zgs_downloadSegment":
                return self._download(self._newest(params[0]), params[1], params[2])
            case "zgs_uploadSegmentsByTxSeq":
                return self._upload(self.files.get(params[1]), params[0])
        raise RefusedCallError("Method not found")

    def _read_events(self) -> None:
        newest = self._flow.w3.eth.block_number
        if newest < self._from:
            return
        for each in self._flow.events.Submit().get_logs(from_block=self._from, to_block=newest):
            said = each["args"]
            nodes = [bytes(node["root"]) for node in said["submission"]["nodes"]]
            root = nodes[-1]
            for node in reversed(nodes[:-1]):
                root = keccak(node + root)
            sequence = said["submissionIndex"]
            self.files[sequence] = StoredFile(
                f"0x{root.hex()}",
                said["submission"]["length"],
                sequence,
                said["startPos"],
                self.shard,
            )
        self._from = newest + 1

    def _newest(self, root: str) -> StoredFile | None:
        found = [each for each in self.files.values() if each.root == root]
        return found[-1] if found else None

    def _info(self, file: StoredFile | None) -> Any:
        if file is None:
            return None
        about = {"seq": file.sequence, "size": file.size, "dataMerkleRoot": file.root,
                 "startEntryIndex": file.start, "data": [], "streamIds": []}  # fmt: skip
        return {"tx": about, "finalized": file.whole, "isCached": False, "pruned": False,
                "uploadedSegNum": len(file.segments)}  # fmt: skip

    def _download(self, file: StoredFile | None, first: int, end: int) -> str | None:
        if file is None or not file.whole:
            return None
        if not 0 <= first < end <= -(-file.size // CHUNK) or end - first > SEGMENT_CHUNKS:
            raise RefusedCallError("Invalid params: range")
        number, begin = divmod(first, SEGMENT_CHUNKS)
        if not file.kept(number):
            return None
        data = file.segments[number][begin * CHUNK : (begin + end - first) * CHUNK]
        return base64.b64encode(data).decode()

    def _upload(self, file: StoredFile | None, segments: list[Any]) -> int:
        if file is None:
            raise RefusedCallError("Invalid params: tx_seq; data: not found")
        if file.whole:
            raise RefusedCallError("Invalid params: root; data: already uploaded and finalized")
        for each in segments:
            number, data = each["index"], base64.b64decode(each["data"], validate=True)
            if not file.kept(number):
                raise RefusedCallError("Invalid params: segment of another shard")
            if self.check:
                self._check(file, each, number, data)
            with self._lock:
                self.twice += number in file.segments
                file.segments[number] = data
        return 0

    def _check(self, file: StoredFile, said: Any, number: int, data: bytes) -> None:
        """Compare a segment with its proof, and the proof with the contract's root."""
        chunks = -(-file.size // CHUNK)
        begin = number * SEGMENT_CHUNKS
        if len(data) != CHUNK * min(SEGMENT_CHUNKS, chunks - begin):
            raise RefusedCallError("Invalid params: data length")
        whole = min(SEGMENT_CHUNKS, UTILS.compute_padded_chunks(chunks) - begin)
        lemma = [bytes.fromhex(each[2:]) for each in said["proof"]["lemma"]]
        path = said["proof"]["path"]
        now = segment_root(data.ljust(whole * CHUNK, b"\0"))
        if len(lemma) != (1 if not path else len(path) + 2) or lemma[0] != now:
            raise RefusedCallError("Invalid params: proof")
        for left, other in zip(path, lemma[1:-1], strict=True):
            now = keccak(now + other) if left else keccak(other + now)
        if not f"0x{now.hex()}" == said["root"] == file.root or said["fileSize"] != file.size:
            raise RefusedCallError("Invalid params: root")


class Indexer:
    """Knows storage nodes by their URLs."""

    def __init__(self, nodes: Mapping[str, StorageNode]) -> None:
        self.nodes = dict(nodes)

    def call(self, method: str, params: list[Any]) -> Any:
        """Answer a call."""
        told = [
            {"url": url, "config": dict(zip(("shardId", "numShard"), node.shard, strict=True)),
             "latency": 1, "since": 0}
            for url, node in self.nodes.items()
        ]  # fmt: skip
        match method:
            case "indexer_getSelectedNodes":
                return {"trusted": told, "discovered": []}
            case "indexer_getFileLocations":
                has = [self.nodes[each["url"]].files.values() for each in told]
                return [
                    each for each, files in zip(told, has, strict=True)
                    if any(file.root == params[0] and file.whole for file in files)
                ]  # fmt: skip
        raise RefusedCallError("Method not found")


UTILS = reference()


def keccak(data: bytes) -> bytes:
    """Keccak-256."""
    found: bytes = sha3.keccak_256(data).digest()
    return found


def segment_root(data: bytes) -> bytes:
    """Root of a segment. The wheel's own function takes five times as long."""
    hashes = [keccak(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
    found: bytes = UTILS.build_merkle_root(hashes) if len(hashes) < 64 else _fold(hashes)
    return found


def _fold(hashes: list[bytes]) -> bytes:
    while len(hashes) > 1:
        odd = hashes[len(hashes) - len(hashes) % 2 :]
        pairs = zip(hashes[::2], hashes[1::2], strict=False)
        hashes = [keccak(left + right) for left, right in pairs] + odd
    return hashes[0]


class RpcServer:
    """Answers JSON-RPC on a port of this machine."""

    def __init__(self, answer: Callable[[str, list[Any]], Any]) -> None:
        """`answer`: called with method and parameters; returns the result."""

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                said = {"jsonrpc": "2.0", "id": asked["id"]}
                try:
                    said["result"] = answer(asked["method"], asked["params"])
                except RefusedCallError as error:
                    said["error"] = {"code": -32602, "message": str(error)}
                except ConnectionError:
                    self.close_connection = True
                    return
                data = Web3.to_json(said).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()


def answers_of(chain: Chain) -> Callable[[str, list[Any]], Any]:
    """Return what answers calls to a chain of this process, which takes one call at a time."""
    ask = chain.web3.provider.request_func(  # type: ignore[union-attr]
        chain.web3, chain.web3.middleware_onion
    )
    lock = threading.Lock()

    def answer(method: str, params: list[Any]) -> Any:
        with lock:
            said = ask(method, params)
        if said.get("error"):
            raise RefusedCallError(str(said["error"].get("message", said["error"])))
        return said["result"]

    return answer


def main() -> None:
    """Start everything and wait until standard input ends."""
    chain = in_process()
    flow = deploy_flow(chain)
    chain.pay(to=sys.argv[1], value=100 * ETHER)
    servers = {"rpc": RpcServer(answers_of(chain)), "node": RpcServer(StorageNode(flow).call)}
    places: dict[str, Any] = {name: each.port for name, each in servers.items()}
    print(json.dumps({**places, "contract": flow.address}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
