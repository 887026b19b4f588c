"""The (epsilon, delta) of sites with `[privacy]`, from the contributions that plans ask of them.

A site's contribution to one round is a Gaussian mechanism of sensitivity C and deviation
`noise` · C (`dilocox.outer.private`). T such mechanisms are as private as one mechanism with
deviation `noise` · C / √T, also if each depends on the earlier ones (Dong, Roth, Su, "Gaussian
differential privacy", JRSS-B 2022, corollary 3.3). The package dp-accounting gives the exact
epsilon of a Gaussian mechanism (Balle and Wang, ICML 2018, theorem 8). No amplification by sampling
is claimed, since a site trains on its own text in every round.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from dilocox.config.run_config import RunConfig
from dilocox.errors import ConfigError

Record = dict[str, Any]


def check_accountant(config: RunConfig) -> None:
    """Raise `ConfigError` if the run needs the package dp-accounting and it is not installed."""
    if _is_bounded(config) and importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError(
            "privacy.noise: the coordinator computes epsilon with the package dp-accounting, "
            "which is not installed: pip install 'dilocox[privacy]'"
        )


def epsilon(noise: float, delta: float, contributions: int) -> float:
    """Return epsilon of `contributions` contributions with noise multiplier `noise`.

    Infinity without noise. 0.0 without contributions.
    """
    if contributions == 0:
        return 0.0
    if noise == 0.0:
        return math.inf
    from dp_accounting import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise / math.sqrt(contributions), delta))


class PrivacyAccount:
    """Counts the contributions that were asked of each private site, and their epsilon.

    The count never decreases: rounds that a resumed run repeats are counted again, because the
    other sites may hold the contributions of both. A planned contribution counts even if the site
    does not make it.
    """

    def __init__(self, config: RunConfig, plans: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start from the `plans` of earlier processes, each a `RoundPlan` as JSON.

        A plan is among them once for each time that its round was begun.
        """
        self._section = config.privacy
        self._counts: Counter[str] = Counter(dict.fromkeys(config.private_sites, 0))
        for plan in plans:
            self._count(plan)

    def _count(self, plan: Mapping[str, Any]) -> bool:
        named = [site for site in plan["members"] if site in self._counts]
        self._counts.update(named)
        return bool(named)

    def plan(self, plan: Mapping[str, Any]) -> Record | None:
        """Count a new plan. Returns the record for the metrics; None without private members."""
        if not self._count(plan):
            return None
        return {"kind": "privacy", "round": plan["round"], "sites": self.figures()}

    def resumed(self, round_: int, plans: Iterable[Mapping[str, Any]]) -> Record | None:
        """Count the round that a resume repeats. Returns like `plan`.

        `plans`: the plans that the resume has restored. Round `round_` goes on from the checkpoint.
        If its plan was made before the checkpoint was complete, sites do not get a new one.
        """
        found = [record for plan in repeated(round_, plans) if (record := self.plan(plan))]
        return found[-1] if found else None

    def figures(self) -> dict[str, Record]:
        """Return contributions, epsilon and delta by site. Epsilon is None if there is no bound."""
        return {site: self._of(count) for site, count in self._counts.items()}

    def _of(self, count: int) -> Record:
        found = epsilon(self._section.noise, self._section.delta, count)
        return {
            "contributions": count,
            "epsilon": found if math.isfinite(found) else None,
            "delta": self._section.delta,
        }


def account_of(config: RunConfig, event_log: Path) -> PrivacyAccount | None:
    """Return the account of a run whose event log may exist. None if no site is private.

    Raises `ConfigError` if the log cannot be read.
    """
    if not config.private_sites:
        return None
    return PrivacyAccount(config, _planned(event_log) if event_log.exists() else ())


def words(figures: object) -> str:
    """Return the figures of one site, of `PrivacyAccount.figures` or a file, in words."""
    if not isinstance(figures, Mapping):
        return "unreadable figures"
    count, found, delta = (figures.get(key) for key in ("contributions", "epsilon", "delta"))
    if not isinstance(count, int) or not isinstance(delta, int | float):
        return "unreadable figures"
    of = f"{count:,} contribution{'' if count == 1 else 's'}"
    if not isinstance(found, int | float):
        return f"no epsilon after {of}: privacy.noise is 0"
    return f"epsilon {found:.3g} at delta {delta:g} after {of}"


def repeated(round_: int, plans: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return those of the restored `plans` by which sites contribute again after a resume.

    `round_`: the round in which the run goes on.
    """
    return [plan for plan in plans if plan["round"] >= round_]


def _planned(event_log: Path) -> list[Mapping[str, Any]]:
    try:
        with closing(sqlite3.connect(f"{event_log.resolve().as_uri()}?mode=ro", uri=True)) as log:
            rows = log.execute(
                "SELECT kind, data FROM events WHERE kind IN ('Planned', 'Resumed')"
            ).fetchall()
        found: list[Mapping[str, Any]] = []
        for kind, data in rows:
            event = json.loads(data)
            again = kind == "Resumed"
            found += repeated(event["round"], event["plans"]) if again else [event["plan"]]
        return found
    except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{event_log}: its plans cannot be counted for privacy ({error}); restore it from "
            "a copy"
        ) from None


def _is_bounded(config: RunConfig) -> bool:
    return bool(config.private_sites) and config.privacy.noise > 0.0
