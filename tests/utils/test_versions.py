"""What is installed is looked at before a run starts."""

from __future__ import annotations

import ast
import re
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

import dilocox
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.errors import ConfigError, ModelError
from dilocox.models import transformers_internals
from dilocox.training.launch import cuda_driver, local
from dilocox.utils import torch_internals, versions

pytestmark = pytest.mark.waits

ROOT = Path(__file__).parents[2]


def test_what_is_installed_will_do() -> None:
    versions.check_versions()
    transformers_internals.check()


def test_lowest_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lowest = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    for package, version in versions.LOWEST.items():
        assert f'"{package}>={version}' in text
        assert f"\n{package}=={version}.0\n" in lowest


@pytest.mark.parametrize(
    ("version", "fine"),
    [
        ("2.10.1", False),
        ("2.11.0+cu130", True),
        ("2.9.1", False),
        ("2.13.0+cpu", True),
        ("3", True),
    ],
)
def test_old_versions_are_refused(version: str, fine: bool) -> None:
    if fine:
        versions.check_lowest("torch", version, "2.11")
        return
    with pytest.raises(ConfigError) as caught:
        versions.check_lowest("torch", version, "2.11")
    assert str(caught.value) == (
        f"torch {version} is too old, dilocox needs 2.11 or newer; install a tested version "
        f"({versions.TESTED['torch']})"
    )


def private_names() -> set[str]:
    """Private names of PyTorch that the sources use, written in full."""
    found = set()
    for path in sorted(Path(dilocox.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{each.name}" for each in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            found |= {
                name for name in names if re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", name)
            }
    # Of torch._dynamo.config.suppress_errors only the whole counts.
    return {each for each in found if not any(other.startswith(f"{each}.") for other in found)}


def test_the_check_at_the_start_knows_every_private_name() -> None:
    known = {
        ".".join(part for part in (module, kind, name) if part)
        for module, kind, either, _ in torch_internals.NAMES
        for name in either
    }
    known |= {name.rpartition(".")[0] for name in known}
    assert "torch._foreach_norm" in (used := private_names())
    assert used <= known, used - known


@pytest.mark.parametrize("entry", torch_internals.NAMES, ids=lambda entry: "/".join(entry[2]))
def test_every_private_name_that_goes_is_noticed(
    entry: tuple[str, str, tuple[str, ...], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, kind, either, purpose = entry
    gone = (
        types.SimpleNamespace() if not kind else types.SimpleNamespace(**{kind: type("K", (), {})})
    )
    monkeypatch.setitem(sys.modules, module, gone)
    full = ".".join(part for part in (module, kind, either[0]) if part)
    assert torch_internals.missing_name([entry]) == (full, purpose)


def test_a_module_that_goes_is_noticed() -> None:
    entry = ("torch.no_such_module", "K", ("name",), "stages > 1")
    assert torch_internals.missing_name([entry]) == ("torch.no_such_module.K", "stages > 1")


def test_a_run_is_refused_before_its_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "missing_name", lambda: ("torch.K._name", "stages > 1"))
    run = config(tmp_path)
    with pytest.raises(ConfigError) as caught:
        local.train_here(run, None, resume=False, overwrite=False, debug=False)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"torch {metadata.version('torch')} has no torch.K._name, which dilocox needs for "
        f"stages > 1; install a tested version ({versions.TESTED['torch']})"
    )
    assert not run.folder.exists()


def test_transformers_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        transformers_internals, "NAMES", (("transformers", "", ("_no_such",), "[model]"),)
    )
    with pytest.raises(ModelError, match=r"has no transformers\._no_such, which dilocox needs for"):
        transformers_internals.check()


def config(folder: Path, device: str = "auto") -> RunConfig:
    return resolve_run(
        {
            "run": {"name": "r", "folder": str(folder / "r")},
            "model": {"path": str(folder)},
            "data": {"source": str(folder)},
            "site": {"device": device},
            "sites": {"paris": {}},
        }
    )


OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
CLOSED = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024
GCC version:
"""


def test_the_driver_version_is_read() -> None:
    assert cuda_driver.driver_version(OPEN) == "580.65.06"
    assert cuda_driver.driver_version(CLOSED) == "535.183.01"
    assert cuda_driver.driver_version("NVRM version: who knows\n") is None
    assert cuda_driver.driver_version("GCC version:  gcc version 12.3.0\n") is None


@pytest.mark.parametrize(
    ("driver", "cuda", "enough"),
    [
        ("580.65.06", "13.0", True),
        ("575.57.08", "13.0", False),
        ("535.183.01", "12.8", True),
        ("470.256.02", "12.6", False),
        (None, "13.0", True),
        ("450.80.02", "14.0", True),
    ],
)
def test_which_driver_is_enough(driver: str | None, cuda: str, enough: bool) -> None:
    assert cuda_driver.driver_is_enough(driver, cuda) is enough


@pytest.mark.parametrize("newest", [12, 13])
def test_a_driver_that_is_too_old_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: int
) -> None:
    proc = tmp_path / "version"
    proc.write_text(CLOSED, encoding="ascii")
    monkeypatch.setattr(cuda_driver, "KERNEL_MODULE", proc)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_driver, "_newest_cuda", lambda: newest)
    cuda_driver.check_driver(config(tmp_path, "cpu"))
    if newest == 13:  # the compatibility package is there
        cuda_driver.check_driver(config(tmp_path))
        return
    for device in ("auto", "cuda"):
        run = config(tmp_path, device)
        with pytest.raises(ConfigError, match=r"driver 535\.183\.01 is too old: .*CUDA 13\.0"):
            local.train_here(run, None, resume=False, overwrite=False, debug=False)  # type: ignore[arg-type]
        assert not run.folder.exists()
    monkeypatch.setattr(torch.version, "cuda", None)
    cuda_driver.check_driver(config(tmp_path))
