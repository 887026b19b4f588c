"""Policy files: what they must say, and the errors that name key, reason and remedy."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from dilocox.errors import AttestationError
from dilocox.tools.attestation.policy import (
    GpuRules,
    PolicyFile,
    SimulationRules,
    SnpRules,
    TdxRules,
)

SNP = f'[snp]\nmeasurements = ["{"a" * 96}"]\n'
HEAD = 'environment = "production"\nmax_age_rounds = 20\n'


def test_a_policy_is_known_by_the_digest_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tee.toml"
    path.write_text(HEAD + SNP)
    found = PolicyFile.read(path)
    assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.policy.max_age_rounds == 20
    assert found.policy.simulated_roots == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "environment: Field required"),
        ("a = " + "[" * 10**5, "not a policy: nested too deeply"),
        (HEAD, "name accepted machines: add"),
        (HEAD + SNP + f'[simulation]\nroots = ["{"0" * 64}"]\n', "the environment is production"),
        (HEAD + "[snp]\nmeasurements = []\n", "snp.measurements: List should have at least 1"),
        (HEAD + f'[tdx]\nmrtd = ["{"a" * 96}"]\n', "tdx.rtmr1: Field required"),
        (HEAD + SNP + "min_tcb = { more = 1 }\n", "snp.min_tcb.more"),
        (HEAD + SNP + "debug = true\n", "snp.debug: Extra inputs are not permitted"),
        (HEAD + SNP + "[gpu]\ncount = 8\nmanifests = []\n", "gpu.manifests"),
        (HEAD.replace("20", "0") + SNP, "max_age_rounds: Input should be greater than or equal"),
        ("a = ", "not valid TOML"),
    ],
)
def test_an_incomplete_policy_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "tee.toml"
    path.write_text(text)
    with pytest.raises(AttestationError, match=reason) as error:
        PolicyFile.read(path)
    assert str(error.value).startswith(str(path))


def test_a_missing_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(AttestationError, match=r"tee\.toml: cannot be read"):
        PolicyFile.read(tmp_path / "tee.toml")


def test_the_policy_of_the_page_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs/attestation.md").read_text()
    (text,) = re.findall(r"```ini\n(.*?)```", page, re.S)
    found = PolicyFile.parse(text.encode(), "page").policy
    assert None not in (found.tdx, found.snp, found.gpu)
    keys = set(re.findall(r"`(?:tdx|snp|gpu|simulation)\.(\w+)`", page))
    rules = (TdxRules, SnpRules, GpuRules, SimulationRules)
    assert keys == {name for each in rules for name in each.model_fields}
