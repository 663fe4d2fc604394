"""In which order topics are read, so that a row finds what its table said before it arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millstream.kernels.joins.lookup import Lookup
from millstream.pipeline.graph import GraphNode, OperatorNode, SourceNode, parents


def look_up_levels(nodes: Iterable[object]) -> dict[str, int]:
    """Return a number for the topics of tables that rows are looked up in; others have none.

    A topic with a higher number is read first. The rows of one look-up may be the table of the next, so
    tables of tables have the higher ones. Topics that need each other first, as each is looked up in the
    other, have no order: they are read side by side.
    """
    before: dict[str, set[str]] = {}  # by topic of a table, the topics of the rows that look it up
    for node in nodes:
        if isinstance(node, OperatorNode) and isinstance(node.kernel, Lookup):
            rows, table = map(_topics_of, node.inputs)
            for topic in table:
                before.setdefault(topic, set()).update(rows - {topic})
    later = {topic: _all_after(topic, before) for topic in before}
    levels: dict[str, int] = {}

    def level(topic: str) -> int:
        if topic not in levels:
            below = later.get(topic, frozenset())
            together = {one for one in below if topic in later.get(one, ())} | {topic}
            found = max((1 + level(one) for one in below - together), default=0)
            levels.update(dict.fromkeys(together, found))
        return levels[topic]

    return {topic: level(topic) for topic in before}


def _topics_of(node: GraphNode) -> set[str]:
    """Return the topics that rows of a node come from; of a look-up only its own rows bring some."""
    if isinstance(node, SourceNode):
        return {node.topic}
    above = parents(node)
    if isinstance(node, OperatorNode) and isinstance(node.kernel, Lookup):
        above = above[:1]
    return set().union(*map(_topics_of, above))


def _all_after(topic: str, before: Mapping[str, set[str]]) -> frozenset[str]:
    found: set[str] = set()
    waiting = [topic]
    while waiting:
        new = before.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return frozenset(found)
