"""Fetch the npm packages that contracts are compiled and tested with. Standard library only.

    python scripts/npm_packages.py        # to build/npm

No npm is needed: a package is one archive of the registry, checked by the SHA-512 that stands here.
npm's own variable NPM_CONFIG_REGISTRY names another registry.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import platform
import secrets
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "npm"
REGISTRY = "https://registry.npmjs.org"
SECONDS = 120
"""Longest silence of the registry."""
PACKAGES = {
    "solc": (
        "solc/-/solc-0.8.37.tgz",
        "ieUYdPDRGNKMsZpCfi9tY64Q+ASoL8tyhLuvf9cFiqDs+6ijlx8Wn2CRi0N71AlCvRx0V092rlUYu3b3PuxWlA==",
    ),
    "openzeppelin": (
        "@openzeppelin/contracts/-/contracts-5.7.0.tgz",
        "IL2AZpI+7THMzt1u6Cxmc1zLwVnudtUGvrqXQ/HnbLKfQ/8dIWMMQPDwPIjRQzNrlAo4cxZaCGRB/XvwPo9ILA==",
    ),
    "anvil-x86_64": (
        "@foundry-rs/anvil-linux-amd64/-/anvil-linux-amd64-1.7.1.tgz",
        "+XmShybEaxfCrr0OUUZwYEy2OnYZt5pHH9TzBtLv3+VrK0O/ANuNSVEahqNhKHlgX7GRJ59383ofNhxkRWIYTg==",
    ),
    "anvil-aarch64": (
        "@foundry-rs/anvil-linux-arm64/-/anvil-linux-arm64-1.7.1.tgz",
        "ykHJmFOGdBR8+9smOKBm9ZZDCCCkLQctiHOAddLvmYx9mPeBDMfq6jP51hKYsO5MG8ClPLSlWe+JpiXPjoXgBQ==",
    ),
}
"""Path at the registry and SHA-512, base64, by name."""


class PackageError(Exception):
    """A package cannot be fetched; the message is the reason."""


def package(name: str, folder: Path = FOLDER) -> Path:
    """Return the folder of a package's files; fetch it if it is not there.

    Args:
        name: One of `PACKAGES`.
        folder: Where packages lie, each in a folder named by its digest.

    Raises:
        PackageError: The registry does not answer, or the archive has another digest.
    """
    path, wanted = PACKAGES[name]
    target = folder / f"{name}-{base64.b64decode(wanted)[:8].hex()}"
    if target.exists():
        return target
    url = f"{os.environ.get('NPM_CONFIG_REGISTRY', REGISTRY).rstrip('/')}/{path}"
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            data = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise PackageError(f"{url}: {error}; is the registry of npm reachable?") from None
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != wanted:
        raise PackageError(f"{url}: has another SHA-512 than scripts/npm_packages.py says")
    part = folder / f".{name}.{secrets.token_hex(4)}"
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(part, filter="data")
    try:
        (part / "package").rename(target)
    except OSError:
        if not target.exists():  # another process was first
            raise
    return target


def anvil() -> Path:
    """Return the program `anvil` for this machine. Raises `PackageError`."""
    name = f"anvil-{platform.machine()}"
    if sys.platform != "linux" or name not in PACKAGES:
        raise PackageError(f"anvil: none for {sys.platform} on {platform.machine()} is named here")
    return package(name) / "bin" / "anvil"


def main() -> None:
    """Fetch all packages that this machine can use."""
    try:
        for found in (package("solc"), package("openzeppelin"), anvil()):
            print(found)
    except PackageError as error:
        sys.exit(f"npm_packages: {error}")


if __name__ == "__main__":
    main()
