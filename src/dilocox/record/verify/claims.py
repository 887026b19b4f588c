"""The claims that `dilocox verify` judges, with what each of them proves and does not prove."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["PASS", "FAIL", "NOT_RUN"]


class NotRunError(Exception):
    """A claim cannot be judged here; the message is the reason."""


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
    "the statements are those, in that order and number, that the log's key has signed",
    "that this key is the one you trust: compare it, or give it with --key; that the signer showed "
    "others the same log: give a checkpoint that you kept, with --seen",
)
SIGNATURES = Claim(
    "signatures",
    True,
    "each statement is of this run and signed by whom it must be: the coordinator, or the site",
    "who stands behind a site's key: the coordinator has let it in; statements of types that this "
    "dilocox does not know, which are named",
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
    "each site had signed what it would contribute to an exchange before any vote on it, and with "
    "it before any payload was sent, as the coordinator has it: nobody has chosen its own after it "
    "had seen another's, but for those named as recommitted after a resume",
    "that no payload went other ways; with low-rank codecs and in `reduce` only an audit shows "
    "that a payload was made from what was committed to",
)
RUN_FILE = Claim(
    "run-file",
    True,
    "run.toml is the run file that each site whose contribution counts had signed before it "
    "signed anything else",
    "that the run followed it; keys that are one machine's own matter (folders, ports, devices) "
    "are not compared",
)
START = Claim(
    "start",
    False,
    "theta_0 is, bit for bit, what the run file says that the run began from: the weights that "
    "run.seed gives, or those of model.path",
    "where the weights of model.path come from; that files which you name with --start are those",
)
METRICS = Claim(
    "metrics",
    False,
    "the losses and figures in metrics.jsonl, which a run's page shows, are what its sites have "
    "signed, and those of the whole run are made of them",
    "that a site has said the truth of its own loss; times and bytes of the whole run",
)
PAYLOADS = Claim(
    "payloads",
    True,
    "the bytes of every payload that counts, and of theta_0, are there and are those signed",
    "that an honest training step made them",
)
REPLAY = Claim(
    "replay",
    True,
    "from theta_0 and the payloads every outer step gives, bit for bit, the final state that was "
    "signed: nothing else went into the model between the sites",
    "that the sites' inner steps were honest, or what text they were made on; of rounds before a "
    "signed state that the replay begins from, anything (claim history)",
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
    "the published folder holds that final state bit for bit, and the files that came with it; "
    "no other weights lie there",
    "that the model is good, or safe to use",
)
RELEASE = Claim(
    "release",
    False,
    "every file of the released folder is the one that the holder of the release key has signed, "
    "and none was added",
    "that this key is its owner's: compare it, or give it with --release-key; where the weights "
    "come from (claim model)",
)
DATA = Claim(
    "data",
    False,
    "the token files here are those that each site whose contribution counts had signed before "
    "it signed anything else",
    "that the sites trained on them; private token files of a site are not looked at",
)
CODE = Claim(
    "code",
    False,
    "this dilocox has, byte for byte, the code that the coordinator ran",
    "what code the sites ran: the digest that they signed is their own word",
)
AUDITS = Claim(
    "audits",
    False,
    "the rounds that were audited are what their sites signed: the same steps on the assigned "
    "text, repeated from the state in which they began, give the same payloads; every verdict "
    "that the log names is here; a round of every site was found good, but of sites whose text or "
    "code is their own by the run file",
    "rounds that were not audited; that no bad verdict was taken out of this folder that nobody "
    "had handed in to the log; that an auditor's key is one you trust: name it with --auditor",
)
BEACON = Claim(
    "beacon",
    False,
    "all that the log and public randomness select was audited, and no site could know before "
    "what that would be",
    "that the randomness was unknown when the log was signed: look it up at its source, and give "
    "it with --randomness",
)
ATTESTATIONS = Claim(
    "attestations",
    False,
    "each site that has signed evidence of the machine it ran on ran what that evidence says",
    "anything yet: this version keeps evidence, and judges none",
)
CLAIMS = (
    LOG, SIGNATURES, COMPLETE, COMMITMENTS, RUN_FILE, PAYLOADS, REPLAY, HISTORY, MODEL, RELEASE,
    DATA, CODE, START, METRICS, AUDITS, BEACON, ATTESTATIONS,
)  # fmt: skip
"""All claims. Some are judged only for certain runs: `history` if `record.keep` removes old
payloads; `audits` and `beacon` if the run stores states for audits; `release` if the model is
signed; `attestations` if a site has signed one."""


@dataclass(frozen=True)
class Finding:
    """The verdict on one claim."""

    claim: Claim
    verdict: Verdict
    reason: str
    """What was checked, or the reason why the verdict is not PASS."""


def exit_code(findings: list[Finding]) -> int:
    """Return 1 if any claim is FAIL, else 3 if a required claim is NOT_RUN, else 0."""
    if any(each.verdict == "FAIL" for each in findings):
        return 1
    if any(each.verdict != "PASS" and each.claim.required for each in findings):
        return 3
    return 0
