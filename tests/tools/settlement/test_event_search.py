"""A search for events asks for every block once, whatever number of blocks a server allows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("web3")

from web3.exceptions import Web3RPCError

from dilocox.tools.settlement.ledger import LEAST_BLOCKS, RefusedError, ServerFailedError, logs

BLOCKS = st.integers(0, 5000)


class Events:
    """Events of a server that answers for at most `limit` blocks: each answer is its range."""

    def __init__(self, limit: int) -> None:
        self.limit, self.requests = limit, 0

    def get_logs(self, from_block: int, to_block: int, argument_filters: Any) -> list[Any]:
        """Return the range, if it is short enough."""
        assert argument_filters == {"run": b"r"}
        self.requests += 1
        if to_block - from_block + 1 > self.limit:
            raise Web3RPCError("query exceeds max block range")
        return [(from_block, to_block)]


def pages(server: Any, first: int, last: int, newest: bool = False) -> list[list[Any]]:
    return list(logs(server, "Staked", {"run": b"r"}, first, last, newest))


@given(first=BLOCKS, last=BLOCKS, limit=st.integers(LEAST_BLOCKS, 6000), newest=st.booleans())
def test_every_block_is_asked_for_once_and_in_order(
    first: int, last: int, limit: int, newest: bool
) -> None:
    server = Events(limit)
    asked = pages(server, first, last, newest)
    assert len(asked) == server.requests, "each request counts, refused or not"
    found = [each for page in asked for each in page]
    if first > last:
        assert asked == []
        return
    in_order = found[::-1] if newest else found
    assert (in_order[0][0], in_order[-1][1]) == (first, last)
    assert all(before[1] + 1 == after[0] for before, after in pairwise(in_order))
    assert len(found) == 1 or last - first + 1 > limit


def test_the_search_ends_where_its_reader_ends() -> None:
    server = Events(1000)
    searched = logs(server, "Staked", {"run": b"r"}, 0, 999_999, newest=True)
    assert next(page for page in searched if page)[0][1] == 999_999
    assert server.requests == 11


@pytest.mark.parametrize("newest", [False, True])
@given(limit=st.integers(0, LEAST_BLOCKS - 1))
def test_a_server_that_gives_nearly_nothing_is_no_answer(newest: bool, limit: int) -> None:
    with pytest.raises(RefusedError, match="max block range"):
        pages(Events(limit), 0, 10 * LEAST_BLOCKS, newest)


def test_another_error_is_not_a_refusal() -> None:
    class Dead(Events):
        def get_logs(self, from_block: int, to_block: int, argument_filters: Any) -> list[Any]:
            self.requests += 1
            raise OSError("no route")

    dead = Dead(1)
    with pytest.raises(ServerFailedError, match="no route"):
        pages(dead, 0, 10_000)
    assert dead.requests == 1
