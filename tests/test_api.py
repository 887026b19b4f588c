"""The names and signatures that users of the package rely on.

A change here is a change for users. A name or a parameter that goes away warns for a release first:
then the old form stays in this list, and a test of its warning stands beside it.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import dilocox
from dilocox import loop

SIGNATURES = Path(__file__).with_name("api_signatures.txt")
"""One line per name, sorted. Written anew by `python -m tests.test_api`."""
CLASSES = (dilocox.Method, dilocox.CodecKind, dilocox.CodecNumber)


def signatures() -> list[str]:
    """The functions of `dilocox.__all__`, its records' fields, `Site` and `SiteCallback`."""
    # Here, so that not every process of a test run imports what a trainer needs.
    from dilocox import hf

    found = []
    for name in dilocox.__all__:
        each = getattr(dilocox, name)
        if inspect.isfunction(each) or each in CLASSES:
            found.append(f"dilocox.{name}{inspect.signature(each)}")
        else:
            found.append(f"dilocox.{name}")
    for owner, kind in (("dilocox.loop", loop.Site), ("dilocox.hf", hf.SiteCallback)):
        for name, member in vars(kind).items():
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(member, property):
                found.append(f"{owner}.{kind.__name__}.{name}")
            elif inspect.isfunction(member) and not (kind is loop.Site and name == "__init__"):
                found.append(f"{owner}.{kind.__name__}.{name}{inspect.signature(member)}")
    return sorted(found)


def test_the_public_names_and_signatures_are_those_of_the_list() -> None:
    known = SIGNATURES.read_text(encoding="utf-8").splitlines()
    assert signatures() == known, "if this change is meant: python -m tests.test_api"


def test_type_information_is_part_of_the_package() -> None:
    assert (Path(dilocox.__file__).parent / "py.typed").exists()


def test_what_is_public_says_what_it_is() -> None:
    for name in dilocox.__all__:
        assert name == "__version__" or inspect.getdoc(getattr(dilocox, name)), name


if __name__ == "__main__":
    SIGNATURES.write_text("\n".join(signatures()) + "\n", encoding="utf-8")
