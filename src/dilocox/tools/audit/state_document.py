"""Does a signed state have the tensors that a rank of this run file has? By its document alone."""

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
    """A signed state that no rank of the run can have: its site's doing, not the auditor's."""


UNFIT = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)
"""What is raised where a document does not say what one has to, or says something else."""


def absent(document: Document, get: Get) -> tuple[TensorDigest | None, str | None]:
    """The first tensor of a state that is in no store, and what is wrong with the bytes of one."""
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


def check_tensors(document: Document, built: Mapping[str, Tensor]) -> None:
    """Raise `DocumentError` unless a state has the tensors of the rank that was `built`, each of
    its dtype and shape, and what a round may add to them.

    `built`: of a rank that has trained nothing, on any device.
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
    # An auditor with a GPU takes it up, and misses it there; one without has no use for it.
    gpu = document.facts.get("device") != "cpu"
    for name in there:
        if name not in built and not (name == _ON_GPUS and gpu) and not _of_a_round(name):
            raise DocumentError(f"{name} of its state is no tensor of such a rank")


def _of_a_round(name: str) -> bool:
    """Exchanges under way have tensors of their own, and low-rank codecs keep their basis."""
    kind, *rest = name.split("/")
    if kind in ("pending", "moments"):
        return len(rest) == 1
    return kind == "outer" and rest[1:] == ["warm"]


def unfit(course: RunHistory, site: str, error: Exception) -> tuple[AuditVerdict, str]:
    """Of a state that no rank of the run can have, as far as this dilocox knows the run's states.

    The code that counts is the coordinator's: what a site says of its own is no excuse.
    """
    run, version = str(course.manifest["code"]), course.manifest["versions"]["dilocox"]
    if run == code_digest():
        return "FAIL", f"{site}: {error}"
    return "NOT_RUN", f"{site}: {error}; audit with the run's dilocox ({version}, code {run[:12]}…)"


def replaced(course: RunHistory, site: str, what: Sequence[str]) -> tuple[AuditVerdict, str]:
    """Of a site that says that its steps are other code's: the run file says who may."""
    said = f"the site's own program replaces {' and '.join(what)}"
    allowed, key = course.config["sites"][site].get("own_code"), f"sites.{site}.own_code"
    if course.config["run"].get("code"):
        return "NOT_RUN", f"{said}, as the run file allows (run.code)"
    if allowed is None:  # of a run before there was the key
        return "NOT_RUN", said
    if allowed:
        return "NOT_RUN", f"{said}, as the run file allows ({key})"
    return "FAIL", f"{site} says that {said}; the run file does not allow it ({key} = false)"
