"""A public run from its terms to its pages, on one machine: python public_run.py

    python examples/public-run/public_run.py                 # all of it, about 10 minutes
    python examples/public-run/public_run.py --small         # two sites; no chain and no S3

Every step prints its command. See README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pages import write_pages
from services import PATIENCE, Background, Chain, Storage

HERE = Path(__file__).parent
SITES = ("paris", "lyon", "oslo", "rome")
BY_TERMS, LAZY, LATE = "paris", "oslo", "rome"
AUDITORS = ("first-auditor", "second-auditor")
WINDOW, POOL, STAKE, PRICE = 1000, 40, 2, 10**9
OFFER = ("--gpu", "l40s", "--link", "100mbit")
LARGE = ("qwen1.5-107b.toml", "--gpu", "a800-40g:8x10", "--link", "paper")
MEDIUM = ("two-offices-0.6b.toml", "--gpu", "l40s:1", "--link", "1gbit")
"""What the page computes costs of."""


class PublicRun:
    """The story, in the order of its methods."""

    def __init__(self, folder: Path, anvil: Path | None, sets: list[str], held: ExitStack) -> None:
        """Prepare. `anvil`: the chain's program; None: the small form, which has no chain.

        `held` ends all processes that are still there at the end.
        """
        self.folder, self.anvil, self.sets, self.held = folder, anvil, sets, held
        self.small = small = anvil is None
        self.sites = SITES[:2] if small else SITES
        self.run, self.keys, self.logs = folder / "run", folder / "keys", folder / "logs"
        self.public = folder / "public"
        self.public.mkdir(parents=True)
        self.keys.mkdir(mode=0o700)
        self.password = self.keys / "password"
        self.password.write_text("not a secret: an example\n")
        self.password.chmod(0o600)
        self.address = ""
        self.accounts: dict[str, str] = {}
        self.processes: dict[str, Background] = {}
        self.facts: dict[str, Any] = {"sites": list(self.sites), "small": small}

    # --- before ------------------------------------------------------------------------------

    def services(self) -> None:
        """Start the storage and the chain."""
        heading("services of this machine")
        if self.anvil is None:
            self.url = f"file://{self.folder.absolute()}/storage"
            return
        self.url = self.keep(Storage(self.logs, "public")).url
        self.chain = self.keep(Chain(self.anvil, self.logs))
        print(f"storage {self.url}, chain {self.chain.url}")

    def agree(self) -> None:
        """Make the keys, the contract, the run file and the terms."""
        heading("keys, contract, run file, terms")
        text = (HERE / "run.toml").read_text(encoding="utf-8")
        if self.small:
            text = re.sub(r"^\[sites\.(oslo|rome)\]\n", "", text, flags=re.MULTILINE)
        else:
            for name in ("owner", *SITES, *AUDITORS):
                key = [self.keys / f"{name}.key", "--password-file", self.password]
                self.accounts[name] = self.dilocox("chain", "key", *key).split()[-1]
                self.chain.give(self.accounts[name], 100)
            text = self.with_policy(text) + self.settlement()
        self.file = self.public / "run.toml"
        self.file.write_text(text, encoding="utf-8")
        if not self.small:
            terms = self.public / "terms.toml"
            self.dilocox(
                "plan", self.file, *self.overrides(), *OFFER, "--stake", STAKE, "--window", WINDOW,
                "--write-terms", terms,
            )  # fmt: skip
            digest = hashlib.sha256(terms.read_bytes()).hexdigest()
            self.file.write_text(f'{text}terms = "{digest}"\n', encoding="utf-8")

    def with_policy(self, text: str) -> str:
        """Return the run file with a policy for machines, which are pretended here."""
        said = self.dilocox("attest", "--simulate", self.keys / "machine")
        policy = (self.keys / "machine" / "tee.toml").read_bytes()
        (self.public / "tee.toml").write_bytes(policy)
        found = re.findall(r'record\.tee = ("[0-9a-f]{64}")', said)
        return text.replace("[record]\n", f"[record]\ntee = {found[0]}\n")

    def settlement(self) -> str:
        """Return the section of the run file, with a new contract."""
        self.contract = self.dilocox(
            "chain", "deploy", "--rpc", self.chain.url, *self.key("owner")
        ).split()[0]
        auditor = self.dilocox("auditor", "--show-key", "--key", self.keys / "auditor").strip()
        accounts = ", ".join(f'{name} = "{self.accounts[name]}"' for name in SITES)
        return f"""
[settlement]
price = {PRICE}
chain = {int(self.chain.call("eth_chainId"), 16)}
contract = "{self.contract}"
owner = "{self.accounts["owner"]}"
accounts = {{ {accounts} }}
auditors = ["{auditor}"]
admission = "stake"
"""

    # --- the run ------------------------------------------------------------------------------

    def coordinate(self) -> None:
        """Start the coordinator, register the run, publish it from now on."""
        heading("coordinator, register, publish beside the run")
        hook = [sys.executable, "-m", "dilocox", "chain", "anchor", str(self.run)]
        anchor = [*hook, *map(str, self.key("owner"))] if not self.small else []
        more = ["--set", f"record.anchor={json.dumps(anchor)}"] if anchor else []
        if not self.small:
            more += ["--wait-for", "3"]
        coordinator = self.beside("coordinator", "coordinator", self.file, *self.overrides(), *more)
        said = coordinator.until("dilocox join", len(self.sites))
        self.address = re.findall(r"dilocox join (\S+) ", said)[0]
        self.log_key = (self.run / "record" / "log.pub").read_text(encoding="utf-8").strip()
        if not self.small:
            auditors = [x for name in AUDITORS for x in ("--auditor", self.accounts[name])]
            self.dilocox(
                "chain", "register", self.run, "--rpc", self.chain.url, "--contract", self.contract,
                "--stake", STAKE, "--pool", POOL, "--window", WINDOW, "--quorum", len(AUDITORS),
                *auditors, *self.key("owner"),
            )  # fmt: skip
            self.dilocox("chain", "stake", self.run, "--amount", STAKE, *self.key("owner"))
            chain_file = (self.run / "settlement" / "chain.json").read_bytes()
            (self.public / "chain.json").write_bytes(chain_file)
        self.beside("publish", "publish", self.run, "--to", self.url, "--every", 4, "--follow")

    def train(self) -> None:
        """Let the sites join, one of them late and one of them lazy, and an auditor audit."""
        heading("sites and an auditor")
        for name in () if self.small else SITES:
            if name != BY_TERMS:
                self.dilocox("chain", "stake", self.run, "--amount", STAKE, *self.key(name))
                self.dilocox("chain", "enrol", self.run, "--site", name, *self.key(name))
        for name in self.sites:
            if name != LATE:
                self.join(name)
        self.after_round(0)
        key = ("--key", self.keys / "auditor")
        self.beside("auditor", "auditor", self.run, "--hand-in", *key)
        if not self.small:
            self.join(LATE)
            for name in SITES:
                self.attest(name)
        began = time.monotonic()
        for name, process in list(self.processes.items()):
            if name.startswith("attest"):
                process.stop()  # it would wait two minutes for a coordinator that has ended
            elif name != "publish":
                # An auditor who has found a cheat ends with 1.
                process.wait((0, 1) if name == "auditor" else (0,))
        print(f"trained and audited {time.monotonic() - began:.0f} s after the last start")

    def join(self, name: str) -> None:
        """Start a site. One stakes and enrols by the same command."""
        words: list[Any] = [
            self.address, "--site", name, "--run-file", self.file, *self.overrides(),
            "--token-file", self.run / "coordinator" / "tokens" / name,
        ]  # fmt: skip
        if not self.small and name == BY_TERMS:
            wallet = ["--wallet", *self.key(name)[1:]]
            words += ["--terms", self.public / "terms.toml", *wallet]
        if name == LAZY:
            command = [sys.executable, str(HERE / "lazy.py"), *map(str, words)]
            self.start(name, command)
        else:
            self.beside(name, "join", *words)

    def attest(self, name: str) -> None:
        """Let the site's machine vouch for itself, again and again."""
        machine = self.keys / "machine"
        self.beside(
            f"attest-{name}", "attest", self.run, "--site", name, "--simulate", machine,
            "--policy", machine / "tee.toml", "--follow",
        )  # fmt: skip

    def after_round(self, number: int) -> None:
        """Wait until a round is over."""
        self.processes["coordinator"].until(f"round {number:3d}  step")

    # --- after --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Pay by tokens, and take the stake of the lazy site."""
        if self.small:
            return
        heading("settle, claim, dispute")
        self.dilocox("chain", "anchor", self.run, *self.key("owner"))
        self.dilocox("chain", "settle", self.run, *self.key("owner"))
        self.chain.pass_time(WINDOW + 1)
        self.facts["claims"] = {
            name: self.dilocox("chain", "claim", self.run, *self.key(name)).strip()
            for name in SITES
        }
        verdicts = (self.run / "record" / "audits").glob(f"*-{LAZY}-*.json")
        lazy = min(int(file.name.split("-")[0]) for file in verdicts)
        votes = ("--site", LAZY, "--round", lazy, "--votes", self.keys / "votes.json")
        for name in AUDITORS:
            said = self.dilocox("chain", "dispute", self.run, *votes, *self.key(name))
        self.facts["dispute"] = said.strip().splitlines()[-1]

    def verify(self) -> None:
        """Verify as a stranger: from the storage and the chain alone, in a process of its own."""
        heading("verify from the storage and the chain alone")
        self.processes["publish"].wait()
        self.dilocox("publish", self.run, "--to", self.url, "--every", 4)
        self.kept = self.folder / "kept"
        chain = []
        if not self.small:
            chain = ["--chain", self.public / "chain.json", "--rpc", self.chain.url]
            chain += ["--tee", self.public / "tee.toml"]
        words = [self.url, "--key", self.log_key, *chain, "--keep", self.kept, "--json"]
        # Exit code 1: the claim `audits` is FAIL, since the lazy site was found.
        found = json.loads(self.dilocox("verify", *words, codes=(0, 1), quiet=True))
        self.facts["verdicts"] = found
        for each in found["claims"]:
            print(f"{each['verdict']:<8} {each['name']:<12} {each['reason']}")

    def pages(self) -> None:
        """Write the pages, from what was verified and from the chain's account of the run."""
        heading("pages")
        if not self.small:
            account = self.dilocox("chain", "account", self.kept, "--json", quiet=True)
            self.facts["account"] = json.loads(account)
        name, *offer = MEDIUM if self.small else LARGE
        costs: list[Any] = ["plan", HERE.parent / name, *offer]
        costs += ["--tokens", "1e9", "--rent", "0.20", "--compare", "2.00"]
        self.facts["costs"] = self.dilocox(*costs, quiet=True).strip().splitlines()[-1]
        costs[1] = f"examples/{name}"
        self.facts["costs_command"] = shlex.join(["dilocox", *map(str, costs)])
        self.facts["url"], self.facts["log_key"] = self.url, self.log_key
        self.dilocox("report", self.kept, "--out", self.public / "report.html")
        print(f"written: {write_pages(self.kept, self.public, self.facts)}")

    def serve(self) -> None:
        """Serve the verified model, and ask it once."""
        if self.small:
            return
        heading("serve the model")
        server = self.beside("serve", "serve", self.kept, "--port", 0)
        said = server.until("/v1")
        address = re.findall(r"(http://127\.0\.0\.1:\d+)/v1", said)[0]
        asked = {"prompt": "def main(", "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            print(json.load(reply)["choices"][0]["text"])
        server.stop()

    # --- commands -----------------------------------------------------------------------------

    def overrides(self) -> list[str]:
        """Return the run's folder on this machine, and what the caller has set."""
        return [x for each in (f"run.folder={self.run}", *self.sets) for x in ("--set", each)]

    def key(self, who: str) -> list[Path | str]:
        """Return the options that name an account's key."""
        return ["--key", self.keys / f"{who}.key", "--password-file", self.password]

    def dilocox(self, *words: Any, codes: tuple[int, ...] = (0,), quiet: bool = False) -> str:
        """Run a command to its end, and return what it has printed."""
        command = [sys.executable, "-m", "dilocox", *map(str, words)]
        print(f"$ dilocox {shlex.join(command[3:])}", flush=True)
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode not in codes:
            raise SystemExit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
        if not quiet and done.stdout.strip():
            print(done.stdout.strip())
        return done.stdout

    def beside(self, name: str, *words: Any) -> Background:
        """Start a command that goes on beside this program."""
        return self.start(name, [sys.executable, "-m", "dilocox", *map(str, words)])

    def start(self, name: str, command: list[str]) -> Background:
        """Start a process, and show its command."""
        words = ["dilocox", *command[3:]] if command[1] == "-m" else ["python", *command[1:]]
        print(f"$ {shlex.join(words)} &", flush=True)
        self.processes[name] = self.keep(Background(name, command, self.logs))
        return self.processes[name]

    def keep(self, process: Any) -> Any:
        """Have a process end with this program."""
        self.held.callback(process.stop)
        return process


def heading(text: str) -> None:
    """Print a heading."""
    print(f"\n== {text}", flush=True)


def fetched_anvil() -> Path:
    """Return the chain's program. Exits if it cannot be fetched: nothing is written before."""
    sys.path.insert(0, str(HERE.parents[1]))
    from scripts.npm_packages import PackageError, anvil

    try:
        return anvil()
    except PackageError as error:
        raise SystemExit(f"public_run: {error}; --small needs no chain") from None


def main() -> None:
    """Run the whole story."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/public-run"))
    parser.add_argument("--small", action="store_true", help="two sites; no chain and no S3")
    parser.add_argument("--set", action="append", default=[], help="override of the run file")
    options = parser.parse_args()
    if options.folder.exists():
        raise SystemExit(f"{options.folder}: is there already; remove it, or give --folder")
    anvil = None if options.small else fetched_anvil()
    with ExitStack() as held:
        story = PublicRun(options.folder.absolute(), anvil, options.set, held)
        for part in (
            story.services, story.agree, story.coordinate, story.train, story.settle, story.verify,
            story.pages, story.serve,
        ):  # fmt: skip
            part()


if __name__ == "__main__":
    main()
