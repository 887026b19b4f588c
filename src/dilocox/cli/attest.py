"""`dilocox attest`: file what this machine vouches for, in the record of a run."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.errors import AttestationError, ConfigError
from dilocox.utils.plain_text import plain_lines

if TYPE_CHECKING:
    from dilocox.coordinator.protocol.attestation_messages import AttestReply
    from dilocox.coordinator.protocol.timeouts import Timeouts
    from dilocox.tools.attestation.collecting import Collector
    from dilocox.tools.attestation.filing import Filing

HELP = "file evidence of what this machine has booted, in the record of a run"
PATIENCE = 20.0
"""Seconds for which one call to a coordinator that does not answer is repeated."""
_ADDRESS = re.compile(r"[^/]+:[0-9]{1,5}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox attest` to `parser`."""
    parser.add_argument(
        "run", metavar="RUN", type=Path, nargs="?",
        help="the site's run folder on this machine; without it, --simulate only makes the machine",
    )  # fmt: skip
    parser.add_argument("--site", metavar="NAME", help="the site of this machine")
    parser.add_argument(
        "--node", type=int, default=0, metavar="I",
        help="number of this machine among those of the site, from 0 (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N",
        help="number of machines of the site (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", type=Path, metavar="FILE",
        help="judge the evidence by this policy first, and file it only if it holds; required if "
        "the run file names a policy (record.tee)",
    )  # fmt: skip
    _add_sources(parser)
    _add_run(parser)
    parser.set_defaults(call=run)


def _add_sources(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--dstack", nargs="?", const="", metavar="SOCKET",
        help="take the quote from dstack's agent (default: if its socket is there)",
    )  # fmt: skip
    source.add_argument(
        "--tsm", nargs="?", const="", metavar="FOLDER",
        help="take the quote from the kernel, at /sys/kernel/config/tsm/report (the default)",
    )  # fmt: skip
    source.add_argument(
        "--simulate", type=Path, metavar="FOLDER",
        help="pretend a machine, whose key and certificates are kept in FOLDER; the verdict on it "
        "is never PASS",
    )  # fmt: skip
    parser.add_argument(
        "--collateral", metavar="PLACE",
        help="TDX: file with the platform's collateral, or URL of a service (default: Intel's)",
    )  # fmt: skip
    parser.add_argument(
        "--certificates", type=Path, metavar="FILE",
        help="SEV-SNP: VCEK, ASK and ARK in PEM (default: what the host hands its guest)",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", nargs="?", const="nvattest", metavar="COMMAND",
        help="add reports of the NVIDIA GPUs, from the command nvattest",
    )  # fmt: skip
    parser.add_argument(
        "--manifest", type=Path, action="append", default=[], metavar="FILE",
        help="with --gpus: NVIDIA's reference manifests (RIM) of driver and VBIOS",
    )  # fmt: skip


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT",
        help="the coordinator's address (default: RUN is the coordinator's own folder)",
    )  # fmt: skip
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="with --coordinator: file with the site's join token (default: the environment "
        "variable DILOCOX_TOKEN, else a prompt)",
    )  # fmt: skip
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE",
        help="the site's key file (default: RUN/private/NAME.key)",
    )  # fmt: skip
    parser.add_argument(
        "--store", metavar="PLACE",
        help="the site's store, folder or URL (default: record.store of RUN/run.toml, else "
        "RUN/record/store)",
    )  # fmt: skip
    parser.add_argument(
        "--randomness", type=Path, metavar="FILE",
        help="file with public randomness in hex, which is read at every filing",
    )  # fmt: skip
    parser.add_argument(
        "--follow", action="store_true", help="renew the evidence until the run ends"
    )
    parser.add_argument(
        "--every", type=int, metavar="N",
        help="with --follow: renew after N rounds (default: half of the policy's max_age_rounds)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """File evidence, or only make a pretended machine.

    Returns 0 if that was done, and 3 if `--follow` could file nothing.
    """
    if options.run is None and options.simulate is not None:
        return _made(options.simulate)
    _check(options)
    filing = _opened(options)
    if not options.follow:
        _say(filing.file(filing.asked()))
        return 0
    every, most = options.every, None
    if filing.policy is not None:
        most = filing.policy.policy.max_age_rounds
        every = every or max(1, most // 2)
    if most is not None and every > most:
        raise ConfigError(
            f"--every {every}: the policy allows {most} rounds without new evidence "
            "(max_age_rounds); give a smaller number"
        )
    with contextlib.suppress(KeyboardInterrupt):
        filing.follow(every, _usual().rejoin, _say)
    return 0 if filing.filed else 3


def _made(folder: Path) -> int:
    """Make a pretended machine, and print what the run file has to name."""
    from dilocox.tools.attestation.collecting import CHIP
    from dilocox.tools.attestation.policy import PolicyFile
    from dilocox.tools.attestation.simulated_machine import POLICY_FILE, SimulatedMachine

    SimulatedMachine.kept(folder, CHIP)
    digest = PolicyFile.read(folder / POLICY_FILE).digest
    _say(f'{folder / POLICY_FILE}: accepts this pretended machine; record.tee = "{digest}"')
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other. Raises `ConfigError`."""
    if options.run is None or options.site is None:
        raise ConfigError("name the site's run folder, and the site with --site")
    if not 0 <= options.node < options.nodes:
        raise ConfigError(f"--node {options.node}: give a number from 0 to below --nodes")
    if options.every is not None and not options.follow:
        raise ConfigError("--every is for --follow: add that option, or leave this one out")
    if options.every is not None and options.every < 1:
        raise ConfigError(f"--every {options.every}: give a number of rounds from 1")
    if options.follow and options.every is None and options.policy is None:
        raise ConfigError("--follow: give --policy, whose max_age_rounds says when to renew, or "
                          "--every N")  # fmt: skip
    if options.manifest and options.gpus is None:
        raise ConfigError("--manifest is for --gpus: add that option, or leave this one out")
    if options.token_file is not None and options.coordinator is None:
        raise ConfigError("--token-file needs --coordinator HOST:PORT: add that option")


def _opened(options: argparse.Namespace) -> Filing:
    """Return what files evidence. Raises `DilocoxError` if a file cannot be used."""
    from dilocox.config.run_config import load_written
    from dilocox.coordinator.record_keys import RecordKey, key_file
    from dilocox.record.log.blob_store import Store
    from dilocox.record.log.statements import Signer
    from dilocox.tools.attestation.filing import Filing
    from dilocox.tools.attestation.policy import PolicyFile

    own: Path = options.key_file or key_file(options.run, options.site)
    if not own.exists():
        raise ConfigError(f"{own}: missing; join with the site first, or name its key with "
                          "--key-file")  # fmt: skip
    place = options.store
    if place is None and (options.run / "run.toml").exists():
        config = load_written(options.run / "run.toml", [f'run.folder="{options.run}"'])
        place = config.record_store
    randomness: Path | None = options.randomness
    return Filing(
        _caller(options),
        _collector(options),
        Store(place or str(options.run / "record" / "store"), PATIENCE),
        Signer.from_hex(RecordKey.kept(own).private),
        None if options.policy is None else PolicyFile.read(options.policy),
        options.node,
        options.nodes,
        (lambda: "") if randomness is None else partial(_hex, randomness),
    )


def _caller(options: argparse.Namespace) -> Callable[[str | None], AttestReply]:
    from dilocox.coordinator.client.endpoint import Endpoint
    from dilocox.coordinator.client.enrolment import attest
    from dilocox.training.launch.join_token import read_token

    patience = replace(_usual(), coordinator=PATIENCE)
    if options.coordinator is None:

        def own(statement: str | None) -> AttestReply:
            # Read at every call: a coordinator that starts anew may listen elsewhere.
            try:
                endpoint = Endpoint.load(options.run / "coordinator" / "endpoint.json")
                url, token = endpoint.url, endpoint.tokens[options.site]
            except (OSError, ValueError, TypeError, KeyError):
                raise ConfigError(
                    f"{options.run}: not the folder of a running coordinator that knows site "
                    f"{options.site}; give --coordinator HOST:PORT and --token-file"
                ) from None
            return attest(url, token, patience, statement)

        return own
    if _ADDRESS.fullmatch(options.coordinator):
        url, token = f"https://{options.coordinator}", read_token(options.token_file)
    else:
        raise ConfigError(f"--coordinator {options.coordinator}: not an address; give HOST:PORT")
    return lambda statement: attest(url, token, patience, statement)


def _usual() -> Timeouts:
    """Return the time limits of a run whose run file sets none."""
    from dilocox.config.network import NetworkSection
    from dilocox.coordinator.protocol.timeouts import Timeouts

    return Timeouts.derive(NetworkSection())


def _collector(options: argparse.Namespace) -> Collector:
    from dilocox.tools.attestation.collecting import PCS, Collector
    from dilocox.tools.attestation.gpu_source import collect_gpus
    from dilocox.tools.attestation.sources import DSTACK, TSM, dstack_quote, tsm_quote

    if options.simulate is not None:
        found = Collector.simulated(options.simulate)
    elif options.dstack is not None or (options.tsm is None and DSTACK.exists()):
        socket = Path(options.dstack) if options.dstack else DSTACK
        found = Collector(partial(dstack_quote, path=socket))
    else:
        folder = Path(options.tsm) if options.tsm else TSM
        found = Collector(partial(tsm_quote, folder=folder))
    if options.certificates is not None:
        found = replace(found, certificates=options.certificates)
    if options.gpus is not None:
        found = replace(found, gpus=partial(collect_gpus, command=options.gpus))
    return replace(found, collateral=options.collateral or PCS, manifests=options.manifest)


def _hex(path: Path) -> str:
    try:
        return bytes.fromhex(path.read_text(encoding="ascii")).hex()
    except (OSError, ValueError) as error:
        raise AttestationError(f"--randomness {path}: not hex digits ({error})") from None


def _say(text: str) -> None:
    print(plain_lines(text), flush=True, file=sys.stdout)
