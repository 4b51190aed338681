"""Pages of one file: templates with their styles, scripts, Plotly and a policy that forbids fetching; and numbers as people read them."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

MIB = 1 << 20


def figure(value: float) -> str:
    """Four significant digits, such as 0.2344, 12.5, 16,113, 2.1e-05."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 0.001 or abs(value) >= 1e9:
        return f"{value:.2e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    """Such as 96.3%, 0.965%, 0%."""
    if not math.isfinite(value):
        return figure(value)
    return f"{100 * value:.1f}%" if abs(value) >= 0.1 else f"{100 * value:.3g}%"


def duration(seconds: float) -> str:
    """Such as 48.2 s, 12 min 5 s, 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60)} min"


def size(num_bytes: float) -> str:
    """Such as 526 KiB, 12.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


SCRIPTS = ("charts.js", "report.js")  # in this order


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("megarl.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )  # fmt: skip


def render(template: str, context: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """A page of a template of `templates/`.

    Args:
        context: the template's variables.
        data: the input of report.js: finite numbers, texts and None.
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
    """A content security policy's name for a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"


def _text(name: str) -> str:
    return resources.files("megarl.report").joinpath("templates", name).read_text(encoding="utf-8")


def _script_json(data: Mapping[str, Any]) -> str:
    """Strict JSON in which no text can end the script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
