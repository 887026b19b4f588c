"""One machine's evidence is judged by a policy: what is accepted, and what is refused and why."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import hashlib
import json
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.attestation_vectors import TDX_TIME, at, document, vector
from tests.support.machines import (
    GPUS,
    NOW,
    REGISTERS,
    RIMS,
    SAID,
    SNP,
    TDX,
    gpu_rules,
    policy,
    snp,
    tdx,
    with_gpus,
)
from tests.support.simulated_gpu import MEASUREMENTS

from dilocox.errors import AttestationError
from dilocox.tools.attestation.event_log import DSTACK_EVENT, replay
from dilocox.tools.attestation.evidence import Evidence
from dilocox.tools.attestation.machine import judge_machine
from dilocox.tools.attestation.runtime_data import RuntimeData, nonce_of

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.mark.parametrize("make", [snp, tdx])
def test_a_pretended_machine_is_accepted_in_simulation_and_says_so(make: Any) -> None:
    found = judge_machine(make(), policy(), NOW)
    assert found.said == SAID
    assert found.simulated
    assert not found.not_run
    assert found.expires > NOW


@pytest.mark.parametrize("make", [snp, tdx, with_gpus])
def test_a_pretended_machine_is_refused_in_production(make: Any) -> None:
    strict = policy(environment="production", simulation=None, gpu=gpu_rules())
    with pytest.raises(AttestationError, match="is not accepted"):
        judge_machine(make(), strict, NOW)


def test_only_the_named_authority_counts_in_simulation() -> None:
    other = policy(simulation={"roots": ["0" * 64]})
    for make in (snp, tdx):
        with pytest.raises(AttestationError, match=r"its root .* is not accepted"):
            judge_machine(make(), other, NOW)
    roots = [each for each in policy().simulated_roots if each != GPUS.root_digest]
    without = policy(gpu=gpu_rules(), simulation={"roots": roots})
    with pytest.raises(AttestationError, match="GPU report: its root"):
        judge_machine(with_gpus(), without, NOW)


def test_a_genuine_quote_is_bound_to_its_own_data() -> None:
    own = Evidence(
        SAID.to_bytes(), "tdx", vector("dcap/tdx_quote"),
        document("dcap/tdx_quote_collateral.json"),
    )  # fmt: skip
    strict = policy(environment="production", simulation=None)
    with pytest.raises(AttestationError, match="not bound to this runtime_data"):
        judge_machine(own, strict, at(TDX_TIME))


@pytest.mark.parametrize("make", [snp, tdx])
def test_any_flipped_byte_of_the_runtime_data_is_found(make: Any) -> None:
    own, rules = make(), policy()
    places = range(len(own.runtime_data)) if make is snp else range(0, len(own.runtime_data), 40)
    for place in places:
        data = bytearray(own.runtime_data)
        data[place] ^= 1
        with pytest.raises(AttestationError, match="not bound to this runtime_data"):
            judge_machine(dataclasses.replace(own, runtime_data=bytes(data)), rules, NOW)


def test_the_binding_is_checked_before_fields_are_read() -> None:
    with pytest.raises(AttestationError, match="not bound to this runtime_data"):
        judge_machine(dataclasses.replace(snp(), runtime_data=b"no json"), policy(), NOW)


def test_bound_data_of_another_form_is_refused() -> None:
    from dilocox.tools.attestation.runtime_data import report_data

    for data in (b"no json", SAID.to_bytes() + b" ", b"{}", b"[]", b"5"):
        own = snp(runtime_data=data, quote=SNP.report(report_data(data)))
        with pytest.raises(AttestationError, match="runtime_data: not of this version"):
            judge_machine(own, policy(), NOW)


@pytest.mark.parametrize(("make", "text"), [(snp, "can be debugged"), (tdx, "Debug mode")])
def test_a_guest_that_can_be_debugged_is_refused(make: Any, text: str) -> None:
    with pytest.raises(AttestationError, match=text):
        judge_machine(make(debug=True), policy(), NOW)


def test_a_machine_of_a_kind_that_the_policy_lacks_is_refused() -> None:
    with pytest.raises(AttestationError, match=r"no \[tdx\]"):
        judge_machine(tdx(), policy(tdx=None), NOW)
    with pytest.raises(AttestationError, match=r"no \[snp\]"):
        judge_machine(snp(), policy(snp=None), NOW)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"measurements": ["0" * 96]}, "measurement 0001020304050607… is not accepted"),
        ({"smt": False}, "multithreading"),
        ({"min_tcb": {"snp": 25}}, "snp has security version 24, not 25"),
        ({"min_tcb": {"fmc": 0}}, "fmc has security version none"),
    ],
)
def test_rules_of_snp(rules: dict[str, Any], reason: str) -> None:
    usual = policy().snp
    assert usual is not None
    with pytest.raises(AttestationError, match=reason):
        judge_machine(snp(), policy(snp=usual.model_dump() | rules), NOW)


@pytest.mark.parametrize("name", ["mrtd", "rtmr0", "rtmr1", "rtmr2", "rtmr3"])
def test_registers_of_tdx_are_compared(name: str) -> None:
    usual = {key: [value] for key, value in REGISTERS.items()}
    with pytest.raises(AttestationError, match=f"{name.upper()} .* is not accepted"):
        judge_machine(tdx(), policy(tdx=usual | {name: ["f" * 96]}), NOW)


def log_of(compose: str) -> list[dict[str, Any]]:
    named = {"imr": 3, "event_type": DSTACK_EVENT, "digest": ""}
    return [
        {"imr": 0, "event_type": 1, "event": "", "event_payload": "", "digest": "ab" * 48},
        {**named, "event": "compose-hash", "event_payload": compose},
        {**named, "event": "system-ready", "event_payload": ""},
    ]


def test_the_application_is_known_by_the_replayed_event_log() -> None:
    events = log_of("cd" * 32)
    made = replay(events)
    rules = {"mrtd": [REGISTERS["mrtd"]], "rtmr1": [made[1]], "rtmr2": [made[2]],
             "compose_hashes": ["cd" * 32]}  # fmt: skip
    own = tdx(rtmrs=list(made), event_log=events)
    judge_machine(own, policy(tdx=rules), NOW)
    with pytest.raises(AttestationError, match=r"application cdcd.* is not accepted"):
        judge_machine(own, policy(tdx=rules | {"compose_hashes": ["ce" * 32]}), NOW)
    for edited in (log_of("ce" * 32), events[:-1], [*events, events[-1]], events[::-1]):
        with pytest.raises(AttestationError, match="does not lead to the quote's RTMR3"):
            judge_machine(dataclasses.replace(own, event_log=edited), policy(tdx=rules), NOW)
    with pytest.raises(AttestationError, match="no event log"):
        judge_machine(dataclasses.replace(own, event_log=None), policy(tdx=rules), NOW)


GOOD, EVIL = "cd" * 32, "3a" + "ee" * 31
"""Hashes of compose files. `EVIL` begins with the byte of a colon."""


def added_by_the_application(compose: str) -> dict[str, Any]:
    """What dstack's agent measures when a container calls EmitEvent."""
    return {"imr": 3, "event_type": DSTACK_EVENT, "digest": "", "event": "compose-hash",
            "event_payload": compose}  # fmt: skip


def raw(event: dict[str, Any]) -> dict[str, Any]:
    """The same event by its digest alone, as firmware's events are."""
    parts = (DSTACK_EVENT.to_bytes(4, "little"), event["event"].encode(),
             bytes.fromhex(event["event_payload"]))  # fmt: skip
    return {"imr": 3, "event_type": 1, "digest": hashlib.sha384(b":".join(parts)).hexdigest()}


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [
        (raw, "is not of dstack's type"),
        (lambda event: raw(event) | {"event": "x", "event_payload": ""}, "not of dstack's type"),
        (lambda event: event | {"imr": "3"}, "another form"),
        (lambda event: event | {"imr": 3.5}, "another form"),
        (lambda event: event | {"event": "compose-hash:", "event_payload": EVIL[2:]}, "a colon"),
        (lambda event: event, "two events compose-hash"),
    ],
)
def test_an_application_cannot_name_another_compose_file(hidden: Any, reason: str) -> None:
    """Each way to hide the genuine event leaves the registers as the quote has them."""
    first, own, ready = log_of(EVIL)
    genuine = [first, own, ready, added_by_the_application(GOOD)]
    made = replay(genuine)
    rules = {"mrtd": [REGISTERS["mrtd"]], "rtmr1": [made[1]], "rtmr2": [made[2]],
             "compose_hashes": [GOOD]}  # fmt: skip
    shown = [first, hidden(own), *genuine[2:]]
    with pytest.raises(AttestationError, match=reason):
        judge_machine(tdx(rtmrs=list(made), event_log=shown), policy(tdx=rules), NOW)


def test_a_compose_file_that_the_application_alone_names_is_none() -> None:
    first, _, ready = log_of(EVIL)
    events = [first, ready, added_by_the_application(GOOD)]
    made = replay(events)
    rules = {"mrtd": [REGISTERS["mrtd"]], "rtmr1": [made[1]], "rtmr2": [made[2]],
             "compose_hashes": [GOOD]}  # fmt: skip
    with pytest.raises(AttestationError, match=r"application \(none\) is not accepted"):
        judge_machine(tdx(rtmrs=list(made), event_log=events), policy(tdx=rules), NOW)


def test_evidence_counts_while_its_collateral_is_valid() -> None:
    own = tdx()
    month = datetime.timedelta(days=30)
    with pytest.raises(AttestationError, match=r"[Ee]xpired"):
        judge_machine(own, policy(), NOW + month)
    assert judge_machine(own, policy(), NOW).expires < NOW + month


def test_a_status_of_the_platform_must_be_accepted() -> None:
    collateral = TDX.collateral()
    said = json.loads(collateral["tcb_info"])
    for level in said["tcbLevels"]:
        level["tcbStatus"] = "OutOfDate"
    text = json.dumps(said, separators=(",", ":"))
    from tests.support.simulated_tdx import _signed

    collateral |= {
        "tcb_info": text,
        "tcb_info_signature": _signed(TDX.tcb_key, text.encode()).hex(),
    }
    own, usual = tdx(collateral=collateral), {key: [value] for key, value in REGISTERS.items()}
    with pytest.raises(AttestationError, match="OutOfDate is not acceptable"):
        judge_machine(own, policy(), NOW)
    found = judge_machine(own, policy(tdx=usual | {"tcb": ["OutOfDate"]}), NOW)
    assert found.notes == ["TDX OutOfDate"]


def test_gpus_are_bound_counted_and_measured() -> None:
    found = judge_machine(with_gpus(), policy(gpu=gpu_rules()), NOW)
    assert found.notes == ["SNP", "1 GPUs, revocation NOT_RUN"]
    assert not found.not_run
    asked = judge_machine(with_gpus(), policy(gpu=gpu_rules(revocation="required")), NOW)
    assert "revoked" in asked.not_run


def test_a_spliced_gpu_report_is_found() -> None:
    other = dataclasses.replace(SAID, node=1, nodes=2)
    spliced = dataclasses.replace(with_gpus(), gpus=with_gpus(said=other).gpus)
    with pytest.raises(AttestationError, match="GPU 0: its report is not bound to this machine"):
        judge_machine(spliced, policy(gpu=gpu_rules()), NOW)


@pytest.mark.parametrize(
    ("evidence", "rules", "reason"),
    [
        (with_gpus(2), gpu_rules(), "2 different GPUs in 2 reports instead of 1"),
        (with_gpus(0), gpu_rules(), "0 different GPUs"),
        (with_gpus(), gpu_rules(drivers=["1.0"]), "driver '545.00' is not accepted"),
        (with_gpus(), gpu_rules(vbios=["1.0"]), "VBIOS '96.00.5E.00.01' is not accepted"),
        (with_gpus(measurements=["ab" * 48] * 4), gpu_rules(), "measurement 0 is not the ref"),
        (dataclasses.replace(with_gpus(), manifests=[]), gpu_rules(), "no reference manifest"),
        (dataclasses.replace(with_gpus(), manifests=[RIMS[0] + " "]), gpu_rules(),
         "manifest .* is"),
        # A site leaves out the manifest that would accuse its GPU.
        (dataclasses.replace(with_gpus(measurements=[*MEASUREMENTS[:2], "ab" * 48, "cd" * 48]),
                             manifests=RIMS[:1]), gpu_rules(),
         "no reference manifest of its VBIOS"),
        (dataclasses.replace(with_gpus(), manifests=RIMS[1:]), gpu_rules(),
         "no reference manifest of its driver"),
    ],
)  # fmt: skip
def test_rules_of_gpus(evidence: Evidence, rules: dict[str, Any], reason: str) -> None:
    with pytest.raises(AttestationError, match=reason):
        judge_machine(evidence, policy(gpu=rules), NOW)


def resigned(place: int, value: bytes) -> Evidence:
    """Evidence of a report with other bytes at `place`, signed by the same processor."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    report = bytearray(snp().quote)
    report[place : place + len(value)] = value
    halves = decode_dss_signature(SNP.key.sign(bytes(report[:0x2A0]), ec.ECDSA(hashes.SHA384())))
    for number, half in enumerate(halves):
        report[0x2A0 + 72 * number : 0x2A0 + 72 * (number + 1)] = half.to_bytes(72, "little")
    return snp(quote=bytes(report))


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0x186, b"\x19", "its snp version is not its certificate's"),
        (0x187, b"\x00", "its microcode version is not its certificate's"),
        (0x1A0, b"\xff", "its processor is not its certificate's"),
        (0x1DF, b"\x00", "its processor is not its certificate's"),
        (0x48, b"\x04", r"not signed with the processor's own key \(VCEK\)"),
        (0x0A, b"\x07", "can be migrated by an agent"),
        (0x30, b"\x02", "from privilege level 2"),
    ],
)
def test_what_a_report_says_of_its_processor_and_guest(
    place: int, value: bytes, reason: str
) -> None:
    with pytest.raises(AttestationError, match=reason):
        judge_machine(resigned(place, value), policy(), NOW)


def test_a_masked_processor_is_accepted() -> None:
    assert judge_machine(resigned(0x1A0, bytes(64)), policy(), NOW).simulated


def test_a_certificate_of_a_processor_signs_no_other() -> None:
    from dilocox.tools.attestation.certificates import check_chain
    from dilocox.tools.attestation.simulated_machine import _certificate

    forged = _certificate("forged", SNP.key, "SEV-VCEK", SNP.key, {})
    with pytest.raises(AttestationError, match="is not one of an authority"):
        check_chain([forged, *SNP.chain], [SNP.root], NOW, "chain")


def test_a_gpu_with_other_firmware_than_its_certificate_is_refused() -> None:
    with pytest.raises(AttestationError, match="its certificate is for other firmware"):
        judge_machine(with_gpus(firmware=b"x" * 48), policy(gpu=gpu_rules()), NOW)


def test_one_gpu_is_not_two() -> None:
    own = with_gpus()
    twice = dataclasses.replace(own, gpus=[*own.gpus, *own.gpus])
    with pytest.raises(AttestationError, match="1 different GPUs in 2 reports instead of 2"):
        judge_machine(twice, policy(gpu=gpu_rules(count=2)), NOW)


def test_evidence_is_one_document() -> None:
    events = log_of("cd" * 32)
    for own in (snp(), tdx(event_log=events), with_gpus(2)):
        assert Evidence.from_bytes(own.to_bytes()) == dataclasses.replace(
            own, gpus=[*own.gpus], manifests=[*own.manifests]
        )


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"v":2}', b"\xff", b'{"v":1,"tee":"sgx"}', b"[" * 10**5]
)
def test_what_is_no_document_of_evidence_is_refused(data: bytes) -> None:
    with pytest.raises(AttestationError, match="evidence: "):
        Evidence.from_bytes(data)


@pytest.mark.parametrize("name", ["certificates", "collateral", "manifests", "event_log"])
def test_halves_of_characters_are_no_evidence(name: str) -> None:
    said = json.loads(tdx(event_log=log_of("cd" * 32)).to_bytes())
    half = "\ud800"
    values = {"collateral": {"pck_crl_issuer_chain": half}, "manifests": [half],
              "event_log": [{"imr": 0, "event": half}]}  # fmt: skip
    said[name] = values.get(name, half)
    with pytest.raises(AttestationError, match="evidence: not a document"):
        Evidence.from_bytes(json.dumps(said).encode())


def test_a_certificate_that_no_parser_takes_is_refused() -> None:
    """Versions and names of certificates are read late, and fail in their own ways."""
    first = x509.load_pem_x509_certificate(SNP.certificates.encode())
    rest = SNP.certificates.split("-----END CERTIFICATE-----\n", 1)[1]
    der = first.public_bytes(serialization.Encoding.DER)
    for old, new in (
        (b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07"),
        (b"SEV-VCEK", b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe"),
    ):
        assert old in der
        body = base64.encodebytes(der.replace(old, new)).decode()
        chain = f"-----BEGIN CERTIFICATE-----\n{body}-----END CERTIFICATE-----\n{rest}"
        with pytest.raises(AttestationError, match="certificate"):
            judge_machine(snp(certificates=chain), policy(), NOW)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**40), st.integers(0, 63), st.text(min_size=1, max_size=20),
    st.sampled_from([None, "0x" + "a" * 40]),
)  # fmt: skip
def test_runtime_data_has_one_form(incarnation: int, node: int, site: str, evm: str | None) -> None:
    said = dataclasses.replace(
        SAID, incarnation=incarnation, node=node, nodes=node + 1, site=site, evm=evm
    )
    data = said.to_bytes()
    assert RuntimeData.from_bytes(data) == said
    assert json.loads(data).get("evm") == evm
    assert ("evm" in json.loads(data)) == (evm is not None)


@pytest.mark.parametrize(
    "changes",
    [{"node": 1}, {"node": -1}, {"nodes": 0}, {"incarnation": True}, {"incarnation": "3"},
     {"run": "1"}, {"key": 5}, {"nonce": "x" * 64}, {"evm": "0x1"}, {"site": 5}, {"v": 2},
     {"more": 1}],
)  # fmt: skip
def test_fields_of_runtime_data_are_typed(changes: dict[str, Any]) -> None:
    from dilocox.record.log.canonical import dumps

    with pytest.raises(AttestationError, match="runtime_data"):
        RuntimeData.from_bytes(dumps(json.loads(SAID.to_bytes()) | changes))


def test_a_nonce_names_size_root_and_randomness() -> None:
    usual = nonce_of(5, bytes(32), b"")
    assert len({usual, nonce_of(6, bytes(32), b""), nonce_of(5, b"a" * 32, b""),
                nonce_of(5, bytes(32), b"a")}) == 4  # fmt: skip


SOUND = (snp(), tdx(event_log=log_of("cd" * 32)), with_gpus())
ODD = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.just([]) | st.just({})


@settings(max_examples=150, deadline=None, database=None)
@given(st.sampled_from(SOUND), st.data())
def test_evidence_of_any_form_is_judged_or_refused(own: Evidence, data: st.DataObject) -> None:
    """A site may store anything as its evidence."""
    said = json.loads(own.to_bytes())
    place, keys = said, list[tuple[Any, Any]]()
    while isinstance(place, dict | list) and place and (not keys or data.draw(st.booleans())):
        inner = list(place) if isinstance(place, dict) else list(range(len(place)))
        keys.append((place, data.draw(st.sampled_from(inner))))
        place = place[keys[-1][1]]
    above, key = keys[-1]
    above[key] = data.draw(ODD)
    with contextlib.suppress(AttestationError):
        judge_machine(Evidence.from_bytes(json.dumps(said).encode()), policy(gpu=gpu_rules()), NOW)


@settings(max_examples=150, deadline=None, database=None)
@given(st.sampled_from(("quote", "certificates", "collateral", "gpu", "chain")), st.data())
def test_changed_bytes_of_any_part_are_refused(part: str, data: st.DataObject) -> None:
    def changed(whole: bytes) -> bytes:
        start = data.draw(st.integers(0, len(whole) - 1))
        end = start + data.draw(st.integers(0, 9))
        return whole[:start] + data.draw(st.binary(max_size=9)) + whole[end:]

    def text(whole: str) -> str:
        return changed(whole.encode()).decode("latin-1")

    _, of_tdx, own = SOUND
    own = of_tdx if part == "collateral" else own
    if part == "quote":
        own = data.draw(st.sampled_from([of_tdx, own]))
        own = dataclasses.replace(own, quote=changed(own.quote))
    elif part == "certificates":
        own = dataclasses.replace(own, certificates=text(own.certificates))
    elif part == "collateral":
        assert own.collateral is not None
        name = data.draw(st.sampled_from(sorted(own.collateral)))
        own = dataclasses.replace(
            own, collateral={**own.collateral, name: text(own.collateral[name])}
        )
    else:
        (gpu,) = own.gpus
        gpu = (
            dataclasses.replace(gpu, report=changed(gpu.report)) if part == "gpu"
            else dataclasses.replace(gpu, certificates=text(gpu.certificates))
        )  # fmt: skip
        own = dataclasses.replace(own, gpus=[gpu])
    with contextlib.suppress(AttestationError):
        # What was not changed, or only in the white space of a certificate, holds.
        judge_machine(own, policy(gpu=gpu_rules() if own.gpus else None), NOW)
