"""How a site enters a run: piece by piece, from one peer, as safetensors and JSON.

The donor copies what all sites agree on of a piece (anchor, outer momentum and, with a low-rank
codec, Q) at a slot end, after its landings, and sends the copy beside its own training. The
entering rank checks every piece's digest. At the
start of a run the founder is the donor of all: a rank that already holds the same theta_0 is told
so and receives no tensors. What either side says is checked before anything is done with it. While
a run goes on, a piece is taken over only if most sites hold the same
(`dilocox.training.anchor_digests`).

No limit is set to how long a piece travels, or to how long the donor's next slot end is away:
while there is nothing to offer the donor says so from time to time, and only a link on which
nothing moves for as long as its group allows is given up.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, TypeVar

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from safetensors import SafetensorError

from dilocox.errors import ExchangeError, JoinError
from dilocox.outer.snapshot import Snapshot
from dilocox.transport.groups import PeerGroup
from dilocox.transport.link.transfer import Transfer

HEADER_BYTES = 4096
"""Every JSON header is padded to this size, but for `Held` of many pieces."""
LOOK = 60.0
"""Seconds of one wait; how many there are is for the link to say."""
BESIDE_TENSORS = 1 << 16
"""Bytes that names and shapes take in a piece's body, at most."""

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class WireHeader(BaseModel):
    """One JSON header: these keys, of these types, and no others."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Held(WireHeader):
    """What the receiver says first."""

    anchors: list[Sha256]
    """Digests of its anchors, by piece."""
    here: list[Annotated[int, Field(ge=0)]]
    """Pieces that it has from an earlier donor: they are not sent."""


def held_bytes(pieces: int) -> int:
    """Size to which `Held` is padded: a digest and a number of each piece, and the rest."""
    return max(HEADER_BYTES, 64 + 80 * pieces)


class PieceHeader(WireHeader):
    """What the donor says before each piece."""

    piece: Annotated[int, Field(ge=0)]
    """With `wait`: none, and nothing else of this counts."""
    tick: Annotated[int, Field(ge=0, lt=1 << 53)]
    codec: Annotated[str, StringConstraints(max_length=64)]
    bytes: Annotated[int, Field(ge=0)]
    """Of the body that follows; 0: what the receiver holds is the same."""
    sha256: Sha256
    landed: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    """Round of the exchange that landed on the piece last; -1: none since the run started."""
    wait: bool = False
    """No piece can be offered yet; another header follows."""


WAIT = PieceHeader(piece=0, tick=0, codec="", bytes=0, sha256="0" * 64, wait=True)


class AckHeader(WireHeader):
    """What the receiver says last."""

    done: bool


AnyHeader = TypeVar("AnyHeader", bound=WireHeader)


def digest_of(anchor: torch.Tensor) -> str:
    """sha256 of a flat anchor's bytes, hex."""
    return hashlib.sha256(anchor.contiguous().numpy().data).hexdigest()


class Donor:
    """Serves one entering rank from a thread of its own.

    The training loop calls `offer` for each piece when the entering site may take it over;
    every `pause` seconds without one the receiver is told that this site lives.
    A receiver that dies harms nobody: the thread ends and says so in the log.
    """

    def __init__(
        self, form_group: Callable[[], PeerGroup], site: str, pieces: int, pause: float
    ) -> None:
        self._form_group = form_group
        self._site = site
        self._pieces = pieces
        self._pause = pause
        self._offers: queue.Queue[Snapshot | None] = queue.Queue()
        self.waiting = set(range(pieces))
        """Pieces not offered yet."""
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._serve, name=f"donor-{site}", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> None:
        """Hand over copies of one piece's tensors; they must not change afterwards."""
        self.waiting.discard(snapshot.piece)
        self._offers.put(snapshot)

    def cancel(self) -> None:
        """The receiver waits for no more offers: it has died, or has another donor."""
        self._offers.put(None)

    @property
    def done(self) -> bool:
        """True when everything is sent or the receiver is gone."""
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            channel = Channel(self._form_group(), self._site)
            held = channel.receive_header(Held, held_bytes(self._pieces))
            known = held.anchors
            if len(known) != self._pieces:
                raise ExchangeError(
                    f"{self._site} holds {len(known)} pieces, here are {self._pieces}"
                )
            for _ in known:
                snapshot = self._next(channel)
                if snapshot is None:
                    raise ExchangeError(f"{self._site} does not wait for this site any more")
                if snapshot.piece in held.here:
                    continue
                anchor = digest_of(snapshot.tensors["anchor"])
                fresh = not snapshot.codec and not bool(snapshot.tensors["momentum"].any())
                same = fresh and known[snapshot.piece] == anchor
                body = b"" if same else safetensors.torch.save(dict(snapshot.tensors))
                header = PieceHeader(
                    piece=snapshot.piece,
                    tick=snapshot.tick,
                    codec=snapshot.codec,
                    landed=snapshot.landed,
                    bytes=len(body),
                    sha256=hashlib.sha256(body).hexdigest(),
                )
                channel.send_header(header)
                if body:
                    channel.send(torch.frombuffer(bytearray(body), dtype=torch.uint8))
            channel.receive_header(AckHeader)
        except ExchangeError as error:
            self.failure = str(error)

    def _next(self, channel: Channel) -> Snapshot | None:
        """What is offered next, however long that takes."""
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
) -> None:
    """Receive all pieces but those that are `here` from `donor`.

    `anchors`: digests of what this rank holds (`digest_of`), one per piece; `limits`: bytes that
    a piece's tensors can have at most. `on_piece` is called once for each. Raises
    `ExchangeError` if the link goes silent or the donor says what makes no sense, and `JoinError`
    if what came is not what its digest says.
    """
    channel = Channel(form_group(), donor)
    held = Held(anchors=list(anchors), here=sorted(here))
    channel.send_header(held, held_bytes(len(anchors)))
    missing = set(range(len(anchors))) - set(here)
    while missing:
        header = channel.receive_header(PieceHeader)
        if header.wait:
            continue
        check_header(header, donor, missing, limits)
        missing.discard(header.piece)
        tensors: dict[str, torch.Tensor] = {}
        if header.bytes:
            tensors = read_body(channel.receive(header.bytes).numpy().tobytes(), header, donor)
        on_piece(Snapshot(header.piece, header.tick, tensors, header.codec, header.landed))
    channel.send_header(AckHeader(done=True))


def read_header(kind: type[AnyHeader], data: bytes, site: str) -> AnyHeader:
    """The header that `site` sent, padding included. Raises `ExchangeError` for anything else."""
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
    """Raise `ExchangeError` for a piece that is not one of `missing`, or cannot be so large."""
    if header.piece not in missing:
        raise ExchangeError(f"{site} offers piece {header.piece}, which is not missing here")
    most = limits[header.piece] + BESIDE_TENSORS
    if header.bytes > most:
        raise ExchangeError(
            f"{site} announces {header.bytes} B for piece {header.piece}, which has "
            f"{most} B at most"
        )


def read_body(body: bytes, header: PieceHeader, site: str) -> dict[str, torch.Tensor]:
    """The tensors of a piece. Raises `JoinError` if they are not what `header` says."""
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
    """Messages between donor and receiver, in order: each direction numbers its own."""

    def __init__(self, group: PeerGroup, site: str) -> None:
        self._group, self._site = group, site
        self._said = self._heard = 0

    def receive_header(self, kind: type[AnyHeader], size: int = HEADER_BYTES) -> AnyHeader:
        """The next header. Raises `ExchangeError`."""
        data = self.receive(size)
        return read_header(kind, data.numpy().tobytes(), self._site)

    def send_header(self, said: WireHeader, size: int = HEADER_BYTES) -> None:
        """Send a header. Raises `ExchangeError`."""
        text = said.model_dump_json().encode()
        if len(text) > size:
            raise ExchangeError(f"an entry header has {len(text)} B, the limit is {size} B")
        self.send(torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8))

    def receive(self, size: int) -> torch.Tensor:
        """The next message, of `size` bytes. Raises `ExchangeError`."""
        data = torch.empty(size, dtype=torch.uint8)
        self._heard += 1
        _wait(self._group.receive(data, self._site, self._heard))
        return data

    def send(self, data: torch.Tensor) -> None:
        """Send a message. Raises `ExchangeError`."""
        self._said += 1
        _wait(self._group.send(data, self._site, self._said))


def _wait(transfer: Transfer) -> None:
    """Until it has ended. It ends by itself when one of its pieces does not move for the group's
    limit: a large piece on a slow link takes as long as it takes."""
    while not transfer.poll(LOOK):
        pass
