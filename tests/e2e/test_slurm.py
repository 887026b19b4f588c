"""Sites as jobs of a real Slurm: deploy/slurm/site.sbatch."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_network import start_coordinator
from tests.support.harness import Run, Workshop, verdicts
from tests.support.slurm_cluster import Cluster, cluster, needs_slurm

pytestmark = [pytest.mark.slow, pytest.mark.stops]
SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "site.sbatch"
LONG = ("outer.rounds=40", "checkpoint.every_rounds=4")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    needs_slurm()
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


class Jobs:
    """The sites of a run as jobs, with one rank on each of two nodes."""

    def __init__(self, slurm: Cluster, workshop: Workshop, name: str, *sets: str) -> None:
        self.slurm = slurm
        self.coordinator, self.lines = start_coordinator(workshop, name, *sets)
        self.run_file = written_run_file(workshop, name, sets)

    def submit(self, site: str, *options: str) -> int:
        """Submit the job of a site."""
        address, token = self.lines[site].split()[1], self.lines[site].split()[-1]
        here = Path(sys.executable).parent
        return self.slurm.submit(
            "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1",
            f"--output={self.log(site)}", *options,
            str(SCRIPT), address, site, str(self.run_file), token,
            # The virtual nodes have no names that a resolver knows.
            MASTER_ADDR="127.0.0.1", PATH=f"{here}:{self.slurm.environment['PATH']}",
        )  # fmt: skip

    def log(self, site: str) -> Path:
        """The file of what a job prints."""
        return self.run_file.with_name(f"{self.run_file.stem}-{site}.log")

    def said(self, site: str) -> str:
        """What a job has printed. It is empty if the job has not begun."""
        if not self.log(site).exists():
            return ""
        return self.log(site).read_text(encoding="utf-8", errors="replace")


def written_run_file(workshop: Workshop, name: str, sets: tuple[str, ...]) -> Path:
    """Write the run file of a run with its overrides inside, since launchers take none."""
    path = workshop.root / f"{name}.toml"
    text = Path(workshop.run_file(name)[0]).read_text(encoding="utf-8")
    path.write_text(_with(text, name, sets), encoding="utf-8")
    return path


def _with(text: str, name: str, sets: tuple[str, ...]) -> str:
    """Return a run file with the name of a run and with other values of keys that it has not."""
    text = re.sub(r'^name = "run"$', f'name = "{name}"', text, flags=re.MULTILINE)
    for item in sets:
        key, _, value = item.partition("=")
        section, _, field = key.partition(".")
        text = re.sub(rf"^{field} = .*\n", "", text, flags=re.MULTILINE)
        head = f"[{section}]\n"
        text = text.replace(head, f"{head}{field} = {value}\n") if head in text else (
            f"{text}\n{head}{field} = {value}\n"
        )  # fmt: skip
    return text


def ranks_of(site: str, run_file: Path) -> list[int]:
    """Return the processes of a site's ranks, as Slurm has started them."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        named = site.encode() in words and str(run_file).encode() in words
        if named and b"srun" not in words[0] and b"SLURM_PROCID=1" in variables:
            found.append(int(folder.name))
    return sorted(found)


def check(run: Run) -> None:
    """Check that the run has ended well, and that its record says so."""
    assert run.wait() == 0, run.output()
    assert run.summary()["val_loss_last"] < run.summary()["val_loss_first"]
    assert set(verdicts(run.folder).values()) <= {"NOT_RUN"}


def test_a_killed_rank_comes_back_with_its_site(slurm: Cluster, workshop: Workshop) -> None:
    jobs = Jobs(slurm, workshop, "slurm-kill", *LONG, "outer.rounds=2000")
    first = {site: jobs.submit(site) for site in jobs.lines}
    jobs.coordinator.until_round(3)
    ranks = ranks_of("lyon", jobs.run_file)
    assert ranks
    os.kill(ranks[0], signal.SIGKILL)
    jobs.coordinator.until(lambda: "site lyon starts again in 10 s" in jobs.said("lyon"))
    entered = "lyon contributes from round"
    jobs.coordinator.until(lambda: jobs.coordinator.printed().count(entered) == 2)
    jobs.coordinator.interrupt()
    assert jobs.coordinator.wait() == 130
    for job in first.values():
        slurm.until(job, ("COMPLETED",))


def test_a_job_whose_time_is_over_goes_back_into_the_queue(
    slurm: Cluster, workshop: Workshop
) -> None:
    jobs = Jobs(slurm, workshop, "slurm-time", *LONG, "outer.rounds=5000")
    # Slurm sends the signal up to a minute early, which this test need not wait for.
    short = jobs.submit("lyon", "--time=00:03:00", "--signal=B:TERM@120")
    other = jobs.submit("paris")
    back = "the job goes back into the queue"
    jobs.coordinator.until(lambda: back in jobs.said("lyon"), limit=400)
    # A job that went back waits two minutes; it may begin at once.
    slurm.until(short, ("PENDING", "RUNNING", "CONFIGURING"))
    slurm.ask("scontrol", "update", f"JobId={short}", "StartTime=now")
    slurm.until(short, ("RUNNING",))
    jobs.coordinator.until(lambda: jobs.coordinator.printed().count("lyon enrolled") == 2)
    # A job that is cancelled does not come back.
    slurm.ask("scancel", str(short), str(other))
    assert slurm.until(short, ("CANCELLED", "PENDING")) == "CANCELLED"
    jobs.coordinator.interrupt()
    assert jobs.coordinator.wait() == 130


def test_a_site_that_was_asked_to_leave_does_not_come_back(
    slurm: Cluster, workshop: Workshop
) -> None:
    jobs = Jobs(slurm, workshop, "slurm-leave", *LONG, "outer.min_sites=1")
    lyon, paris = jobs.submit("lyon", "--time=UNLIMITED"), jobs.submit("paris")
    jobs.coordinator.until_round(2)
    slurm.ask("scancel", "--signal=TERM", str(lyon))
    assert slurm.until(lyon, ("COMPLETED", "FAILED")) == "COMPLETED"
    assert "queue" not in jobs.said("lyon")
    check(jobs.coordinator)
    slurm.until(paris, ("COMPLETED",))


def test_what_is_missing_is_said(slurm: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    small = ("--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0")
    job = slurm.submit(*small, f"--output={log}", str(SCRIPT), "only-one")
    slurm.until(job, ("FAILED",))
    assert log.read_text().startswith("usage: sbatch site.sbatch HOST:PORT SITE")
