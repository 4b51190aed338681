"""Templates, and what makes of them one file: styles, scripts, Plotly and a policy that nothing is fetched."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

SCRIPTS = ("charts.js", "report.js")  # in this order


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("megarl.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )  # fmt: skip


def render(template: str, context: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """A page of a template of `templates/`.

    Args:
        context: what the template shows.
        data: what report.js draws: finite numbers, texts and None.
    """
    library, packed = _plotly()
    scripts = [_text(name) for name in SCRIPTS]
    hashes = " ".join(_hash(script) for script in (library, *(text.encode() for text in scripts)))
    parts = {
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        "style": Markup(_text("style.css")),
        "scripts": [Markup(text) for text in scripts],
        "plotly": packed,
        "data": Markup(_script_json(data)),
    }
    return _environment().get_template(template).render(context | parts)


@cache
def _plotly() -> tuple[bytes, str]:
    """Plotly's JavaScript (4.8 MB), and the same compressed, as text (2 MB)."""
    library = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return library, base64.b64encode(gzip.compress(library, mtime=0)).decode()


def _hash(script: bytes) -> str:
    """What a content security policy calls a script by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"


def _text(name: str) -> str:
    return resources.files("megarl.report").joinpath("templates", name).read_text(encoding="utf-8")


def _script_json(data: Mapping[str, Any]) -> str:
    """Strict JSON that no text in it can end the script element of."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
