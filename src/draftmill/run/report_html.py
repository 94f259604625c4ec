"""Pieces of HTML. Whatever is not Markup is escaped, so text from files cannot become anything but text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

NONE = "–"


class Markup(str):
    """HTML of our own making."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """Escaped, unless it is markup already."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def join(*parts: Any) -> Markup:
    return Markup("".join(text(part) for part in parts))


def tag(name: str, *content: Any, **attributes: Any) -> Markup:
    """<name …>content</name>. Of an attribute's name a trailing _ is dropped: class_, for_."""
    pairs = "".join(f' {key.rstrip("_")}="{escape(str(value))}"' for key, value in attributes.items())
    return Markup(f"<{name}{pairs}>{join(*content)}</{name}>")


def note(*content: Any) -> Markup:
    return tag("p", *content, class_="note")


def tile(label: str, value: Any, *notes: Any) -> Markup:
    """A number with what it is above and what it goes by below."""
    return tag("div", tag("span", label), tag("b", value), *[tag("span", line) for line in notes], class_="tile")


def card(title: str, *content: Any) -> Markup:
    return tag("div", tag("h3", title), *content, class_="card")


def fold(title: Any, *content: Any, class_: str = "") -> Markup:
    """Opened by a click."""
    return tag("details", tag("summary", title), *content, class_=class_)


def table(headings: Sequence[Any], rows: Sequence[Sequence[Any]], *, words: int = 1) -> Markup:
    """The first `words` columns are words, the others numbers. Scrolls sideways where it is too wide."""

    def line(cell: str, values: Sequence[Any]) -> Markup:
        return tag("tr", *[tag(cell, v, class_="w" if i < words else "n") for i, v in enumerate(values)])

    body = join(line("th", headings), *[line("td", row) for row in rows])
    return tag("div", tag("table", body), class_="wide")


def shown(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    """A number for people, or a dash."""
    return NONE if value is None else format(value, form) + unit


def count(number: int, one: str) -> str:
    """1 update, 2 updates."""
    return f"{number:,} {one}" + ("" if number == 1 else "s")


def percent(share: float | None) -> str:
    return shown(None if share is None else 100 * share, ".1f", "\u00a0%")


def moment(seconds: float | None) -> str:
    """2026-12-03 07:08 UTC."""
    try:
        return NONE if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):  # no time of this world
        return NONE


def plain(value: Any) -> str:
    """A config value as it stands in YAML or JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
