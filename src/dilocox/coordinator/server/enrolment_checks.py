"""Checks of an enrolment: every reason to refuse a site, with the remedy in the message."""

from __future__ import annotations

import hmac

from dilocox.coordinator.protocol.messages import Application
from dilocox.coordinator.record_keys import why_not
from dilocox.coordinator.server.refusals import Refused
from dilocox.coordinator.server.site_state import BANNED
from dilocox.coordinator.server.state import CoordinatorState
from dilocox.coordinator.server.tokens import SiteTokens, mend
from dilocox.version import __version__


def check_admission(state: CoordinatorState, tokens: SiteTokens, request: Application) -> None:
    """Raise `Refused` unless a site of this run may join with this request.

    A caller without a valid token learns nothing about the run.
    """
    site = request.site
    holder = tokens.holder(request.token, state.token_issues)
    if holder is None:
        raise Refused("join", tokens.unknown(request.token, site))
    if site not in state.sites:
        known = ", ".join(state.sites)
        raise Refused("join", f"site {site}: not in the run file; use one of: {known}")
    if holder != site:
        raise Refused("join", f"token: belongs to site {holder}, not to site {site}; {mend(site)}")
    if state.sites[site].standing.banned:
        raise Refused("join", f"site {site}: {BANNED}; ask the operator why")
    why = why_not(
        state.sites[site].standing.bound_key, request.record_key, request.record_proof, site,
        tokens.fingerprint, request.csr,
    )  # fmt: skip
    if why is not None:
        raise Refused("join", why)
    if not hmac.compare_digest(request.run_digest, state.digest):
        _check_code(site, request.code_digest, state.config.run.code)
        raise Refused(
            "join",
            f"site {site}: its run file differs from this run's; use the same file and the same "
            "--set options everywhere",
        )
    if state.over or state.phase == "stopping":
        raise Refused("join", f"site {site}: the run is {state.phase}; resume it to go on")
    if state.config.exchanges_gradients and state.phase != "enrolling":
        raise Refused(
            "join",
            f"site {site}: with method {state.config.outer.method} a site cannot enter after the "
            "start, because all sites share one optimizer state; stop the run and resume it with "
            "this site",
        )
    wanted = (state.config.site.stages, state.config.site.shards)
    if (request.stages, request.shards) != wanted:
        raise Refused(
            "join",
            f"site {site}: {request.stages} stages x {request.shards} shards, but this run has "
            f"{wanted[0]} x {wanted[1]} at every site; start the site with these numbers",
        )
    theirs = request.versions.named()
    for name, version in {**(state.versions or {}), "dilocox": __version__}.items():
        own = theirs.get(name, "")
        if _comparable(name, own) != _comparable(name, version):
            raise Refused(
                "join",
                f"site {site}: {name} {own or 'missing'}, but this run has {version}; install the "
                "same version at every site",
            )
    _check_base(state, request)
    if request.data_digest is None or state.data_digest is None:
        return
    if request.data_digest != state.data_digest:
        # Sites with their own text have the shared files, too, because tokenizer and held-out text
        # are the same for all sites.
        private = state.config.sites[site].data is not None
        which = f"its shared token files (data.folder, not sites.{site}.data)"
        raise Refused(
            "join",
            f"site {site}: {which if private else 'its token files'} differ from the first site's; "
            "copy the data folder from there, or prepare it from the same source",
        )


def _check_code(site: str, theirs: str | None, ours: str) -> None:
    """Raise `Refused` if a site's run file differs by the user's own functions."""
    if (theirs or "") == ours:
        return
    if theirs is None:
        raise Refused(
            "join",
            f"site {site}: has no functions of the user's own, and this run trains with those of "
            f"SHA-256 {ours[:12]}…; copy their file from another site and name it as site.code, "
            "or set run.code and give them to dilocox.join",
        )
    what = f"has SHA-256 {ours[:12]}…" if ours else "has none"
    raise Refused(
        "join",
        f"site {site}: its own functions (site.code, run.code) have SHA-256 {theirs[:12]}…, and "
        f"this run {what}; copy the same file to the coordinator and to every site",
    )


def _check_base(state: CoordinatorState, request: Application) -> None:
    """Raise `Refused` unless the site has the frozen base model of the other sites."""
    site, theirs, ours = request.site, request.base_digest, state.base_digest
    if state.config.model.own:
        _check_own_model(site, theirs, ours)
        return
    if (theirs is None) != (state.config.adapter is None):
        raise Refused(
            "join",
            f"site {site}: {'no' if theirs is None else 'a'} digest of a base model, but this run "
            f"{'has' if theirs is None else 'has no'} adapters; use the same run file everywhere",
        )
    if theirs is not None and ours is not None and theirs != ours:
        raise Refused(
            "join",
            f"site {site}: its base model {state.config.model.path} has digest {theirs[:12]}…, "
            f"this run's has {ours[:12]}…; copy the folder from another site, or set "
            "model.revision to the same commit",
        )


def _check_own_model(site: str, theirs: str | None, ours: str | None) -> None:
    """Raise `Refused` unless the site's own model has the tensors of the other sites' models."""
    if theirs is None:
        raise Refused(
            "join",
            f"site {site}: model.own needs a loop of the site's own; take part with dilocox.site, "
            "not with dilocox join",
        )
    if ours is not None and theirs != ours:
        raise Refused(
            "join",
            f"site {site}: its model trains other tensors than the model of the sites before; "
            "build it with the same names, shapes and order everywhere",
        )


def _comparable(name: str, version: str) -> str:
    """Return the part of a version that must be equal: torch without "+cpu", python major.minor."""
    if name == "python":
        return ".".join(version.split(".")[:2])
    return version.split("+")[0] if name == "torch" else version
