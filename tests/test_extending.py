"""A codec and a method from outside the package, as docs/extending.md has them."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dilocox
from dilocox import CodecKind, CodecNumber, Method
from dilocox.compression import Compressor, Geometry, compressor
from dilocox.config import codec_kinds, extensions, methods
from dilocox.config.codec_spec import parse_spec
from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.coordinator.controller.candidates import codecs
from dilocox.coordinator.controller.loss_model import codec_loss
from dilocox.errors import ConfigError, ExchangeError
from dilocox.record.verify.places import Places
from dilocox.record.verify.verify import verify
from dilocox.tools.audit.audited_run import AuditedRun
from dilocox.tools.planner.payload_costs import PayloadCost, toil
from tests.support.neighbours import honest, trained_in
from tests.test_docs import ROOT, blocks
from tests.tools.audit.test_cheats import audit
from tests.tools.planner.test_payload_costs import host

pytestmark = pytest.mark.waits

PAGE = ROOT / "docs" / "extending.md"
CODEC, METHOD, PROGRAM = (code for language, code in blocks(PAGE.read_text("utf-8"))
                          if language == "python")  # fmt: skip
(ENTRY_POINTS,) = (code for language, code in blocks(PAGE.read_text("utf-8")) if language == "ini")
MODULES = ("dilocox_sign", "dilocox_sign_method")
VALUES = torch.randn(4096, generator=torch.Generator().manual_seed(0))
SIGN = CodecKind("other", lambda *_: None, 0.2)


def forget() -> None:
    """Nothing that is known of codecs and methods outlives a test."""
    parse_spec.cache_clear()
    compressor.cache_clear()
    codec_loss.cache_clear()
    extensions._points.cache_clear()
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for registry in (codec_kinds._KINDS, methods._METHODS):
        before = dict(registry.records)
        monkeypatch.setattr(registry, "records", before)
        if registry is methods._METHODS:
            monkeypatch.setattr(methods, "METHODS", before)
    forget()
    yield
    forget()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's modules in a folder that Python imports from; nothing is registered."""
    folder = tmp_path / "package"
    folder.mkdir()
    for name, code in zip(MODULES, (CODEC, METHOD), strict=True):
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    return folder


def install(package: Path, entry_points: str = ENTRY_POINTS) -> None:
    """What pip leaves of a distribution with these entry points."""
    own = entry_points.replace("project.entry-points.", "").replace('"', "")
    folder = package / "dilocox_sign-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: dilocox-sign\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(own)
    importlib.invalidate_caches()
    forget()


def register(package: Path) -> ModuleType:
    """The page's program up to its last line, which reads a run file."""
    exec(PROGRAM.rpartition("config =")[0], {})
    return sys.modules[MODULES[0]]


def resolved(**sections: object) -> RunConfig:
    return resolve_run({"model": {"path": "x"}, "sites": {"a": {}, "b": {}}, **sections})


# --- training with them -----------------------------------------------------------------------


def test_a_run_with_both_is_verified_and_audited(package: Path, tmp_path: Path) -> None:
    """The codec comes by a call, the method by an entry point."""
    install(package, ENTRY_POINTS[ENTRY_POINTS.index("[", 1) :])
    dilocox.register_codec(importlib.import_module(MODULES[0]).KIND)
    folder = trained_in(tmp_path, 2, {}, method="sign-loco", flush=honest, ends=True)
    plain = verify(Places(folder), lambda what, share: None)
    found = {each.claim.name: each.verdict for each in plain.findings}
    for claim in ("log", "signatures", "complete", "commitments", "run-file", "payloads", "replay"):
        assert found[claim] == "PASS", plain.findings
    steps = AuditedRun(folder, (), None).course.steps.values()
    # Two rounds of two pieces, and the flush.
    assert sorted(step.codec for step in steps) == ["int8", "int8", *["sign"] * 4]
    verdict = audit(folder, "paris", 1)
    assert verdict.verdict == "EXACT", verdict
    # Who has not the package is told so, and nothing is called bad.
    for name in MODULES:
        (package / f"{name}.py").unlink()
    codec_kinds._KINDS.records.pop("sign")
    methods._METHODS.records.pop("sign-loco")
    for left in package.glob("*.dist-info/*"):
        left.unlink()
    forget()
    lacking = verify(Places(folder), lambda what, share: None)
    told = {each.claim.name: each for each in lacking.findings}
    assert told["complete"].verdict == told["payloads"].verdict == "NOT_RUN"
    assert "method 'sign-loco', which this dilocox does not know" in told["complete"].reason
    assert "FAIL" not in {each.verdict for each in told.values()}


def test_forked_processes_have_what_was_registered(package: Path) -> None:
    register(package)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(parse_spec("sign").text))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == "sign"


# --- the codec --------------------------------------------------------------------------------


def made(text: str) -> Compressor:
    found = compressor(text, Geometry(((32, 120),), (0,), 4096))
    assert isinstance(found, Compressor)
    return found


def test_the_codec_of_the_page_sends_signs(package: Path) -> None:
    register(package)
    part = made("sign").part(0, 4096)
    payload = part.encode(VALUES)
    assert len(payload) == 4096 // 128 * 20
    decoded = part.decode(payload)
    scales = VALUES.view(-1, 128).abs().median(1).values.repeat_interleave(128)
    expected = torch.where(VALUES < 0, -scales, scales)
    assert torch.equal(decoded[:3840], expected[:3840])
    assert not decoded[3840:].any()
    behind = made("sign+moments").part(0, 4096)
    assert torch.equal(behind.decode(behind.encode(VALUES)), decoded)
    payload[:4] = torch.tensor([float("inf")]).view(torch.uint8)
    with pytest.raises(ExchangeError, match=r"sign payload refused: value 0 is -?inf"):
        part.decode(payload)


def test_what_the_record_says_is_asked_of_the_run_file(package: Path) -> None:
    register(package)
    with pytest.raises(ConfigError, match=r"codec sign needs compression.error_feedback = true"):
        resolved(compression={"codec": "sign", "error_feedback": False})
    with pytest.raises(ConfigError, match=r"no codec 'sign:3'; use one of: none, .*, sign$"):
        resolved(compression={"codec": "sign:3"})
    assert codecs(resolved()) == codecs(resolved(outer={"method": "dilocox"}))
    assert "sign" not in codecs(resolved())


def test_a_number_and_a_place_in_the_controllers_list() -> None:
    dilocox.register_codec(
        replace(SIGN, number=CodecNumber("N", 8, 2, 16), loses_like="int2", offered=("other:4",))
    )
    assert parse_spec("other").text == "other:8"
    with pytest.raises(ConfigError, match="in 'other:1', N is a whole number from 2 to 16"):
        parse_spec("other:1")
    assert codec_loss(30, "other:4", 1000) == codec_loss(30, "int2", 1000) > 0
    free = {"adapt": "link", "pinned": []}
    chosen = codecs(resolved(compression={"codec": "other:8"}, control=free))
    assert chosen[-2:] == ["other:4", "other:8"]
    # Of a run that has nothing to do with it, a site may lack the package.
    assert chosen[:-2] == codecs(resolved(control=free))


# --- records that cannot be -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "int4"}, "there is a 'int4' already"),
        ({"name": "a:b"}, "'a:b' is no name"),
        ({"name": "a+moments"}, "is no name"),
        ({"picks": True}, "set sparse = True"),
        ({"sparse": True}, "set needs_feedback = True"),
        ({"agrees_first": True}, "only built-in kinds"),
        ({"number": CodecNumber("K", 0, 0, 9)}, "0 < least <= default <= largest"),
        ({"loses_like": "fp16"}, "use one of: none, int8, int4, int2, topk, top1"),
        ({"loses_like": "topk"}, "give a density too"),
        ({"offered": ("other",)}, "set loses_like"),
        ({"loses_like": "int2", "offered": ("int4",)}, "offered has texts of another kind"),
        ({"computes_like": "zip"}, "computes_like is no built-in kind"),
    ],
)
def test_a_contradictory_codec_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dilocox.register_codec(replace(SIGN, **changes))  # type: ignore[arg-type]
    assert codec_kinds.find_kind("other") is None


def test_a_codec_that_others_cannot_tell_is_refused(package: Path) -> None:
    sign = register(package)
    for build, said in (
        (lambda *_: sign.Sign(), "its build gives one named 'sign'; name it 'other'"),
        (lambda *_: sign.Sign("other", 5), "identifier 5; take one from 4096 to 32767"),
        ("nowhere:build", "its build 'nowhere:build' is no module:function"),
    ):
        codec_kinds._KINDS.records.pop("other", None)
        forget()
        dilocox.register_codec(replace(SIGN, build=build))
        with pytest.raises(ConfigError, match=said):
            made("other")


def test_a_method_that_lacks_a_key_is_refused() -> None:
    row = Method("own", {"inner_steps": 3, "overlap": "none"}, {"codec": "none"})
    with pytest.raises(ConfigError, match="its outer lacks learning_rate, momentum"):
        dilocox.register_method(row)
    whole = {**methods.METHODS["diloco"].outer}
    with pytest.raises(ConfigError, match="its compression lacks error_feedback"):
        dilocox.register_method(replace(row, outer=whole))
    compression = methods.METHODS["diloco"].compression
    with pytest.raises(ConfigError, match="its outer has rounds, which only a run file sets"):
        dilocox.register_method(Method("own", {**whole, "rounds": 3}, compression))
    with pytest.raises(ConfigError, match=r'outer.method: got "own", expected one of: "allreduce"'):
        resolved(outer={"method": "own"})


def test_a_method_may_exchange_gradients() -> None:
    row = replace(methods.METHODS["allreduce"], name="own")
    dilocox.register_method(row)
    dilocox.register_method(row)  # the same once more
    assert resolved(outer={"method": "own"}).exchanges_gradients
    with pytest.raises(ConfigError, match=r"dilocox.methods: there is a 'own' already"):
        dilocox.register_method(replace(row, exchanges_gradients=False))


# --- entry points -----------------------------------------------------------------------------


def test_an_entry_point_is_loaded_when_it_is_named(package: Path) -> None:
    install(package)
    with pytest.raises(ConfigError, match=r'expected one of: "allreduce", .*, "sign-loco"$'):
        resolved(outer={"method": "zip"})
    with pytest.raises(ConfigError, match=r"lowrank:R:int8, sign$"):
        parse_spec("zip")
    assert not set(MODULES) & set(sys.modules)
    config = resolved(outer={"method": "sign-loco"})
    assert (config.compression.codec, config.outer.delay) == ("sign", 30)
    assert set(MODULES) <= set(sys.modules)


def test_a_broken_entry_point_is_named(package: Path) -> None:
    install(package, "[dilocox.codecs]\nsign = dilocox_sign:NOTHING\nsigns = dilocox_sign:KIND\n")
    where = r"entry point 'sign' of dilocox.codecs \(dilocox_sign:NOTHING\): AttributeError"
    with pytest.raises(ConfigError, match=where):
        parse_spec("sign")
    with pytest.raises(ConfigError, match="it must be a CodecKind named 'signs'"):
        parse_spec("signs")


# --- the rest of the product ------------------------------------------------------------------


def test_the_planner_takes_the_speed_of_a_kind_that_was_measured() -> None:
    dilocox.register_codec(replace(SIGN, computes_like="int2"))
    rates = host()
    slow = replace(
        rates, encode={**rates.encode, "int2": 1e3}, decode={**rates.decode, "int2": 1e3}
    )
    parcel = PayloadCost(payload=4000, values=1000, own=500, products=0)
    costs = [toil(parcel, codec, slow, 3, "gather") for codec in ("other", "int2", "int4")]
    assert costs[0] == costs[1] != costs[2]


def test_the_page_names_every_field() -> None:
    text = PAGE.read_text(encoding="utf-8")
    own = {field.name for field in fields(CodecKind)} - {"agrees_first", "variants"}
    assert {name for name in own if f"| `{name}` |" not in text} == set()
