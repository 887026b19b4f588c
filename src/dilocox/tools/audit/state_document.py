"""Checks, by its document alone, whether a signed state has the tensors of a rank of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dilocox.errors import RecordError
from dilocox.record.log.audit_verdicts import AuditVerdict
from dilocox.record.log.digests import TensorDigest
from dilocox.record.log.round_document import Document
from dilocox.record.verify.replay import Get
from dilocox.record.verify.run_history import RunHistory
from dilocox.record.writer.notary import code_digest

_ON_GPUS = "random/cuda"


class DocumentError(RecordError):
    """A signed state that no rank of the run can have: a fault of the site, not the auditor."""


UNFIT = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)
"""Exceptions that a malformed document causes when it is used."""


def absent(document: Document, get: Get) -> tuple[TensorDigest | None, str | None]:
    """Return (first tensor of a state that is in no store, fault of a tensor's bytes).

    Each is None if there is no such tensor or fault.
    """
    missing = None
    for each in document.tensors:
        try:
            length = len(get(each.sha256))
        except RecordError:
            missing = missing or each
            continue
        dtype = getattr(torch, each.dtype, None)
        size = dtype.itemsize if isinstance(dtype, torch.dtype) else -1
        if length != size * math.prod(each.shape):
            return missing, (
                f"the bytes of {each.name} of its state are no {each.dtype} {list(each.shape)}"
            )
    return missing, None


def check_tensors(
    document: Document, built: Mapping[str, Tensor], own_optimizer: bool = False
) -> None:
    """Raise `DocumentError` unless a state has the tensors of a rank, with their dtypes and shapes.

    It may also have tensors that a round adds, such as exchanges in flight. `built`: tensors of
    a rank that has not trained yet, on any device. `own_optimizer`: the run's own functions make
    the optimizer, whose tensors nobody knows before its first step.
    """
    there = {each.name: each for each in document.tensors}
    for name, tensor in built.items():
        if name == _ON_GPUS:
            continue
        each, dtype = there.get(name), str(tensor.dtype).removeprefix("torch.")
        if each is None:
            raise DocumentError(f"its state has no {name}")
        if (each.dtype, each.shape) != (dtype, tuple(tensor.shape)):
            raise DocumentError(
                f"{name} of its state is {each.dtype} {list(each.shape)}; with this run file it is "
                f"{dtype} {list(tensor.shape)}"
            )
    # The random state of a GPU: an auditor with a GPU needs it and finds out there if it is
    # missing; an auditor without a GPU does not use it.
    gpu = document.facts.get("device") != "cpu"
    for name in there:
        if own_optimizer and name.startswith("inner/"):
            continue
        if name not in built and not (name == _ON_GPUS and gpu) and not _of_a_round(name):
            raise DocumentError(f"{name} of its state is no tensor of such a rank")


def _of_a_round(name: str) -> bool:
    """Return whether a round may add a tensor of this name: for exchanges in flight, and for the
    basis of low-rank codecs."""
    kind, *rest = name.split("/")
    if kind in ("pending", "moments"):
        return len(rest) == 1
    return kind == "outer" and rest[1:] == ["warm"]


def unfit(course: RunHistory, site: str, error: Exception) -> tuple[AuditVerdict, str]:
    """Return the verdict on a state that no rank of the run can have.

    It is FAIL if this dilocox has the coordinator's code, and NOT_RUN otherwise, since other code
    may have other states. What a site states about its own code does not matter.
    """
    run, version = str(course.manifest["code"]), course.manifest["versions"]["dilocox"]
    if run == code_digest():
        return "FAIL", f"{site}: {error}"
    return "NOT_RUN", f"{site}: {error}; audit with the run's dilocox ({version}, code {run[:12]}…)"


def replaced(course: RunHistory, site: str, what: Sequence[str]) -> tuple[AuditVerdict, str]:
    """Return the verdict on a site which states that its own program replaces parts of a step.

    `what`: the replaced parts. The run file says which sites may do that.
    """
    said = f"the site's own program replaces {' and '.join(what)}"
    allowed, key = course.config["sites"][site].get("own_code"), f"sites.{site}.own_code"
    if course.config["run"].get("code"):
        return "NOT_RUN", f"{said}, as the run file allows (run.code; --code FILE repeats it)"
    if allowed is None:  # the run is older than the key
        return "NOT_RUN", said
    if allowed:
        return "NOT_RUN", f"{said}, as the run file allows ({key})"
    return "FAIL", f"{site} says that {said}; the run file does not allow it ({key} = false)"


def other_code(
    course: RunHistory, site: str, stated: Sequence[str], code: Sequence[str]
) -> tuple[AuditVerdict, str]:
    """Return the verdict on a site which states that it replaces other parts than the run's code.

    `stated`: parts that the site's program replaces, as the site has signed. `code`: parts that
    the file on which the run agreed replaces.
    """
    if stated and course.config["sites"][site].get("own_code"):
        return replaced(course, site, stated)
    said = " and ".join(stated) or "no part"
    return "FAIL", (
        f"{site} says that its program replaces {said} of a step; the code on which the run "
        f"agreed (run.code) replaces {' and '.join(code) or 'none'}"
    )
