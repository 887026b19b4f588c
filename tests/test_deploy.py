"""Files of deploy/, as far as no cluster and no registry is needed to try them."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dilocox.cli.main import _parser
from dilocox.config.network import NetworkSection
from dilocox.coordinator.protocol.timeouts import Timeouts

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import setup_venv

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SITE = DEPLOY / "container" / "site.sh"
BATCH = DEPLOY / "slurm" / "site.sbatch"
CHART = DEPLOY / "helm" / "dilocox-site"
GOLDEN = Path(__file__).parent / "support" / "fixtures" / "helm"
COORDINATOR = "203.0.113.7:29400"


def service(unit: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return parser["Service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_again_after_a_crash_and_not_after_a_stop(unit: Path) -> None:
    assert len(UNITS) == 2
    said = service(unit)
    assert said["Restart"] == "on-failure"
    assert said["RestartPreventExitStatus"] == "130"
    assert said["KillMode"] == "mixed"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_of_a_unit_is_one_that_dilocox_takes(unit: Path) -> None:
    words = service(unit)["ExecStart"].split()
    assert words[0].endswith("/dilocox")
    plain = [word.replace("${", "").strip("}") for word in words[1:] if not word.startswith("$O")]
    assert callable(_parser().parse_args(plain).call)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    checker = shutil.which("systemd-analyze")
    if checker is None:
        pytest.skip("this machine has no systemd-analyze")
    text = unit.read_text(encoding="utf-8")
    command = service(unit)["ExecStart"].split()[0]
    copy = tmp_path / unit.name.replace("@", "@one")
    copy.write_text(text.replace(command, shutil.which("true") or ""), encoding="utf-8")
    done = subprocess.run(
        [checker, "verify", str(copy)], capture_output=True, text=True, check=False, timeout=60
    )
    assert unit.name.replace("@", "@one") not in done.stderr, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    "script", [*sorted((DEPLOY / "slurm").glob("*.sbatch")), SITE], ids=lambda s: s.stem
)
def test_a_batch_script_is_sound_and_says_what_it_needs(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    usage = script.name if script == SITE else f"sbatch {script.name}"
    assert done.stderr.startswith(f"usage: {usage} ")


class Machine:
    """`site.sh` with a program in place of `dilocox` that writes down how it was called, and ends
    as the next line of `codes` says: with an exit code, or `term`: with 130 at SIGTERM."""

    def __init__(self, root: Path, script: Path = SITE, **more: str) -> None:
        """`more`: the text of other programs that the script calls."""
        self.root, self.script = root, script
        programs = root / "programs"
        programs.mkdir()
        for name, text in {"dilocox": STAND_IN, "sleep": "#!/bin/bash\nexit 0\n", **more}.items():
            (programs / name).write_text(text.replace("ROOT", str(root)))
            (programs / name).chmod(0o755)
        self.path = f"{programs}:{os.environ['PATH']}"

    def start(self, *codes: int | str, **variables: str) -> subprocess.Popen[str]:
        """Start a machine whose ranks end with `codes`, one after the other."""
        (self.root / "codes").write_text("".join(f"{code}\n" for code in codes))
        (self.root / "calls").write_text("")
        return subprocess.Popen(
            [self.script, COORDINATOR, "lyon", "run.toml", "token", "--set", "a.b=c d"],
            env={"PATH": self.path, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *codes: int | str, **variables: str) -> tuple[int, str]:
        """Exit code and output of a machine."""
        process = self.start(*codes, **variables)
        said = process.communicate(timeout=60)[0]
        return process.returncode, said

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Arguments and variables of each call, in order."""
        lines = (self.root / "calls").read_text().splitlines()
        return [json.loads(line) for line in lines]


STAND_IN = """\
#!/bin/bash
# One line at a time is taken, by whoever holds the lock.
exec 9>ROOT/lock
flock 9
code=$(head -n 1 ROOT/codes)
sed -i 1d ROOT/codes
printf -v words '"%s",' "$@"
[[ $code == term ]] && trap 'exit 130' TERM
echo "{\\"words\\": [${words%,}], \\"rank\\": \\"${RANK:-} ${LOCAL_RANK:-} ${WORLD_SIZE:-}" \\
    "${LOCAL_WORLD_SIZE:-} ${MASTER_ADDR:-} ${MASTER_PORT:-}\\"}" >> ROOT/calls
flock -u 9
exec 9>&-
[[ $code == term ]] || exit "$code"
# Waits without forks: nobody writes into the pipe. A signal that comes during a fork can be lost.
exec 9<> <(:)
while :; do read -rt 0.2 -u 9; done
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_starts_again_after_crashes_and_not_after_an_end(machine: Machine) -> None:
    assert machine.run(1, 137, 0) == (0, (
        "site lyon starts again in 10 s; exit code 1\n"
        "site lyon starts again in 10 s; exit code 137\n"
    ))  # fmt: skip
    (first, *_) = machine.calls
    options = _parser().parse_args(first["words"])
    assert (options.address, options.site, options.overrides) == (COORDINATOR, "lyon", ["a.b=c d"])
    assert (str(options.run_file), str(options.token_file)) == ("run.toml", "token")
    assert first["rank"].split() == [], "`dilocox join` starts the ranks itself"
    # Asked to leave by its coordinator: it stays away.
    assert machine.run(130) == (0, "")
    code, said = machine.run(1, 1, 1, 1, 7)
    assert code == 7
    assert said.endswith("site lyon: 5 starts in a row have failed; exit code 7\n")
    assert len(machine.calls) == 5


def test_machines_of_a_site_number_their_ranks(machine: Machine) -> None:
    several = {"NODES": "2", "NODE": "1", "RANKS": "3", "MASTER_ADDR": "first"}
    assert machine.run(0, 0, 0, **several) == (0, "")
    ranks = sorted(call["rank"] for call in machine.calls)
    assert ranks == [f"{n} {n - 3} 6 3 first 29600" for n in (3, 4, 5)]
    # One crashed rank decides, whatever the others say.
    code, said = machine.run(130, 9, 0, 0, 0, 0, **several, MASTER_PORT="5")
    assert (code, said) == (0, "site lyon starts again in 10 s; exit code 9\n")
    # Another machine of the site is taken back: the site has to come back on all of them.
    told = "site lyon was told to end on another machine\n"
    assert machine.run(130, 130, 130, **several) == (143, told)
    assert machine.run(0, 130, 0, **several) == (143, told)
    for wrong in ({"RANKS": ""}, {"MASTER_ADDR": ""}):
        code, said = machine.run(0, **{**several, **wrong})
        assert (code, said) == (2, "site.sh: NODES is 2: set RANKS and MASTER_ADDR, too\n")


@pytest.mark.parametrize("variables", [{}, {"NODES": "2", "RANKS": "2", "MASTER_ADDR": "first"}])
def test_a_machine_that_has_to_end_lets_its_ranks_finish(
    machine: Machine, variables: Mapping[str, str]
) -> None:
    ranks = int(variables.get("RANKS", 1))
    process = machine.start(*["term"] * ranks, **variables)
    until(lambda: len(machine.calls) == ranks)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert (process.returncode, said) == (143, "site lyon was told to end here\n")
    assert len(machine.calls) == ranks


class BatchJob(Machine):
    """`site.sbatch` with programs in place of Slurm's. Slurm itself: tests/e2e/test_slurm.py."""

    def __init__(self, root: Path) -> None:
        super().__init__(
            root,
            BATCH,
            srun='#!/bin/bash\necho $$ > ROOT/step\nexec "$@"\n',
            scancel='#!/bin/bash\necho "$*" >> ROOT/asked\nkill -TERM "$(cat ROOT/step)"\n',
            squeue="#!/bin/bash\ncat ROOT/state\n",
            scontrol='#!/bin/bash\necho "$*" >> ROOT/asked\n',
        )

    @property
    def asked(self) -> list[str]:
        """What Slurm was asked to do."""
        path = self.root / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def batch_job(tmp_path: Path) -> BatchJob:
    return BatchJob(tmp_path)


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_batch_job_goes_back_into_the_queue_when_its_time_is_nearly_over(
    batch_job: BatchJob, state: str
) -> None:
    """Slurm signals the script, however long before the end. A cancelled job stays away."""
    (batch_job.root / "state").write_text(f"{state}\n")
    process = batch_job.start("term", SLURM_JOB_ID="7")
    until(lambda: len(batch_job.calls) == 1)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    told = "site lyon has left before the job's time is over; the job goes back into the queue\n"
    back = state == "RUNNING"
    assert (process.returncode, said) == (0, told if back else "")
    assert batch_job.asked == ["--signal=TERM 7", *(["requeue 7"] if back else [])]


def test_a_batch_job_whose_site_was_asked_to_leave_ends(batch_job: BatchJob) -> None:
    assert batch_job.run(130, SLURM_JOB_ID="7") == (0, "")
    assert batch_job.run(1, 0, SLURM_JOB_ID="7") == (
        0,
        "site lyon starts again in 10 s; exit code 1\n",
    )
    assert batch_job.asked == []
    options = _parser().parse_args(batch_job.calls[0]["words"])
    assert (options.address, options.site, options.overrides) == (COORDINATOR, "lyon", ["a.b=c d"])


def test_slurm_signals_the_script_of_a_site_and_not_its_ranks() -> None:
    (said,) = re.findall(r"^#SBATCH --signal=(\S+)$", BATCH.read_text(), re.MULTILINE)
    assert said == "B:TERM@600"


def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("never came true")


@pytest.mark.parametrize("script", [SITE, BATCH], ids=lambda script: script.stem)
def test_a_start_that_waits_for_the_first_rank_in_vain_is_no_good_one(script: Path) -> None:
    found = re.search(r"^long=(\d+)", script.read_text(), re.MULTILINE)
    assert found is not None
    limits = Timeouts.derive(NetworkSection())
    assert int(found[1]) > limits.stall + limits.link


def join_of(words: list[str]) -> Any:
    """What `dilocox join` makes of the arguments of `site.sh`."""
    address, site, run_file, token, *more = words
    command = ["join", address, "--site", site, "--run-file", run_file, "--token-file", token]
    return _parser().parse_args([*command, *more])


@pytest.mark.parametrize("name", ["one-machine", "two-machines"])
def test_the_rendered_chart_starts_what_dilocox_takes(name: str) -> None:
    """The rendered files are what `helm template` writes: tests/test_launchers.py compares."""
    text = (GOLDEN / f"{name}.golden.yaml").read_text()
    objects = {each["kind"]: each for each in yaml.safe_load_all(text)}
    assert objects.keys() | {"Secret"} == {"ConfigMap", "Secret", "Service", "Job"}
    assert objects["Service"]["spec"]["clusterIP"] == "None"
    spec = objects["Job"]["spec"]
    pod = spec["template"]["spec"]
    values = yaml.safe_load((GOLDEN / f"{name}.values.yaml").read_text())
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert spec["completions"] == spec["parallelism"] == values.get("machines", 1)
    # As long as Slurm's script gives them.
    assert pod["terminationGracePeriodSeconds"] == 600
    rules = spec["podFailurePolicy"]["rules"]
    codes = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    assert codes == [[143]], "a machine that was told to end is no failure"
    (site,) = pod["containers"]
    assert site["command"] == ["dilocox-site"]
    options = join_of(site["args"])
    assert (options.address, options.site) == (values["coordinator"], "lyon")
    mounted = {each["mountPath"]: each["name"] for each in site["volumeMounts"]}
    assert str(options.run_file.parent) in mounted
    assert str(options.token_file.parent) in mounted
    assert options.run_file.name in objects["ConfigMap"]["data"]
    (secret,) = (each["secret"] for each in pod["volumes"] if "secret" in each)
    assert (secret["items"][0]["path"], secret["defaultMode"]) == (options.token_file.name, 0o440)
    assert pod["securityContext"]["runAsNonRoot"]
    variables = {each["name"]: each.get("value") for each in site["env"]}
    read = set(re.findall(r"\$\{?(NODES|NODE|RANKS|MASTER_ADDR)\b", SITE.read_text()))
    assert read <= variables.keys()
    assert variables["MASTER_ADDR"] == "lyon-0.lyon"
    assert "not-a-token" not in text


def test_the_chart_reads_the_values_that_it_explains_and_no_others() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert values.keys() == schema["properties"].keys() - {"global"}
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert set(re.findall(r"\.Values\.(\w+)", templates)) == values.keys()
    assert values["graceSeconds"] == 600


def test_the_image_is_of_files_that_are_there_and_runs_as_nobody_in_particular() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith(("#", " "))]
    copied = [word for step in steps if step[0] == "COPY"
              for word in step[1:-1] if not word.startswith("--")]  # fmt: skip
    assert "src" in copied
    root = DEPLOY.parent
    assert [path for path in copied if not (root / path).exists()] == []
    allowed = {line[1:] for line in (root / ".dockerignore").read_text().splitlines()
               if line.startswith("!")}  # fmt: skip
    assert [path for path in copied if not allowed & {path, str(Path(path).parent)}] == []
    assert [step[1] for step in steps if step[0] == "USER"][-1] == "10001:10001"
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["user"] == 10001


def test_a_rented_machine_gets_a_python_that_dilocox_takes(tmp_path: Path) -> None:
    """The setup of SkyPilot's file, with a stand-in for uv that writes down how it was called."""
    uv = tmp_path / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > ~/asked\nexit 3\n')
    uv.chmod(0o755)
    file = yaml.safe_load((DEPLOY / "skypilot" / "site.yaml").read_text())
    done = subprocess.run(
        ["bash", "-c", f"{file['setup']}\ntrue"], cwd=DEPLOY.parent, check=False, timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 3, "a failed setup is not followed by `run`"
    words = (tmp_path / "asked").read_text().splitlines()
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    assert Version(words[words.index("--python") + 1]) in SpecifierSet(project["requires-python"])
    script = words.index("scripts/setup_venv.py")
    assert (DEPLOY.parent / words[script]).exists()
    folder = setup_venv.parser().parse_args(words[script + 1 :]).folder
    assert folder == tmp_path / "venv"
    assert "PATH=$HOME/venv/bin:" in file["run"]


def commands_of(name: str) -> str:
    """The shell commands of a launcher's file."""
    said = yaml.safe_load((DEPLOY / name).read_text())
    return "\n".join(said["commands"]) if "commands" in said else str(said["run"])


@pytest.mark.parametrize("name", ["skypilot/site.yaml", "dstack/site.dstack.yml"])
def test_rented_machines_start_the_site_with_a_token_that_only_its_user_reads(
    name: str, machine: Machine, tmp_path: Path
) -> None:
    """The file's own commands run, with the launcher's variables and a stand-in for `dilocox`."""
    commands = re.sub(r"/(data|tmp)\b", str(tmp_path), commands_of(name))
    (tmp_path / "dilocox").mkdir()
    (tmp_path / "programs" / "dilocox-site").symlink_to(SITE)
    (machine.root / "codes").write_text("0\n0\n")
    prefix = name.split("/")[0].upper()
    of_launcher = {
        "NUM_NODES": "2", "NODES_NUM": "2", "NODE_RANK": "1", "NUM_GPUS_PER_NODE": "2",
        "GPUS_PER_NODE": "2", "NODE_IPS": "10.0.0.1\n10.0.0.2", "MASTER_NODE_IP": "10.0.0.1",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", commands], cwd=DEPLOY.parent, text=True, check=False, timeout=60,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={"PATH": machine.path, "HOME": str(tmp_path), "DILOCOX_TOKEN": "geheim",
             "COORDINATOR": COORDINATOR, "SITE": "lyon",
             **{f"{prefix}_{key}": value for key, value in of_launcher.items()}},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    ranks = sorted(call["rank"] for call in machine.calls)
    assert ranks == ["2 0 4 2 10.0.0.1 29600", "3 1 4 2 10.0.0.1 29600"]
    options = _parser().parse_args(machine.calls[0]["words"])
    assert (options.address, options.site) == (COORDINATOR, "lyon")
    assert options.run_file.name == "run.toml"
    (token,) = tmp_path.rglob("token")
    assert (token.read_text(), token.stat().st_mode & 0o777) == ("geheim\n", 0o600)
    assert "geheim" not in (machine.root / "calls").read_text()
