"""Write the table of metrics into docs/metrics.md: ``python docs/metrics.py``."""

from __future__ import annotations

from pathlib import Path

from millstream.metrics.definitions import METRICS, SERVED_BY

DOCUMENT = Path(__file__).with_name("metrics.md")
BEGIN, END = "<!-- table: docs/metrics.py -->", "<!-- end of table -->"


def table() -> str:
    """Return the table of all metrics, in Markdown, by what serves them."""
    lines = []
    for source, servers in SERVED_BY.items():
        lines += [f"## {source.capitalize()}: {servers}", ""]
        lines += ["| Metric | Kind | Labels | Meaning |", "|---|---|---|---|"]
        for metric in METRICS.values():
            if metric.source == source:
                labels = ", ".join(f"`{name}`" for name in metric.labels) or "-"
                lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
        lines.append("")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return the document with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
