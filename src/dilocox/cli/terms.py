"""Terms of a run on the command line: a sponsor writes them, an owner of GPUs plans and joins."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.cli.placements import at_sites
from dilocox.errors import ConfigError
from dilocox.tools.settlement.web3_package import load_web3
from dilocox.utils.plain_text import plain, plain_lines
from dilocox.utils.storage import replace_file

if TYPE_CHECKING:
    from dilocox.config.run_config import RunConfig

GWEI = 10**9
"""Wei."""


def plan_terms(options: argparse.Namespace) -> int:
    """Carry out `dilocox plan --terms`: plan one site by the terms. Returns the exit code 0.

    Raises `ConfigError` for terms or options that cannot be used.
    """
    _refuse(options, "--terms", "run", "overrides", "sites", "tokens", "compare", "write_terms",
            "calibrate", "peer")  # fmt: skip
    gpu, link = _one_site(options, "--terms")
    from dilocox.config.terms import read_terms
    from dilocox.tools.planner.comparison import at_price
    from dilocox.tools.planner.hardware_table import HardwareTable

    file = read_terms(options.terms)
    from dilocox.tools.planner.terms_plan import as_json, as_text, plan_site

    table = HardwareTable.load(*options.table)
    places, (own,) = at_sites(options, table, [gpu], [link], 1)
    (place,) = at_price(places, options.rent)
    found = plan_site(file, place, own, table.fabric(options.fabric), table)
    print(json.dumps(as_json(found), indent=2) if options.json else plain_lines(as_text(found)))
    return 0


def write_terms(options: argparse.Namespace) -> int:
    """Carry out `dilocox plan --write-terms`. Returns the exit code 0.

    Raises `ConfigError` if the run has no terms, or for options that cannot be used.
    """
    _refuse(options, "--write-terms", "sites", "tokens", "compare", "calibrate", "peer", "table",
            "rent", "rtt", "egress", "utilisation", "host_memory", "json")  # fmt: skip
    gpu, link = _one_site(options, "--write-terms")
    if options.run is None:
        raise ConfigError("--write-terms: name the run file, too")
    stake = options.stake
    if not stake or stake % GWEI:
        raise ConfigError("--stake: say how many coins each site stakes, down to 0.000000001")
    if options.window < 1:
        raise ConfigError(f"--window {options.window}: give a number of seconds above 0")
    from dilocox.config.terms import load_draft, read_terms

    config = load_draft(options.run, options.overrides)
    from dilocox.tools.planner.hardware_table import HardwareTable
    from dilocox.tools.planner.terms_plan import write_terms as made

    fabric = HardwareTable.load().fabric(options.fabric)
    terms = made(config, gpu, link, fabric, stake // GWEI, options.window)
    _keep(options.write_terms, terms.to_toml())
    file = read_terms(str(options.write_terms))
    print(f"{options.write_terms}: terms of {config.run.name}; into [settlement] of the run file:")
    print(f'terms = "{file.digest}"')
    return 0


def deposit_by_terms(options: argparse.Namespace, config: RunConfig) -> Callable[[], None] | None:
    """Compare a run file with terms. With `--wallet`, return what stakes and enrols.

    Nothing is sent or signed before that is called, and it raises `SettlementError` if the contract
    is not what the terms say, or the chain fails. Only the first rank of a site gets it, if a
    launcher has started all of them.

    Raises `ConfigError` if options contradict each other or the terms are not those of the run, and
    `SettlementError` if the key cannot be used or is that of another account.
    """
    if options.terms is None:
        for name in ("wallet", "chain", "password_file"):
            if getattr(options, name) is not None:
                raise ConfigError(f"{_option(name)}: needs --terms, which say what is staked")
        return None
    from dilocox.training.launch.torchrun_env import rank_variables

    variables = rank_variables()
    if variables is not None and variables.rank > 0:
        return None
    from dilocox.config.terms import kept_terms

    file = kept_terms(options.terms, config)
    if options.site not in config.sites:
        raise ConfigError(
            f"--site {options.site}: not in the run file (sites: {', '.join(config.sites)})"
        )
    print(f"the run file is that of the terms {file.digest[:12]}…", flush=True)
    if options.wallet is None:
        return None
    from dilocox.coordinator.record_keys import key_file

    load_web3()
    from dilocox.tools.settlement.joining import check_account, stake_and_enrol
    from dilocox.tools.settlement.keystore import load_key, read_password

    account = load_key(options.wallet, read_password(options.password_file, options.wallet))
    check_account(account, config, options.site)
    own = options.key_file or key_file(config.folder, options.site)
    place = options.chain or config.folder

    def deposit() -> None:
        for line in stake_and_enrol(account, place, config, file.terms, options.site, own):
            print(plain(line), flush=True)

    return deposit


def _keep(path: Path, text: str) -> None:
    try:
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"{path}: exists with other terms; published terms are not replaced, so name "
                "another file"
            )
        replace_file(path, text.encode())  # whole or not at all: a part would not be replaced
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be written ({error})") from None


def _one_site(options: argparse.Namespace, what: str) -> tuple[str, str]:
    """Return the one `--gpu` and the one `--link`."""
    if len(options.gpu) != 1 or len(options.link) != 1:
        raise ConfigError(
            f"{what}: give --gpu and --link once, for one site, such as --gpu h100-80g:8 --link "
            "1gbit"
        )
    return options.gpu[0], options.link[0]


def _refuse(options: argparse.Namespace, what: str, *names: str) -> None:
    """Raise `ConfigError` if one of these options is given."""
    for name in names:
        if getattr(options, name) not in (None, False, []):
            told = {"run": "a run file", "overrides": "--set"}.get(name, _option(name))
            raise ConfigError(f"{told}: cannot be used with {what}: leave it out")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
