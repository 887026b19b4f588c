"""Commitments over a real coordinator: whoever is there first waits for the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dilocox.errors import ExchangeError
from dilocox.outer.coordinator import messages as m
from dilocox.record.notary import LogNotary, commitment
from dilocox.record.statements import Signer
from tests.outer.coordinator.helpers import run_config
from tests.outer.coordinator.served import Run

KEY = m.ExchangeKey.outer(0, 0, 0)


def test_nobody_begins_before_all_have_committed(tmp_path: Path) -> None:
    config = run_config("ab", run={"folder": str(tmp_path / "run")})
    notary = LogNotary.open(config, tmp_path / "coordinator", print)
    run = Run(tmp_path / "coordinator", notary=notary)

    def signed(site: str) -> str:
        rank = m.Rank(site=site, stage=0, shard=0)
        said = commitment(notary.run, rank, KEY, "1" * 64, "2" * 64)
        return Signer.from_hex(run.identities[site].record_key).sign(said)

    try:
        clients = run.start()
        clients["a"].plan(0)
        with pytest.raises(ExchangeError, match=r"after 0\.05 s; waited for b stage 0 shard 0"):
            clients["a"].begin(KEY, signed("a"), limit=0.05)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(clients["a"].begin, KEY, signed("a"))
            # Asking who is there commits to nothing, and waits for nobody.
            assert clients["b"].begin(KEY).waiting_for == []
            assert not waiting.done()
            assert clients["b"].begin(KEY, signed("b")).waiting_for == []
            assert waiting.result(20).attempt == 1
    finally:
        run.close()
        notary.close()
