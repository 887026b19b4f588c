"""Serves a run's model: OpenAI's endpoints on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from dilocox.errors import ConfigError
from dilocox.tools.serving.asked import CHAT, COMPLETION, Served
from dilocox.tools.serving.engine import Engine, check_packages
from dilocox.tools.serving.front import Front
from dilocox.tools.serving.other_servers import chat_template, vllm_line
from dilocox.tools.serving.served_folder import link_files, name_answers, tokens_of
from dilocox.training.run_model import check_plain_folder, export, model_folder
from dilocox.utils.adapter_files import is_adapter_folder
from dilocox.utils.processes import term_as_interrupt

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": "auto"}
DTYPES = tuple(_DTYPES)
_LOOK = 0.5
"""Seconds between looks at the engine."""
_ENDING = 2.0
"""Seconds that open answers have when the server ends."""


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
    if not called or called.startswith((".", "-")) or set(called) & set("/@:"):
        raise ConfigError(f"--name {called!r}: give a name without / @ :, such as our-model")
    with (
        _bound(place) as listening,
        term_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="dilocox-serve-") as temporary,
    ):
        work = Path(temporary)
        folder = work / called
        if is_adapter_folder(source):
            print("adding the adapters to their base model", flush=True)
            export(source, folder, "fp32" if dtype == "auto" else dtype, merge=True)
        else:
            check_plain_folder(source)
            link_files(source, folder)
        name_answers(folder)
        chats = chat_template(folder) is not None
        served = Served(called, tokens_of(folder), chats, int(source.stat().st_mtime))
        engine = Engine(work, called, device, _DTYPES[dtype], work / "engine.log")
        try:
            print(f"loading {called}", flush=True)
            engine.wait()
            for line in _greeting(served, place.host, listening.getsockname()[1], source):
                print(line, flush=True)
            return asyncio.run(_listen(engine, served, place.host, listening))
        except KeyboardInterrupt:
            return True
        finally:
            engine.end()


def _bound(place: Place) -> socket.socket:
    """Return a socket at the place. Raises `ConfigError` if it cannot be had."""
    where = f"{place.host}:{place.port}"
    if not 0 <= place.port < 2**16:
        raise ConfigError(f"--port {place.port}: give a number from 0 to {2**16 - 1}")
    try:
        kind = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        return socket.create_server((place.host, place.port), family=kind)
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot listen there ({error.strerror or error}); choose another --port or "
            "--host"
        ) from None


async def _listen(engine: Engine, served: Served, host: str, listening: socket.socket) -> bool:
    """Answer until a signal. Returns False if the engine has ended by itself."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    application = Front(served, engine.socket, host).application()
    # A client that leaves ends the work on its answer, and Ctrl-C does not wait for answers.
    runner = web.AppRunner(
        application, access_log=None, handler_cancellation=True, shutdown_timeout=_ENDING
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
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


def _greeting(served: Served, host: str, port: int, source: Path) -> Iterator[str]:
    shown = f"[{host}]" if ":" in host else host
    path = f"{CHAT} and {COMPLETION}" if served.chats else COMPLETION
    yield f"{served.name}: http://{shown}:{port}/v1 ({path}); Ctrl-C ends"
    yield f"for many users: {vllm_line(source, served.name)}"
