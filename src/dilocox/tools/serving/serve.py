"""Serves a run's model: OpenAI's endpoints on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from dilocox.errors import ConfigError
from dilocox.tools.serving.engine import Engine, check_packages
from dilocox.tools.serving.front import Front
from dilocox.tools.serving.other_servers import chat_template, vllm_line
from dilocox.tools.serving.served_folder import link_files, name_answers
from dilocox.training.run_model import check_plain_folder, export, model_folder
from dilocox.utils.adapter_files import is_adapter_folder
from dilocox.utils.processes import Requests

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": "auto"}
DTYPES = tuple(_DTYPES)
_LOOK = 0.5
"""Seconds between looks at the engine."""


@dataclass(frozen=True)
class Place:
    """Where the server listens. `port` 0: any free port."""

    host: str = "127.0.0.1"
    port: int = 8000


def serve(model: Path, place: Place, name: str | None, device: str, dtype: str) -> bool:
    """Serve a model until Ctrl-C. Returns whether the server ended because the user wanted it.

    Adapters are added to their base model in a temporary folder, which needs the base model's size
    on disk.

    Args:
        model: a run folder, a Hugging Face folder or a PEFT folder.
        place: where to listen.
        name: the model's name for clients. None: the name of the run's folder.
        device: PyTorch's name of a device, or `auto`.
        dtype: one of `DTYPES`; auto: as the model is stored.

    Raises:
        CheckpointError: there is no model, or it cannot be loaded.
        ConfigError: the server cannot listen there, or packages are missing.
    """
    check_packages()
    source = model_folder(model)
    called = name or (source.parent if source.name == "model" else source).resolve().name
    if not called or "/" in called or called.startswith((".", "-")):
        raise ConfigError(f"--name {called!r}: give a name without a slash, such as our-model")
    with tempfile.TemporaryDirectory(prefix="dilocox-serve-") as temporary:
        work = Path(temporary)
        folder = work / called
        if is_adapter_folder(source):
            print("adding the adapters to their base model", flush=True)
            export(source, folder, "fp32" if dtype == "auto" else dtype, merge=True)
        else:
            check_plain_folder(source)
            link_files(source, folder)
        name_answers(folder)
        with _ended() as requests:
            engine = Engine(work, called, device, _DTYPES[dtype], work / "engine.log")
            try:
                print(f"loading {called}", flush=True)
                if not engine.wait(lambda: requests.times > 0):
                    return True
                return asyncio.run(_listen(engine, called, folder, source, place))
            finally:
                engine.end()


@contextmanager
def _ended() -> Iterator[Requests]:
    """Count requests to end the process, while no event loop listens to signals."""
    requests = Requests()
    signals = (signal.SIGINT, signal.SIGTERM)

    def hear(*_: object) -> None:
        requests.heard()

    before = [signal.signal(number, hear) for number in signals]
    try:
        yield requests
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


async def _listen(engine: Engine, name: str, folder: Path, source: Path, place: Place) -> bool:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    chats = chat_template(folder) is not None
    created = int(source.stat().st_mtime)
    front = Front(name, f"http://127.0.0.1:{engine.port}", place.host, created, chats)
    runner = web.AppRunner(front.application(), access_log=None)
    await runner.setup()
    try:
        try:
            site = web.TCPSite(runner, place.host, place.port)
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"{place.host}:{place.port}: cannot listen there ({error.strerror or error}); "
                "choose another --port"
            ) from None
        port = runner.addresses[0][1]
        for line in _greeting(name, place.host, port, chats, source):
            print(line, flush=True)
        while not end.is_set():
            if not engine.runs():
                print(f"the model's process has ended: {engine.last_words()}", flush=True)
                return False
            try:
                await asyncio.wait_for(end.wait(), _LOOK)
            except TimeoutError:
                continue
    finally:
        await runner.cleanup()
    return True


def _greeting(name: str, host: str, port: int, chats: bool, source: Path) -> Iterator[str]:
    shown = f"[{host}]" if ":" in host else host
    path = "/v1/chat/completions and /v1/completions" if chats else "/v1/completions"
    yield f"{name}: http://{shown}:{port}/v1 ({path}); Ctrl-C ends"
    yield f"for many users: {vllm_line(source, name)}"
