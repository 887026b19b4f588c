"""Small runs, devices and links for the planner's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.tools.planner.hardware_table import Device, HardwareTable, Host, Link

KINDS = ("none", "fp16", "bf16", "int8", "int4", "int2", "topk", "top1", "cocktail", "lowrank")
FREE = Host(
    encode=dict.fromkeys(KINDS, 1e18),
    decode=dict.fromkeys(KINDS, 1e18),
    lowrank=1e18,
    average=1e18,
    digest=1e18,
    outer=0.0,
    exchange=0.0,
    exchange_cpu=0.0,
    exchange_thread=0.0,
)
"""A machine whose exchanges cost nothing beside their transfers."""
ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LAYER = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
"""Parameters: q and o, k and v of half the width, three of the feed-forward, two norms."""
EMBEDDING = 128 * 32


def run(**sections: Any) -> RunConfig:
    """A run of a four-layer Llama at two sites; `sections` are laid over it."""
    raw: dict[str, Any] = {
        "model": {"architecture": dict(ARCHITECTURE)},
        "data": {"sequence_length": 16, "tokenizer": "given"},
        "site": {"batch_size": 8, "micro_batch_size": 2, "precision": "bf16"},
        "outer": {"steps": 4000},
        "sites": {"lyon": {}, "paris": {}},
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section} if name != "sites" else section
    return resolve_run(raw)


def device(**values: Any) -> Device:
    """A GPU of 1 TFLOP/s that is used to the full, with 1 GB and `FREE` machines around it."""
    plain = Device(
        name="plain",
        bf16=1e12,
        fp32=1e11,
        utilisation=1.0,
        memory=10**9,
        memory_rate=1e12,
        peer_rate=1e10,
        pcie_rate=1e18,
        host=FREE,
        usd_per_hour=2.0,
    )
    return replace(plain, **values)


def link(payload_rate: float, rtt: float = 0.0) -> Link:
    """A link that carries so many payload bytes per second both ways."""
    wire = payload_rate / 0.95
    return Link(wire, wire, rtt)


TABLE = HardwareTable.load()
