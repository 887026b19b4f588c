"""Section `[settlement]` of the run file: what a run pays its sites for, and where to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dilocox.config.base import Section
from dilocox.config.site import SiteName

Account = Annotated[str, Field(pattern=r"^0x[0-9a-fA-F]{40}$")]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SettlementSection(Section):
    """`[settlement]`: what the run pays its sites for, on a chain ([settlement](settlement.md)).

    All sites sign it with the rest of the run file, so the coordinator cannot change it later.
    Training itself does not use it.
    """

    price: Annotated[int, Field(gt=0, le=2**53 - 1)]
    """Price of a million tokens whose contribution counts, in gwei (1e-9 of the chain's coin)."""
    accounts: dict[SiteName, Account] = Field(default={})
    """Account of each site on the chain, 0x and 40 hex digits, by name of the site. A site without
    an account is not paid."""
    auditors: list[Key] = Field(default=[])
    """Public keys, 64 hex digits, of auditors. A round of a site is not paid if one of them has
    handed in the verdict MISMATCH or FAIL. Verdicts of others change no amount."""
    chain: Annotated[int, Field(gt=0, le=2**53 - 1)] | None = None
    """Id (EIP-155) of the chain that the run is settled on. Names one place with `contract` and
    `owner`; a log that is registered anywhere else is refused. None: any place."""
    contract: Account | None = None
    """Address of the contract `RunLedger` on that chain."""
    owner: Account | None = None
    """Account that registers and settles the run."""
    admission: Literal["stake"] | None = None
    """"stake": a site joins only if its account has signed its key and has staked
    ([settlement](settlement.md#join-by-stake)). Needs `chain` and an account of every site. None:
    the coordinator does not ask the chain."""
    terms: Key | None = None
    """SHA-256, 64 hex digits, of the file of the run's terms ([terms](terms.md)), which
    `dilocox plan --write-terms` prints. All sites sign it with the run file. `dilocox join --terms`
    compares."""

    @model_validator(mode="after")
    def _place_is_whole(self) -> Self:
        named = [each is not None for each in (self.chain, self.contract, self.owner)]
        if any(named) and not all(named):
            raise ValueError("chain, contract and owner name one place: give all three, or none")
        if self.admission is not None and not all(named):
            raise ValueError("admission: name chain, contract and owner, where sites stake")
        return self

    def agreed(self) -> dict[str, Any]:
        """Return the keys that are set, as all sites sign them."""
        return self.model_dump(mode="json", exclude_none=True)


def place_problem(
    terms: Mapping[str, Any] | None, chain: int, contract: str, owner: str
) -> str | None:
    """Return why a run file's `[settlement]` forbids a place on a chain, or None.

    Args:
        terms: The section; None if the run file has none.
        chain: Id of the chain (EIP-155).
        contract: Address of the contract.
        owner: Account that has registered the run there, or will.
    """
    terms = terms or {}
    for name, found in (("chain", chain), ("contract", contract), ("owner", owner)):
        said = terms.get(name)
        if said is not None and str(said).lower() != str(found).lower():
            return f"the run file names the {name} {said}, and not {found}"
    return None


def names_place(terms: Mapping[str, Any] | None) -> bool:
    """Return True if a run file's `[settlement]` names chain, contract and owner."""
    return (terms or {}).get("contract") is not None


def settlement_problem(
    settlement: SettlementSection | None, sites: Collection[str], recorded: bool, gradients: bool
) -> str | None:
    """Return why a run cannot be settled as `[settlement]` says, with the remedy, or None.

    Args:
        settlement: The section; None if the run file has none.
        sites: Names of the run's sites.
        recorded: True if the run writes a record.
        gradients: True if the method exchanges gradients, without outer steps.
    """
    if settlement is None:
        return None
    strange = sorted(set(settlement.accounts) - set(sites))
    if strange:
        return f"settlement.accounts names {strange[0]!r}, which is not one of the sites: " + (
            ", ".join(sites)
        )
    poor = [name for name in sites if name not in settlement.accounts]
    if settlement.admission is not None and poor:
        return f"settlement.admission: site {poor[0]} has no account in settlement.accounts"
    if not recorded:
        return "settlement: amounts follow from the record: set record.enabled, or leave it out"
    if gradients:
        return (
            "settlement: amounts follow from outer steps, and this method exchanges gradients: "
            "choose another outer.method, or leave [settlement] out"
        )
    return None
