"""Judges the claims `audits` and `beacon` by the verdicts of audits in a run's folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dilocox.errors import RecordError
from dilocox.record.log.audit_verdicts import BAD, FOLDER, GOOD, Signed, paths_of
from dilocox.record.log.verdict_statements import VerdictFile, latest, read_file
from dilocox.record.verify.audit_sampling import Point, decided, due_rounds, points_of, sites_of
from dilocox.record.verify.claims import NotRunError
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.verify.verdict_validity import not_replaced, stands, still_standing


@dataclass(frozen=True)
class Audits:
    """The audits of one run. All methods raise `RecordError` (FAIL) and `NotRunError`."""

    course: RunHistory
    entries: Sequence[str]
    """All entries of the log."""
    folder: Path
    """The run's folder."""
    auditors: Sequence[str]
    """Keys, hex, of auditors whose verdicts count; empty: all auditors."""
    randomness: Mapping[int, bytes] = field(default_factory=dict)
    """Public randomness by round, which the reader has looked up at its source."""

    def verdicts(self) -> str:
        """Judge: every verdict is about this log, none is bad, and each site has a good round.

        Verdicts on rounds that a resume has abandoned do not count.
        """
        files = self._files()
        everything = self._counting(files)
        signed = still_standing(self.course, self.entries, everything)
        for each in signed:
            self._check_states(each)
        bad = [each for each in signed if each.verdict.verdict in BAD]
        if bad:
            first, more = bad[0].verdict, len(bad) - 1
            others = f" (and {more} more)" if more else ""
            raise RecordError(
                f"round {first.round} of {first.site}: {first.verdict}, {first.reason}{others}"
            )
        handed_in = self._handed_in(files)
        good = {(s.verdict.round, s.verdict.site) for s in signed if s.verdict.verdict in GOOD}
        due = Counter(site for r in due_rounds(self.course) for site in sites_of(self.course, r))
        if not good:
            raise NotRunError(f"none of {due.total()} rounds of sites that keep states was audited")
        by_site = self._by_site(due, Counter(site for _, site in good), signed)
        counts = Counter(each.verdict.verdict for each in signed)
        said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        keys = sorted({each.auditor for each in signed})
        names = ", ".join(f"{key[:12]}…" for key in keys)
        old = len(everything) - len(signed)
        since = f"; {old} more on rounds trained again since" if old else ""
        return (
            f"{len(good)} of {due.total()} rounds of sites that keep states: {said}, by {names}; "
            f"good, {by_site}{handed_in}{since}"
        )

    def _handed_in(self, files: Sequence[VerdictFile]) -> str:
        """Return a phrase on the verdicts that the log names; `files` must have their files.

        Raises `RecordError` if a bad verdict's file is missing, `NotRunError` if another is.
        """
        named = [
            each
            for each in latest(v for v in self.course.verdicts if stands(self.course, v))
            if self._counts(each.auditor)
        ]
        here = {each.name for each in files}
        gone = [each for each in named if each.file not in here]
        bad = [each for each in gone if each.verdict in BAD]
        if bad:
            others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise RecordError(
                f"{bad[0].text}, by the log (statement {bad[0].number}); this verdict is not in "
                f"record/{FOLDER}{others}"
            )
        if gone:
            what = "verdict that is" if len(gone) == 1 else "verdicts that are"
            raise NotRunError(
                f"the log names {len(gone)} {what} not here, the first: {gone[0].text}; get the "
                f"file for record/{FOLDER} from its auditor, or say whose count (--auditor)"
            )
        return f"; {len(named)} by the log, and here" if named else ""

    def _files(self) -> list[VerdictFile]:
        return [read_file(path, self.course.run) for path in paths_of(self.folder)]

    def _counts(self, auditor: str) -> bool:
        return not self.auditors or auditor in self.auditors

    def _by_site(
        self, due: Mapping[str, int], good: Mapping[str, int], signed: Sequence[Signed]
    ) -> str:
        """Return a phrase: by site, the number of `good` rounds of those `due`.

        Raises `NotRunError` naming sites without a good round, unless the run file exempts them.
        """
        parts, unseen = [], []
        for site, count in sorted(due.items()):
            found, why = good.get(site, 0), self._exempt(site)
            parts.append(f"{site} {found} of {count}{f' ({why})' if why and not found else ''}")
            if not found and not why:
                unseen.append(site)
        told = f"of the verdicts in this folder: {', '.join(parts)}"
        if unseen:
            own = [each.verdict for each in signed if each.verdict.site == unseen[0]]
            why = f" (round {own[0].round}: {own[0].verdict}, {own[0].reason})" if own else ""
            who = " or ".join(unseen)
            raise NotRunError(f"no round of {who} was found good; good, {told}{why}")
        return told

    def _exempt(self, site: str) -> str:
        """Return the reason in the agreed run file why a site cannot be audited; else empty."""
        own = self.course.config["sites"].get(site, {})
        if own.get("data"):
            return "text of its own"
        allowed = own.get("own_code") or self.course.config["run"].get("code")
        return "code of its own" if allowed else ""

    def beacon(self) -> str:
        """Judge: every round of a site that public randomness selects was audited.

        A site that the run file exempts needs no audit; the line names the site. If the reader
        gives public randomness, it must have a value for every round that is due.
        """
        signed = still_standing(self.course, self.entries, self._counting(self._files()))
        drawn = [each for each in signed if each.selection.by == "beacon"]
        due = due_rounds(self.course)
        there = {each.verdict.round for each in drawn if decided(self.course, each.verdict.round)}
        points = points_of(self.course, self.entries, there.union(due))
        for each in drawn:
            self._check_drawn(each, points.get(each.verdict.round))
        values = self._values(drawn)
        if not values:
            how = "the log alone has selected" if drawn else "no audit was selected by the log"
            raise NotRunError(f"{how}: without public randomness")
        rate = float(self.course.config["record"].get("audit_rate", 0.0))
        if not due or not rate:
            why = "record.audit_rate is 0" if due else "no decided round keeps states"
            raise NotRunError(f"{why}: nothing can be selected")
        good = {(s.verdict.round, s.verdict.site) for s in signed if s.verdict.verdict in GOOD}
        chosen = [
            (round_, site)
            for round_ in due
            if round_ in values
            for site in sites_of(self.course, round_)
            if points[round_].draw(values[round_], site) < rate
        ]
        left = [each for each in chosen if each not in good]
        for round_, site in left:
            if not self._exempt(site):
                raise NotRunError(f"round {round_} of {site} is selected and was not audited")
        unknown = [round_ for round_ in due if round_ not in (self.randomness or values)]
        if unknown:
            where = "--randomness has" if self.randomness else "there is"
            raise NotRunError(f"{where} no public randomness of round {unknown[0]}")
        names = ", ".join(f"{s} ({self._exempt(s)})" for s in sorted({s for _, s in left}))
        besides = f"; not audited: {names}" if names else ""
        told = sum(round_ in self.randomness for round_ in due)
        return (
            f"{len(good)} rounds of sites are good, among them {len(chosen) - len(left)} of the "
            f"{len(chosen)} selected at a rate of {rate:.0%}{besides}; "
            f"--randomness confirms {told} of {len(due)} rounds"
        )

    def _values(self, drawn: Sequence[Signed]) -> dict[int, bytes]:
        """Return the public randomness by round: the reader's, and that of the verdicts.

        Raises `RecordError` if two values of a round differ.
        """
        values = dict(self.randomness)
        for each in drawn:
            round_, value = each.verdict.round, bytes.fromhex(each.selection.randomness)
            if not value or values.setdefault(round_, value) == value:
                continue
            if round_ in self.randomness:
                raise RecordError(
                    f"round {round_} was selected with other randomness than --randomness gives"
                )
            raise RecordError(f"two audits of round {round_} name other randomness")
        return values

    def _counting(self, files: Sequence[VerdictFile]) -> list[Signed]:
        """Return the verdicts among `files` that count; the log says which were replaced since."""
        counting = (each.signed for each in not_replaced(self.course, files))
        return [signed for signed in counting if self._counts(signed.auditor)]

    def _check_states(self, signed: Signed) -> None:
        verdict = signed.verdict
        if verdict.verdict not in GOOD:
            return
        places = {
            f"{stage}/{shard}": (stage, shard)
            for stage in range(self.course.stages)
            for shard in range(self.course.shards)
        }
        where = f"the audit of round {verdict.round} of {verdict.site}"
        if set(verdict.states) != set(places):
            raise RecordError(f"{where} is not about all of the site's ranks")
        for name, (stage, shard) in places.items():
            state = self.course.rounds.get((verdict.round, verdict.site, stage, shard))
            if state is None or state.document != verdict.states[name]:
                raise RecordError(f"{where} is about another state than the one in this log")

    def _check_drawn(self, signed: Signed, point: Point | None) -> None:
        verdict, chosen = signed.verdict, signed.selection
        where = f"the audit of round {verdict.round} of {verdict.site}"
        if point is None:
            raise RecordError(f"{where}: this log does not decide the round")
        if (point.size, point.root) != (chosen.size, chosen.root):
            raise RecordError(f"{where} was selected by another log")
