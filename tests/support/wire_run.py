"""A real run of sites in network namespaces, and what their interfaces count."""

from __future__ import annotations

import re
from typing import Any

from dilocox.tools.testbed import Network
from tests.support.forge import Forge
from tests.support.harness import Workshop

FILE = """\
[run]
name = "wire"
folder = "{folder}/hub"
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
source = "{text}"
vocabulary_size = 300
sequence_length = 16
validation_sequences = 2
folder = "{data}"
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


def counted_run(
    workshop: Workshop, forge: Forge, exchange: str, codec: str, count: int
) -> dict[str, Any]:
    """Run it with `count` sites, and return what the sites reported, what the interfaces counted
    and how many segments were sent again: `records`, and by host `counters` and `retransmitted`."""
    name, sites = f"wire-{exchange}", [f"site{number}" for number in range(count)]
    folder = workshop.root / name
    folder.mkdir()
    file = folder / "run.toml"
    with Network(["hub", *sites]) as network:
        file.write_text(
            FILE.format(
                folder=folder,
                text=workshop.text,
                data=workshop.root / "data",
                exchange=exchange,
                codec=codec,
                host=network.address("hub"),
                sites="\n".join(f"{site} = {{}}" for site in sites),
            ),
            encoding="utf-8",
        )
        prepared = forge.command(workshop, f"{name}/hub", "data", "prepare", str(file))
        assert prepared.wait() == 0, prepared.output()
        before = {host: network.counters(host) for host in network.hosts}
        run = forge.command(
            workshop, f"{name}/hub", "coordinator", str(file), namespace=network.namespace("hub")
        )
        run.until(lambda: run.printed().count("dilocox join") == count)
        address = re.findall(r"dilocox join (\S+) ", run.printed())[0]
        tokens = run.folder / "coordinator" / "tokens"
        joined = [
            forge.command(
                workshop, f"{name}/{site}", "join", address, "--site", site,
                "--run-file", str(file), "--set", f"run.folder={folder / site}",
                "--token-file", str(tokens / site), namespace=network.namespace(site),
            )
            for site in sites
        ]  # fmt: skip
        assert [each.wait() for each in joined] == [0] * count, joined[0].output()
        assert run.wait() == 0, run.output()
        counted = {host: network.counters(host).since(before[host]) for host in network.hosts}
        retransmitted = {host: network.retransmitted(host) for host in network.hosts}
    return {
        "records": [
            record
            for kind in ("round", "flush")
            for site in sites
            for record in run.records(kind, site)
        ],
        "counters": {host: vars(counter) for host, counter in counted.items()},
        "retransmitted": retransmitted,
    }
