"""`dilocox serve`: answer OpenAI's requests with a run's model, until Ctrl-C."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "serve a run's model on this machine, with OpenAI's endpoints"
PORT = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox serve` to `parser`."""
    parser.add_argument("model", type=Path, help="a run folder, or a Hugging Face or PEFT folder")
    parser.add_argument(
        "--name", help="the model's name for clients (default: the name of the folder)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, only this machine); there is no password",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=int, default=PORT,
        help=f"port to listen on (default: {PORT}; 0: any free port)",
    )  # fmt: skip
    parser.add_argument(
        "--device",
        default="auto",
        help="PyTorch's device name, such as cuda or cpu (default: auto)",
    )
    parser.add_argument(
        "--dtype", choices=["auto", "fp32", "bf16", "fp16"], default="auto",
        help="data type to compute in (default: auto, as the model is stored)",
    )  # fmt: skip
    parser.set_defaults(call=_serve)


def _serve(options: argparse.Namespace) -> int:
    # Imported here, because no other command needs these modules.
    from dilocox.tools.serving.serve import Place, serve

    place = Place(options.host, options.port)
    return 0 if serve(options.model, place, options.name, options.device, options.dtype) else 1
