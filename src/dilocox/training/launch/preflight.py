"""Checks before any process starts, and preparation of what the processes need.

Every command that starts a part of a run calls `check`. The cheapest checks come first, and text is
only read after all checks that need none. No file of an earlier run is changed here:
`run_folder.claim_folder` comes after `check`, so a refused start loses nothing.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from typing import Literal

from dilocox.config.run_config import RunConfig
from dilocox.coordinator.client.transport import addresses_of
from dilocox.coordinator.controller.candidates import Menu
from dilocox.coordinator.metrics.privacy import check_accountant
from dilocox.coordinator.protocol.token_format import JoinToken
from dilocox.data import TokenFiles
from dilocox.data.folder import check_place
from dilocox.errors import ConfigError, JoinError
from dilocox.models.prefetch import fetch_weights
from dilocox.training.builder import Hooks, ModelPlan
from dilocox.training.launch.base_check import check_base
from dilocox.training.launch.capacity_check import check_capacity
from dilocox.training.launch.console import Display, tell
from dilocox.training.launch.coordinator_check import check_coordinator, port_before, with_port
from dilocox.training.launch.cuda_driver import check_driver
from dilocox.training.launch.data_check import check_data, check_handed_data
from dilocox.training.launch.data_preparation import OWN_DATA, prepare_data
from dilocox.training.launch.forking import stay_forkable
from dilocox.training.launch.headline import headline
from dilocox.training.launch.hints import hints
from dilocox.training.launch.model_check import (
    check_blueprint,
    check_first_adapters,
    check_model,
)
from dilocox.training.launch.run_folder import (
    as_begun,
    check_folder,
    check_reachable,
    check_writable,
    refuse_finished,
)
from dilocox.training.launch.tasks_check import check_run_tasks
from dilocox.training.launch.tokenizer_check import (
    check_handed_tokenizer,
    check_tokenizer,
    check_tokenizer_keys,
    check_trained_tokenizer,
    model_vocabulary,
)
from dilocox.training.payload_sizes import payload_sizes
from dilocox.training.portable_checkpoint import check_handed_momentum, check_handover
from dilocox.transport.link.endpoint import check_ports
from dilocox.transport.link.tcp import check_congestion
from dilocox.utils.versions import check_versions


@dataclass(frozen=True)
class Role:
    """The part of a run that this process is about to start. It decides which checks apply."""

    command: Literal["train", "join", "rank", "coordinator", "lab"]
    """The command. `join` is also the first rank of a site under torchrun or Slurm; `rank` is
    every other rank there."""
    hooks: Hooks = field(default_factory=Hooks)
    """The user's own functions."""
    resume: bool = False
    """The run in the folder goes on from its last checkpoint."""
    overwrite: bool = False
    """The new run replaces an earlier run in the folder."""
    wait_for: int | None = None
    """Number of sites with which the run starts; None: all. For the coordinator."""
    site: str | None = None
    """The site that joins. None if this machine runs no site, or all sites."""
    url: str = ""
    """Address of the coordinator that `site` joins."""
    token: str | None = None
    """Join token of `site`. None: it is not checked."""
    ranks_here: int | None = None
    """Number of the site's ranks on this machine, which are the first ones. None: all ranks."""

    @property
    def trains(self) -> bool:
        """Whether ranks train on this machine."""
        return self.command != "coordinator"

    @property
    def serves(self) -> bool:
        """Whether the coordinator listens on this machine, and owns the run folder."""
        return self.command in ("train", "coordinator")


@dataclass(frozen=True)
class Prepared:
    """Results of the checks."""

    config: RunConfig
    """The run file. For a run that goes on, with the former defaults that the run began with."""
    begun: bool = False
    """The run in the folder goes on."""
    port: int = 0
    """Port for the coordinator to listen on; 0 takes a free one."""
    payloads: Menu | None = None
    """Sizes of payloads for the coordinator, see `payload_sizes`."""
    headline: str = ""
    """Lines that say what will be trained. Empty unless all sites train on this machine."""


def check(config: RunConfig, role: Role, display: Display | None = None) -> Prepared:
    """Refuse a start that cannot work, and prepare the weights and the token files.

    `display` shows the progress; None: only warnings are printed.

    Raises `DilocoxError` for the first fault that is found.
    """
    check_process(config, role)
    return prepare(config, role, display)


def prepare(config: RunConfig, role: Role, display: Display | None = None) -> Prepared:
    """Do what `check` does after `check_process`, for a process that was checked before."""
    prepared = _check_places(config, role)
    config, fresh = prepared.config, not prepared.begun
    if role.command == "rank":
        fetch_weights(config)
        # The machine of the site's first rank has checked its own copy.
        check_first_adapters(config)
        return prepared
    _check_start(config, role, fresh)
    if not role.trains:
        # Only the sites read the text; the sizes of payloads follow from the tokenizer's size.
        plans = config.control.adapt != "off"
        payloads = payload_sizes(config, model_vocabulary(config)) if plans else None
        return replace(prepared, payloads=payloads)
    check_model(config, own_loss="loss" in role.hooks.functions)
    if role.site is None and fresh:
        check_tokenizer(config)
    check_handed_momentum(config)
    check_run_tasks(config, role.site, display)
    for line in hints(config, alone=role.site is not None):
        tell(line, display)
    if display is None:
        fetch_weights(config)
    else:
        fetch_weights(config, display.step)
    if prepared.begun or config.handover is not None:
        check_base(config)
    # A joining site keeps its files: the coordinator compares their digest with that of the start.
    kept = role.site is not None or prepared.begun
    files = prepare_data(config, display, begun=kept, overwrite=role.overwrite)
    return _check_files(config, role, prepared, files)


def check_process(config: RunConfig, role: Role) -> None:
    """Check the arguments of the command and this process, and keep the process fit for forking.

    Needs neither the network nor the run folder. Raises `JoinError` for a wrong site, address or
    token, and `ConfigError` for versions, a driver, own code or a process that cannot be used.
    """
    if role.site is not None:
        if role.site not in config.sites:
            known = ", ".join(config.sites)
            raise JoinError(f"site {role.site!r}: not in the run file, which names: {known}")
        addresses_of(role.url)
        if role.token is not None:
            JoinToken.parse(role.token)
    check_versions()
    check_stakes(config, role.command)
    if config.data.own and role.trains:
        raise ConfigError(OWN_DATA)
    if role.serves:
        check_accountant(config)
    if role.trains:
        check_driver(config)
        role.hooks.check(config, required=role.site is not None)
        stay_forkable(config.site.device)


def check_stakes(config: RunConfig, command: str) -> None:
    """Raise `ConfigError` if `command` cannot take part in a run that admits sites by stake."""
    if config.settlement is None or config.settlement.admission is None:
        return
    if command in ("train", "lab"):
        raise ConfigError(
            "settlement.admission: sites stake after the log has begun and before they join: use "
            "dilocox coordinator and dilocox join"
        )
    if command == "coordinator" and importlib.util.find_spec("web3") is None:
        raise ConfigError(
            "settlement.admission: the coordinator looks at stakes, and the package web3 is not "
            "installed: pip install 'dilocox[chain]'"
        )


def check_run(
    config: RunConfig,
    vocabulary_size: int,
    sites_here: int,
    own_dataset: bool = False,
    ranks_here: int | None = None,
) -> None:
    """Check the run with its token files. Raises the error that a rank would raise later.

    `sites_here`: number of sites on this machine; if these are not all, the caller checks the
    site's own token files by `check_data`. `ranks_here`: number of the site's ranks on this
    machine, which are the first ones; None means all.
    """
    files = TokenFiles.open(config.data_folder)
    everyone = list(config.sites) if sites_here == len(config.sites) else []
    check_data(config, files, everyone, own_dataset)
    if config.handover is not None:
        check_handed_data(config, files)
    blueprint = ModelPlan.of(config, vocabulary_size)
    parameters = check_blueprint(config, blueprint)
    check_capacity(config, blueprint, parameters, sites_here, ranks_here)


def _check_places(config: RunConfig, role: Role) -> Prepared:
    """Check the run folder, addresses and ports. Returns the run as it goes on, if it does."""
    if not role.serves:
        if role.site is not None:
            check_reachable(config.folder)
            check_writable(config.folder)
        check_congestion(config.network.congestion)
        return Prepared(config)
    check_reachable(config.folder)
    # A coordinator that is started again goes on with its run, with or without a checkpoint.
    again = role.command == "coordinator" and (config.folder / "run.toml").exists()
    begun = role.resume or again
    check_folder(config, begun, role.overwrite)
    if begun:
        refuse_finished(config.folder)
        config = as_begun(config)
    port = config.network.port
    if role.command == "coordinator":
        port = port or port_before(config.folder)
    check_coordinator(with_port(config, port), role.wait_for)
    if role.trains:
        check_congestion(config.network.congestion)
        # `run_site` checks the ports of a site that joins, at each of its starts.
        for name, own in config.sites.items():
            address = own.interface or config.network.interface or config.network.host
            check_ports(name, own, config.site.exchanging_ranks, address)
    return Prepared(config, begun, port)


def _check_start(config: RunConfig, role: Role, fresh: bool) -> None:
    """Check the state and the tokenizer from which the run starts, without reading weights."""
    if role.trains:
        check_place(config.data_folder)
    if role.command == "coordinator":
        if not fresh:
            return
        check_trained_tokenizer(config)
    elif role.site is None and fresh:
        check_tokenizer_keys(config)
    check_handover(config)
    check_handed_tokenizer(config)


def _check_files(config: RunConfig, role: Role, prepared: Prepared, files: TokenFiles) -> Prepared:
    """Check the run with its token files, and add what is known with these."""
    own_dataset, vocabulary = role.hooks.dataset is not None, files.vocabulary_size
    if role.site is not None:
        check_run(
            config,
            vocabulary,
            sites_here=1,
            own_dataset=own_dataset,
            ranks_here=role.ranks_here,
        )
        check_data(config, files, [role.site], own_dataset)
        return prepared
    check_run(config, vocabulary, sites_here=len(config.sites), own_dataset=own_dataset)
    if not role.serves:
        return prepared
    payloads = payload_sizes(config, vocabulary)
    return replace(prepared, payloads=payloads, headline=headline(config, files))
