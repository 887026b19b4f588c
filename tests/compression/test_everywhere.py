"""The same bytes on every machine: other instruction sets and thread counts change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dilocox.compression.buffer_layout import Geometry
from tests.support.patterns import ODD, WIDE, decoded, digests, everything, save, with_threads

GOLDEN = {
    "none": "f1c8d1b19bcb7625383399c9d9e1478bfb4d45bc4d0bb9a6e104481a4d1bd0a9",
    "fp16": "1c6d647c1ebe32f109671375ebb9b375e0fb67d5d4dfb499e5ea121d4b3df555",
    "bf16": "2ecdfaf3c88e0049907f6692ef2fd380f92a6d8361774a1e457776c608ba1889",
    "int8": "953d4c97215a679a5097b87bec54c77930d906fd627677728a194bab37283d18",
    "int4": "71a4e5e58b57544944e6d6873cd32e0ef38f2e4e6959ce63146b564760703d92",
    "int2": "3ffa85cee407a417465df885945263db7af69a8de5d3c29901e215b434cd2f81",
    "topk:1": "2aae682e75990e10368b10aa8a822a8092859a6879bace6b1d1d69ca851ee0bf",
    "topk:64": "6c228e7f1c611e8fb9f87be6d8eceb99ebff7e615f583fc7d1666e04d0f81b97",
    "topk:77": "d7753c689ba2c749e5893211e3169ae58b1f99d81e342ac8d6df49aec7b71d4d",
    "topk:2048": "b822d189828c4cd3e2d9f03c9bc5fb5d3f3434a37d1431c9f8132ace472edba9",
    "top1:2": "5a6a6a0a1b79eecb1be40a7953cf7fe5ab64a68e47cddeae5a9e5f9882ee95c9",
    "top1:64": "47528142b6115e6606025e9bd74143d2feec4ad1ff0b8c96d8ae5b0dfdd03379",
    "top1:600": "de599959c9fabf273166c9984d3b0ebdce9d6eb85e870737d378787349c78204",
    "cocktail": "c40c8e068a1e0117802a0b280a26df1c438b41d1faf549d0588824e04482f00a",
}


CAPABILITIES = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}


def test_golden_bytes_in_this_process() -> None:
    assert with_threads(digests) == [GOLDEN] * 3


@pytest.mark.parametrize("geometry", [ODD, WIDE], ids=["odd", "wide"])
def test_what_is_decoded_does_not_depend_on_threads(geometry: Geometry, tmp_path: Path) -> None:
    save(tmp_path / "payloads", geometry)
    found = with_threads(lambda: decoded(tmp_path / "payloads", geometry))
    assert found[1:] == found[:1] * 2


@pytest.mark.parametrize(
    ("capability", "threads"),
    [
        ("default", "2"),
        pytest.param("avx2", "1", marks=pytest.mark.slow),
        pytest.param("avx512", "2", marks=pytest.mark.slow),
    ],
)
def test_the_same_bytes_on_other_processors(capability: str, threads: str, tmp_path: Path) -> None:
    here = torch.backends.cpu.get_cpu_capability()
    if CAPABILITIES[capability.upper()] > CAPABILITIES.get(here, 0):
        pytest.skip(f"this processor has no {capability}")
    save(tmp_path / "payloads")
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.patterns", str(tmp_path / "payloads")],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": threads},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    )
    told = json.loads(found.stdout)
    assert told["capability"] == capability.upper()
    assert told["digests"] == everything(tmp_path / "payloads")
