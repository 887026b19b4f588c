"""One call of `dilocox lab`: makes a lab, trains in it, and prints the measurements."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from dilocox.config.run_config import RunConfig, resolve_run, with_sites
from dilocox.tools.testbed import report
from dilocox.tools.testbed.commands import LabError
from dilocox.tools.testbed.results import RunResult
from dilocox.tools.testbed.run import alone, check, run, run_alone
from dilocox.tools.testbed.testbed import Lab
from dilocox.training.launch.console import Display
from dilocox.training.launch.run_folder import check_folder
from dilocox.utils.formatting import number


class Session:
    """A training run in a lab. Its folder is the run's with the suffix `-lab`.

    It uses the run's token files. `sites`: number of sites in place of the run's; None: the run's
    own. Raises `DilocoxError` for a run that cannot be trained.
    """

    def __init__(
        self,
        config: RunConfig,
        sites: int | None,
        *,
        overwrite: bool,
        warm_up: int,
        trace: bool,
        alone: bool,
    ) -> None:
        if sites is not None:
            config = with_sites(config, sites)
        raw = config.model_dump(mode="json", exclude_none=True)
        raw["data"]["folder"] = str(config.data_folder)
        raw["run"]["folder"] = f"{config.folder}-lab"
        self._config = resolve_run(raw)
        self._overwrite = overwrite
        self._warm_up = warm_up
        self._trace = trace
        self._alone = alone
        self._display = Display(self._config)

    def hold(
        self,
        link: str,
        links: Sequence[str],
        quota: float | None,
        delay: float,
        json_file: Path | None,
    ) -> None:
        """Make the lab, train, print the figures, and write them to `json_file` if it is given.

        Raises `LabError` if the lab's links or quotas are not as requested. Then no figure of the
        run is printed.
        """
        self._check_places(json_file)
        display = self._display
        with Lab(list(self._config.sites), link, links, quota=quota, delay=delay) as lab:
            check(self._config, display)
            display.step("measuring links, round trips and quotas")
            before = len(lab.changes)
            checked = lab.verify()
            display.step_done()
            self._print(report.describe_lab(lab, checked))
            by_themselves = self._train_alone(lab) if self._alone else None
            result, changes = self._train(lab, before)
            # Links may have changed.
            checked = lab.verify()
            self._print(report.describe_run(result, checked))
            if by_themselves is not None:
                share = result.tokens_per_second / by_themselves
                self._print(
                    [f"alone             {number(by_themselves)} tokens/s, this is {share:.1%}"]
                )
            if changes:
                self._print([f"links changed     {change}" for change in changes])
                self._print(report.link_lines(checked))
            if json_file is not None:
                plain = report.plain(lab, checked, result, changes)
                plain["alone_tokens_per_second"] = by_themselves
                json_file.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        display.line(f"all of it         {result.folder}")

    def _check_places(self, json_file: Path | None) -> None:
        """Refuse places that cannot be written at the end, before anything is measured."""
        runs = [self._config]
        if self._alone:
            runs += [alone(self._config, site) for site in self._config.sites]
        for each in runs:
            check_folder(each, resume=False, overwrite=self._overwrite)
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise LabError(f"--json {json_file}: no folder {json_file.parent}; make it first")

    def _train_alone(self, lab: Lab) -> float:
        """Return the tokens per second of all sites together without exchanges."""
        self._display.step("training every site by itself")
        found = run_alone(lab, self._config, overwrite=self._overwrite, warm_up=self._warm_up)
        self._display.step_done()
        return sum(result.tokens_per_second for result in found.values())

    def _train(self, lab: Lab, before: int) -> tuple[RunResult, list[str]]:
        """Train, and return the result and texts about changes of links, without the first
        `before` changes."""
        begin = time.time()
        self._display.start()
        try:
            result = run(
                lab,
                self._config,
                overwrite=self._overwrite,
                trace=self._trace,
                warm_up=self._warm_up,
                on_record=self._display.show,
            )
        finally:
            self._display.stop()
        new = lab.changes[before:]
        return result, [
            f"after {when - begin:.1f} s: {what}" if when >= begin else f"before the run: {what}"
            for when, what in new
        ]

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._display.line(line)
