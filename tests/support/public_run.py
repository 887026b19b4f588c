"""A small run that has everything a stranger may check: stakes, anchors, evidence, pieces, bundles.

No text is trained on. The run is under way, so the claims that need its end are NOT_RUN.
"""

from __future__ import annotations

import datetime
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.config.run_config import digest_of
from dilocox.coordinator.protocol.exchange_key import ExchangeKey
from dilocox.coordinator.protocol.messages import StakeProof
from dilocox.errors import DilocoxError, SettlementError
from dilocox.record.bundles.fetch import fetched, open_bundles
from dilocox.record.bundles.place import Place
from dilocox.record.bundles.publication import INDEX, Publication
from dilocox.record.log.transparency_log import leaves_of, read_log
from dilocox.record.verify.piece_stores import PieceStores
from dilocox.record.verify.places import Places
from dilocox.record.verify.published_bundles import verify_fetched
from dilocox.record.verify.signed_cuts import read_cuts
from dilocox.record.verify.verify import Report, verify
from dilocox.tools.attestation.policy import PolicyFile
from dilocox.tools.attestation.run_judge import RunJudge
from dilocox.tools.availability.sampling import Sampled, sample
from dilocox.tools.settlement.chain_heads import chain_heads
from dilocox.tools.settlement.ledger import run_id
from dilocox.tools.settlement.run_on_chain import RunOnChain
from dilocox.tools.storage.destination import FilesDestination
from dilocox.tools.storage.follow import publish_once
from dilocox.tools.storage.publisher import Publisher
from dilocox.tools.storage.run_source import RunSource
from dilocox.tools.storage.uplink import Uplink
from tests.support.attested_scene import AttestedScene, policy_text
from tests.support.chains import ETHER, Chain
from tests.support.dispersed import Town
from tests.support.ledger_scene import LedgerScene, deployed
from tests.support.record_scene import KEYS, Scene

SITES = "abc"
ROUNDS = 3
"""The last one is not published: nothing says yet that it is complete."""
SAMPLES = 400
"""Of 18 pieces: so many that no piece is left out."""
FAR = 2**40
"""Unix time, seconds."""


class OnChain(LedgerScene):
    """The run on a chain: its run file, its owner's and its sites' stakes, one anchored head."""

    manifest: str

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Arguments of `register`."""
        first, _, *rest = super().parameters
        return (first, bytes.fromhex(self.manifest), *rest)


@dataclass(frozen=True)
class Seen:
    """What a reader makes of a run."""

    verdicts: dict[str, str]
    """By claim. `pieces` is the result of `dilocox availability`, `refused` that of a command
    which has not begun."""
    reasons: dict[str, str]


@dataclass(frozen=True)
class PublicRun:
    """All files of a run, in a folder that can be copied and changed.

    `run/`: the coordinator's folder. `public/`: its bundles. `a/`, `b/`, `c/`: the sites' stores,
    with pieces. `chain.json` and `tee.toml`: what the reader has.
    """

    root: Path

    @classmethod
    def make(cls, root: Path, chain: Chain) -> PublicRun:
        """Make the run below `root`."""
        contract = deployed(chain)
        owner = chain.funded("owner")
        accounts = {site: chain.funded(f"site {site}") for site in SITES}
        root.mkdir()
        (root / "tee.toml").write_bytes(policy_text())
        policy = PolicyFile.read(root / "tee.toml")
        scene = AttestedScene(
            root, policy, availability={}, settlement={
                "price": 1, "chain": chain.web3.eth.chain_id, "contract": contract,
                "owner": owner.address, "admission": "stake",
                "accounts": {site: each.address for site, each in accounts.items()},
            },
        )  # fmt: skip
        on_chain = OnChain(chain, contract, scene.notary.run)
        on_chain.manifest = digest_of(scene.config.shared())

        def vouch(site: str) -> StakeProof:
            said = {"run": run_id(owner.address, scene.notary.run),
                    "ed25519Key": bytes.fromhex(KEYS[site].public), "expiry": FAR}  # fmt: skip
            domain = on_chain.ledger("owner").domain
            return StakeProof(
                expiry=FAR, signature=domain.sign(accounts[site], "Enrol", **said).hex()
            )

        scene.driver.core.stakes = None  # no chain is asked
        scene.enrol(vouch)
        _train(scene, Town(root, scene=scene))
        run = cls(root)
        (run.folder / "run.toml").write_text(scene.config.to_toml())
        shutil.copytree(root / "coordinator", run.folder / "coordinator")
        on_chain.register()
        for who in ("owner", *(f"site {site}" for site in SITES)):
            on_chain.send(who, "stake", on_chain.run, value=ETHER)
        run.publish()
        hashes = list(leaves_of(read_log(run.folder / "record").entries))
        for bundle in run.index.bundles:
            on_chain.anchor(bundle.head.size, hashes)
        place = RunOnChain(
            "test", chain.web3.eth.chain_id, contract, owner.address, scene.notary.run, 0,
            tuple(each.address for each in on_chain.auditors),
        )  # fmt: skip
        shutil.move(place.write(run.folder), run.chain_file)
        return run

    @property
    def folder(self) -> Path:
        """The coordinator's folder."""
        return self.root / "run"

    @property
    def public(self) -> Path:
        """Where the bundles are."""
        return self.root / "public"

    @property
    def index(self) -> Publication:
        """The index of the bundles."""
        return Publication.parse((self.public / INDEX).read_text())

    @property
    def chain_file(self) -> Path:
        """The file of `dilocox chain register`, as a reader has it."""
        return self.root / "chain.json"

    @property
    def stores(self) -> list[str]:
        """The sites' stores."""
        return [str(self.root / site) for site in SITES]

    def copy(self, target: Path) -> PublicRun:
        """Copy all files to a new folder."""
        shutil.copytree(self.root, target)
        return PublicRun(target)

    def publish(self) -> None:
        """Publish the run in bundles, one for each round."""
        source = RunSource(self.folder, stores=tuple(self.stores))
        place = FilesDestination(Place(f"file://{self.public}"))
        publish_once(Publisher(source, place, 1, Uplink(None)))

    def seen(self, key: str, bundled: bool) -> Seen:
        """Judge the run as a reader does who knows the log's key.

        `bundled`: from what was published, not from the run's folder.
        """
        try:
            heads = chain_heads(self.chain_file)
            now = datetime.datetime.now(datetime.UTC)
            judge = RunJudge(PolicyFile.read(self.root / "tee.toml"), now, {})
            known: dict[str, Any] = {"key": key, "chain": heads, "machines": judge}
            if not bundled:
                report = _quietly(Places(self.folder, self.stores, **known))
                return _seen(report, self._sampled(self.folder, key))
            with fetched(open_bundles(f"file://{self.public}"), key) as found:
                report = verify_fetched(found, Places(found.folder, **known), lambda *_: None)
                return _seen(report, self._sampled(found.folder, key))
        except SettlementError as error:
            return Seen({"refused": "FAIL"}, {"refused": str(error)})

    def _sampled(self, folder: Path, key: str) -> Sampled | str:
        try:
            signed = read_cuts(folder, key)
        except DilocoxError as error:
            return str(error)
        return sample(signed, PieceStores(self.stores), SAMPLES, random.Random(0))


def _quietly(places: Places) -> Report:
    return verify(places, lambda what, share: None)


def _seen(report: Report, pieces: Sampled | str) -> Seen:
    verdicts = {each.claim.name: str(each.verdict) for each in report.findings}
    reasons = {each.claim.name: each.reason for each in report.findings}
    if isinstance(pieces, str):
        return Seen({**verdicts, "pieces": "NOT_RUN"}, {**reasons, "pieces": pieces})
    told = "; ".join([*pieces.wrong, *pieces.lost, *pieces.dead])
    passed = "PASS" if pieces.passed else "FAIL"
    return Seen({**verdicts, "pieces": passed}, {**reasons, "pieces": told})


def _train(scene: AttestedScene, town: Town) -> None:
    """Three rounds of two fragments; the evidence is filed before them."""
    for site in SITES:
        scene.file(site)
    for round_ in range(ROUNDS):
        scene.driver.plan(round_, "a")
        keys = [ExchangeKey.outer(round_, 0, fragment) for fragment in (0, 1)]
        town.exchange(*keys)
        _done(scene, round_, SITES)
    scene.notary.close()


def _done(scene: Scene, round_: int, sites: Iterable[str]) -> None:
    for site in sites:
        scene.driver.round_done(site, round_)
