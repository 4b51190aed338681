"""Numbers as people read them."""

from __future__ import annotations

import math

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
