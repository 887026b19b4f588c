"""`dilocox serve` as a user runs it: a process, OpenAI's client, Ctrl-C."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from tests.support.base_model import write_base

from dilocox.errors import CheckpointError, ConfigError
from dilocox.tools.serving.serve import Place, serve

pytestmark = pytest.mark.waits
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def adapters(folder: Path, base: Path) -> Path:
    """Write adapters that change what the base model says."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules="all-linear")
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class Server:
    """A running `dilocox serve`."""

    def __init__(self, model: Path) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dilocox",
                "serve",
                str(model),
                "--port",
                "0",
                "--device",
                "cpu",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines: IO[str] = self.process.stdout

    def address(self) -> str:
        """Return the address that the server prints."""
        for line in self.lines:
            if "http://" in line:
                return line.partition(": ")[2].split(" ")[0]
        raise AssertionError("the server has ended")

    def end(self) -> int:
        """Press Ctrl-C. Return the exit code."""
        self.process.send_signal(signal.SIGINT)
        self.lines.read()
        return self.process.wait(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    return adapters(root / "our-run" / "model", write_base(root / "base")).parent


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    made = Server(model)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()


@pytest.mark.slow
def test_adapters_answer_as_generate_does_and_ctrl_c_ends(server: Server, model: Path) -> None:
    import openai

    from dilocox.api import generate

    client = openai.OpenAI(base_url=server.address(), api_key="none")
    assert [each.id for each in client.models.list().data] == ["our-run"]
    settings: dict[str, Any] = {"model": "our-run", "max_tokens": 12, "temperature": 0.0}
    said = client.chat.completions.create(
        messages=[{"role": "user", "content": "the value"}], **settings
    )
    expected = generate(model, "the value", chat=True, tokens=12, temperature=0.0)
    assert said.choices[0].message.content == expected
    assert said.model.startswith("our-run")
    pieces = client.completions.create(prompt="def ", stream=True, **settings)
    text = "".join(piece.choices[0].text for piece in pieces)
    assert "def " + text == generate(model, "def ", tokens=12, temperature=0.0)
    # An answer of the whole length is under way when Ctrl-C comes.
    long = client.completions.create(prompt="def ", stream=True, **{**settings, "max_tokens": 128})
    next(iter(long))
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    assert children.strip()
    assert server.end() == 0
    assert not any(Path(f"/proc/{child}").exists() for child in children.split())


@pytest.mark.slow
def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model is here"):
        serve(tmp_path, Place(port=0), None, "cpu", "auto")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="give a name without / @ :"):
        serve(tmp_path, Place(port=0), "a/b", "cpu", "auto")
    with pytest.raises(ConfigError, match="--port 99999: give a number from 0 to 65535"):
        serve(tmp_path, Place(port=99999), None, "cpu", "auto")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Place(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen there"):
            serve(tmp_path, place, None, "cpu", "auto")
    with pytest.raises(CheckpointError, match="the model cannot be served: "):
        serve(tmp_path, Place(port=0), None, "cpu", "auto")
