"""Renders a run's page as HTML, with escaping and a content security policy."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dilocox.tools.report import charts
from dilocox.tools.report.page import Page, after

SECTIONS = (
    ("summary", "Summary"),
    ("learning", "Learning"),
    ("traffic", "Traffic"),
    ("time", "Time"),
    ("sites", "Sites"),
    ("events", "What happened"),
    ("data", "Data"),
    ("digests", "Digests"),
    ("verify", "Verification"),
    ("runfile", "Run file"),
)
"""(id, heading) of each section in the page's order. The template of a section is named by id."""


def sections(page: Page) -> dict[str, str]:
    """Return the HTML of each section, by id."""
    room = _environment()
    frame = {
        "width": charts.WIDTH, "height": charts.HEIGHT, "left": charts.LEFT,
        "right": charts.RIGHT, "top": charts.TOP, "bottom": charts.BOTTOM,
    }  # fmt: skip
    return {
        id_: room.get_template(f"{id_}.html.j2").render(page=page, **frame) for id_, _ in SECTIONS
    }


def render(page: Page, live: str = "") -> str:
    """Return the HTML of the whole page.

    `live`: path on the page's server from which the page fetches updates. Empty: no updates.
    """
    style, script = _file("style.css"), _file("script.js")
    parts = sections(page)
    # The policy allows only these two texts as style and script. A script in the run's folder
    # could not run, even if it got past the escaping.
    policy = "; ".join(
        [
            "default-src 'none'",
            f"style-src {_allowed(style)}",
            f"script-src {_allowed(script)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            *(["connect-src 'self'"] if live else []),
        ]
    )
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            policy=policy,
            style=style,
            script=script,
            live=live,
            names=SECTIONS,
            stamps=stamps(parts),
            # Each section was escaped when its own template was rendered.
            sections=[(id_, Markup(parts[id_])) for id_, _ in SECTIONS],  # noqa: S704
        )
    )


def stamps(parts: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of each section's HTML, by id. It changes when the section changes."""
    return {id_: hashlib.sha256(html.encode()).hexdigest()[:16] for id_, html in parts.items()}


def _environment() -> Environment:
    room = Environment(
        loader=PackageLoader("dilocox.tools.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    room.filters["after"] = after
    return room


def _file(name: str) -> str:
    return resources.files("dilocox.tools.report").joinpath("templates", name).read_text("utf-8")


def _allowed(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
