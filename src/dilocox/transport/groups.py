"""Peer groups between sites: one group per (stage, shard) and membership epoch.

Members announce their listening addresses through the coordinator's key-value store. A change of
members forms a new group. A connection that breaks is made again within its group
(`dilocox.transport.link.link`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol

import torch

from dilocox.coordinator.client.errors import EpochOverError
from dilocox.errors import ExchangeError
from dilocox.transport.link.addresses import Announcement, announce, connects, read_announcement
from dilocox.transport.link.endpoint import LinkEndpoint
from dilocox.transport.link.link import Link, UnreachableError, Ways
from dilocox.transport.link.tls import UnauthenticatedPeerError
from dilocox.transport.link.transfer import Transfer
from dilocox.transport.unreached import UnreachedError

LOOK = 0.02
"""Seconds between two checks of a group that is being formed: is it complete, or cancelled?"""
_PAUSE = 0.2
"""Seconds between two attempts to connect to a peer."""
_POLL = 1.0
"""Seconds that one request to the key-value store waits for a peer's announcement."""


class KeyValue(Protocol):
    """The coordinator's rendezvous store, as `CoordinatorClient` offers it."""

    def kv_set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""

    def kv_check(self, keys: Sequence[str]) -> bool:
        """Return True if a value is stored under each of `keys`."""

    def kv_get(self, keys: Sequence[str], limit: float) -> dict[str, bytes]:
        """Return the values of `keys`.

        Raises `ExchangeError` if a value is still missing after `limit` seconds.
        """


class EpochChangedError(ExchangeError):
    """The membership changed while a group was being formed or used."""


class PeerGroup:
    """This rank and its peers of the same (stage, shard) at the other sites of one epoch.

    The constructor blocks until this rank has a connection with each peer.

    Args:
        endpoint: This rank's listening port and TLS settings.
        kv: Key-value store in which members announce their addresses.
        name: Name of the group, the same at all members.
        sites: All members, this rank's own site included, in the order of the epoch.
        timeout: Seconds within which every peer must have announced itself and be linked.
        silence: Seconds after which a transfer fails if no bytes of it have moved.
        cancelled: Returns True once the group is no longer needed.

    Raises:
        UnreachedError: A peer does not announce itself or is not linked within `timeout`, or it
            refuses the connection.
        EpochChangedError: `cancelled()` returned True before the group was formed.
    """

    def __init__(
        self,
        endpoint: LinkEndpoint,
        kv: KeyValue,
        name: str,
        sites: Sequence[str],
        timeout: float,
        silence: float,
        cancelled: Callable[[], bool],
    ) -> None:
        self.name = name
        self.sites = list(sites)
        self.me = endpoint.site
        self._silence = silence
        self._ended: Callable[[], bool] = lambda: False
        others = [site for site in sites if site != self.me]
        limits = endpoint.timeouts
        self._links = {
            site: Link(name, site, min(silence, limits.link), limits.parting) for site in others
        }
        if not others:
            return
        mine = endpoint.announcement()
        endpoint.offer(mine.route, self._links)
        # A group that is garbage-collected without `close` ends its links, too.
        self._end = weakref.finalize(self, _close, endpoint, mine.route, list(self._links.values()))
        self._end.atexit = False
        try:
            _Forming(endpoint, kv, name, self.sites, self._links, cancelled, timeout).form(mine)
        except BaseException:
            self._end()
            raise

    def send(self, tensor: torch.Tensor, site: str, tag: int) -> Transfer:
        """Start sending a contiguous uint8 CPU tensor to `site`.

        Each tag may be used only once per receiving site. The tensor must not change afterwards.
        """
        return self._begin("send", tensor, site, tag)

    def receive(self, tensor: torch.Tensor, site: str, tag: int) -> Transfer:
        """Start filling a contiguous uint8 CPU tensor with message `tag` from `site`."""
        return self._begin("receive", tensor, site, tag)

    def watch(self, ended: Callable[[], bool]) -> None:
        """Make transfers that start after this call raise `EpochChangedError` once `ended()`."""
        self._ended = ended

    def close(self) -> None:
        """Close the connections. Transfers in flight fail at the peers."""
        if self._links:
            self._end()

    def _begin(
        self, what: Literal["send", "receive"], tensor: torch.Tensor, site: str, tag: int
    ) -> Transfer:
        link, ended = self._links[site], self._ended

        # The closure does not hold `self`: a link that waits for an acknowledgement must not keep
        # the group from being garbage-collected.
        def check() -> None:
            if ended():
                raise EpochChangedError(f"the members changed during a transfer with {site}")

        # The transfer comes as an argument: a closure that held the transfer would make a
        # cycle, and the payload would stay in memory until the next garbage collection.
        withdraw = partial(link.withdraw, tag)
        transfer = Transfer(site, tensor, what, self._silence, self.name, check, withdraw)
        (link.send if what == "send" else link.receive)(tag, transfer)
        return transfer


def _close(endpoint: LinkEndpoint, route: str, links: Sequence[Link]) -> None:
    endpoint.withdraw(route)
    endpoint.close_links(links)


class _Forming:
    """Connects one group: publishes this rank's address, then dials or awaits each peer."""

    def __init__(
        self,
        endpoint: LinkEndpoint,
        kv: KeyValue,
        name: str,
        sites: Sequence[str],
        links: dict[str, Link],
        cancelled: Callable[[], bool],
        timeout: float,
    ) -> None:
        self._endpoint, self._kv, self._name = endpoint, kv, name
        self._sites, self._links = list(sites), links
        self._cancelled, self._limit = cancelled, timeout
        self._end = time.monotonic() + timeout
        self._over = False
        self._failed: dict[str, str] = {}

    def form(self, mine: Announcement) -> None:
        """Block until every peer is linked. Raises the errors that `PeerGroup` lists."""
        me = self._sites.index(self._endpoint.site)
        try:
            try:
                self._kv.kv_set(self._key(self._endpoint.site), announce(mine))
            except EpochOverError as error:
                raise EpochChangedError(str(error)) from None
            for number, site in enumerate(self._sites):
                if number != me:
                    peer = self._asked(site)
                    self._meet(site, peer, connects(mine, me, peer, number))
            while not self._linked():
                time.sleep(LOOK)
        finally:
            self._over = True

    def _key(self, site: str) -> str:
        """Return the key under which `site` announces its address.

        The key ends with the site's name, so that the coordinator lets no other site set it.
        """
        return f"{self._name}/{site}"

    def _asked(self, site: str) -> Announcement:
        """Wait for the announcement of `site` and return it."""
        key = self._key(site)
        while True:
            if self._cancelled():
                raise EpochChangedError(f"the members changed while waiting for {site}")
            try:
                value = self._kv.kv_get([key], _POLL)[key]
            except EpochOverError as error:
                raise EpochChangedError(str(error)) from None
            except ExchangeError:
                value = None
            if value is not None:
                try:
                    return read_announcement(value)
                except ExchangeError as error:  # the site that wrote the announcement is to blame
                    raise UnreachedError(f"{self._name}: site {site}: {error}", [site]) from None
            if time.monotonic() > self._end:
                raise UnreachedError(
                    f"{self._name}: site {site} has not announced its address within "
                    f"{self._limit:g} s; does its network.interface reach the other sites?",
                    [site],
                )

    def _meet(self, site: str, peer: Announcement, connects_here: bool) -> None:
        endpoint, link = self._endpoint, self._links[site]
        dial = (lambda: endpoint.dial(site, peer)) if connects_here else None
        link.use(Ways(dial, lambda: endpoint.refuses(peer)))
        if connects_here:
            threading.Thread(
                target=self._dial, args=(site, peer), name=f"dial-{site}", daemon=True
            ).start()

    def _dial(self, site: str, peer: Announcement) -> None:
        """Connect to a peer, in a thread of its own; retry until the time-out."""
        link, end = self._links[site], self._end
        while not self._over:
            try:
                link.attach(self._endpoint.dial(site, peer))
                return
            except UnreachableError as error:
                if error.gone or time.monotonic() + _PAUSE >= end:
                    self._failed[site] = _unreached(site, peer, str(error))
                    return
            except (UnauthenticatedPeerError, ExchangeError) as error:
                self._failed[site] = _unreached(site, peer, str(error))
                return
            time.sleep(_PAUSE)

    def _linked(self) -> bool:
        """Return True when all links are connected. Raises the errors that `PeerGroup` lists."""
        if self._cancelled():
            raise EpochChangedError("the members changed while the group was formed")
        if self._failed:
            failed = dict(self._failed)
            raise UnreachedError("; ".join(failed.values()), list(failed))
        missing = [site for site, link in self._links.items() if not link.attached]
        if missing and time.monotonic() > self._end:
            raise UnreachedError(
                f"group {self._name}: no link to {', '.join(missing)} within {self._limit:g} s; "
                "does network.interface reach the other sites?",
                missing,
            )
        return not missing


def _unreached(site: str, peer: Announcement, reason: str) -> str:
    return (
        f"site {site} cannot be reached at {peer.host}:{peer.port}, as it announces ({reason}); "
        f"set sites.{site}.advertise and sites.{site}.ports to where its router lets this site in"
    )
