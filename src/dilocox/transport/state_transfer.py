"""Transfer of the shared state from a donor to an entering rank, piece by piece.

Messages are JSON headers and safetensors bodies. The shared state of a piece is its anchor, its
outer momentum and, with a low-rank codec, the warm start Q. The donor copies a piece at a slot end,
after the landings, and sends the copy while it trains on. The entering rank checks the digest of
every piece. At the start of a run the founder is the donor of all sites: a rank that already holds
the same theta_0 receives a header without tensors. Both sides validate each header before they use
it. While a run goes on, the entering rank accepts a piece only if most sites hold the same piece
(`dilocox.training.anchor_digests`).

An entering rank may have pieces from another source (`dilocox.training.published_state`). The donor
waits until they are ready, compares their digests with its own, and does not send what is equal.

There is no time limit on the transfer of a piece, or on the wait for the donor's next slot end.
While the donor has no piece to offer, it sends `WAIT` headers at intervals. A transfer fails only
when nothing moves on the link for the group's `silence` seconds.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from safetensors import SafetensorError

from dilocox.errors import ExchangeError, JoinError
from dilocox.outer.snapshot import Snapshot
from dilocox.transport.groups import PeerGroup
from dilocox.transport.link.transfer import Transfer
from dilocox.utils.storage import run_in_thread

HEADER_BYTES = 4096
"""Bytes to which every JSON header is padded; a `Held` of many pieces is larger (`held_bytes`)."""
LOOK = 60.0
"""Seconds of one wait for a transfer; waits repeat until the transfer ends or fails by itself."""
BESIDE_TENSORS = 1 << 16
"""Limit in bytes of tensor names and shapes in a piece's body, beside the tensors."""

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class WireHeader(BaseModel):
    """Base of the JSON headers. Unknown keys and values of other types are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Held(WireHeader):
    """The receiver's first message: the state that it holds already."""

    anchors: list[Sha256]
    """Digests of the receiver's anchors, one per piece."""
    here: list[Annotated[int, Field(ge=0)]]
    """Pieces that the receiver has from an earlier donor; the donor does not send these."""
    states: list[Sha256] = []
    """Digests (`FragmentState.digest`) of pieces that the receiver has from another source than a
    donor, one per piece; `NONE` for a piece that it does not have. Empty: it has none."""
    wait: bool = False
    """True if the receiver still prepares these; another `Held` follows."""


NONE = "0" * 64
"""Stands for the digest of a piece that is not there."""


def held_bytes(pieces: int) -> int:
    """Return the bytes to which `Held` is padded: for each piece two digests and a number."""
    return max(HEADER_BYTES, 128 + 150 * pieces)


class PieceHeader(WireHeader):
    """The donor's header before each piece, or instead of a piece (`wait`)."""

    piece: Annotated[int, Field(ge=0)]
    """Number of the piece. With `wait`, this and all other fields have no meaning."""
    tick: Annotated[int, Field(ge=0, lt=1 << 53)]
    codec: Annotated[str, StringConstraints(max_length=64)]
    bytes: Annotated[int, Field(ge=0)]
    """Bytes of the body that follows; 0 if the receiver holds the same piece already."""
    sha256: Sha256
    landed: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    """Round of the last exchange that landed on the piece; -1 if none has since the start."""
    wait: bool = False
    """True if the donor has no piece to offer yet; another header follows."""
    ready: bool = False
    """True if the piece is the same as the receiver's of `Held.states`; no body follows."""


WAIT = PieceHeader(piece=0, tick=0, codec="", bytes=0, sha256="0" * 64, wait=True)


class AckHeader(WireHeader):
    """The receiver's last message: it has every piece."""

    done: bool


AnyHeader = TypeVar("AnyHeader", bound=WireHeader)


def digest_of(anchor: torch.Tensor) -> str:
    """Return the SHA-256 of a flat anchor's bytes, in hex."""
    return hashlib.sha256(anchor.contiguous().numpy().data).hexdigest()


@dataclass(frozen=True)
class OwnPiece:
    """A piece that the receiver has from another source than a donor."""

    digest: str
    """`FragmentState.digest` of the tensors."""
    tensors: Mapping[str, torch.Tensor]


class Prepared(Protocol):
    """Pieces from another source than a donor."""

    pause: float
    """Seconds after which the donor is told to keep waiting."""

    def pieces(self) -> Mapping[int, OwnPiece]:
        """Return the pieces by number. Called in another thread; it does not raise."""


class Donor:
    """Sends all pieces to one entering rank, in a thread of its own.

    The training loop calls `offer` for each piece once the entering site may take the piece over.
    After every `pause` seconds without an offer the donor sends `WAIT`, so that the receiver knows
    that the donor is alive. If the receiver dies, the thread ends and sets `failure`.
    """

    def __init__(
        self,
        form_group: Callable[[], PeerGroup],
        site: str,
        pieces: int,
        pause: float,
        digest_of: Callable[[Snapshot], str] | None = None,
    ) -> None:
        """Start to serve `site`, in a thread.

        Args:
            form_group: Forms the group of this rank and the receiver.
            site: Name of the receiver's site.
            pieces: Number of pieces.
            pause: Seconds without an offer after which the receiver is told to wait.
            digest_of: Returns `FragmentState.digest` of a piece; called in the donor's thread, and
                only if the receiver has pieces from elsewhere. None: they are sent, too.
        """
        self._form_group, self._digest_of = form_group, digest_of
        self._site = site
        self._pieces = pieces
        self._pause = pause
        self._offers: queue.Queue[Snapshot | None] = queue.Queue()
        self._ending = threading.Lock()
        self._ended = False
        self.waiting = set(range(pieces))
        """Pieces not offered yet."""
        self.failure: str | None = None
        """Reason why the transfer failed; None if it has not."""
        self._thread = threading.Thread(target=self._serve, name=f"donor-{site}", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> None:
        """Queue one piece for sending. The tensors must be copies that do not change afterwards.

        The piece is dropped if the transfer has ended.
        """
        self.waiting.discard(snapshot.piece)
        self._put(snapshot)

    def cancel(self) -> None:
        """Stop serving: the receiver has died, or it has another donor."""
        self._put(None)

    def _put(self, offer: Snapshot | None) -> None:
        with self._ending:
            if not self._ended:
                self._offers.put(offer)

    @property
    def done(self) -> bool:
        """True when the thread has ended: all pieces are sent, or the transfer failed."""
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            self._send_all(Channel(self._form_group(), self._site))
        except ExchangeError as error:
            self.failure = str(error)
        finally:
            self._drop_offers()

    def _send_all(self, channel: Channel) -> None:
        while (held := channel.receive_header(Held, held_bytes(self._pieces))).wait:
            pass
        known = held.anchors
        if len(known) != self._pieces or len(held.states) not in (0, self._pieces):
            raise ExchangeError(
                f"{self._site} has {len(known)} pieces, this site has {self._pieces}"
            )
        for _ in known:
            self._send_next(channel, held)
        channel.receive_header(AckHeader)

    def _send_next(self, channel: Channel, held: Held) -> None:
        """Wait for the next offer and send the piece, if the receiver lacks it.

        A donor that waits has no reference to its last piece, whose memory is then free.
        """
        snapshot = self._next(channel)
        if snapshot is None:
            raise ExchangeError(f"{self._site} no longer waits for this site")
        if snapshot.piece in held.here:
            return
        header, body = self._packed(snapshot, held)
        del snapshot  # while the body travels, its source is not needed
        channel.send_header(header)
        if body:
            channel.send(torch.frombuffer(body, dtype=torch.uint8))

    def _packed(self, snapshot: Snapshot, held: Held) -> tuple[PieceHeader, bytearray]:
        """Return the header and the body of a piece.

        The body is empty if the receiver holds the same piece already.
        """
        anchor = digest_of(snapshot.tensors["anchor"])
        fresh = not snapshot.codec and not bool(snapshot.tensors["momentum"].any())
        same = fresh and held.anchors[snapshot.piece] == anchor
        ready = (
            bool(held.states)
            and self._digest_of is not None
            and (held.states[snapshot.piece] == self._digest_of(snapshot))
        )
        body = bytearray()
        if not (same or ready):
            body = bytearray(safetensors.torch.save(dict(snapshot.tensors)))
        header = PieceHeader(
            piece=snapshot.piece,
            tick=snapshot.tick,
            codec=snapshot.codec,
            landed=snapshot.landed,
            bytes=len(body),
            sha256=hashlib.sha256(body).hexdigest(),
            ready=ready,
        )
        return header, body

    def _drop_offers(self) -> None:
        """Free the copies that were not sent: this object may live on for long."""
        with self._ending:
            self._ended = True
            self._offers = queue.Queue()

    def _next(self, channel: Channel) -> Snapshot | None:
        """Wait for the next offer, without a time limit. Returns None after `cancel`."""
        while True:
            try:
                return self._offers.get(timeout=self._pause)
            except queue.Empty:
                channel.send_header(WAIT)


def fetch(
    form_group: Callable[[], PeerGroup],
    donor: str,
    anchors: Sequence[str],
    limits: Sequence[int],
    on_piece: Callable[[Snapshot], None],
    here: Collection[int] = (),
    prepared: Prepared | None = None,
) -> int:
    """Receive all pieces from `donor`, except pieces that are `here` already.

    A piece of `prepared` is not transferred if the donor has the same one.

    Args:
        form_group: Forms the group of this rank and the donor's rank.
        donor: Name of the donor's site.
        anchors: Digests of the anchors that this rank holds (`digest_of`), one per piece.
        limits: Limit in bytes of the tensors of each piece.
        on_piece: Called once for each received piece. A snapshot without tensors means that this
            rank holds the same piece already.
        here: Pieces that this rank has from an earlier donor.
        prepared: Pieces from another source. None: there is no other source.

    Returns:
        Number of pieces that were not transferred, because they are those of `prepared`.

    Raises:
        ExchangeError: The link went silent, or a header of the donor is invalid.
        JoinError: A piece does not match its digest or cannot be read.
    """
    channel = Channel(form_group(), donor)
    size, held = held_bytes(len(anchors)), Held(anchors=list(anchors), here=sorted(here))
    own: Mapping[int, OwnPiece] = {}
    if prepared is not None:
        preparing = run_in_thread(prepared.pieces)
        while not wait([preparing], prepared.pause).done:
            channel.send_header(held.model_copy(update={"wait": True}), size)
        own = preparing.result()
    if own:
        states = [own[each].digest if each in own else NONE for each in range(len(anchors))]
        held = held.model_copy(update={"states": states})
    channel.send_header(held, size)
    missing, same = set(range(len(anchors))) - set(here), 0
    while missing:
        header = channel.receive_header(PieceHeader)
        if header.wait:
            continue
        check_header(header, donor, missing, limits)
        missing.discard(header.piece)
        same += header.ready
        # No variable holds the tensors, because the wait for the next header may be long.
        on_piece(_received(channel, header, own, donor))
    channel.send_header(AckHeader(done=True))
    return same


def _received(
    channel: Channel, header: PieceHeader, own: Mapping[int, OwnPiece], donor: str
) -> Snapshot:
    """Receive the body of a piece, if there is one, and return the piece."""
    tensors: Mapping[str, torch.Tensor] = {}
    if header.ready:
        if header.piece not in own or header.bytes:
            raise ExchangeError(f"{donor} takes piece {header.piece} for one that is here")
        tensors = own[header.piece].tensors
    elif header.bytes:
        tensors = read_body(channel.receive(header.bytes).numpy().tobytes(), header, donor)
    return Snapshot(header.piece, header.tick, tensors, header.codec, header.landed)


def read_header(kind: type[AnyHeader], data: bytes, site: str) -> AnyHeader:
    """Parse a padded header of type `kind` from `site`. Raises `ExchangeError` if it is invalid."""
    try:
        return kind.model_validate_json(data.rstrip(b" "))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise ExchangeError(
            f"{site} sent no {kind.__name__} that can be read ({reason}); run the same dilocox "
            "version at all sites"
        ) from None


def check_header(header: PieceHeader, site: str, missing: set[int], limits: Sequence[int]) -> None:
    """Raise `ExchangeError` if a piece is not in `missing`, or is larger than its limit."""
    if header.piece not in missing:
        raise ExchangeError(f"{site} offers piece {header.piece}, which is not missing here")
    most = limits[header.piece] + BESIDE_TENSORS
    if header.bytes > most:
        raise ExchangeError(
            f"{site} announces {header.bytes} B for piece {header.piece}, which has "
            f"{most} B at most"
        )


def read_body(body: bytes, header: PieceHeader, site: str) -> dict[str, torch.Tensor]:
    """Load the tensors of a piece by name. Raises `JoinError` if `body` does not match `header`."""
    if hashlib.sha256(body).hexdigest() != header.sha256:
        raise JoinError(f"piece {header.piece} from {site} does not match its digest; join again")
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(body)
        return tensors
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise JoinError(
            f"piece {header.piece} from {site} cannot be read ({error}); join again"
        ) from None


class Channel:
    """Ordered messages between donor and receiver; each direction has its own numbers, from 1."""

    def __init__(self, group: PeerGroup, site: str) -> None:
        self._group, self._site = group, site
        self._said = self._heard = 0

    def receive_header(self, kind: type[AnyHeader], size: int = HEADER_BYTES) -> AnyHeader:
        """Receive the next header, padded to `size` bytes. Raises `ExchangeError`."""
        data = self.receive(size)
        return read_header(kind, data.numpy().tobytes(), self._site)

    def send_header(self, said: WireHeader, size: int = HEADER_BYTES) -> None:
        """Send a header, padded to `size` bytes. Raises `ExchangeError`."""
        text = said.model_dump_json().encode()
        if len(text) > size:
            raise ExchangeError(f"an entry header has {len(text)} B, the limit is {size} B")
        self.send(torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8))

    def receive(self, size: int) -> torch.Tensor:
        """Receive the next message, uint8 [size]. Raises `ExchangeError`."""
        data = torch.empty(size, dtype=torch.uint8)
        self._heard += 1
        _wait(self._group.receive(data, self._site, self._heard))
        return data

    def send(self, data: torch.Tensor) -> None:
        """Send a uint8 tensor as one message. Raises `ExchangeError`."""
        self._said += 1
        _wait(self._group.send(data, self._site, self._said))


def _wait(transfer: Transfer) -> None:
    """Wait until `transfer` has ended, without a limit on the whole transfer.

    The transfer fails by itself when no bytes move for the group's `silence` seconds.
    """
    while not transfer.poll(LOOK):
        pass
