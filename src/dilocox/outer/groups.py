"""Gloo groups between sites: one per (stage, shard) and membership epoch.

A group's rendezvous runs over the coordinator (mutual TLS), not over a TCPStore. Gloo itself
authenticates nobody: the links that it opens belong on a private network (docs/architecture.md).
Groups are never repaired: a change of members forms a new one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from dilocox import timeline
from dilocox.errors import ExchangeError
from dilocox.outer.coordinator.errors import EpochOverError
from dilocox.outer.sockets import connections, set_congestion_of
from dilocox.outer.unreached import Links, UnreachedError, far_ends


class KeyValue(Protocol):
    """The coordinator's rendezvous store, as `CoordinatorClient` offers it."""

    def kv_set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""

    def kv_check(self, keys: Sequence[str]) -> bool:
        """True if all `keys` are there."""

    def kv_get(self, keys: Sequence[str], limit: float) -> dict[str, bytes]:
        """The values of `keys`. Raises `ExchangeError` if one is missing after `limit` s."""


class EpochChangedError(ExchangeError):
    """The membership changed while a group was being formed or used."""


PIECE_BYTES = 4 << 20
FIRST_BYTES = 64
LOOK = 0.02
"""Seconds between two looks at whether a group that is being formed is still wanted."""
PIECES_UNDER_WAY = 4
"""Together 16 MiB: what is on the way on 1 Gbps at a round trip of 130 ms."""

_GLOO: Any = dist.ProcessGroupGloo

Rewrite = Callable[[str, bytes], bytes]
"""(key, value) -> value: changes what a group's members tell each other (see tunnel.py)."""


class CoordinatorStore(dist.Store):
    """A `torch.distributed` store whose keys live at the coordinator.

    Waits are cut into short polls, so that a change of membership (`cancelled`) ends them.
    """

    def __init__(
        self,
        kv: KeyValue,
        prefix: str,
        timeout: float,
        cancelled: Callable[[], bool],
        on_set: Rewrite | None = None,
        on_get: Rewrite | None = None,
    ) -> None:
        super().__init__()
        self._kv = kv
        self._prefix = prefix
        self._limit = timeout
        self._cancelled = cancelled
        self._on_set = on_set
        self._on_get = on_get
        self.asked = ""
        """The key that was asked for last."""
        self.found: dict[str, bytes] = {}
        """What was answered, by key."""
        self._asking = False
        self._heard = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since the last answer; 0 while an answer is waited for."""
        return 0.0 if self._asking else time.monotonic() - self._heard

    def set(self, key: str, value: str | bytes | Sequence[int]) -> None:
        """Store `value` under `key`."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        if self._on_set:
            data = self._on_set(key, data)
        try:
            self._kv.kv_set(self._prefix + key, data)
        except EpochOverError as error:
            raise EpochChangedError(str(error)) from None

    def get(self, key: str) -> bytes:
        """The value under `key`, waiting for it. Raises `UnreachedError`, `EpochChangedError`."""
        self.asked, self._asking = key, True
        try:
            self.found[key] = self._get(key)
        finally:
            self._heard, self._asking = time.monotonic(), False
        return self.found[key]

    def _get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._limit
        while True:
            if self._cancelled():
                raise EpochChangedError(f"the members changed while waiting for {key}")
            name = self._prefix + key
            try:
                value = self._kv.kv_get([name], 1.0)[name]
            except EpochOverError as error:
                raise EpochChangedError(str(error)) from None
            except ExchangeError:
                value = None
            if value is not None:
                return self._on_get(key, value) if self._on_get else value
            if time.monotonic() > deadline:
                raise UnreachedError(
                    f"no peer has answered for {self._prefix}{key} within {self._limit:g} s; "
                    "is network.interface the one that reaches the other sites?"
                )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all `keys` are there."""
        return self._kv.kv_check([self._prefix + key for key in keys])

    def set_timeout(self, timeout: timedelta) -> None:
        """The wait limit is fixed at construction: all time-outs derive from one."""


class Transfer:
    """One tensor on its way to or from a site, in a thread of its own.

    The first pieces are under way when it has been made: Gloo answers "send" with "ready" on the
    same connection, behind whatever this rank has sent before, so receives have to be made before
    sends, or the other direction stands still until these are through.

    It travels in pieces, some of them under way at a time, so that a large tensor on a slow link
    is not taken for silence: only a piece that does not move for the group's time-out ends it.
    The first piece is small: when it is through, the peer has begun, and the time from there is
    the link's own.
    """

    def __init__(
        self,
        start: Callable[[torch.Tensor], dist.Work],
        site: str,
        tensor: torch.Tensor,
        what: Literal["send", "receive"],
        group: str = "",
    ) -> None:
        self.site = site
        self.sends = what == "send"
        self._what = what
        self._group = group
        self._start = start
        self.size = tensor.numel()
        """Bytes."""
        self.moves = False
        """Its first piece is through: the peer has begun."""
        self._pieces = deque(_pieces(tensor))
        self._under_way: deque[tuple[dist.Work, int]] = deque()
        self._ended = threading.Event()
        self._given_up = False
        self._failure: str | None = None
        self.posted = self.began = self.ended = time.time()
        """When it was asked for, and when the first piece and all were through, by the machine's
        clock; once ended."""
        try:
            self._fill()
        except RuntimeError as error:
            self._failure = _first_line(error)
        row = f"{what} {'to' if what == 'send' else 'from'} {site}"
        threading.Thread(target=self._run, name=row, daemon=True).start()

    def poll(self, seconds: float = 0.0) -> bool:
        """True once it has ended well, waiting up to `seconds`.

        Raises `ExchangeError` if the link broke.
        """
        if not self._ended.wait(seconds):
            return False
        if self._failure is not None:
            raise ExchangeError(f"link to {self.site} broke: {self._failure}")
        return True

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for its end, good or bad."""
        self._ended.wait(seconds)

    def give_up(self) -> None:
        """Start no more pieces; those under way end with their time-out."""
        self._given_up = True

    def _run(self) -> None:
        with timeline.span(self._what, site=self.site, bytes=self.size, group=self._group):
            if self._failure is None:
                try:
                    self._move()
                except RuntimeError as error:
                    self._failure = _first_line(error)
        self.ended = time.time()
        self._ended.set()

    def _fill(self) -> None:
        """Start pieces while there are any and few enough are under way."""
        while self._pieces and len(self._under_way) < PIECES_UNDER_WAY:
            piece = self._pieces.popleft()
            self._under_way.append((self._start(piece), piece.numel()))

    def _move(self) -> None:
        through = 0
        while self._under_way:
            work, size = self._under_way.popleft()
            with timeline.span("piece" if through else "wait for peer", bytes=size):
                work.wait()
            through += 1
            if through == 1:
                self.began, self.moves = time.time(), True
            if not self._given_up:
                self._fill()


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A small first piece, and the rest in equal ones; the same at sender and receiver."""
    pieces = [tensor[:FIRST_BYTES], *tensor[FIRST_BYTES:].split(PIECE_BYTES)]
    return [piece for piece in pieces if piece.numel()]


class PeerGroup:
    """This rank and its peers (·, stage, shard) at the other sites of one membership epoch.

    `sites` in the order of the epoch; `address` is the interface name or the IP address that
    the sockets bind to, `congestion` their TCP congestion control, if not the machine's. Forming it
    blocks until every peer has formed its own.
    A transfer fails when nothing moves for `silence` seconds. Raises `UnreachedError` when a peer
    does not come, or is not linked, within `timeout` seconds, or refuses, `EpochChangedError` once
    `cancelled()` is true, and `ExchangeError` for what is wrong at this rank.
    """

    def __init__(
        self,
        kv: KeyValue,
        name: str,
        sites: Sequence[str],
        me: str,
        address: str,
        timeout: float,
        silence: float,
        cancelled: Callable[[], bool],
        on_set: Rewrite | None = None,
        on_get: Rewrite | None = None,
        congestion: str | None = None,
    ) -> None:
        self.name = name
        self.sites = list(sites)
        self.me = me
        self._index = {site: number for number, site in enumerate(self.sites)}
        self._backend: Any = None
        if len(self.sites) == 1:
            return
        options = _GLOO._Options()
        options._devices = [gloo_device(address)]
        # One piece may be silent for so long; what has timed out is not used again.
        options._timeout = timedelta(seconds=silence)
        options._threads = 1
        over = _Sticky(cancelled)
        store = CoordinatorStore(kv, f"{name}/", timeout, over, on_set, on_get)
        self._store = store
        before = connections() if congestion else set()
        try:
            self._backend = _unless(
                over,
                lambda: _GLOO(store, self._index[me], len(self.sites), options),
                lambda: store.idle > timeout,
            )
        except UnreachedError as error:
            links = Links(sites, me, store.found)
            raise UnreachedError(str(error), links.not_come(store.asked)) from None
        except TimeoutError:
            silent = Links(sites, me, store.found).silent(far_ends())
            raise UnreachedError(
                f"group {name}: no link to {', '.join(silent)} within {timeout:g} s; is "
                "network.interface the one that reaches the other sites?",
                silent,
            ) from None
        except (ExchangeError, dist.DistError):
            raise
        except RuntimeError as error:
            if over():
                raise EpochChangedError("the members changed while the group was formed") from None
            line = f"group {name}: {_first_line(error)}"
            if len(store.found) < len(self.sites):
                raise ExchangeError(line) from None  # not so far that a peer could refuse
            refused = Links(sites, me, store.found).refused(str(error))
            raise UnreachedError(line, refused) from None
        if congestion:
            # Another thread's connection may be among them, which takes no harm.
            set_congestion_of(connections() - before, congestion)

    def send(self, tensor: torch.Tensor, site: str, tag: int) -> Transfer:
        """Start sending a contiguous uint8 CPU tensor to `site`."""
        backend, peer = self._backend, self._index[site]
        assert backend is not None
        return Transfer(
            lambda piece: backend.send([piece], peer, tag), site, tensor, "send", self.name
        )

    def receive(self, tensor: torch.Tensor, site: str, tag: int) -> Transfer:
        """Start filling a contiguous uint8 CPU tensor from `site`."""
        backend, peer = self._backend, self._index[site]
        assert backend is not None
        return Transfer(
            lambda piece: backend.recv([piece], peer, tag), site, tensor, "receive", self.name
        )

    def close(self) -> None:
        """Drop the connections; operations under way fail at the peers."""
        self._backend = None


class _Sticky:
    """A condition that stays true, for several threads."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition
        self._lock = threading.Lock()
        self._true = False

    def __call__(self) -> bool:
        with self._lock:
            self._true = self._true or self._condition()
            return self._true


def _unless(
    over: Callable[[], bool], make: Callable[[], Any], late: Callable[[], bool] = lambda: False
) -> Any:
    """What `make` returns or raises. Raises `EpochChangedError` as soon as `over()` is true, and
    `TimeoutError` once it is `late()`.

    Gloo waits for a peer that has left its address and died for five times its own time-out, and
    cannot be interrupted: that wait is left to a thread whose result nobody takes.
    """
    made: list[Any] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)
        ended.set()

    threading.Thread(target=run, name="form group", daemon=True).start()
    while not ended.wait(LOOK):
        if over():
            raise EpochChangedError("the members changed while the group was formed")
        if late():
            raise TimeoutError
    if failed:
        raise failed[0]
    return made[0]


def gloo_device(address: str) -> object:
    """A Gloo device on an interface name or an IP address.

    Raises `ExchangeError` if this machine has neither.
    """
    make = _GLOO.create_device
    looks_like_ip = ":" in address or address.replace(".", "").isdigit()
    try:
        return make(hostname=address) if looks_like_ip else make(interface=address)
    except RuntimeError as error:
        raise ExchangeError(
            f'interface "{address}" cannot be used ({_first_line(error)}); '
            "set network.interface or sites.NAME.interface to one of this machine"
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
