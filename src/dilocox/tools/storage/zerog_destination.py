"""Publishes into 0G Storage: each bundle is a file there, and so is the index.

What was submitted and what is still to be uploaded stands in a folder beside the coordinator's
state, so that a cut costs nothing twice. A bundle of some statements has always the same bytes. So
even without this folder the chain's events tell what was paid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from eth_account.signers.local import LocalAccount
from web3 import Web3

from dilocox.errors import RecordError, SettlementError
from dilocox.record.bundles.fetch import BadBundleError
from dilocox.record.bundles.place import AT_ONCE, CALL_SECONDS, in_order
from dilocox.record.bundles.publication import INDEX, Bundle, Publication, ZerogFile
from dilocox.record.bundles.zerog_network import ZerogNetwork
from dilocox.record.bundles.zerog_node import FileInfo, ZerogUrl
from dilocox.record.bundles.zerog_root import CHUNK, SEGMENT, FileTree, RootBuilder, tree_of
from dilocox.record.log.blob_store import MissingError
from dilocox.tools.settlement.journal import Journal, append_lines, read_lines
from dilocox.tools.settlement.ledger import chain_of, connect
from dilocox.tools.storage import bundle_file
from dilocox.tools.storage.bundle_file import BundleFile
from dilocox.tools.storage.uplink import Uplink
from dilocox.tools.storage.zerog_flow import Flow, Submitted, UnknownError
from dilocox.utils.storage import replace_file, sync_folder

FOLDER = "zerog"
"""Folder in the coordinator's folder; one folder in it for each contract."""
FILES = "files.jsonl"
"""Roots that were submitted, with transaction and number."""
NODE_SECONDS = 120.0
"""Seconds in which a node must see a submission, and must have a file whole once all is sent."""
POLL = 0.25
"""Seconds between two questions to a node that is behind."""

Pieces = Callable[[], Iterator[bytes]]
"""Begins to read a file from its start, in pieces of `PART_SIZE` bytes but the last."""


@dataclass(frozen=True)
class ZerogAccess:
    """What is needed to publish into 0G Storage."""

    url: ZerogUrl
    rpc: str
    """URL of the chain's server."""
    contract: str
    """Address of the Flow contract."""
    account: LocalAccount
    """Who pays."""
    fee: int
    """Wei that one transaction may cost, its payment for the storage included."""


@dataclass
class ZerogDestination:
    """A storage node and a contract, to which one run is published."""

    access: ZerogAccess
    coordinator: Path
    """The folder `coordinator` of the run."""
    patience: float = 0.0
    """Seconds for which a failing call to the node is repeated."""
    seconds: float = CALL_SECONDS
    """Time limit of one call to the node, beside the time for its bytes."""
    tell: Callable[[str], object] = lambda line: None
    """Called with a line for each payment and each new index."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    _nodes: ZerogNetwork = field(init=False)
    _flow: Flow = field(init=False)
    _folder: Path | None = None
    _known: dict[str, Submitted] = field(default_factory=dict)
    _index_root: str = ""
    _stored: str = ""
    """Text of the index that is stored."""

    def __post_init__(self) -> None:
        """Look at node and contract; nothing is asked. Raises `RecordError` for a bad address."""
        access = self.access
        self._nodes = ZerogNetwork(access.url, self.patience, self.seconds)
        web3 = connect(access.rpc)
        self._flow = Flow(web3, access.contract, access.account, access.fee)

    @property
    def url(self) -> str:
        """The node's URL."""
        return self.access.url.text

    @property
    def published(self) -> str:
        """URL of the newest index that is stored."""
        return self.access.url.at(self._index_root or "ROOT")

    @property
    def paid(self) -> bool:
        """True: the room for each index is bought."""
        return True

    def read_index(self, key: str) -> Publication:
        """Return the index that this run's folder has. Raises like `Destination.read_index`."""
        path = self._opened() / INDEX
        try:
            return Publication.parse(path.read_text(encoding="utf-8"), key)
        except FileNotFoundError:
            raise MissingError(f"{path}: not there") from None
        except (OSError, UnicodeDecodeError, RecordError) as error:
            raise BadBundleError(f"{path}: {error}") from None

    def send(self, file: BundleFile, bundle: Bundle, uplink: Uplink) -> tuple[Bundle, int]:
        """Submit a bundle and upload it, as far as this was not done. Raises `RecordError`."""
        builder = RootBuilder()
        for part in file.parts():
            builder.update(part)
        tree = builder.finish()
        submitted, sent = self._store(bundle.name, tree, file.parts, uplink)
        where = ZerogFile(tree.root.hex(), submitted.transaction)
        return replace(bundle, zerog=where), sent

    def send_index(self, text: str, due: bool, uplink: Uplink) -> None:
        """Keep the index in the run's folder; `finish` stores it. Raises `RecordError`."""
        folder = self._opened()
        try:
            replace_file(folder / INDEX, text.encode())
            sync_folder(folder)
        except OSError as error:
            raise RecordError(f"{folder / INDEX}: cannot be written ({error})") from None

    def finish(self, text: str, uplink: Uplink) -> None:
        """Store the index, and tell its URL. Raises `RecordError`."""
        if text == self._stored:
            return
        data = text.encode()
        tree = tree_of(data)
        step = bundle_file.PART_SIZE

        def pieces() -> Iterator[bytes]:
            return (data[at : at + step] for at in range(0, len(data), step))

        self._store(INDEX, tree, pieces, uplink)
        self._index_root, self._stored = tree.root.hex(), text
        self.tell(f"index stored: {self.published}")

    def _opened(self) -> Path:
        """Return the folder of what was submitted; open it at the first use."""
        if self._folder is None:
            try:
                chain = chain_of(self._flow.web3)
            except SettlementError as error:
                raise RecordError(str(error)) from None
            self._flow.check()
            self._nodes.takers()
            folder = self.coordinator / FOLDER / f"{chain}-{self._flow.address}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for said in read_lines(folder / FILES):
                    self._known[said["root"]] = Submitted(said["transaction"], said["sequence"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise RecordError(f"{folder / FILES}: cannot be read ({error})") from None
            self._folder = folder
        return self._folder

    def _store(
        self, name: str, tree: FileTree, pieces: Pieces, uplink: Uplink
    ) -> tuple[Submitted, int]:
        """Submit a file and upload it, as far as this was not done.

        Returns the submission, and the number of bytes that were uploaded.
        """
        root = tree.root.hex()
        infos = self._nodes.infos(root)  # and nothing is paid before the nodes answer
        submitted = self._known.get(root)
        if submitted is None:
            submitted = self._submit(name, tree, any(infos))
        seen = self._seen(submitted, root)
        if all(info.finalized for info in seen):
            return submitted, 0
        sent = self._upload(tree, submitted, seen, pieces, uplink)
        self._await_whole(name, root)
        return submitted, sent

    def _submit(self, name: str, tree: FileTree, known: bool) -> Submitted:
        """Submit a file unless the chain has it, and write that down.

        `known`: a node says that it was submitted.
        """
        folder, root, account = self._opened(), tree.root.hex(), self.access.account
        journal = Journal(folder / f"journal-{account.address}.jsonl")
        try:
            journal.catch_up(self._flow.web3, account, self._flow.fee, whole=True)
            found = self._flow.among(tree, journal.sent()) or self._searched(name, tree, known)
            if found is None:
                found = self._flow.submit(tree, journal.keep)
            said = {"root": root, "transaction": found.transaction, "sequence": found.sequence}
            append_lines(folder / FILES, [said])
            if found.paid:  # only now: until then the next start looks at the transaction again
                journal.done(found.transaction)
        except OSError as error:
            raise RecordError(f"{folder}: cannot be written ({error.strerror})") from None
        except SettlementError as error:
            raise RecordError(str(error)) from None
        if found.paid:
            paid = Web3.from_wei(found.paid, "ether")
            self.tell(f"{name}: {paid:f} coins for its storage, transaction {found.transaction}")
        self._known[root] = found
        return found

    def _searched(self, name: str, tree: FileTree, known: bool) -> Submitted | None:
        """Search the chain for a submission of a file; None if there was none.

        `known`: whether a node says that there was one. Raises `RecordError` if node and chain's
        server contradict each other.
        """
        try:
            found = self._flow.find(tree)
        except UnknownError as error:
            if known:
                raise RecordError(f"{name}: was submitted before, but {error}") from None
            return None
        if found is None and known:
            raise RecordError(
                f"{name}: the node says that it was submitted, and the chain's server says that it "
                "was not; name another server, as nothing is paid twice"
            )
        return found

    def _seen(self, submitted: Submitted, root: str) -> list[FileInfo]:
        """Wait until all nodes know a submission."""
        end = self.clock() + NODE_SECONDS
        while True:
            found = self._nodes.infos(root)
            known = [info for info in found if info is not None]
            if len(known) == len(found):
                return known
            if self.clock() > end:
                raise RecordError(
                    f"{self.url}: does not know transaction {submitted.transaction} after "
                    f"{NODE_SECONDS:.0f} s; it is paid, so publish again later, or to another node"
                )
            self.sleep(POLL)

    def _upload(
        self, tree: FileTree, submitted: Submitted, seen: Sequence[FileInfo], pieces: Pieces,
        uplink: Uplink,
    ) -> int:  # fmt: skip
        """Upload the segments that the nodes may lack; return the bytes that were sent.

        A node tells only how many segments it has. Uploads go in order, so most of these are the
        first ones: the upload to one node begins after them, and comes back to them if the file is
        not whole.
        """
        begin, info = 0, seen[0]
        if len(seen) == 1:
            begin = max(0, min(info.segments, tree.count) // _segments_of_part() - AT_ONCE)

        def send(part: tuple[int, bytes]) -> int:
            number, data = part
            size, first = len(data), number * _segments_of_part()
            data = data.ljust(-(-size // CHUNK) * CHUNK, b"\0")
            segments = [data[at : at + SEGMENT] for at in range(0, len(data), SEGMENT)]
            uplink.take(size * 4 // 3)  # base64
            self._nodes.upload(tree, info, submitted.sequence, list(enumerate(segments, first)))
            return size

        sent = sum(in_order(send, islice(enumerate(pieces()), begin, None)))
        if begin and not self._whole(tree.root.hex()):
            sent += sum(in_order(send, islice(enumerate(pieces()), 0, begin)))
        return sent

    def _whole(self, root: str) -> bool:
        """Return whether all nodes say that they have all of a file."""
        return all(info is not None and info.finalized for info in self._nodes.infos(root))

    def _await_whole(self, name: str, root: str) -> None:
        """Wait until the node says that it has all of a file."""
        end = self.clock() + NODE_SECONDS
        while not self._whole(root):
            if self.clock() > end:
                raise RecordError(
                    f"{self.url}: has not all of {name} {NODE_SECONDS:.0f} s after it was "
                    "uploaded; publish again later, or to another node"
                )
            self.sleep(POLL)


def _segments_of_part() -> int:
    """Return the number of segments that one call uploads, those of a part of a bundle."""
    return bundle_file.PART_SIZE // SEGMENT
