"""The claims that `dilocox verify` judges, with what each of them proves and does not prove."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["PASS", "FAIL", "NOT_RUN", "SIMULATED"]
"""SIMULATED: evidence of pretended machines holds. It never counts as PASS."""


class NotRunError(Exception):
    """A claim cannot be judged here; the message is the reason."""


class SimulatedError(Exception):
    """A claim would hold, but of pretended machines; the message says what was checked."""


@dataclass(frozen=True)
class Claim:
    """One statement that can be true or false of a record."""

    name: str
    required: bool
    """True if any verdict other than PASS makes the verification unsuccessful."""
    proves: str
    """What PASS proves, for users."""
    not_proved: str
    """What PASS does not prove, for users."""


LOG = Claim(
    "log",
    True,
    "the log holds exactly the statements that its key has signed, in the signed order",
    "that this key is the one that you trust: compare it, or give it with --key; that other "
    "readers saw the same log: give a checkpoint that you kept, with --seen",
)
SIGNATURES = Claim(
    "signatures",
    True,
    "each statement is about this run and signed by the required key, the coordinator's or the "
    "site's",
    "who owns a site's key: the coordinator alone admitted it; anything about statements of types "
    "that this dilocox does not know, which the line names",
)
COMPLETE = Claim(
    "complete",
    True,
    "no round is missing, and every payload that counts was signed by its site",
    "that each site left out of a round was left out for a good reason",
)
COMMITMENTS = Claim(
    "commitments",
    True,
    "each site had signed a commitment to its contribution before any vote on the exchange, and so "
    "before any payload was sent, in the coordinator's order: no site chose its contribution after "
    "it had seen another's, except contributions named as recommitted after a resume",
    "that no payload was sent in another way; with low-rank codecs and in `reduce`, only an audit "
    "shows that a payload was made from the committed contribution",
)
RUN_FILE = Claim(
    "run-file",
    True,
    "run.toml is the run file that each site whose contribution counts had signed before it "
    "signed anything else",
    "that the run followed the run file; keys that concern one machine alone (folders, ports, "
    "devices) are not compared",
)
START = Claim(
    "start",
    False,
    "theta_0 is, bit for bit, the initial weights that the run file names: the weights that "
    "run.seed gives, or the weights of model.path",
    "where the weights of model.path come from; that a folder given with --start is model.path",
)
BASE = Claim(
    "base",
    False,
    "the base model here, the frozen weights of model.path, is the one that each site had signed "
    "before it trained adapters on it",
    "where the base model comes from; that the sites computed with it, which an audit shows",
)
METRICS = Claim(
    "metrics",
    False,
    "the losses and figures of sites in metrics.jsonl, which a run's page shows, are what the "
    "sites have signed, and the losses and tokens of the whole run are computed from these",
    "that a site reported its own loss, or its figures of tasks, truthfully; times and bytes of "
    "the whole run",
)
PAYLOADS = Claim(
    "payloads",
    True,
    "the bytes of every payload that counts, and of theta_0, are there and match the signatures",
    "that an honest training step made them",
)
REPLAY = Claim(
    "replay",
    True,
    "all outer steps, replayed from theta_0 and the payloads, give the signed final state bit for "
    "bit: nothing else that sites exchanged went into the model",
    "that the sites' inner steps were honest, or which text they trained on; anything about rounds "
    "before a signed state that the replay begins from (claim history)",
)
HISTORY = Claim(
    "history",
    False,
    "the payloads of all rounds are there: the replay begins with theta_0",
    "what the claims payloads and replay do not prove",
)
MODEL = Claim(
    "model",
    True,
    "the published folder holds the signed final state bit for bit, and the other files that were "
    "published with it; it holds no other weights",
    "that the model is good, or safe to use",
)
RELEASE = Claim(
    "release",
    False,
    "every file of the released folder is the one that the holder of the release key has signed, "
    "and none was added",
    "who owns this key: compare it, or give the owner's key with --release-key; where the weights "
    "come from (claim model)",
)
DATA = Claim(
    "data",
    False,
    "the token files here are those that each site whose contribution counts had signed before "
    "it signed anything else",
    "that the sites trained on them; private token files of a site are not checked",
)
CODE = Claim(
    "code",
    False,
    "this dilocox has, byte for byte, the code that the coordinator ran",
    "which code the sites ran: nobody but the site can check the digest that it signed",
)
AUDITS = Claim(
    "audits",
    False,
    "the rounds that were audited are what their sites signed: the same steps on the assigned "
    "text, repeated from the state in which the round began, give the same payloads; every verdict "
    "that the log names is here; a round of every site was found good, except of sites that use "
    "text or code of their own by the run file",
    "anything about rounds that were not audited; that nobody removed a bad verdict from this "
    "folder that the log does not name; that an auditor's key is one that you trust: give it with "
    "--auditor",
)
BEACON = Claim(
    "beacon",
    False,
    "every round of a site that the log and public randomness select was audited, and no site "
    "could know the selection in advance; sites that use text or code of their own by the run file "
    "are excepted",
    "that the randomness was unknown when the log was signed: look it up at its source, and give "
    "it with --randomness",
)
ATTESTATIONS = Claim(
    "attestations",
    False,
    "each machine of each site has said, as of each filing and again within the policy's rounds, "
    "that it booted what the policy accepts, and has bound this to run, site, start and key",
    "that the site trained on this machine alone, unless its image keeps the site's key to itself; "
    "that the training computed what it should (claims replay, audits); which text was used; who "
    "owns a machine; that nobody attacked it physically; how many machines a site has, which is "
    "its own word; anything about GPUs without confidential computing",
)
AVAILABILITY = Claim(
    "availability",
    False,
    "two thirds of the sites have signed, for the payloads of every exchange, that they hold their "
    "pieces under one root",
    "that the sites still hold them: ask their stores with `dilocox availability`",
)
ANCHORS = Claim(
    "anchors",
    True,
    "every head of the log that the chain keeps is a prefix of this log: what it covers was not "
    "rewritten after the head's block",
    "that contract and run on the chain are the ones that you trust: compare them; anything about "
    "statements after the newest head; when a round was trained",
)
STAKES = Claim(
    "stakes",
    True,
    "every enrolment is signed by the site's account for the site's key, and the contract has had "
    "a stake of that account",
    "that the stake was there when the site joined, or is now; who owns the account; that two "
    "accounts have two owners",
)
WITNESSES = Claim(
    "witnesses",
    True,
    "as many of the named witnesses as asked have cosigned all of this log: each has seen these "
    "statements as the continuation of all that it had cosigned before",
    "that the witnesses have different operators, or have kept their memory; that nobody has shown "
    "another log to people who ask no witness; the order of statements between two checkpoints",
)
BUNDLES = Claim(
    "bundles",
    False,
    "every bundle at the URL has the bytes that the log's key has published, and its head is a "
    "prefix of this log",
    "that no newer bundle was withheld: compare the number of bundles, and size and root of the "
    "log; give a checkpoint that you kept, with --seen",
)
CLAIMS = (
    LOG, SIGNATURES, COMPLETE, COMMITMENTS, RUN_FILE, PAYLOADS, REPLAY, HISTORY, MODEL, RELEASE,
    DATA, CODE, START, BASE, METRICS, AUDITS, BEACON, ATTESTATIONS, AVAILABILITY, ANCHORS, STAKES,
    WITNESSES, BUNDLES,
)  # fmt: skip
"""All claims. Some are judged only for certain runs: `history` if `record.keep` removes old
payloads; `base` if adapters are trained; `audits` and `beacon` if the run stores states for audits;
`release` if the model is signed, or the reader names a key; `attestations` if a site has signed
one, the run file names a policy, or the reader gives one; `availability` if the run cuts payloads;
`anchors` if a chain is asked; `stakes` if, besides, the run admits by stake; `witnesses` if some
are named; `bundles` if the run is read from bundles. A claim is required if the reader has asked
for it by naming a chain, witnesses, a policy, a release key, token files, auditors, public
randomness, or the folder of the weights that the run began from."""


def asked(claim: Claim) -> Claim:
    """Return a claim that is not required of every run as required: the reader has asked for it."""
    return replace(claim, required=True)


@dataclass(frozen=True)
class Finding:
    """The verdict on one claim."""

    claim: Claim
    verdict: Verdict
    reason: str
    """What was checked, or the reason why the verdict is not PASS."""


def exit_code(findings: list[Finding]) -> int:
    """Return 1 if any claim is FAIL, else 3 if a required claim is not PASS, else 0."""
    if any(each.verdict == "FAIL" for each in findings):
        return 1
    if any(each.verdict != "PASS" and each.claim.required for each in findings):
        return 3
    return 0
