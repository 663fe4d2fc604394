"""HTML for notebooks: it has no colours of its own, and so those of the notebook, light or dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def facts_html(title: str, facts: Iterable[tuple[str, object]], problem: str | None = None) -> str:
    """Return a title, a table of names and what they are, and a problem below it."""
    rows = "".join(
        f'<tr><th style="text-align:left;font-weight:normal;opacity:.7">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(str(fact))}</td></tr>'
        for name, fact in facts
    )
    below = "" if problem is None else f"<p><b>{escape(problem)}</b></p>"
    return f"<div><b>{escape(title)}</b><table>{rows}</table>{below}</div>"


def titled_html(title: str, content: str, note: str = "") -> str:
    """Return HTML with a title above it, and a note beside that."""
    beside = f' <span style="opacity:.7">{escape(note)}</span>' if note else ""
    return f"<div><b>{escape(title)}</b>{beside}{content}</div>"
