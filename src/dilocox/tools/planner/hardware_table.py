"""Table of the speeds, sizes and prices of GPUs, hosts and links, each with its source.

The package's own table is `devices.toml`; files of the user add to it. This module converts the
units of data sheets to bytes, operations and seconds, so that no other module needs to.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from dilocox.config.outer import RATE, rate_of
from dilocox.errors import ConfigError

GIB = 2**30
LOCAL = "local"
"""Name of the device that `dilocox plan --calibrate` has measured: a GPU or processor cores."""
MEASURED, LOOPBACK = "measured", "loopback"
"""Names of the links that `dilocox plan --calibrate` has measured: to the machine of `--peer`, or,
without `--peer`, from this machine to itself."""
LOCAL_LINKS = frozenset((MEASURED, LOOPBACK))
WIRE_SHARE = 0.95
"""Payload bytes per byte on the wire. TCP, IP and Ethernet headers take the rest: 1,448 of 1,514
bytes are payload, and Gloo reached 0.95 Gbit/s on a `tc tbf` link of 1 Gbit/s."""
_RATE = re.compile(RATE)
LONGEST_MS = 86_400_000.0
"""Longest round trip, and largest fixed time of an exchange, in milliseconds: a day."""


@dataclass(frozen=True)
class Host:
    """Speed of exchange work on a site's machines, per core. Rates are fp32 bytes per second."""

    encode: Mapping[str, float]
    """By kind of codec, such as `topk` for `topk:64`."""
    decode: Mapping[str, float]
    """By kind of codec."""
    lowrank: float
    """Multiply-adds per second with low-rank factors; they come on top of `encode` and `decode`."""
    average: float
    """Adding one decoded payload to the average."""
    digest: float
    """Bytes of payload that SHA-256 hashes per second."""
    outer: float
    """Seconds of the training thread per parameter and round, for boundary and landing together."""
    exchange: float
    """Fixed seconds of an exchange, outside of its transfer and its codec."""
    exchange_cpu: float
    """Fixed processor seconds of an exchange, of all threads."""
    exchange_thread: float
    """The part of `exchange_cpu` in the exchange thread. A real controller measures this part
    only."""
    memory: int | None = None
    """Bytes of one machine's memory. None: unknown."""
    source: str = ""
    boundary_copies: float = 0.0
    """Seconds per parameter of copies between GPU and host memory at a boundary
    (`dilocox.tools.planner.outer_path`)."""
    landing_copies: float = 0.0
    """Seconds per parameter of copies between GPU and host memory at a landing."""
    payload_copies: float = 0.0
    """Seconds per payload byte of copies between GPU and host memory."""
    codecs_beside: bool = True
    """Where codecs run. True: on the host's processors, in parallel with training. False: on the
    GPUs, where they take time from training."""


@dataclass(frozen=True)
class Device:
    """One GPU, or the processors of a site without GPUs."""

    name: str
    bf16: float
    """Peak operations per second in bf16."""
    fp32: float
    """Peak operations per second in fp32."""
    utilisation: float
    """Share of the peak that training reaches without waits."""
    memory: int
    """Bytes that training may use."""
    memory_rate: float
    """Memory bandwidth, bytes per second."""
    peer_rate: float
    """Bytes per second, one way, to another GPU of the node."""
    pcie_rate: float
    """Bytes per second, one way, between the GPU and pinned memory of its machine."""
    host: Host
    usd_per_hour: float | None = None
    source: str = ""
    price_source: str = ""
    shared: bool = False
    """Whether the device is a site's processor cores, shared by all of its ranks for training and
    exchanges. Rates are then those of one core."""
    cores: float = 1.0
    """With `shared`: processor cores of a site, or its quota of cores."""
    multiplies_bf16: bool = True
    """Whether the device multiplies bf16 natively, as GPUs since Ampere do. Decides what
    `site.precision = "auto"` means."""
    reserved: int = 0
    """Bytes of CUDA's context and NCCL's buffers; not part of `memory`."""
    encode_bytes: Mapping[str, float] = field(default_factory=dict)
    """By kind of codec: bytes of GPU memory that encoding reads and writes per value."""
    decode_bytes: Mapping[str, float] = field(default_factory=dict)
    """The same for decoding."""

    def rate(self, bf16: bool) -> float:
        """Return the operations per second that training reaches without waits."""
        count = self.cores if self.shared else 1.0
        return (self.bf16 if bf16 else self.fp32) * self.utilisation * count


@dataclass(frozen=True)
class Link:
    """A site's link to the other sites. `up` and `down` are bytes per second on the wire."""

    up: float
    down: float
    rtt: float = 0.0
    """Round trip to the other sites, in seconds."""
    usd_per_gb: float = 0.0
    """Price of 10^9 bytes that leave the site."""
    name: str = ""
    source: str = ""

    @property
    def rate(self) -> float:
        """Payload bytes per second of the narrower direction, with both directions in use."""
        return WIRE_SHARE * min(self.up, self.down)


@dataclass(frozen=True)
class GpuPlacement:
    """The GPUs of one site: `nodes` machines with `per_node` GPUs each."""

    device: Device
    per_node: int
    nodes: int

    @property
    def gpus(self) -> int:
        """Number of GPUs of the site."""
        return self.per_node * self.nodes

    @property
    def text(self) -> str:
        """The placement in the form of `--gpu`, `NAME:GPUSxNODES`."""
        return f"{self.device.name}:{self.per_node}x{self.nodes}"


OF_TABLES = ("gpu", "host", "link")
"""Sections of the table whose entries are tables themselves."""
OF_CALIBRATIONS = frozenset(("stepped_parameters", "step_seconds", "peer_source"))
"""Keys that `dilocox plan --calibrate` writes for information; plans do not use them."""


MEMORY = "memory_gib"
"""Key of a device's memory, and of a host's memory if it is known."""


class HardwareTable:
    """Devices, hosts and links by name."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self._content = content
        self._where = where

    @classmethod
    def load(cls, *more: Path) -> HardwareTable:
        """Return the package's table with the user's files `more` merged in, later files on top.

        Raises `ConfigError` if a file cannot be read or has an entry that is not valid.
        """
        own = files("dilocox.tools.planner").joinpath("devices.toml").read_text("utf-8")
        content = tomllib.loads(own)
        known_keys = _keys(content)
        for path in more:
            for section, entries in _read(path).items():
                if section not in content or not isinstance(entries, dict):
                    known = ", ".join(content)
                    raise ConfigError(f"{path}: no table [{section}] is known; use one of {known}")
                odd = None
                if section in OF_TABLES:
                    odd = next(
                        (n for n, each in entries.items() if not isinstance(each, dict)), None
                    )
                if odd is not None:
                    raise ConfigError(
                        f"{path}: {section}.{odd} is not a table; write [{section}.{odd}]"
                    )
                if section in OF_TABLES:
                    for name, each in entries.items():
                        _check_keys(f"{path}: {section}.{name}", each, known_keys[section])
                elif section == "defaults":
                    _check_keys(f"{path}: defaults", entries, known_keys[section])
                content[section] = _merged(content[section], entries)
        table = cls(content, ", ".join(map(str, more)) or "the planner's table")
        for name in table.devices:
            table.device(name)
        for name in content["link"]:
            table.link(name)
        table.link("1gbit")  # by the defaults
        return table

    @property
    def devices(self) -> list[str]:
        """Names of the devices, sorted."""
        return sorted(self._content["gpu"])

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Values for keys that neither the device, nor the link, nor the command line sets."""
        found: Mapping[str, Any] = self._content["defaults"]
        return found

    @cached_property
    def host(self) -> Host:
        """The default entry for a site's machines."""
        return self._host("default")

    def device(self, name: str) -> Device:
        """Return the device `name`. Raises `ConfigError` with all known names if it is unknown."""
        if name not in self._content["gpu"]:
            near = difflib.get_close_matches(name, self.devices, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            if name == LOCAL:
                hint = "; `dilocox plan --calibrate` measures this machine and writes it"
            raise ConfigError(
                f'no GPU "{name}" in {self._where}{hint} (known: {", ".join(self.devices)}; '
                "--table FILE adds others)"
            )
        entry, where = self._content["gpu"][name], f"gpu.{name}"
        every = _merged(self.defaults, entry)
        shared = entry.get("shared", False)
        if not isinstance(shared, bool):
            raise ConfigError(f"{self._where}: {where}.shared: {shared!r} is not true or false")
        total = self._number(where, every, "memory_gib", scale=GIB)
        reserved = 0.0
        if not shared:
            reserved = self._number(where, every, "reserved_gib", zero=True, scale=GIB)
            lost = self._number(where, every, "fragmented", zero=True, most=1)
            total = (total - reserved) * (1 - lost)
        price = None
        if "usd_per_hour" in entry:
            price = self._number(where, entry, "usd_per_hour", zero=True)
        return Device(
            name=name,
            bf16=self._number(where, every, "bf16_tflops", scale=1e12),
            fp32=self._number(where, every, "fp32_tflops", scale=1e12),
            utilisation=self._number(where, every, "utilisation", most=1),
            memory=max(0, int(total)),
            memory_rate=self._number(where, every, "memory_gb_s", scale=1e9),
            peer_rate=self._number(where, every, "peer_gb_s", scale=1e9),
            pcie_rate=self._number(where, every, "pcie_gb_s", scale=1e9),
            host=self._host(str(entry.get("host", "default"))),
            usd_per_hour=price,
            source=self._told(str(entry.get("source", ""))),
            price_source=self._told(str(entry.get("price_source", ""))),
            shared=shared,
            cores=self._number(where, {"cores": 1.0, **entry}, "cores"),
            multiplies_bf16=self._precision(where, entry) == "bfloat16",
            reserved=int(reserved),
            encode_bytes=self._of_kinds(where, every, "encode_bytes"),
            decode_bytes=self._of_kinds(where, every, "decode_bytes"),
        )

    def link(self, text: str, rtt: float | None = None, usd_per_gb: float | None = None) -> Link:
        """Return the link of a name, a rate (`1gbit`) or two rates (up/down, `100mbit/1gbit`).

        `rtt`, in seconds, and `usd_per_gb` replace the table's values. Raises `ConfigError` if
        `text` is neither a known name nor a rate.
        """
        entries = self._content["link"]
        if text in entries:
            entry, where = {**self.defaults, **entries[text]}, f"link.{text}"
            found = Link(
                up=float(self._rate(where, entry.get("up"))),
                down=float(self._rate(where, entry.get("down"))),
                rtt=self._number(where, entry, "rtt_ms", zero=True, most=LONGEST_MS) / 1000,
                usd_per_gb=self._number(where, entry, "usd_per_gb", zero=True),
                name=text,
                source=self._told(str(entry.get("source", ""))),
            )
        else:
            up, slash, down = text.partition("/")
            if not (_RATE.fullmatch(up) and (not slash or _RATE.fullmatch(down))):
                hint = ""
                if text == MEASURED:
                    hint = "; `dilocox plan --calibrate --peer HOST:PORT` measures a link"
                raise ConfigError(
                    f'--link "{text}": give a rate such as 1gbit or 2.5mbit, up/down such as '
                    f"100mbit/1gbit, or a name: {', '.join(sorted(entries))}{hint}"
                )
            found = Link(
                up=float(self._rate(f'--link "{text}"', up)),
                down=float(self._rate(f'--link "{text}"', down or up)),
                rtt=self._number("defaults", self.defaults, "rtt_ms", zero=True, most=LONGEST_MS)
                / 1000,
                # A plain rate stands for an office's line, which costs nothing per byte.
                usd_per_gb=0.0,
                name=text,
            )
        if rtt is not None:
            found = replace(found, rtt=rtt)
        return found if usd_per_gb is None else replace(found, usd_per_gb=usd_per_gb)

    def place(
        self, text: str, utilisation: float | None = None, host_memory: int | None = None
    ) -> GpuPlacement:
        """Return the site of `NAME:GPUSxNODES`, `NAME:GPUS` or `NAME`.

        `utilisation` and `host_memory`, in bytes per machine, replace the table's values. Raises
        `ConfigError` if `text` has another form or the device is unknown.
        """
        name, colon, shape = text.partition(":")
        found = re.fullmatch(r"([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?", shape) if colon else None
        if colon and found is None:
            raise ConfigError(
                f'--gpu "{text}": write NAME:GPUSxNODES for each site, for example h100-80g:8x4 '
                "for four nodes of eight GPUs"
            )
        device = self.device(name)
        if utilisation is not None:
            device = replace(device, utilisation=utilisation)
        if host_memory is not None:
            device = replace(device, host=replace(device.host, memory=host_memory))
        per_node, nodes = (int(found[1]), int(found[2] or 1)) if found else (1, 1)
        return GpuPlacement(device, per_node, nodes)

    def fabric(self, text: str | None) -> float:
        """Return the bytes per second, one way, of a node's network inside its site.

        `text`: a rate such as `100gbit`; None: the table's default.
        """
        chosen = str(self.defaults["fabric"]) if text is None else text
        return float(self._rate("--fabric", chosen))

    def _host(self, name: str) -> Host:
        entry, where = self._content["host"].get(name), f"host.{name}"
        if entry is None:
            raise ConfigError(f"{self._where}: no [{where}]")
        every = _merged(self._content["host"]["default"], entry)
        return Host(
            encode=self._rates(where, every, "encode_gb_s"),
            decode=self._rates(where, every, "decode_gb_s"),
            lowrank=self._number(where, every, "lowrank_gmacs", scale=1e9),
            average=self._number(where, every, "average_gb_s", scale=1e9),
            digest=self._number(where, every, "sha256_gb_s", scale=1e9),
            outer=self._number(where, every, "outer_ns", zero=True, most=1e9, scale=1e-9),
            exchange=self._milliseconds(where, every, "exchange_ms"),
            exchange_cpu=self._milliseconds(where, every, "exchange_cpu_ms"),
            exchange_thread=self._milliseconds(where, every, "exchange_thread_ms"),
            memory=(
                int(self._number(where, every, MEMORY, scale=GIB)) if MEMORY in every else None
            ),
            source=self._told(str(every.get("source", ""))),
        )

    def _precision(self, where: str, entry: Mapping[str, Any]) -> str:
        found = entry.get("precision", "bfloat16")
        if found not in ("bfloat16", "float32"):
            raise ConfigError(
                f'{self._where}: {where}.precision: {found!r} is neither "bfloat16" nor "float32"'
            )
        return str(found)

    def _rates(self, where: str, entry: Mapping[str, Any], key: str) -> dict[str, float]:
        """Return the bytes per second by kind of codec; the table has GB/s."""
        return self._of_kinds(where, entry, key, scale=1e9)

    def _of_kinds(
        self, where: str, entry: Mapping[str, Any], key: str, scale: float = 1.0
    ) -> dict[str, float]:
        """Return a positive number by kind of codec, times `scale`."""
        own = entry.get(key)
        if not isinstance(own, dict):
            raise ConfigError(f"{self._where}: {where}.{key}: is not a table")
        return {kind: self._number(f"{where}.{key}", own, kind, scale=scale) for kind in own}

    def _told(self, source: str) -> str:
        """Return `source` with names in square brackets replaced by their addresses."""
        known = self._content["sources"]
        return re.sub(r"\[([a-z0-9-]+)\]", lambda m: str(known.get(m[1], m[0])), source)

    def _rate(self, where: str, text: object) -> int:
        if not isinstance(text, str) or not _RATE.fullmatch(text):
            what = "a rate is missing" if text is None else f'"{text}" is not a rate'
            raise ConfigError(f"{where}: {what} such as 1gbit or 2.5mbit")
        try:
            return rate_of(text)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None

    def _milliseconds(self, where: str, entry: Mapping[str, Any], key: str) -> float:
        """Return seconds; the table has milliseconds."""
        return self._number(where, entry, key, zero=True, most=LONGEST_MS, scale=1e-3)

    def _number(
        self,
        where: str,
        entry: Mapping[str, Any],
        key: str,
        *,
        zero: bool = False,
        most: float = math.inf,
        scale: float = 1.0,
    ) -> float:
        """Return the number `key` of `entry`, times `scale`.

        Args:
            where: Name of the entry, for the error.
            entry: The entry.
            key: Key of the number.
            zero: Whether the number may be 0.
            most: Largest number.
            scale: Factor from the unit of the table to the unit of the result.

        Raises:
            ConfigError: The number is missing, out of range, or too large for its unit.
        """
        value = entry.get(key)
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            found = float(value) if plain else math.nan  # type: ignore[arg-type]
        except OverflowError:  # a whole number of more than 308 digits
            found = math.inf
        right = (found > 0 or (zero and found == 0)) and found <= most
        # The product is checked: a finite number of GiB may be an infinite number of bytes.
        if not (right and math.isfinite(found * scale)):
            limits = "from 0" if zero else "above 0"
            limits += "" if most == math.inf else f", at most {most:g}"
            limits += " that is not too large" if right else ""
            what = "missing" if value is None else f"{value!r} is not a number {limits}"
            raise ConfigError(f"{self._where}: {where}.{key}: {what}")
        return found * scale


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--table {path}: cannot be read ({reason})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--table {path}: not valid TOML: {error}") from None


def _keys(content: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the keys that entries of each section may have: the package's, and optional ones."""
    known = {section: set().union(*content[section].values()) for section in OF_TABLES}
    known["host"] |= {MEMORY}
    known["defaults"] = set(content["defaults"])
    known["gpu"] |= known["defaults"] | {"shared", "cores", "host", "precision"} | OF_CALIBRATIONS
    return known


def _check_keys(where: str, entry: Mapping[str, Any], known: set[str]) -> None:
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"{where}.{key}: no such key{hint} (known: {', '.join(sorted(known))})"
            )


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above` on top; nested tables are merged likewise."""
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        merged[key] = (
            _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
        )
    return merged
