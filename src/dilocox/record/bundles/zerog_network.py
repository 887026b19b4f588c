"""The storage nodes behind a URL of 0G Storage: one node, or those that an indexer names.

An indexer knows nodes and says which of them have a file. Its nodes keep parts of each file, and
together they keep all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from dilocox.errors import RecordError
from dilocox.record.bundles.place import CALL_SECONDS
from dilocox.record.bundles.zerog_node import FileInfo, Shard, ZerogNode, ZerogUrl
from dilocox.record.bundles.zerog_root import FileTree
from dilocox.record.bundles.zerog_rpc import JsonRpc, RefusedCallError
from dilocox.record.log.blob_store import MissingError

MOST_NODES = 64
"""Nodes of an indexer's answer that are used."""
_NODE = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+/?", re.ASCII)


class ZerogNetwork:
    """Storage nodes that together keep all segments."""

    def __init__(self, url: ZerogUrl, patience: float, seconds: float = CALL_SECONDS) -> None:
        """Nothing is asked yet.

        Args:
            url: A node, or an indexer.
            patience: Seconds for which a failing call is repeated.
            seconds: Time limit of one call, beside the time for its bytes.
        """
        self.url = url.text
        self._limits = patience, seconds
        self._rpc = JsonRpc(url.text, url.node, *self._limits)
        self._only: list[ZerogNode] | None = None
        """The node of the URL; empty for an indexer; None: not asked yet."""
        self._takers: list[ZerogNode] = []
        self._holders: dict[str, list[ZerogNode]] = {}
        self._infos: dict[str, FileInfo] = {}

    def open(self) -> None:
        """Ask what the URL is, unless this is known.

        Raises `RecordError` if it is a node with a part of each file, or if it fails.
        """
        if self._only is not None:
            return
        node = ZerogNode(self._rpc)
        try:
            shard = node.ask_shard()
        except RefusedCallError:
            self._only = []
            return
        if shard.count != 1:
            raise RecordError(
                f"{self.url}: keeps part {shard.number} of {shard.count} of each file; name an "
                "indexer, or a node that keeps all parts"
            )
        self._only = [node]

    def takers(self) -> list[ZerogNode]:
        """Return the nodes that a file is uploaded to. Raises `RecordError`."""
        self.open()
        if not self._takers:
            params = [1, "min", True, []]
            self._takers = self._only or self._rpc.call(
                "indexer_getSelectedNodes", params,
                lambda said: self._parse([*said["trusted"], *said["discovered"]]),
                "read", "nodes",
            )  # fmt: skip
            self._check(self._takers, "that take files")
        return self._takers

    def infos(self, root: str) -> list[FileInfo | None]:
        """Return what each of `takers` says about a file. Raises `RecordError`."""
        return [node.info(root) for node in self.takers()]

    def upload(
        self, tree: FileTree, info: FileInfo, sequence: int, segments: Sequence[tuple[int, bytes]]
    ) -> None:
        """Upload segments, by number, to the nodes that keep them; see `ZerogNode.upload`."""
        for node in self.takers():
            own = [each for each in segments if node.shard.holds(info.global_segment(each[0]))]
            if own:
                node.upload(tree, sequence, own)

    def info(self, root: str) -> FileInfo | None:
        """Return what the first node that has a file says about it; None if no node has it.

        Raises `RecordError` if no node has it, and one fails.
        """
        failed = None
        for node in () if root in self._infos else self._holding(root):
            try:
                found = node.info(root)
            except RecordError as error:
                failed = error
                continue
            if found is not None:
                self._infos[root] = found
                break
        if failed is not None and root not in self._infos:
            raise failed
        return self._infos.get(root)

    def segment(self, root: str, number: int, size: int) -> bytes:
        """Return the bytes of a segment; see `ZerogNode.segment`.

        Nodes that fail are passed over as long as another one keeps the segment.
        """
        nodes = self._holding(root)
        if any(node.shard.count != 1 for node in nodes):
            info = self.info(root)
            if info is None:
                raise MissingError(f"{self.url}: no node has the file of root {root}")
            at = info.global_segment(number)
            nodes = [node for node in nodes if node.shard.holds(at)]
        failed: RecordError = MissingError(f"{self.url}: no node has the file of root {root}")
        for node in nodes:
            try:
                return node.segment(root, number, size)
            except RecordError as error:
                failed = error
        raise failed

    def _holding(self, root: str) -> list[ZerogNode]:
        """Return the nodes that have a file."""
        self.open()
        if self._only:
            return self._only
        if root not in self._holders:
            call = "indexer_getFileLocations"
            self._holders[root] = self._rpc.call(
                call, [f"0x{root}"], lambda said: self._parse(said or []), "looked up", root
            )
        return self._holders[root]

    def _parse(self, said: Any) -> list[ZerogNode]:
        """Parse an indexer's list of nodes. Raises `KeyError`, `TypeError` or `ValueError`."""
        found = []
        for each in said[:MOST_NODES]:
            url = each["url"]
            if not _NODE.fullmatch(url):
                raise ValueError(f"{str(url)[:80]!r} is no node")
            found.append(
                ZerogNode(JsonRpc(url.rstrip("/"), url, *self._limits), Shard.parse(each["config"]))
            )
        return found

    def _check(self, nodes: Sequence[ZerogNode], which: str) -> None:
        """Raise `RecordError` unless `nodes` together keep all segments."""
        every = math.lcm(*(node.shard.count for node in nodes))
        if (
            not nodes
            or every > 1 << 20
            or not all(any(node.shard.holds(at) for node in nodes) for at in range(every))
        ):
            raise RecordError(
                f"{self.url}: names no nodes {which} and keep all parts; name another indexer"
            )
