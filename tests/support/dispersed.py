"""A recorded run of three sites whose payloads are cut into pieces, without any training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.custody_messages import CustodyRequest
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.record.log.blob_store import Store
from dilocox.record.log.digests import sha256
from dilocox.record.writer.dispersal import Coordinator, Dispersal
from dilocox.record.writer.dispersal_journal import Journal
from dilocox.record.writer.signing_identity import SigningIdentity
from tests.support.record_scene import KEY, SIGNERS, Scene

NEXT = ExchangeKey.outer(0, 0, 1)
PATIENCE = 30.0


def payload(site: str, key: ExchangeKey) -> bytes:
    """The payload with which a site votes (`record_scene.own_digest`)."""
    return f"{site} {key.text}".encode()


class Site:
    """One site's store, and what cuts its payloads."""

    def __init__(
        self,
        town: Town,
        name: str,
        coordinator: Coordinator | None = None,
        keep_whole: bool = True,
    ) -> None:
        self.town, self.name, self.lines = town, name, list[str]()
        self.keep_whole = keep_whole
        self.store = Store(str(town.root / name))
        self.rank = m.RankId(site=name, stage=0, shard=0)
        self.coordinator = coordinator or self
        self.begin()

    def begin(self) -> None:
        """Start the thread; after `end`, as a rank that is started again does."""
        availability = self.town.scene.config.availability
        assert availability is not None
        author = SigningIdentity(self.town.scene.notary.run, self.rank, SIGNERS[self.name])
        journal = Journal(self.town.root / f"custody-{self.name}.jsonl")
        code = availability.code(self.town.scene.config.sites)
        self.dispersal = Dispersal(
            author, self.store, self.coordinator, self.lines.append, code, journal,
            self.keep_whole,
        )  # fmt: skip

    def custody(self, statement: str | None, asked: Sequence[str]) -> Mapping[str, str]:
        """Submit to the scene's coordinator."""
        request = CustodyRequest(rank=self.rank, statement=statement, asked=list(asked))
        return self.town.scene.driver.core.saves.custody(request).certified

    def keep(self, key: ExchangeKey, sites: str = "abc", more: Sequence[bytes] = ()) -> None:
        """Store the payloads of an exchange, and have them cut."""
        objects = [*(payload(site, key) for site in sites), *more]
        for each in objects:
            self.store.put(each)
        self.dispersal.stored(key, len(sites), [(sha256(each), len(each)) for each in objects])


class Town:
    """Three sites, each with a store of its own, and the coordinator with the log."""

    def __init__(
        self,
        root: Path,
        own: Callable[[str], Coordinator | None] = lambda site: None,
        keep_whole: bool = True,
        scene: Scene | None = None,
    ) -> None:
        """`scene`: where all sites have enrolled, and a round is planned; None: a new one."""
        self.root = root
        self.scene = scene or _enrolled(root)
        self.sites = {name: Site(self, name, own(name), keep_whole) for name in "abc"}

    def exchange(self, *keys: ExchangeKey) -> None:
        """Decide exchanges, and let all sites cut and sign."""
        for key in keys or (KEY, NEXT):
            self.scene.exchange(key)
            for site in self.sites.values():
                site.keep(key)
        self.wait()

    def wait(self) -> None:
        """Let all sites sign."""
        for site in self.sites.values():
            site.dispersal.wait(PATIENCE)

    def folder(self) -> Path:
        """The run's folder, once its log is closed."""
        self.scene.notary.close()
        return self.scene.config.folder

    def stores(self, sites: str = "abc") -> list[str]:
        """The places of some sites' stores."""
        return [str(self.root / site) for site in sites]


def _enrolled(root: Path) -> Scene:
    scene = Scene(root, availability={})
    scene.enrol()
    scene.driver.plan(0, "a")
    return scene
