"""One real run of several sites in network namespaces, from one interpreter; for a test.

python -m tests.support.wire_run FOLDER CORPUS EXCHANGE CODEC SITES: prints one line of JSON with
what the sites reported, what their interfaces counted, and the exchange's length of every fragment.
Every process is forked from this one, which imports torch but never computes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dilocox.config.run_config import RunConfig, load_run
from dilocox.tools.testbed import Network
from dilocox.training.launch.coordinator_process import coordinate
from dilocox.training.launch.local import join, prepare_data
from dilocox.utils import processes

FILE = """\
[run]
name = "wire"
folder = "{folder}/coordinator"
[model.architecture]
model_type = "qwen3"
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 32
max_position_embeddings = 64
tie_word_embeddings = true
vocab_size = 4096
[data]
source = "{corpus}"
vocabulary_size = 300
sequence_length = 16
validation_sequences = 2
folder = "{folder}/data"
[site]
batch_size = 2
micro_batch_size = 2
threads = 1
device = "cpu"
[outer]
rounds = 2
inner_steps = 4
fragments = 2
exchange = "{exchange}"
[compression]
codec = "{codec}"
[control]
adapt = "off"
[checkpoint]
every_rounds = 0
[evaluation]
completion_tokens = 0
[network]
heartbeat = 20.0
host = "{host}"
[sites]
{sites}
"""
LIMIT = 180.0


def main() -> None:
    """Run it and print what was counted."""
    folder, corpus = Path(sys.argv[1]), sys.argv[2]
    exchange, codec, count = sys.argv[3], sys.argv[4], int(sys.argv[5])
    torch.set_num_threads(1)
    sites = [f"site{number}" for number in range(count)]
    with Network(["hub", *sites]) as network:
        file = folder / "run.toml"
        file.write_text(
            FILE.format(
                folder=folder,
                corpus=corpus,
                exchange=exchange,
                codec=codec,
                host=network.address("hub"),
                sites="\n".join(f"{site} = {{}}" for site in sites),
            ),
            encoding="utf-8",
        )
        config = load_run(file)
        prepare_data(config)
        before = {host: network.counters(host) for host in network.hosts}
        run(network, file, config, sites)
        counted = {host: network.counters(host).since(before[host]) for host in network.hosts}
        retransmitted = {host: network.retransmitted(host) for host in network.hosts}
    print(
        json.dumps(
            {
                "records": reports(config),
                "counters": {host: vars(counter) for host, counter in counted.items()},
                "retransmitted": retransmitted,
            }
        )
    )


def run(network: Network, file: Path, config: RunConfig, sites: list[str]) -> None:
    """Coordinator and sites, each on a host of its own, to their end."""
    log = file.parent / "hub.log"
    started = [processes.start(_hub, network, file, config, log, name="hub")]
    token = _token(log)
    address = f"{network.address('hub')}:{token[0]}"
    for site in sites:
        own = token[1].with_name(site).read_text().strip()
        started.append(processes.start(_site, network, file, site, address, own, name=site))
    processes.end(started, grace=LIMIT)
    failed = [process.name for process in started if process.exitcode != 0]
    if failed:
        text = "\n".join(p.read_text(errors="replace")[-1500:] for p in file.parent.glob("*.log"))
        sys.exit(f"{', '.join(failed)} failed\n{text}")


def _hub(network: Network, file: Path, config: RunConfig, log: Path) -> None:
    network.enter("hub")
    _to_file(log)
    sys.exit(coordinate(config, run_file=file, overrides=[], wait_for=None, resume=False))


def _site(network: Network, file: Path, site: str, address: str, token: str) -> None:
    network.enter(site)
    _to_file(file.parent / f"{site}.log")
    config = load_run(file, [f"run.folder={file.parent / site}"])
    sys.exit(join(config, site=site, address=address, token=token, debug=False))


def _token(log: Path) -> tuple[str, Path]:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        found = re.search(r"dilocox join \S+:(\d+) .*--token-file (\S+)", text)
        if found:
            return found[1], Path(found[2])
        time.sleep(0.02)
    sys.exit(f"the coordinator did not start\n{log.read_text(errors='replace')}")


def _to_file(log: Path) -> None:
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.close(stream)


def reports(config: RunConfig) -> list[dict[str, Any]]:
    """What the sites reported, rounds and flush."""
    lines = (config.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [r for r in records if r["kind"] in ("round", "flush") and r.get("site")]


if __name__ == "__main__":
    main()
