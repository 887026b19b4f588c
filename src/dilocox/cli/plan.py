"""`dilocox plan`: predict memory, speed and cost of a run, and measure this machine for it."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.cli import terms
from dilocox.cli.coins import coin
from dilocox.cli.placements import at_sites
from dilocox.errors import ConfigError

if TYPE_CHECKING:
    from dilocox.config.run_config import RunConfig
    from dilocox.tools.planner.hardware_table import GpuPlacement, HardwareTable, Link

CALIBRATION = Path("runs/local-device.toml")
"""File that `--calibrate` writes, and from which `--gpu local` is read."""
HELP = "predict memory, speed and cost of a run before you rent a GPU"
DESCRIPTION = """\
Predicts from the run file alone (no GPU, no weights): the memory of every rank, the settings that
the controller would choose for the link, the speed of each method, the time and cost of a token
budget, and the bottleneck of the run. See docs/planner.md."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `dilocox plan` to `command`."""
    command.description = DESCRIPTION
    command.add_argument("run", metavar="RUN.toml", type=Path, nargs="?", help="run file")
    command.add_argument(
        "--set", dest="overrides", metavar="section.key=value", action="append", default=[],
        help="override a key of the run file; may be given several times",
    )  # fmt: skip
    command.add_argument(
        "--sites", type=int, metavar="N", help="number of sites (default: as in the run file)"
    )
    command.add_argument(
        "--gpu", action="append", default=[], metavar="NAME:GPUSxNODES",
        help="the GPUs of EACH site, for example a800-40g:8x10 for ten nodes of eight; for unequal "
        "sites, give it once per site",
    )  # fmt: skip
    command.add_argument(
        "--link", action="append", default=[], metavar="RATE",
        help="each site's link: 1gbit, up/down such as 100mbit/1gbit, or a name of the table; "
        "give it once, or once per site",
    )  # fmt: skip
    command.add_argument("--rtt", type=float, metavar="MS", help="round trip between sites, in ms")
    command.add_argument(
        "--egress", type=float, metavar="USD", help="price per GB that leaves a site"
    )
    command.add_argument(
        "--rent", type=float, action="append", default=[], metavar="USD",
        help="price per GPU and hour, or the electricity of your own GPUs; give it once, or once "
        "per site (default: as in the table of GPUs)",
    )  # fmt: skip
    command.add_argument(
        "--compare", type=float, metavar="USD",
        help="compare the cost with one cluster with a fast network, whose GPUs cost this per hour",
    )  # fmt: skip
    command.add_argument(
        "--fabric", metavar="RATE", help="rate of a node's network inside its site (100gbit)"
    )
    command.add_argument(
        "--utilisation", type=float, metavar="SHARE",
        help="share of a GPU's peak speed that training reaches if nothing waits (default 0.4)",
    )  # fmt: skip
    command.add_argument(
        "--host-memory", type=float, metavar="GIB",
        help="host memory of each machine; if given, the need for host memory is checked, too",
    )  # fmt: skip
    command.add_argument(
        "--tokens", type=float, metavar="N", help="token budget of the run, for example 1e9"
    )
    command.add_argument(
        "--table", type=Path, action="append", default=[], metavar="FILE",
        help="a TOML file with more GPUs, hosts and links",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--calibrate", action="store_true",
        help="measure this machine, and write the result for --gpu local; with RUN.toml, also "
        "plan the run with it",
    )  # fmt: skip
    command.add_argument(
        "--peer", metavar="HOST:PORT",
        help="with --calibrate: also measure the link to the machine that runs --answer there, for "
        "--link measured (default: measure the loopback, for --link loopback)",
    )  # fmt: skip
    command.add_argument(
        "--answer", type=int, metavar="PORT",
        help="let another machine, by --calibrate --peer there, measure its link to this one once",
    )  # fmt: skip
    command.add_argument(
        "--to", type=Path, metavar="FILE", help=f"file of --calibrate (default {CALIBRATION})"
    )
    _add_terms(command)
    command.set_defaults(call=run)


def _add_terms(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--terms", metavar="FILE|URL",
        help="plan one site of the run whose terms these are, with --gpu and --link: memory, share "
        "of the tokens, pay; #sha256=HEX at the end names the digest that the file must have",
    )  # fmt: skip
    command.add_argument(
        "--write-terms", type=Path, metavar="FILE",
        help="write the terms of the run, for sites with --gpu and --link; needs --stake",
    )  # fmt: skip
    command.add_argument(
        "--stake", type=coin, metavar="COINS", help="with --write-terms: stake of each site"
    )
    command.add_argument(
        "--window", type=int, default=86_400, metavar="SECONDS",
        help="with --write-terms: time in which a settlement can be vetoed (default: a day)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Carry out `dilocox plan`. Returns the exit code 0, even if the run does not fit.

    Raises `ConfigError` if options contradict each other, or if a value cannot be used.
    """
    # Imported here and below, because the help text needs neither pydantic nor torch.
    from dilocox.config.run_config import load_run

    if options.answer is not None:
        if options.run is not None or options.calibrate or options.peer is not None:
            raise ConfigError(
                "--answer neither plans nor calibrates: give it without other options"
            )
        return _answer(options.answer)
    if options.terms is not None:
        if _wants_calibration(options) and CALIBRATION.exists():
            options.table.insert(0, CALIBRATION)
        return terms.plan_terms(options)
    if options.write_terms is not None:
        return terms.write_terms(options)
    if options.run is None and not options.calibrate:
        raise ConfigError("dilocox plan: give a run file, or --calibrate")
    if options.peer is not None and not options.calibrate:
        raise ConfigError("--peer needs --calibrate, which measures the link: add --calibrate")
    config = None if options.run is None else load_run(options.run, options.overrides)
    from dilocox.utils.versions import check_versions

    check_versions()
    tables = list(options.table)
    if options.calibrate:
        tables.append(_calibrate(config, options.peer, options.to or CALIBRATION))
        if config is None:
            return 0
    elif _wants_calibration(options) and CALIBRATION.exists():
        tables.insert(0, CALIBRATION)
    assert config is not None
    _plan(config, options, tables)
    return 0


def _wants_calibration(options: argparse.Namespace) -> bool:
    from dilocox.tools.planner.hardware_table import LOCAL, LOCAL_LINKS

    devices = {text.partition(":")[0] for text in options.gpu}
    return LOCAL in devices or not LOCAL_LINKS.isdisjoint(options.link)


def _answer(port: int) -> int:
    from dilocox.tools.planner.link_probe import answer, listen

    listener = listen(port)
    _say(f"waiting at port {port} for one measurement; Ctrl-C ends it")
    answer(listener, lambda what: _say(f"measuring: {what} ..."))
    _say("measured; the port is closed")
    return 0


def _calibrate(config: RunConfig | None, peer: str | None, path: Path) -> Path:
    from dilocox.tools.planner.calibrate import calibrate, write
    from dilocox.tools.planner.link_probe import parse_address

    other = None if peer is None else parse_address(peer)
    table = calibrate(config, lambda what: _say(f"measuring: {what} ..."), other)
    write(table, path)
    device, host = table["gpu"]["local"], table["host"]["local"]
    ((link, measured),) = table["link"].items()
    cores = f" on each of {device['cores']:g} cores" if device["shared"] else ""
    rates = f"{measured['up']} up and {measured['down']} down, {measured['rtt_ms']:g} ms"
    _say(
        f"{path}: {1e3 * device['bf16_tflops']:,.0f} GFLOP/s in a real step{cores} in bf16, "
        f"{1e3 * device['fp32_tflops']:,.0f} in fp32, int4 at {host['encode_gb_s']['int4']:.1f} "
        f"GB/s, link {rates}; use it with --gpu local --link {link}"
        + ("" if path == CALIBRATION else f" --table {shlex.quote(str(path))}")
    )
    if "peer_source" in device:
        _say(
            f"  of {device['stepped_parameters'] / 1e6:,.0f}M parameters; PCIe "
            f"{device['pcie_gb_s']:.1f} GB/s; between GPUs {device['peer_gb_s']:.1f} GB/s "
            f"({device['peer_source']})"
        )
    return path


def _plan(config: RunConfig, options: argparse.Namespace, tables: Sequence[Path]) -> None:
    from dilocox.tools.planner.comparison import at_price, compare
    from dilocox.tools.planner.hardware_table import HardwareTable
    from dilocox.tools.planner.plan import plan_run
    from dilocox.tools.planner.render import as_json, as_text, compared

    table = HardwareTable.load(*tables)
    places, links = sites_of(config, options, table)
    places = at_price(places, options.rent)
    if options.tokens is not None and not (options.tokens >= 1 and math.isfinite(options.tokens)):
        raise ConfigError(f"--tokens {options.tokens:g}: give a number of tokens, such as 1e9")
    lively = sys.stderr.isatty()

    def progress(what: str) -> None:
        if lively:
            print(f"\r\x1b[Kplanning: {what}", end="", file=sys.stderr, flush=True)

    try:
        plan = plan_run(
            config, places, links, table.fabric(options.fabric), options.tokens, progress
        )
    finally:
        if lively:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    other = None if options.compare is None else compare(plan, options.compare)
    if options.json:
        more = {} if other is None else {"comparison": asdict(other)}
        print(json.dumps(as_json(plan) | more, indent=2))
    else:
        print("\n\n".join([as_text(plan), *([] if other is None else [compared(other)])]))


def sites_of(
    config: RunConfig, options: argparse.Namespace, table: HardwareTable
) -> tuple[list[GpuPlacement], list[Link]]:
    """Return the devices and the link of every site, as the options say.

    Both lists have one item per site. Raises `ConfigError` for a value that cannot be used, or
    if an option is given neither once nor once per site.
    """
    from dilocox.tools.planner.hardware_table import LOCAL, LOOPBACK, MEASURED

    gpus = options.gpu or ([LOCAL] if options.calibrate else [])
    if not gpus:
        raise ConfigError(
            f"--gpu: name the GPUs of each site, as NAME:GPUSxNODES; known: "
            f"{', '.join(table.devices)}"
        )
    count = options.sites
    if count is None:
        count = max(len(gpus), len(options.link), len(config.sites))
    if count < 1:
        raise ConfigError(f"--sites {count}: give a number of at least 1")
    measured = LOOPBACK if options.peer is None else MEASURED
    links = options.link or ([measured] if options.calibrate else [])
    if not links and count > 1:
        raise ConfigError("--link: say how fast the sites' links are, for example --link 1gbit")
    return at_sites(options, table, gpus, links, count)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
