"""Compile contracts/RunLedger.sol, and write the artifact that dilocox deploys.

    python scripts/compile_contract.py            # writes run_ledger.json of tools/settlement
    python scripts/compile_contract.py --check    # fails if the committed artifact differs

`solc` is JavaScript with WebAssembly. It runs in the node that playwright brings
(`make setup-dev`), or in the machine's own.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from npm_packages import PackageError, package

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = "RunLedger"
SOURCE = ROOT / "contracts" / f"{CONTRACT}.sol"
ARTIFACT = ROOT / "src" / "dilocox" / "tools" / "settlement" / "run_ledger.json"
SETTINGS = {
    "evmVersion": "cancun",
    "optimizer": {"enabled": True, "runs": 10_000},
    "viaIR": True,
    # Without it the bytecode ends in a digest of the sources' paths and comments.
    "metadata": {"bytecodeHash": "none", "appendCBOR": False},
}
LIBRARY = "@openzeppelin/contracts/"
DRIVER = """
const solc = require(process.argv[1] + '/soljson.js');
const call = (name, ...words) => solc.cwrap(name, 'string', words);
const compile = call('solidity_compile', 'string', 'number', 'number');
const input = require('fs').readFileSync(0, 'utf8');
const output = compile(input, 0, 0);
process.stdout.write(JSON.stringify({version: call('solidity_version')(), output: output}));
"""
"""Calls the compiler with standard JSON. All sources are in the input."""


class CompileError(Exception):
    """The contract cannot be compiled; the message is the reason."""


def compiled() -> dict[str, Any]:
    """Compile the contract; return the artifact. Raises `CompileError` or `PackageError`."""
    sources = {f"contracts/{SOURCE.name}": SOURCE.read_text(encoding="utf-8")}
    library = package("openzeppelin")
    waiting = list(sources)
    while waiting:
        for name in _imports(waiting[-1], sources[waiting.pop()]):
            if name not in sources:
                if not name.startswith(LIBRARY):
                    raise CompileError(f"{name}: neither the contract nor OpenZeppelin's")
                sources[name] = (library / name.removeprefix(LIBRARY)).read_text(encoding="utf-8")
                waiting.append(name)
    outputs = ["abi", "evm.bytecode.object", "evm.deployedBytecode"]
    settings = {**SETTINGS, "outputSelection": {"*": {CONTRACT: outputs, "": ["ast"]}}}
    request = {
        "language": "Solidity",
        "sources": {name: {"content": text} for name, text in sources.items()},
        "settings": settings,
    }
    done = subprocess.run(
        [node(), "-e", DRIVER, str(package("solc"))],
        input=json.dumps(request), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise CompileError(f"solc ended with {done.returncode}: {done.stderr[-500:]}")
    said = json.loads(done.stdout)
    found = json.loads(said["output"])
    troubles = [each["formattedMessage"] for each in found.get("errors", ())]
    if troubles:  # warnings, too
        raise CompileError("\n".join(troubles))
    contract = found["contracts"][f"contracts/{SOURCE.name}"][CONTRACT]
    return {
        "contract": CONTRACT,
        "compiler": said["version"],
        "settings": SETTINGS,
        "source": hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
        "abi": contract["abi"],
        "bytecode": "0x" + contract["evm"]["bytecode"]["object"],
        "runtime": "0x" + contract["evm"]["deployedBytecode"]["object"],
        "immutables": _immutables(found["sources"], contract["evm"]["deployedBytecode"]),
    }


def _immutables(sources: dict[str, Any], runtime: dict[str, Any]) -> dict[str, list[int]]:
    """Return the places in the runtime code, in bytes, of each immutable variable by its name.

    The constructor writes 32 bytes into each place.
    """
    names: dict[str, str] = {}
    waiting: list[Any] = [each["ast"] for each in sources.values()]
    while waiting:
        node_ = waiting.pop()
        if isinstance(node_, list):
            waiting += node_
        elif isinstance(node_, dict):
            if node_.get("mutability") == "immutable":
                names[str(node_["id"])] = node_["name"]
            waiting += node_.values()
    found = {}
    for number, places in sorted(runtime["immutableReferences"].items(), key=lambda p: int(p[0])):
        if any(each["length"] != 32 for each in places):
            raise CompileError(f"{names[number]}: an immutable variable not of 32 bytes")
        found[names[number]] = sorted(each["start"] for each in places)
    return found


def _imports(name: str, text: str) -> list[str]:
    """Return the names of the sources that a source imports."""
    found = re.findall(r'^import (?:\{[^}]*\} from )?"([^"]+)";', text, re.MULTILINE)
    return [_joined(name, each) if each.startswith(".") else each for each in found]


def _joined(name: str, relative: str) -> str:
    parts = name.split("/")[:-1]
    for part in relative.split("/"):
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def node() -> str:
    """Return the program of node. Raises `CompileError` if there is none."""
    spec = importlib.util.find_spec("playwright")
    if spec is not None and spec.origin is not None:
        own = Path(spec.origin).parent / "driver" / "node"
        if own.exists():
            return str(own)
    found = shutil.which("node")
    if found is None:
        raise CompileError("node is not installed; make setup-dev brings it with playwright")
    return found


def as_text(artifact: dict[str, Any]) -> str:
    """Return the artifact's file."""
    return json.dumps(artifact, indent=1) + "\n"


def main() -> None:
    """Compile, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    options = parser.parse_args()
    try:
        text = as_text(compiled())
    except (CompileError, PackageError) as error:
        sys.exit(f"compile_contract: {error}")
    if options.check:
        if ARTIFACT.read_text(encoding="utf-8") != text:
            sys.exit(f"compile_contract: {ARTIFACT} is not what {SOURCE.name} compiles to")
        print(f"{ARTIFACT.name} is what {SOURCE.name} compiles to")
        return
    ARTIFACT.parent.mkdir(parents=True, exist_ok=True)
    ARTIFACT.write_text(text, encoding="utf-8")
    print(f"wrote {ARTIFACT}: {(len(text)) // 1000} kB")


if __name__ == "__main__":
    main()
