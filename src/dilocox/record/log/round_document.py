"""Documents with which a rank describes a round for audits: its start state, its inner steps.

The document of a state is canonical JSON: digests of its tensors, its numbers, and the determinism
class of the rank. The fingerprint of an inner step is the exact bits of loss and gradient norm, and
a checksum of the parameters after the step. From fingerprints an audit tells at which step its
repetition begins to differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rfc8785

from dilocox.errors import RecordError
from dilocox.record.log.digests import TensorDigest, stage_root, tensor_digest

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of one inner step."""

    loss: str
    """The site's mean loss, as the hex text of a float64 (`float.hex`)."""
    norm: str
    """The global norm of the site's gradient before clipping, as the hex text of a float64."""
    checksum: int
    """`checksum` of the rank's own parameters after the step."""


@dataclass(frozen=True)
class Document:
    """Description of the state in which a rank begins a round."""

    state: Mapping[str, Any]
    """Position, exchanges in flight and other numbers, as `dilocox.training.checkpointing` captures
    them."""
    tensors: tuple[TensorDigest, ...]
    """Digests of the state's tensors, sorted by name."""
    facts: Mapping[str, Any]
    """The determinism class (see `dilocox.inner.determinism`)."""
    replaced: tuple[str, ...] = ()
    """Parts of dilocox that the site's own program replaces: `dataset`, `loss`."""

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        facts: Mapping[str, Any],
        replaced: Sequence[str],
    ) -> Document:
        """Describe a state by its `tensors` by name, in any order."""
        digests = tuple(tensor_digest(name, tensors[name]) for name in sorted(tensors))
        return cls(json.loads(json.dumps(state)), digests, dict(facts), tuple(replaced))

    @property
    def root(self) -> str:
        """Merkle root over the tensors, hex."""
        return stage_root(self.tensors).hex()

    def to_bytes(self) -> bytes:
        """Encode as canonical JSON, the form in the store."""
        return rfc8785.dumps(
            {
                "format": FORMAT,
                "state": dict(self.state),
                "tensors": [each.to_json() for each in self.tensors],
                "class": dict(self.facts),
                "replaced": list(self.replaced),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Document:
        """Decode `to_bytes`. Raises `RecordError` if `data` is malformed or of another format."""
        try:
            found = json.loads(data)
            if found["format"] != FORMAT:
                raise RecordError(f"a round's state of format {found['format']}; this is {FORMAT}")
            tensors = tuple(TensorDigest.from_json(each) for each in found["tensors"])
            return cls(
                dict(found["state"]), tensors, dict(found["class"]), tuple(found["replaced"])
            )
        except (ValueError, KeyError, TypeError):
            raise RecordError("not the document of a round's state") from None


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Sum the bits of all fp32 `tensors` as int32 values: an int64 scalar on their device.

    The sum is exact in any order. The call does not wait for the device.
    """
    import torch

    sums = [
        tensor.detach().reshape(-1).view(torch.int32).sum(dtype=torch.int64) for tensor in tensors
    ]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def fingerprint(numbers: Tensor, total: Tensor) -> Fingerprint:
    """Build the fingerprint from `numbers`, float64 [loss, norm], and a `checksum`."""
    loss, norm = numbers.tolist()
    return Fingerprint(float(loss).hex(), float(norm).hex(), int(total))


def steps_to_bytes(steps: Iterable[Fingerprint]) -> bytes:
    """Encode fingerprints as canonical JSON, the form in the store.

    Checksums are written as text, because JSON's integers are exact only up to 2^53.
    """
    rows = [[step.loss, step.norm, str(step.checksum)] for step in steps]
    return rfc8785.dumps({"format": FORMAT, "steps": rows})


def steps_from_bytes(data: bytes) -> list[Fingerprint]:
    """Decode `steps_to_bytes`. Raises `RecordError` if `data` is malformed or of another format."""
    try:
        found = json.loads(data)
        if found["format"] != FORMAT:
            raise RecordError(f"fingerprints of format {found['format']}; this is {FORMAT}")
        steps = [
            Fingerprint(str(loss), str(norm), int(sums)) for loss, norm, sums in found["steps"]
        ]
        for step in steps:
            float.fromhex(step.loss)
            float.fromhex(step.norm)
    except (ValueError, KeyError, TypeError):
        raise RecordError("not the fingerprints of a round's inner steps") from None
    return steps
