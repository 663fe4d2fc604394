"""Which topics and steps the definitions of a program depend on.

A definition names a stateful step above it by digests of that step's definition; here they are resolved.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from millstream.kernels.code_digest import digest
from millstream.kernels.definition import canonical_text
from millstream.views.state_store.definition_comparison import whole_definition
from millstream.views.state_store.program import StoredProgram

_ABOVE = ("rows of", "late rows of")


class ProgramPaths:
    """Follows the paths of a program upwards."""

    def __init__(self, program: StoredProgram) -> None:
        self._program = program

    @cached_property
    def _by_code(self) -> dict[str, set[str]]:
        """The steps by the digests of their definitions: of those that are the same as a whole, one."""
        whole = {
            canonical_text(whole_definition(step)): key for key, step in self._program.steps.items()
        }
        found: dict[str, set[str]] = {}
        for key in whole.values():
            code = digest(canonical_text(self._program.steps[key]["definition"]))
            found.setdefault(code, set()).add(key)
        return found

    def next_steps_of(self, definition: Any) -> set[str]:
        """Return the keys of the stateful steps whose rows a definition reads, with no other between.

        Steps that differ in what is passed on to them alone are not told apart here: all of them are returned.
        """
        words = [(edge, word) for edge in _edges(definition) for word in _ABOVE if word in edge]
        return {key for edge, word in words for key in self._by_code[edge[word]["code"]]}

    def steps_of(self, definition: Any) -> set[str]:
        """Return the keys of all stateful steps above a definition."""
        found = self.next_steps_of(definition)
        for key in tuple(found):
            found |= self.steps_of(self._program.steps[key]["definition"])
        return found

    def topics_of(self, definition: Any) -> set[str]:
        """Return the topics that a definition reads, by itself or through steps above it."""
        above = [self._program.steps[key]["definition"] for key in self.steps_of(definition)]
        return {
            edge["topic"] for one in (definition, *above) for edge in _edges(one) if "topic" in edge
        }


def _edges(definition: Any) -> Iterator[Any]:
    """Yield the paths that end in a definition, those of unions among them one by one."""
    waiting = list(definition["reads"])
    while waiting:
        edge = waiting.pop()
        waiting += edge.get("union", ())
        yield edge
