"""Figures of devices and links: read, extended, refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.errors import ConfigError
from dilocox.tools.planner.hardware_table import WIRE_SHARE, HardwareTable

KNOWN = HardwareTable.load()


def more(folder: Path, text: str) -> HardwareTable:
    path = folder / "more.toml"
    path.write_text(text, encoding="utf-8")
    return HardwareTable.load(path)


def test_every_entry_can_be_used_and_has_its_source() -> None:
    assert len(KNOWN.devices) >= 8
    for name in KNOWN.devices:
        found = KNOWN.device(name)
        assert found.source, name
        assert found.price_source, name
        # Names of sources are replaced by their addresses.
        assert "[" not in found.source + found.price_source
        assert 10e9 < found.memory < 200e9
        assert 5e13 < found.bf16 < 5e15
        assert found.rate(bf16=True) == 0.4 * found.bf16


def test_units_of_a_device_worked_by_hand() -> None:
    found = KNOWN.device("a800-40g")
    assert found.bf16 == 312e12
    assert found.memory_rate == 1555e9
    assert found.peer_rate == 200e9
    assert found.pcie_rate == 24e9
    assert found.reserved == 1.5 * 2**30
    # 39.5 GiB less 1.5 for CUDA and NCCL, less 3 % for fragmentation
    assert found.memory == int((39.5 - 1.5) * 2**30 * 0.97)


def test_an_unknown_gpu_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r'no GPU "h100".*did you mean "h100-80g"') as refused:
        KNOWN.device("h100")
    for name in KNOWN.devices:
        assert name in str(refused.value)
    with pytest.raises(ConfigError, match="dilocox plan --calibrate"):
        KNOWN.device("local")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[gpu.a800-40g]\nutilization = 0.6", r"gpu\.a800-40g\.utilization: .*utilisation"),
        ("[gpu.a800-40g]\nusd_per_hr = 2.0", r"gpu\.a800-40g\.usd_per_hr: .*usd_per_hour"),
        ("[link.mine]\nup = '1gbit'\ndown = '1gbit'\nrtt = 12", r"link\.mine\.rtt: .*rtt_ms"),
        ("[host.default]\nsha_gb_s = 1.0", r"host\.default\.sha_gb_s: .*sha256_gb_s"),
        ("[defaults]\nfabrics = '1gbit'", r"defaults\.fabrics: .*fabric"),
        ("[gpu.a800-40g]\nshared = 'false'", r"gpu\.a800-40g\.shared: .*true or false"),
    ],
)
def test_a_misspelt_key_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        more(tmp_path, text)


def test_a_file_adds_and_replaces(tmp_path: Path) -> None:
    found = more(
        tmp_path,
        """
        [gpu.mine]
        bf16_tflops = 10
        fp32_tflops = 5.0
        memory_gib = 12.0
        memory_gb_s = 300.0
        peer_gb_s = 8.0
        utilisation = 0.5
        precision = "float32"
        pcie_gb_s = 12.0
        encode_bytes = { int4 = 20.0 }
        source = "measured"
        [gpu.l40s]
        usd_per_hour = 0.5
        [link.vpn]
        up = "50mbit"
        down = "200mbit"
        rtt_ms = 12.0
        usd_per_gb = 0.0
        source = "ours"
        [host.default]
        sha256_gb_s = 3.0
        """,
    )
    assert found.device("mine").rate(bf16=True) == 5e12
    assert not found.device("mine").multiplies_bf16
    assert found.device("mine").pcie_rate == 12e9
    # Of other codecs the defaults are known.
    assert found.device("mine").encode_bytes == {
        **KNOWN.device("l40s").encode_bytes, "int4": 20.0
    }  # fmt: skip
    assert found.device("l40s").multiplies_bf16
    assert found.device("mine").usd_per_hour is None
    assert found.device("l40s").usd_per_hour == 0.5
    assert found.device("l40s").bf16 == KNOWN.device("l40s").bf16
    vpn = found.link("vpn")
    assert (vpn.up, vpn.down, vpn.rtt, vpn.usd_per_gb) == (6.25e6, 25e6, 0.012, 0.0)
    assert vpn.rate == WIRE_SHARE * 6.25e6
    assert found.host.digest == 3e9
    assert found.host.encode == KNOWN.host.encode


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gpus.x]\na = 1", r"no table \[gpus\]"),
        ("[gpu.x]\nbf16_tflops = 1.0", r"gpu\.x\.memory_gib: missing"),
        (
            "[gpu.l40s]\nbf16_tflops = -1.0",
            r"gpu\.l40s\.bf16_tflops: -1\.0 is not a number above 0",
        ),
        ("[gpu.l40s]\nbf16_tflops = true", r"gpu\.l40s\.bf16_tflops"),
        ('[link.x]\nup = "fast"\ndown = "1gbit"', r'link\.x: "fast" is not a rate'),
        ("[gpu.l40s]\nhost = 'x'", r"no \[host\.x\]"),
        ("not toml", "not valid TOML"),
        ('[link.x]\nup = "1gbit"', r"link\.x: a rate is missing"),
        ("[gpu]\nx = 3", r"gpu\.x is not a table"),
        ('[gpu.l40s]\nusd_per_hour = "three"', r"gpu\.l40s\.usd_per_hour: 'three' is not a number"),
        ("[gpu.l40s]\nusd_per_hour = -3", r"usd_per_hour: -3 is not a number from 0"),
        ("[gpu.l40s]\nmemory_gib = inf", r"gpu\.l40s\.memory_gib: inf is not a number"),
        ("[gpu.l40s]\nutilisation = 40", r"utilisation: 40 is not a number above 0, at most 1"),
        ("[gpu.l40s]\nfragmented = 2", r"fragmented: 2 is not a number from 0, at most 1"),
        ('[gpu.l40s]\nprecision = "fp16"', r"gpu\.l40s\.precision: 'fp16' is neither"),
        ("[gpu.l40s]\npcie_gb_s = 0", r"gpu\.l40s\.pcie_gb_s: 0 is not a number above 0"),
        ("[gpu.l40s]\ndecode_bytes = 3", r"gpu\.l40s.*decode_bytes: is not a table"),
        ("[gpu.l40s]\ncores = 0", r"gpu\.l40s\.cores: 0 is not a number above 0"),
        ('[host.default]\nencode_gb_s = {int4 = "x"}', r"encode_gb_s\.int4: 'x' is not a number"),
        (
            "[host.default]\nencode_gb_s = {int4 = 0}",
            r"encode_gb_s\.int4: 0 is not a number above 0",
        ),
        ("[host.default]\nencode_gb_s = 3", r"encode_gb_s: is not a table"),
        ("[host.default]\nouter_ns = -1", r"outer_ns: -1 is not a number from 0"),
        ('[defaults]\nrtt_ms = "x"', r"defaults\.rtt_ms: 'x' is not a number"),
        # Finite in the unit of the table, and infinite in bytes.
        ("[gpu.l40s]\nmemory_gib = 1e300", r"memory_gib: 1e\+300 is not a number above 0 that is"),
        ("[gpu.l40s]\nreserved_gib = 1e308", r"reserved_gib: 1e\+308 is not a number from 0 that"),
        ("[gpu.l40s]\nbf16_tflops = 1e300", r"bf16_tflops: 1e\+300 is not a number"),
        (f"[gpu.l40s]\nmemory_gib = 1{'0' * 400}", r"memory_gib: 10+ is not a number"),
        ("[host.default]\nmemory_gib = 1e300", r"memory_gib: 1e\+300 is not a number"),
        ("[host.default]\nexchange_ms = 1e308", r"exchange_ms: 1e\+308 .*at most 8\.64e\+07"),
        (
            '[link.x]\nup = "1gbit"\ndown = "1gbit"\nrtt_ms = 1e308\nusd_per_gb = 0',
            r"link\.x\.rtt_ms: 1e\+308 is not a number from 0, at most 8\.64e\+07",
        ),
        ("[defaults]\nrtt_ms = 1e308", r"defaults\.rtt_ms: 1e\+308 is not a number"),
        ('[link.x]\nup = "0kbit"\ndown = "1gbit"', r'link\.x: the rate "0kbit" carries nothing'),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        more(tmp_path, text)


def test_what_may_be_nothing_may_be_nothing(tmp_path: Path) -> None:
    found = more(tmp_path, "[gpu.l40s]\nreserved_gib = 0\nfragmented = 0\nusd_per_hour = 0")
    assert found.device("l40s").memory > KNOWN.device("l40s").memory
    assert found.device("l40s").usd_per_hour == 0.0
    # What is told of a source is text, whatever it is.
    assert more(tmp_path, "[gpu.l40s]\nsource = 3").device("l40s").source == "3"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        HardwareTable.load(tmp_path / "none.toml")


def test_links_by_rate_both_ways_and_name() -> None:
    plain = KNOWN.link("1gbit")
    assert (plain.up, plain.down, plain.rtt) == (125e6, 125e6, 0.03)
    uneven = KNOWN.link("100mbit/1gbit", rtt=0.1, usd_per_gb=0.0)
    assert (uneven.up, uneven.down, uneven.rtt, uneven.usd_per_gb) == (12.5e6, 125e6, 0.1, 0.0)
    assert uneven.rate == WIRE_SHARE * 12.5e6
    assert KNOWN.link("paper").rtt == 0.0
    assert KNOWN.link("paper", rtt=0.2).rtt == 0.2
    for wrong in ("fast", "1gbit/", "1gbit/fast", "1 gbit", ""):
        with pytest.raises(ConfigError, match="give a rate such as 1gbit"):
            KNOWN.link(wrong)


def test_sites_as_they_are_written() -> None:
    place = KNOWN.place("a800-40g:8x10")
    assert (place.per_node, place.nodes, place.gpus) == (8, 10, 80)
    assert place.text == "a800-40g:8x10"
    assert KNOWN.place("h100-80g:4").gpus == 4
    assert KNOWN.place("h100-80g").gpus == 1
    assert KNOWN.place("l40s", 0.3).device.utilisation == 0.3
    for wrong in ("h100-80g:", "h100-80g:0x1", "h100-80g:8x", "h100-80g:axb", "h100-80g:8x8x8"):
        with pytest.raises(ConfigError, match="NAME:GPUSxNODES for each site"):
            KNOWN.place(wrong)
    assert KNOWN.fabric(None) == 12.5e9
    assert KNOWN.fabric("10gbit") == 1.25e9
    with pytest.raises(ConfigError, match="--fabric"):
        KNOWN.fabric("fast")
