"""Requests of the operator about a site's name: ban it, lift the ban, or release it from its key.

The changes are in the event log, so they outlast restarts and resumes.
"""

from __future__ import annotations

from collections.abc import Callable

from dilocox.coordinator.protocol import messages as m
from dilocox.coordinator.server import events as e
from dilocox.coordinator.server.notary import RecordHook
from dilocox.coordinator.server.refusals import Caller, Refused
from dilocox.coordinator.server.run_log import RunLog


class Standings:
    """Handles the operator's requests about names.

    A request that is not allowed raises `Refused` with one line.
    """

    def __init__(self, run: RunLog, witness: RecordHook, hand_out: Callable[[], object]) -> None:
        """`hand_out` writes the files of the valid join tokens; it may raise `OSError`."""
        self._run, self._witness, self._hand_out = run, witness, hand_out

    def change(self, request: m.StandingRequest, caller: Caller) -> m.RetireReply:
        """Make the requested change. The reply says in one line what it means for the site."""
        state, name = self._run.state, request.site
        if not caller.operator:
            raise Refused("refused", f"site {name}: only the operator may do that")
        if name not in state.sites:
            known = ", ".join(state.sites)
            raise Refused("refused", f"site {name}: not in the run file, which names: {known}")
        if state.over:
            raise Refused("ended", f"run {state.phase}: {state.reason or 'complete'}")
        text = {
            "ban": self._ban, "unban": self._unban, "forget-key": self._forget_key,
        }[request.change](name)  # fmt: skip
        return m.RetireReply(text=text + self._write_tokens())

    def _ban(self, name: str) -> str:
        run, state = self._run, self._run.state
        if state.sites[name].standing.banned:
            raise Refused("conflict", f"site {name}: is banned already")
        self._witness.standing(name, "ban")
        run.append(e.Banned(run.wall(), name))
        text = f"site {name} is banned: its join token is void, and it is out of the run"
        if state.phase == "enrolling" and len(state.admissible) < state.config.outer.min_sites:
            text += (
                f"; {len(state.admissible)} of the sites that outer.min_sites = "
                f"{state.config.outer.min_sites} asks for may join, so the run does not begin"
            )
        return text

    def _unban(self, name: str) -> str:
        run = self._run
        if not run.state.sites[name].standing.banned:
            raise Refused("conflict", f"site {name}: is not banned")
        self._witness.standing(name, "unban")
        run.append(e.Unbanned(run.wall(), name))
        return (
            f"site {name} may join again, with any key but only with its new join token: "
            f"coordinator/tokens/{name}"
        )

    def _forget_key(self, name: str) -> str:
        run = self._run
        if not run.state.sites[name].standing.bound:
            raise Refused("conflict", f"site {name}: is bound to no key")
        self._witness.standing(name, "forget-key")
        run.append(e.KeyForgotten(run.wall(), name))
        return f"site {name} may join with another key, once; the record will show that it did"

    def _write_tokens(self) -> str:
        """Write the files of the valid tokens. Returns a note if it failed, else an empty text."""
        try:
            self._hand_out()
        except OSError as error:
            return (
                f" (the files in coordinator/tokens were not written: {error.strerror}; start the "
                "coordinator again)"
            )
        return ""
