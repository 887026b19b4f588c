"""Codec specs: one text per codec, and one line for everything else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.config.codec_kinds import BUILT_IN
from dilocox.config.codec_spec import Spec, parse_spec
from dilocox.errors import ConfigError

pytestmark = pytest.mark.waits

CANONICAL = {
    **{kind.name: Spec(kind.name) for kind in BUILT_IN if kind.number is None},
    "topk:1": Spec("topk", 1),
    "topk:2048": Spec("topk", 2048),
    "top1:2": Spec("top1", 2),
    "top1:32768": Spec("top1", 32768),
    "lowrank:1": Spec("lowrank", 1, "int4"),
    "lowrank:2048:int8": Spec("lowrank", 2048, "int8"),
}


@pytest.mark.parametrize(("text", "spec"), CANONICAL.items())
def test_canonical_texts(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec
    assert spec.text == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("topk", "topk:64"),
        ("top1", "top1:64"),
        ("lowrank", "lowrank:8"),
        ("lowrank:3:int4", "lowrank:3"),
        ("lowrank:8:int8", "lowrank:8:int8"),
    ],
)
def test_short_and_long_forms(text: str, canonical: str) -> None:
    assert parse_spec(text).text == canonical


@pytest.mark.parametrize(
    "text",
    ["", "int5", "INT4", " int4", "int4:2", "cocktail:1", "topk:4:4", "lowrank:4:int2", "low:4"],
)
def test_unknown_codecs_are_told_the_known(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"no codec .*none, .*topk:K, top1:B, cocktail, lowrank:R"
    ):
        parse_spec(text)


@pytest.mark.parametrize(
    "text",
    [
        *["topk:0", "topk:2049", "topk:", "topk:064", "topk:-1", "topk:1.5", "topk:٣"],
        *["top1:1", "top1:0", "top1:32769", "top1:", "top1:064"],
        *["topk:9999999", "lowrank:0", "lowrank:65536", "lowrank:", "lowrank::int8", "lowrank:+4"],
    ],
)
def test_numbers_out_of_range_are_told_the_range(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is a whole number from (1 to (2048|65535)|2 to 32768)"):
        parse_spec(text)


def test_density_is_of_4096_values() -> None:
    found = [parse_spec(text).density for text in ("topk:64", "top1:64", "top1:4096", "int4")]
    assert found == [64, 64, 1, 0]


@given(text=st.text("topklwrank0123456789:int", max_size=16))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_text_is_a_spec_or_an_error(text: str) -> None:
    try:
        spec = parse_spec(text)
    except ConfigError:
        return
    assert parse_spec(spec.text) == spec
