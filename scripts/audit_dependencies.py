"""Look up security advisories for every package of requirements-hashed.txt.

    make audit-dependencies

`pip-audit` does the look-ups: first in PyPI's own index, then in OSV. It reports packages that it
could not look up as fine; this script does not. Exit codes: 0 no advisories, 1 advisories, 2 some
packages were not looked up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = "requirements-hashed.txt"
SERVICES = {"pypi": "https://pypi.org", "osv": "https://api.osv.dev"}


def main() -> None:
    """Ask the indexes in turn until one has answered for every package."""
    for service in SERVICES:
        code, lines = judge(ask(service))
        print(*(f"audit: {service}: {line}" for line in lines), sep="\n")
        if code != 2:
            break
    if code == 2:
        print("audit: NOT DONE; run it where one of these can be reached:", *SERVICES.values())
    sys.exit(code)


def ask(service: str) -> dict[str, Any] | None:
    """Run this interpreter's `pip-audit`, and return its report. None if it gives no report."""
    command = [
        sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--requirement",
        LOCK, "--vulnerability-service", service, "--format", "json", "--progress-spinner", "off",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        return None
    return found


def judge(found: dict[str, Any] | None) -> tuple[int, list[str]]:
    """Return the exit code and the lines to print for a report of `pip-audit`.

    `found`: the report, `{"dependencies": [...]}`; None: there is none.
    """
    packages = [] if found is None else found["dependencies"]
    bad = [
        f"{each['name']} {each['version']}: {vulnerability['id']}, fixed in "
        f"{', '.join(vulnerability['fix_versions']) or 'no release yet'}"
        for each in packages
        for vulnerability in each.get("vulns", [])
    ]
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    asked = len(packages) - len(skipped)
    if not asked:
        return 2, [*bad, "no index of advisories can be reached from here: nothing was looked up"]
    lines = [*bad, f"{asked} of {len(packages)} packages looked up"]
    if skipped:
        lines.append(f"not looked up: {', '.join(skipped)}")
    return 1 if bad else 2 if skipped else 0, lines


if __name__ == "__main__":
    main()
