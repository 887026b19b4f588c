"""A coordinator served over real TLS on loopback, in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.client import CoordinatorClient
from dilocox.coordinator.client.enrolment import Applicant, enrol
from dilocox.coordinator.identity import Identity
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.record_keys import RecordKey
from dilocox.coordinator.server.http_server import CoordinatorServer
from dilocox.coordinator.server.standby import StandbyLink
from dilocox.record.log.acceptance import OwnFacts, accept
from tests.support.coordinator_driver import VERSIONS, Clock, open_coordinator, run_config


class Run:
    """A server in a thread, and the sites that joined it."""

    def __init__(
        self,
        folder: Path,
        sites: str = "ab",
        shards: int = 1,
        outer: dict[str, Any] | None = None,
        run: dict[str, Any] | None = None,
        record: dict[str, Any] | None = None,
        standby: StandbyLink | None = None,
        config: RunConfig | None = None,
        **options: Any,
    ) -> None:
        self.standby = standby
        self.config = config or run_config(
            sites, shards=shards, outer=outer or {}, run=run or {}, record=record or {}
        )
        self.folder, self.options, self.clock = folder, options, Clock()
        self.identities: dict[str, Identity] = {}
        self.clients: list[CoordinatorClient] = []
        self.keys: dict[str, RecordKey] = {}
        self.port = 0
        self.up()

    def up(self) -> None:
        """Start on the log of the folder, on the same port as before."""
        self.core = open_coordinator(
            self.config, self.folder, now=self.clock, wall=self.clock, **self.options
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server = CoordinatorServer(self.core, self.standby)
        self.port = self.call(self.server.start("127.0.0.1", self.port))
        self.url = f"https://127.0.0.1:{self.port}"

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def expire(self) -> None:
        """Look at the clock now, on the server's own thread."""

        async def look() -> None:
            self.core.expire()

        self.call(look())

    def down(self) -> None:
        """Stop the server as a kill would, but for the port."""
        self.call(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.core.close()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.down()

    def enrol(self, site: str, **changes: Any) -> m.EnrolReply:
        fields: dict[str, Any] = {
            "token": self.token(site),
            "run_digest": self.config.digest(),
            "versions": VERSIONS,
            "stages": 1,
            "shards": self.config.site.shards,
            "record_key": self.keys.setdefault(site, RecordKey.new()),
        }
        fields.update(changes)
        token, own = fields.pop("token"), fields.pop("record_key")
        applicant = Applicant(site, **fields)
        identity, reply = enrol(
            self.url, token, applicant, timeouts=self.core.timeouts, record_key=own
        )
        self.identities[site] = identity
        if reply.record_run:
            said = (fields.get("data_digest"), None, "0" * 64, VERSIONS.named())
            text = accept(self.config, identity, reply.record_manifest, OwnFacts(*said))
            self.client(site).record_state(text)
        return reply

    def token(self, site: str) -> str:
        """The join token of a site; for a name that there is not, another site's."""
        issues = self.core.state.token_issues
        known = site if site in issues else next(iter(issues))
        return str(self.core.tokens.of(known, issues[known]))

    def client(self, site: str, shard: int = 0, **options: Any) -> CoordinatorClient:
        rank = m.RankId(site=site, stage=0, shard=shard)
        made = CoordinatorClient(
            self.url, self.identities[site], self.core.timeouts, rank, **options
        )
        self.clients.append(made)
        return made

    def start(self) -> dict[str, CoordinatorClient]:
        """All sites join and get ready; the clients of their shard 0."""
        for site in self.config.sites:
            self.enrol(site)
        clients = {site: self.client(site) for site in self.config.sites}
        for client in clients.values():
            client.ready()
        return clients
