"""Pages that are one file: they need nothing from elsewhere, are readable in light and dark, and say in words what colours say.

Whatever text is given is shown as it is: none of it becomes markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1e; --back: #ffffff; --line: #c8c8cc; --quiet: #5c5c62; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ececf0; --back: #18181b; --line: #46464c; --quiet: #a6a6ae; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { padding: 0.15rem 0.8rem 0.15rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
p, li { max-width: 60rem; }
.quiet { color: var(--quiet); }
svg { display: block; margin: 0.3rem 0 1.2rem; max-width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--text); }
svg .in { fill: #ffffff; text-anchor: middle; }
svg .limit { stroke: var(--text); stroke-dasharray: 4 3; }
svg .frame { fill: none; stroke: var(--line); }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line); padding-left: 0.8rem; margin: 0.3rem 0; }
.charts { display: flex; flex-wrap: wrap; gap: 0 1rem; }
.wide { overflow-x: auto; }
summary { cursor: pointer; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page of `parts`, which are HTML."""
    head = f'<meta charset="utf-8">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>'
    inner = "\n".join(part for part in parts if part)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{inner}\n</body>\n</html>\n'


def tag(name: str, text: str, kind: str | None = None) -> str:
    start = name if kind is None else f'{name} class="{kind}"'
    return f"<{start}>{escape(text)}</{name}>"


def bullets(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(tag("li", line) for line in lines) + "</ul>" if lines else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(tag("th", cell) for cell in header) + "</tr>"]
    lines += ["<tr>" + "".join(tag("td", cell) for cell in row) + "</tr>" for row in rows]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def folded(title: str, inner: str) -> str:
    """HTML that is shown when somebody asks for it."""
    return f"<details>{tag('summary', title)}\n{inner}\n</details>"


def svg(title: str, width: int, height: int, lines: Sequence[str]) -> str:
    start = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([start, *lines, "</svg>"])


def colour(place: int, of: int) -> str:
    """Hues as far apart as can be; dark enough for white words, light enough on black."""
    return f"hsl({round(360 * place / max(of, 1))} 50% 42%)"
