"""Terms of a run: the file, what it fixes, and what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox.config.run_config import RunConfig, resolve_run
from dilocox.config.terms import (
    KEPT,
    Deposit,
    Need,
    Terms,
    TermsFile,
    agreed_keys,
    kept_terms,
    load_draft,
    offer_of,
    read_terms,
)
from dilocox.errors import ConfigError
from dilocox.utils import fetch
from tests.support.planned_runs import ARCHITECTURE

ONE, TWO, OWNER, CONTRACT = ("0x" + digit * 20 for digit in ("11", "22", "aB", "cc"))
SETTLEMENT = {"price": 2000, "chain": 7, "contract": CONTRACT, "owner": OWNER}


def raw_run(**settlement: Any) -> dict[str, Any]:
    return {
        "model": {"architecture": dict(ARCHITECTURE)},
        "data": {"sequence_length": 16, "tokenizer": "given"},
        "site": {"batch_size": 8, "micro_batch_size": 2, "stages": 2},
        "outer": {"steps": 400},
        "sites": {"lyon": {}, "paris": {}},
        "settlement": {**SETTLEMENT, **settlement},
    }


def run(**settlement: Any) -> RunConfig:
    return resolve_run(raw_run(**settlement))


def terms_of(config: RunConfig) -> Terms:
    """Terms with made-up figures of the planner."""
    assert config.settlement is not None
    need = Need(gpu="l40s:2x1", link="100mbit", gpu_memory=10**9, host_memory=0, upload=1.0,
                tokens_per_second=10.0)  # fmt: skip
    return Terms(
        format=1, offer=offer_of(config, config.settlement.agreed()), need=need,
        deposit=Deposit(stake=10**9, window=60), run_file=agreed_keys(config),
    )  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "terms.toml"
    path.write_text(terms_of(run()).to_toml())
    return path


def test_what_is_written_is_read_and_is_the_same_for_the_same_run(file: Path) -> None:
    found = read_terms(str(file))
    assert found.terms == terms_of(run())
    assert found.terms.to_toml() == file.read_text()
    assert found.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    offer = found.terms.offer
    assert (offer.sites, offer.gpus, offer.tokens) == (2, 2, 400 * 2 * 8 * 16)
    assert (offer.price, offer.chain, offer.contract) == (2000, 7, CONTRACT)
    planned = found.terms.planned()
    assert (list(planned.sites), planned.settlement) == (["site1", "site2"], None)
    assert planned.site.stages == 2


def test_the_terms_are_those_of_a_run_that_names_them_whoever_takes_part(file: Path) -> None:
    found = read_terms(str(file))
    known = {"terms": found.digest, "accounts": {"oslo": ONE, "rome": TWO}, "admission": "stake"}
    raw = raw_run(**known)
    raw["sites"] = {"oslo": {"advertise": "192.0.2.7"}, "rome": {}}
    with pytest.raises(ConfigError, match=r"terms: settlement\.admission: the terms say nothing"):
        found.check(resolve_run(raw))
    raw["settlement"].pop("admission")
    config = resolve_run(raw)
    found.check(config)
    # The digest that the contract keeps covers the name of the terms.
    without = resolve_run({**raw, "settlement": {**raw["settlement"], "terms": "0" * 64}})
    assert config.shared() != without.shared()
    assert config.digest() != without.digest()
    assert agreed_keys(config) == agreed_keys(without)


@pytest.mark.parametrize("own", [{"batch_size": 16}, {"speed": 2.0}])
def test_terms_are_for_sites_that_are_alike(file: Path, own: dict[str, Any]) -> None:
    """Otherwise tokens, payment and duration of the terms are not those of the run."""
    found = read_terms(str(file))
    raw = raw_run(terms=found.digest)
    raw["sites"] = {name: own if name == "paris" else {} for name in raw["sites"]}
    (key,) = own
    with pytest.raises(ConfigError, match=rf"sites\.paris\.{key}: the terms of a run are the same"):
        found.check(resolve_run(raw))
    with pytest.raises(ConfigError, match=rf"sites\.paris\.{key}: the terms of a run are the same"):
        terms_of(resolve_run(raw))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"settlement": {"price": 2001}}, r"settlement\.price: the terms say 2000, the run file"),
        ({"settlement": {"auditors": ["ab" * 32]}}, r"settlement\.auditors: "),
        ({"settlement": {"contract": OWNER}}, r"settlement\.contract: "),
        ({"record": {"audit_rate": 0.5}}, r"record\.audit_rate: the terms say 0\.05"),
        ({"outer": {"steps": 800}}, r"outer\.steps: "),
        ({"model": {"architecture": {**ARCHITECTURE, "hidden_size": 64}}}, "hidden_size: "),
        ({"sites": {"a": {}}}, "for 2 sites, the run file names 1"),
        ({"settlement": {"terms": "0" * 64}}, "names the terms 000000000000…, these are "),
        ({"settlement": {"terms": None}}, "the run file names no terms"),
    ],
)
def test_another_run_is_refused(file: Path, changes: dict[str, Any], match: str) -> None:
    found = read_terms(str(file))
    raw = raw_run(terms=found.digest)
    found.check(resolve_run(raw))
    for section, keys in changes.items():
        raw[section] = keys if section == "sites" else {**raw.get(section, {}), **keys}
    if raw["settlement"]["terms"] is None:
        del raw["settlement"]["terms"]
    with pytest.raises(ConfigError, match=match) as told:
        found.check(resolve_run(raw))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("key", ["sites", "gpus", "tokens", "price", "audit_rate", "chain"])
def test_an_offer_that_its_run_does_not_make_is_refused(file: Path, key: str) -> None:
    raw = tomllib.loads(file.read_text())
    raw["offer"][key] = 1 if key == "audit_rate" else raw["offer"][key] + 1
    file.write_text(tomli_w.dumps(raw))
    with pytest.raises(ConfigError, match=r"terms\.toml: offer\.\w+: the terms say"):
        read_terms(str(file))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "format: missing"),
        ("format = 2", "format: got 2"),
        ("a = ", "not a file of terms"),
        ("\udcff", "not a file of terms"),
        ("#" * (1 << 20) + "#", "is larger than 1,048,576 bytes"),
        ("a = " + "[" * 100_000, "not a file of terms"),
        ("a = " + "9" * 5000, "not a file of terms"),
        ("a = " + "9" * 50, "a number of more than 64 bits"),
    ],
    ids=["empty", "newer", "no TOML", "no text", "large", "deep", "digits", "huge"],
)
def test_what_is_no_file_of_terms_is_refused_in_one_line(file: Path, text: str, match: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=match) as told:
        read_terms(str(file))
    assert "\n" not in str(told.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_terms(f"{file}.missing")


def test_millions_of_sites_are_not_planned(file: Path) -> None:
    raw = tomllib.loads(file.read_text())
    raw["offer"]["sites"] = 10**7
    file.write_text(tomli_w.dumps(raw))
    with pytest.raises(ConfigError, match=r"offer\.sites: "):
        read_terms(str(file))


@pytest.mark.parametrize("end", ["#sha256=", "#sha256=12", "#sha256=" + "g" * 64])
def test_a_digest_that_is_none_is_refused(file: Path, end: str) -> None:
    """It would protect from nothing."""
    with pytest.raises(ConfigError, match="write #sha256= and 64 hex digits"):
        read_terms(f"{file}{end}")
    with pytest.raises(ConfigError, match="write #sha256= and 64 hex digits"):
        read_terms("http://127.0.0.1:1/terms.toml#SHA256=" + "0" * 64)


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.text(max_size=9),
    st.sampled_from(["price chain contract owner", "../..", "x\n\x1b[31m", [[]], {}, [{}]]),
)  # fmt: skip


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_terms_are_terms_or_refused_in_one_line(
    file: Path, data: st.DataObject
) -> None:
    raw = tomllib.loads(terms_of(run()).to_toml())
    for _ in range(data.draw(st.integers(1, 2))):
        table: dict[str, Any] = raw
        while True:
            key = data.draw(st.sampled_from(sorted(table)))
            if not isinstance(table[key], dict) or not table[key] or data.draw(st.booleans()):
                break
            table = table[key]
        odd = data.draw(ODD)
        table.pop(key) if odd is None else table.update({key: odd})
        if not table:
            break
    file.write_text(tomli_w.dumps(raw))
    try:
        read_terms(str(file)).terms.planned()
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017 - most files are refused, some are terms


def test_a_run_without_a_place_on_a_chain_has_no_terms() -> None:
    with pytest.raises(ConfigError, match=r"settlement\.chain: missing; terms need"):
        offer_of(run(), {"price": 3})
    with pytest.raises(ConfigError, match=r"settlement\.price: missing"):
        offer_of(run(), None)


def test_a_draft_needs_no_accounts_yet(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(raw_run(admission="stake", accounts={"lyon": ONE})))
    draft = load_draft(path, ["outer.steps=800"])
    assert draft.settlement is not None
    assert draft.settlement.accounts == {"lyon": ONE, "paris": OWNER}
    assert draft.outer.steps == 800
    raw = raw_run(admission="stake", accounts={"lyon": ONE, "paris": TWO})
    assert agreed_keys(load_draft(path, [])) == agreed_keys(resolve_run(raw))
    path.write_text("sites = 3")
    with pytest.raises(ConfigError):
        load_draft(path, [])


def test_a_site_that_starts_again_needs_no_web_server(file: Path, tmp_path: Path) -> None:
    raw = raw_run(terms=read_terms(str(file)).digest)
    raw["run"] = {"folder": str(tmp_path / "runs")}
    config = resolve_run(raw)
    first = kept_terms(str(file), config)
    file.rename(tmp_path / "gone.toml")
    assert kept_terms(str(file), config) == first
    # A copy that is not the run's does not count, nor is another file kept.
    copy = config.folder / KEPT
    copy.write_text(copy.read_text() + "\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        kept_terms(str(file), config)
    copy.unlink()
    raw["settlement"]["terms"] = "0" * 64
    with pytest.raises(ConfigError, match="names the terms 000000000000…"):
        kept_terms(str(tmp_path / "gone.toml"), resolve_run(raw))
    assert not copy.exists()


class _Server(http.server.SimpleHTTPRequestHandler):
    def log_request(self, *_: Any) -> None:
        """Say nothing of a request."""

    def log_error(self, *_: Any) -> None:
        """Say nothing of an error."""


@pytest.fixture
def url(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a server has the file of terms."""
    monkeypatch.chdir(file.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{file.name}"
        server.shutdown()


def test_a_server_that_sends_byte_by_byte_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "WHOLE_SECONDS", 0.3)
    over = threading.Event()

    class Slow(_Server):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            with contextlib.suppress(OSError):
                while not over.wait(0.05):
                    self.wfile.write(b"#")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(ConfigError, match="not all of it in 0 s"):
                read_terms(f"http://127.0.0.1:{server.server_port}/terms.toml")
        finally:
            over.set()
            server.shutdown()


def test_terms_are_read_from_a_web_address(file: Path, url: str) -> None:
    found = read_terms(url)
    assert found == TermsFile(terms_of(run()), hashlib.sha256(file.read_bytes()).hexdigest())
    assert read_terms(f"{url}#sha256={found.digest}") == found
    file.write_text(file.read_text() + "# another byte\n")
    with pytest.raises(ConfigError, match=r"is not the file of #sha256="):
        read_terms(f"{url}#sha256={found.digest}")
    with pytest.raises(ConfigError, match="the server answers 404"):
        read_terms(f"{url}.missing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_terms("http://127.0.0.1:1/terms.toml")
