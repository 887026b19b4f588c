"""`dilocox generate`: text or an answer from a model."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "sample text from a run's model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument("model", type=Path, help="a run folder or a Hugging Face folder")
    parser.add_argument("--prompt", default="")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer the prompt, written with the model's chat template; the prompt is a user's "
        "message, or a JSON list of messages",
    )
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0 always takes the most likely token (default: 0.8)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help="PyTorch's device name, such as cuda (default: cpu)"
    )
    parser.set_defaults(call=_generate)


def _generate(options: argparse.Namespace) -> int:
    from dilocox.api import generate
    from dilocox.training.chat_prompt import messages_in

    print(
        generate(
            options.model,
            messages_in(options.prompt) if options.chat else options.prompt,
            chat=options.chat,
            tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
            device=options.device,
        )
    )
    return 0
