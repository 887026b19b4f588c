"""`dilocox export`: copy a run's model as a folder, a release, or for llama.cpp."""

from __future__ import annotations

import argparse
from pathlib import Path

from dilocox.errors import ConfigError

HELP = "copy a run's model to a Hugging Face folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox export` to `parser`."""
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", type=Path, metavar="FOLDER", help="write the model alone")
    target.add_argument(
        "--release", type=Path, metavar="FOLDER",
        help="write the model, a model card made from the record, a description of the data, and "
        "a signature",
    )  # fmt: skip
    parser.add_argument(
        "--licence", metavar="ID", help="with --release: the weights' licence, such as apache-2.0"
    )
    parser.add_argument(
        "--signing-key", type=Path, metavar="FILE",
        help="with --release: PEM file of an EC private key; it is created if it does not exist "
        "(default: a file in the coordinator's folder)",
    )  # fmt: skip
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="the model's folder (default: RUN_FOLDER/model)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="with --release: folder of the token files (default: as the run file says)",
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument(
        "--merge", action="store_true",
        help="add adapters to their base model, and write a whole Hugging Face folder",
    )  # fmt: skip
    parser.add_argument(
        "--gguf", choices=["f16", "bf16", "f32"],
        help="with --to: write a GGUF file for llama.cpp, and a Modelfile for Ollama",
    )  # fmt: skip
    parser.set_defaults(call=_export)


def _export(options: argparse.Namespace) -> int:
    if options.release is not None:
        if options.merge or options.gguf:
            given = "--merge" if options.merge else "--gguf"
            raise ConfigError(f"{given} is for --to: a release is what the record leads to")
        return _release(options)
    if options.licence or options.signing_key or options.data:
        raise ConfigError("--licence, --signing-key and --data are for --release")
    from dilocox.api import export

    run = options.model or options.run_folder
    if options.gguf:
        from dilocox.tools.serving.gguf_export import export_gguf

        if options.merge:
            raise ConfigError("--merge is not needed: --gguf always writes a whole model")
        print(export_gguf(run, options.to, options.gguf))
        return 0
    print(export(run, options.to, options.dtype, merge=options.merge))
    return 0


def _release(options: argparse.Namespace) -> int:
    from dilocox.tools.release.release import release

    made = release(
        options.run_folder,
        options.release,
        dtype=options.dtype,
        licence=options.licence,
        key=options.signing_key,
        model=options.model,
        data=options.data,
    )
    for line in made.unknown:
        print(f"not in the card: {line}")
    print(f"{made.folder}  signed; the key to tell others: {made.public_key}")
    return 0
