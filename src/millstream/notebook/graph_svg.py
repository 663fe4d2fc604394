"""The drawing of a pipeline as SVG: in layers, left to right, like that of the page (``views/server/page/graph.js``).

Lines and letters have the colour of the text around them, so the drawing fits a light and a dark notebook.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 178, 64
_GAP_ALONG, _GAP_ACROSS = 54, 18
_LINE_CHARACTERS = 21
_ROUNDS = 4  # of putting nodes beside their neighbours
# The mark at the left of a box, by what the node is: colours that are seen on white and on black.
_MARKS = {
    "topic": "#4f8cc9",
    "dataframe": "#4f8cc9",
    "operator": "#c98a2b",
    "native": "#c98a2b",
    "view": "#3f9d6b",
    "dataset": "#3f9d6b",
    "function": "#3f9d6b",
}
_PLAIN_MARK = "#8a8f98"

Graph = Mapping[str, Any]
Point = tuple[float, float]


def graph_svg(graph: Graph) -> str:
    """Return a drawing of ``nodes`` (``id``, ``kind``, ``name``) and ``edges`` (``from``, ``to``, ``late``)."""
    rows = _ordered(_layers(graph), graph["edges"])
    along, across = _WIDTH + _GAP_ALONG, _HEIGHT + _GAP_ACROSS
    breadth = max(map(len, rows)) * across - _GAP_ACROSS
    width = len(rows) * along - _GAP_ALONG
    at: dict[str, Point] = {}
    for layer, row in enumerate(rows):
        top = (breadth - (len(row) * across - _GAP_ACROSS)) / 2
        for place, node in enumerate(row):
            at[node["id"]] = (layer * along, top + place * across)
    names = {node["id"]: node["name"] for node in graph["nodes"]}
    summary = "; ".join(f"{names[one['from']]} to {names[one['to']]}" for one in graph["edges"])
    edges = "".join(_edge(edge, at) for edge in graph["edges"])
    nodes = "".join(_node(node, at[node["id"]]) for node in graph["nodes"])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {width + 2:g} {breadth + 2:g}" role="img" '
        f'aria-label="{escape(summary)}" style="width:100%;max-width:{width + 2:g}px;color:inherit" '
        'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">'
        f"{edges}{nodes}</svg>"
    )


def _layers(graph: Graph) -> list[list[Mapping[str, Any]]]:
    """Divide nodes into layers: a node is one layer after the last of its inputs."""
    depth = {node["id"]: 0 for node in graph["nodes"]}
    for _ in graph["nodes"]:
        for edge in graph["edges"]:
            depth[edge["to"]] = max(depth[edge["to"]], depth[edge["from"]] + 1)
    rows: list[list[Mapping[str, Any]]] = [[] for _ in range(max(depth.values()) + 1)]
    for node in graph["nodes"]:
        rows[depth[node["id"]]].append(node)
    return [row for row in rows if row]


def _ordered(
    rows: list[list[Mapping[str, Any]]], edges: Sequence[Mapping[str, Any]]
) -> list[list[Mapping[str, Any]]]:
    """Order each layer by the places of its neighbours, so that few edges cross."""
    place: dict[str, float] = {}

    def note() -> None:
        for row in rows:
            place.update((node["id"], n - (len(row) - 1) / 2) for n, node in enumerate(row))

    note()
    for turn in range(_ROUNDS):
        near, far = ("to", "from") if turn % 2 == 0 else ("from", "to")
        for row in rows:
            weights = {}
            for node in row:
                beside = [place[edge[far]] for edge in edges if edge[near] == node["id"]]
                known = place[node["id"]]
                weights[node["id"]] = sum(beside) / len(beside) if beside else known
            row.sort(key=lambda node: weights[node["id"]])
        note()
    return rows


def _edge(edge: Mapping[str, Any], at: Mapping[str, Point]) -> str:
    (x, y), (end_x, end_y) = at[edge["from"]], at[edge["to"]]
    x, y, end_y = x + _WIDTH, y + _HEIGHT / 2, end_y + _HEIGHT / 2
    bend = (end_x - x) / 2
    dashes = ' stroke-dasharray="4 3"' if edge["late"] else ""
    title = "<title>late events</title>" if edge["late"] else ""
    return (
        f'<path d="M{x:g} {y:g}C{x + bend:g} {y:g} {end_x - bend:g} {end_y:g} {end_x - 6:g} {end_y:g}" fill="none" '
        f'stroke="currentColor" stroke-opacity=".45"{dashes}>{title}</path>'
        f'<path d="M{end_x - 7:g} {end_y - 4:g}L{end_x:g} {end_y:g}L{end_x - 7:g} {end_y + 4:g}Z" fill-opacity=".6"/>'
    )


def _node(node: Mapping[str, Any], at: Point) -> str:
    lines = _wrapped(node["name"])
    top = 44 if len(lines) == 1 else 37
    texts = "".join(
        f'<text x="14" y="{top + n * 15}">{escape(line)}</text>' for n, line in enumerate(lines)
    )
    mark = _MARKS.get(node["kind"], _PLAIN_MARK)
    return (
        f'<g transform="translate({at[0]:g} {at[1]:g})"><title>{escape(node["name"])}</title>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="10" fill="none" stroke="currentColor" stroke-opacity=".35"/>'
        f'<rect y="12" width="3" height="{_HEIGHT - 24}" rx="1.5" fill="{mark}"/>'
        f'<text x="14" y="19" font-size="10" fill-opacity=".65">{escape(node["kind"])}</text>{texts}</g>'
    )


def _wrapped(name: str) -> list[str]:
    """Return a name in two lines at most."""
    lines = [""]
    for word in re.split(r"(?<=[ ,(])", name):
        if lines[-1] and len(lines[-1]) + len(word) > _LINE_CHARACTERS:
            lines.append("")
        lines[-1] += word
    shown = [line.strip() for line in lines[:2]]
    if len(lines) > 2:
        shown[1] = f"{shown[1][: _LINE_CHARACTERS - 1]}…"
    return [
        line if len(line) <= _LINE_CHARACTERS else f"{line[: _LINE_CHARACTERS - 1]}…"
        for line in shown
    ]
