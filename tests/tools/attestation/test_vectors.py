"""Genuine evidence is accepted, and every change of it is refused."""

from __future__ import annotations

import copy
import dataclasses
import random
import uuid
from typing import Any

import pytest
from tests.support.attestation_vectors import (
    TDX_TIME,
    at,
    document,
    gpu_chain,
    hex_of,
    snp_chain,
    vector,
)

from dilocox.errors import AttestationError
from dilocox.tools.attestation.certificates import AMD, INTEL, NVIDIA
from dilocox.tools.attestation.event_log import compose_hash, replay
from dilocox.tools.attestation.gpu import check_measurements, golden_measurements, verify_gpu
from dilocox.tools.attestation.snp import SIGNED_BYTES, certificate_table, verify_snp
from dilocox.tools.attestation.tdx import verify_tdx

pytestmark = pytest.mark.usefixtures("no_network")
NOW = at(TDX_TIME)
GPUS = (
    ("attestationReport.txt", "gpuAkCertChain.txt", "545.00", "96.00.5E.00.01"),
    ("hopperAttestationReport.txt", "hopperCertChain.txt", "550.90.07", "96.00.9F.00.01"),
)
RIMS = ("nv/Driver_RIM_test_no_gpu.swidtag", "nv/1010_0200_882_96005E0001_test_no_gpu.swidtag")


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes((data[place] ^ 1,)) + data[place + 1 :]


def tdx(name: str, seconds: int, quote: bytes | None = None, **more: Any) -> Any:
    own = vector(f"dcap/{name}") if quote is None else quote
    return verify_tdx(own, document(f"dcap/{name}_collateral.json"), at(seconds), **more)


def test_a_tdx_quote_is_up_to_date_as_of_its_time() -> None:
    found = tdx("tdx_quote", TDX_TIME)
    assert (found.status, found.advisories) == ("UpToDate", ())
    assert found.root == INTEL
    assert found.mrtd.startswith("91eb2b44d141d4ece09f0c75c2c53d")
    assert found.rtmrs[1].startswith("0084452c01668329d4bc06acdf58a7")
    assert found.rtmrs[3] == "00" * 48
    assert found.report_data.hex().startswith("9a9d48e7f6799642d3d1b34e1e5e17")
    assert at(TDX_TIME) < found.expires < at(1752920173)


@pytest.mark.parametrize(
    ("seconds", "reason"), [(1752920173, "TCBInfo expired"), (1715769147, "in the future")]
)
def test_collateral_counts_only_while_it_is_valid(seconds: int, reason: str) -> None:
    with pytest.raises(AttestationError, match=reason):
        tdx("tdx_quote", seconds)


@pytest.mark.parametrize("place", [60, 400, 2503])
def test_a_flipped_byte_of_a_tdx_quote_is_found(place: int) -> None:
    with pytest.raises(AttestationError):
        tdx("tdx_quote", TDX_TIME, flipped(vector("dcap/tdx_quote"), place))


def test_an_sgx_quote_is_no_tdx_quote() -> None:
    with pytest.raises(AttestationError, match="ConfigurationAndSWHardeningNeeded is not accept"):
        tdx("sgx_quote", 1751624924)
    with pytest.raises(AttestationError, match="SGX"):
        tdx("sgx_quote", 1751624924, statuses=["ConfigurationAndSWHardeningNeeded"])


def test_the_advisories_of_a_status_are_told() -> None:
    import json

    import dcap_qvl

    policy = dcap_qvl.QuotePolicy.claims_only(1751624924)
    collateral = dcap_qvl.QuoteCollateralV3.from_json(
        json.dumps(document("dcap/sgx_quote_collateral.json"))
    )
    found = dcap_qvl.QuoteVerifier().verify_with_policy(
        vector("dcap/sgx_quote"), collateral, 1751624924, policy
    )
    assert json.loads(found.to_json())["tcb"]["advisory_ids"] == [
        "INTEL-SA-00289",
        "INTEL-SA-00615",
    ]


def test_a_platform_without_a_known_level_is_refused() -> None:
    with pytest.raises(AttestationError, match="No matching TCB level"):
        tdx("tdx_quote_outdated", 1772707833)


def test_an_snp_report_and_its_chain_verify() -> None:
    found = verify_snp(hex_of("snp/report_milan.hex"), snp_chain(), NOW)
    assert found.root == AMD["Milan"]
    assert found.measurement.startswith("7a1e5c266c0108dbc9bb94fa92695132")
    assert found.tcb == {"bootloader": 3, "tee": 0, "snp": 8, "microcode": 0x73}
    assert (found.debug, found.migration, found.smt, found.vmpl) == (False, False, True, 0)
    assert found.report_data.hex().startswith("d447b55d197491bf")


def test_any_flipped_byte_of_an_snp_report_is_found() -> None:
    report, chain = hex_of("snp/report_milan.hex"), snp_chain()
    for place in range(SIGNED_BYTES):
        with pytest.raises(AttestationError):
            verify_snp(flipped(report, place), chain, NOW)


def test_snp_certificates_of_another_order_or_time_are_refused() -> None:
    report, chain = hex_of("snp/report_milan.hex"), snp_chain()
    with pytest.raises(AttestationError, match="not signed by"):
        verify_snp(report, [chain[0], chain[2]], NOW)
    with pytest.raises(AttestationError, match="no root"):
        verify_snp(report, chain[:1], NOW)
    with pytest.raises(AttestationError, match="is not accepted"):
        verify_snp(report, gpu_chain("gpuAkCertChain.txt"), NOW)
    with pytest.raises(AttestationError, match="not valid at 2031"):
        verify_snp(report, chain, at(1930000000))
    with pytest.raises(AttestationError, match="bytes instead of"):
        verify_snp(report[:-1], chain, NOW)


@pytest.mark.parametrize("form", ["bytes", "bytes_le"])
def test_the_certificate_table_of_a_host_is_read(form: str) -> None:
    names = (
        "c0b406a4-a803-4952-9743-3fb6014cd0ae",
        "63da758d-e664-4564-adc5-f4b93be8accd",
        "4ab7b379-bbac-4fe4-a02f-05aef327c782",
    )
    head, body = b"", b""
    for number, name in enumerate(names):
        own = bytes((65 + number,)) * (number + 2)
        place = 24 * 4 + len(body)
        head += getattr(uuid.UUID(name), form) + place.to_bytes(4, "little")
        head += len(own).to_bytes(4, "little")
        body += own
    assert certificate_table(head + bytes(24) + body) == [b"BBB", b"CCCC", b"AA"]
    assert certificate_table(head[:48] + bytes(24)) == []
    assert certificate_table(b"") == []


@pytest.mark.parametrize(("report", "chain", "driver", "vbios"), GPUS)
def test_reports_of_an_h100_verify(report: str, chain: str, driver: str, vbios: str) -> None:
    found = verify_gpu(hex_of(f"nv/{report}"), gpu_chain(chain), NOW)
    assert (found.driver, found.vbios, found.root) == (driver, vbios, NVIDIA)
    assert len(found.measurements) == 64
    assert found.nonce == hex_of(f"nv/{report}")[4:36]


@pytest.mark.parametrize(("report", "chain"), [each[:2] for each in GPUS])
def test_a_flipped_byte_of_a_gpu_report_is_found(report: str, chain: str) -> None:
    whole, certificates = hex_of(f"nv/{report}"), gpu_chain(chain)
    places = random.Random(0).sample(range(len(whole)), 100)
    for place in {0, 1, 4, 35, 36, 37, len(whole) - 1, *places}:
        with pytest.raises(AttestationError):
            verify_gpu(flipped(whole, place), certificates, NOW)


def test_another_chain_or_a_gap_in_it_is_refused() -> None:
    report = hex_of("nv/attestationReport.txt")
    with pytest.raises(AttestationError, match="not signed by"):
        verify_gpu(report, gpu_chain("invalidCertChain.txt"), NOW)
    with pytest.raises(AttestationError, match="signature is not its GPU's"):
        verify_gpu(report, gpu_chain("hopperCertChain.txt"), NOW)
    with pytest.raises(AttestationError, match="is not accepted"):
        verify_gpu(report, snp_chain(), NOW)


def test_measurements_are_those_of_the_reference_manifests() -> None:
    chain = gpu_chain("gpuAkCertChain.txt")
    found = verify_gpu(hex_of("nv/attestationReport.txt"), chain, NOW)
    rims = [vector(name) for name in RIMS]
    assert check_measurements(found, rims) == 32
    with pytest.raises(AttestationError, match="two of them have measurement 7"):
        check_measurements(found, [rims[0], rims[0]])
    other = verify_gpu(
        hex_of("nv/hopperAttestationReport.txt"), gpu_chain("hopperCertChain.txt"), NOW
    )
    with pytest.raises(AttestationError, match=r"manifest of its driver '550\.90\.07'"):
        check_measurements(other, rims)
    for left in (0, 1):
        with pytest.raises(AttestationError, match="no reference manifest of its"):
            check_measurements(found, [rims[left]])
    for place in (0, 7, 40):
        changed = dict(found.measurements) | {place: "ab" * 48}
        with pytest.raises(AttestationError, match=f"measurement {place} "):
            check_measurements(dataclasses.replace(found, measurements=changed), rims)


@pytest.mark.parametrize(
    "text", [b"", b"<a/>", b"<a", b'<a xmlns="b"><Resource active="True"/></a>']
)
def test_what_is_no_reference_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(AttestationError, match="reference manifest"):
        golden_measurements(text)


def events(name: str) -> Any:
    import json

    return json.loads(document(f"dstack/{name}")["event_log"])


def registers(name: str) -> list[str]:
    quote = bytes.fromhex(document(f"dstack/{name}")["quote"])
    return [quote[48 + 328 + 48 * n : 48 + 376 + 48 * n].hex() for n in range(4)]


@pytest.mark.parametrize(
    ("name", "compose"),
    [("quote-report.json", "3763bc34552cf3a2"), ("tdx-lite-getquote.json", "86b0e55f2fa8e4fb")],
)
def test_event_logs_of_dstack_replay_to_the_quotes_registers(name: str, compose: str) -> None:
    log = events(name)
    assert list(replay(log)) == registers(name)
    assert str(compose_hash(log)).startswith(compose)


@pytest.mark.parametrize("name", ["quote-report.json", "tdx-lite-getquote.json"])
def test_an_edited_event_log_is_found(name: str) -> None:
    log, own = events(name), registers(name)
    for number, each in enumerate(log):
        if each["imr"] != 3:
            continue
        for key, value in (("event", each["event"] + "x"), ("event_payload", "ab")):
            edited = copy.deepcopy(log)
            edited[number][key] = value
            if each["digest"]:
                with pytest.raises(AttestationError, match="is not its payload's"):
                    replay(edited)
            else:
                assert replay(edited)[3] != own[3]
    assert replay(log[:-1])[3] != own[3]
    assert replay([*log[:-2], log[-1], log[-2]])[3] != own[3]


@pytest.mark.parametrize(
    "event",
    [{}, {"imr": 4, "event_type": 1, "digest": "00" * 48},
     {"imr": 0, "event_type": 1, "digest": ""},
     {"imr": 0, "event_type": 1, "digest": "zz"}, {"imr": 0, "event_type": 1, "digest": 5}],
)  # fmt: skip
def test_events_of_another_form_are_refused(event: Any) -> None:
    with pytest.raises(AttestationError, match="another form"):
        replay([event])


def test_two_compose_files_are_none() -> None:
    log = events("quote-report.json")
    again = next(each for each in log if each["event"] == "compose-hash")
    with pytest.raises(AttestationError, match="two events"):
        compose_hash([*log, again])
