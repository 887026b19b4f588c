"""`dilocox evaluate`: evaluate models on tasks of lm-eval, and print their figures side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "evaluate models on tasks of lm-eval (needs the extra [eval])"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox evaluate` to `parser`."""
    parser.add_argument(
        "models", nargs="+", type=Path, metavar="MODEL",
        help="run folders or Hugging Face folders; several are shown side by side",
    )  # fmt: skip
    parser.add_argument(
        "--tasks", nargs="+", required=True, metavar="TASK",
        help="names that lm-eval knows, task files in YAML, folders with such files, or functions "
        "of your own (FILE.py:FUNCTION); separated by spaces or commas",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N",
        help="evaluate only the first N examples of each task (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--fewshot", type=int, metavar="N",
        help="examples in each prompt (default: as the task says)",
    )  # fmt: skip
    parser.add_argument(
        "--chat", action="store_true", help="write prompts with the model's chat template"
    )
    parser.add_argument(
        "--device", default="cpu", help="PyTorch's device name, such as cuda (default: cpu)"
    )
    parser.add_argument("--json", action="store_true", help="print lm-eval's whole results as JSON")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Evaluate every model, and print a table or JSON. Returns the exit code."""
    from dilocox.api import evaluate
    from dilocox.coordinator.protocol.task_figures import comparison, figures_of

    found = evaluate(
        options.models,
        [name for text in options.tasks for name in text.split(",") if name],
        limit=options.limit,
        fewshot=options.fewshot,
        chat=options.chat,
        device=options.device,
    )
    if options.json:
        print(json.dumps(found, indent=2, default=str))
        return 0
    rows = comparison({model: figures_of(results) for model, results in found.items()})
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0
