"""Enrolment of a site by its join token, and other calls for which the token suffices."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from dilocox.config.run_config import RunConfig, digest_of
from dilocox.coordinator.client.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    StakeUnknownError,
)
from dilocox.coordinator.client.transport import Transport, pool_of_stranger
from dilocox.coordinator.identity import Identity, new_request
from dilocox.coordinator.protocol import attestation_messages as at
from dilocox.coordinator.protocol import audit_messages as am
from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.protocol.calls import Call, Reply
from dilocox.coordinator.protocol.timeouts import Timeouts
from dilocox.coordinator.protocol.token_format import JoinToken
from dilocox.coordinator.record_keys import RecordKey
from dilocox.errors import JoinError, RetryLaterError
from dilocox.utils.backoff import backoff_delays
from dilocox.version import __version__

Described = TypeVar("Described", m.EnrolRequest, m.ApplyRequest)


def installed_versions(packages: Iterable[str] = ()) -> m.Versions:
    """Return this process's versions of Python, dilocox and torch, without importing torch.

    `packages`: further packages that the run needs; see `Versions`.
    """
    more = {name: importlib.metadata.version(name) for name in packages}
    return m.Versions(
        dilocox=__version__,
        torch=importlib.metadata.version("torch"),
        python=platform.python_version(),
        defaults=digest_of(RunConfig.model_json_schema())[:12],
        **more,
    )


@dataclass(frozen=True)
class Applicant:
    """A site that asks to join, as it describes itself; `EnrolRequest` explains the fields."""

    site: str
    run_digest: str
    stages: int
    shards: int
    versions: m.Versions | None = None
    """Versions at the site; None: those of this process."""
    data_digest: str | None = None
    base_digest: str | None = None
    code_digest: str | None = None
    stake: m.StakeProof | None = None


def enrol(
    url: str,
    token: str,
    applicant: Applicant,
    *,
    timeouts: Timeouts,
    record_key: RecordKey | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Identity, m.EnrolReply]:
    """Enrol a site, once for each of its starts.

    The server's certificate is checked against the token before the token is sent. An unreachable
    coordinator is tried for `timeouts.link` seconds.

    Args:
        url: Address of the coordinator, `https://HOST:PORT` or `HOST:PORT`.
        token: The site's join token.
        applicant: The site, as it describes itself.
        timeouts: Time limits of the run.
        record_key: The key with which the site joined before; None: a new key.
        say: Gets a line if the site has to wait for the chain's answer on its stake.

    Returns:
        The identity for all ranks of the site, and the coordinator's reply.

    Raises:
        JoinError: The site may not join. Its subclass `RetryLaterError`: a later try may succeed.
    """
    parsed, site = JoinToken.parse(token), applicant.site
    key, csr = new_request(site)
    own = record_key or RecordKey.new()
    request = _described(m.EnrolRequest, applicant, parsed, own, csr)
    with _transport(url, parsed, timeouts) as transport:
        reply = _sent(transport, request, timeouts, say)
    identity = Identity(
        site,
        reply.incarnation,
        key,
        reply.certificate,
        reply.authority,
        parsed.fingerprint,
        own.private,
        reply.record_run,
    )
    return identity, reply


def apply(
    url: str, token: str, applicant: Applicant, *, timeouts: Timeouts, record_key: RecordKey
) -> None:
    """Ask whether `enrol` with the same arguments would be refused, but for the stake.

    Neither the run nor the site's files change. Raises the errors of `enrol`.
    """
    parsed = JoinToken.parse(token)
    _, csr = new_request(applicant.site)
    request = _described(m.ApplyRequest, applicant, parsed, record_key, csr)
    with _transport(url, parsed, timeouts) as transport:
        transport.send(request)


@contextlib.contextmanager
def _transport(url: str, token: JoinToken, timeouts: Timeouts) -> Iterator[Transport]:
    """Context with a stranger's transport, in which errors of calls are those of `enrol`."""
    transport = Transport(
        pool_of_stranger(url, token.fingerprint),
        request=timeouts.request,
        away=timeouts.link,
        pause=timeouts.beat,
    )
    try:
        yield transport
    except CoordinatorUnreachableError as error:
        raise RetryLaterError(str(error)) from None
    except CoordinatorError as error:
        raise JoinError(str(error)) from None
    finally:
        transport.close()


def _described(
    kind: type[Described], applicant: Applicant, token: JoinToken, own: RecordKey, csr: str
) -> Described:
    """Return a request of a site. Raises `JoinError` for a field that cannot be right."""
    site = applicant.site
    try:
        return kind(
            site=site,
            token=str(token),
            run_digest=applicant.run_digest,
            versions=applicant.versions or installed_versions(),
            stages=applicant.stages,
            shards=applicant.shards,
            csr=csr,
            data_digest=applicant.data_digest,
            base_digest=applicant.base_digest,
            code_digest=applicant.code_digest,
            record_key=own.public,
            record_proof=own.prove(site, token.fingerprint, csr),
            stake=applicant.stake,
        )
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise JoinError(f"site {site!r}: {where}: {problem['msg'].lower()}") from None


def _sent(
    transport: Transport,
    request: m.EnrolRequest,
    timeouts: Timeouts,
    say: Callable[[str], None],
) -> m.EnrolReply:
    """Send a request, and again while the coordinator waits for the chain's answer on a stake.

    Raises the errors of `Transport.send`; `StakeUnknownError` after `timeouts.rejoin` seconds.
    """
    end = time.monotonic() + timeouts.rejoin
    waits, said = backoff_delays(timeouts.retry, timeouts.retry_most), ""
    while True:
        try:
            return transport.send(request)
        except StakeUnknownError as error:
            if str(error) != said:
                said = str(error)
                say(said)
            pause = next(waits)
            if time.monotonic() + pause > end:
                raise
            time.sleep(pause)


def look(url: str, token: str, timeouts: Timeouts) -> m.Status:
    """Return the run's status, by the join token of one of its sites, without joining.

    The server's certificate is checked against the token before the token is sent. Raises
    `JoinError` if the token is not valid or the call is refused.
    """
    request = m.LookRequest(token=str(JoinToken.parse(token)))
    return _send(url, token, timeouts, request)


def hand_in(url: str, token: str, timeouts: Timeouts, statement: str | None) -> am.HandInReply:
    """Submit an auditor's signed verdict for the record, by the join token of a site of the run.

    If `statement` is None, nothing is submitted. The reply says in whose name the verdict is.
    Raises `JoinError` if the token is not valid or the call is refused.
    """
    request = am.TokenHandInRequest(token=str(JoinToken.parse(token)), statement=statement)
    return _send(url, token, timeouts, request)


def attest(url: str, token: str, timeouts: Timeouts, statement: str | None) -> at.AttestReply:
    """File a signed statement of evidence of a machine, by the join token of its site.

    If `statement` is None, nothing is filed. The reply says what evidence has to name. Raises
    `JoinError` if the token is not valid or the call is refused.
    """
    request = at.TokenAttestRequest(token=str(JoinToken.parse(token)), statement=statement)
    return _send(url, token, timeouts, request)


def _send(url: str, token: str, timeouts: Timeouts, request: Call[Reply]) -> Reply:
    """Make a call with a token and without a certificate. Raises `JoinError` if it is refused."""
    transport = Transport(
        pool_of_stranger(url, JoinToken.parse(token).fingerprint),
        request=timeouts.request,
        away=timeouts.coordinator,
        pause=timeouts.beat,
    )
    try:
        return transport.send(request)
    except CoordinatorError as error:
        raise JoinError(str(error)) from None
    finally:
        transport.close()
