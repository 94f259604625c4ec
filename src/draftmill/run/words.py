"""Durations and sizes as they are shown."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """41 s, 3 min 20 s, 2 h 05 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def gigabytes(size: float) -> str:
    """0.35 GB, 61.2 GB, 1,024 GB."""
    gb = size / 1e9
    return f"{gb:.2f} GB" if gb < 10 else f"{gb:.1f} GB" if gb < 1000 else f"{gb:,.0f} GB"
