"""The same bytes on every machine: other instruction sets and thread counts change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compression.patterns import decoded, digests, everything, save

GOLDEN = {
    "none": "f1c8d1b19bcb7625383399c9d9e1478bfb4d45bc4d0bb9a6e104481a4d1bd0a9",
    "fp16": "1c6d647c1ebe32f109671375ebb9b375e0fb67d5d4dfb499e5ea121d4b3df555",
    "bf16": "2ecdfaf3c88e0049907f6692ef2fd380f92a6d8361774a1e457776c608ba1889",
    "int8": "953d4c97215a679a5097b87bec54c77930d906fd627677728a194bab37283d18",
    "int4": "71a4e5e58b57544944e6d6873cd32e0ef38f2e4e6959ce63146b564760703d92",
    "int2": "3ffa85cee407a417465df885945263db7af69a8de5d3c29901e215b434cd2f81",
    "topk:1": "e390ec0ad850ea36b154c33c0b82621f28c4ce0f915b01d05ecca73d41db0351",
    "topk:64": "6824c908083f225abfa95752c3457e92a99cca3e982d9aff1cfc1c2bbc597bca",
    "topk:77": "80ab3fc9c7de47b9a886ad29468927e3fa369c9591ce8fd061985dd8ed30ca1d",
    "topk:2048": "0b787e3bdf26abba643648f2fa8c9ba850fd05a414fcf1f8e065006697a50b74",
    "cocktail": "d86f896a1bac406f25abd5513c6f03aacc2b8f24b71f1a6f17292d2e02547558",
}


CAPABILITIES = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}


def test_golden_bytes_in_this_process() -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert digests() == GOLDEN
    finally:
        torch.set_num_threads(threads)


def test_what_is_decoded_does_not_depend_on_threads(tmp_path: Path) -> None:
    save(tmp_path / "payloads")
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(decoded(tmp_path / "payloads"))
    finally:
        torch.set_num_threads(threads)
    assert found[1:] == found[:1] * 2


@pytest.mark.parametrize(
    ("capability", "threads"), [("default", "2"), ("avx2", "1"), ("avx512", "2")]
)
def test_the_same_bytes_on_other_processors(capability: str, threads: str, tmp_path: Path) -> None:
    here = torch.backends.cpu.get_cpu_capability()
    if CAPABILITIES[capability.upper()] > CAPABILITIES.get(here, 0):
        pytest.skip(f"this processor has no {capability}")
    save(tmp_path / "payloads")
    found = subprocess.run(
        [sys.executable, "-m", "tests.compression.patterns", str(tmp_path / "payloads")],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": threads},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(found.stdout) == everything(tmp_path / "payloads")
