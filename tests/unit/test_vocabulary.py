"""What keeps the vocabulary and the layout: names that mean one thing, and no circles of imports."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
PATHS = sorted((SOURCE / "millstream").rglob("*.py"))

# Two modules may each have a public class of one of these names, for the reason given. The list only
# gets shorter.
HOMONYMS: Mapping[str, str] = {}

# A module is called by a noun for what it holds. These end alike and are nouns of the field.
NOUNS_IN_ING = {
    "decoding": "record batches from bytes: the field's word",
    "encoding": "record batches to bytes: the field's word",
    "routing": "where rows go behind a shuffle: the field's word",
    "staging": "where a database keeps rows before they count: the field's word",
    "sourcing": "event sourcing: the field's word",
    "testing": "the public name of the test kit, as numpy.testing",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_of(path): ast.parse(path.read_text()) for path in PATHS}


def imported_by(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Every module of ours that a module imports: also within functions, also for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in modules else node.module


def circle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """Give the modules of one circle in order, or nothing."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def classes_by_name(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """The modules that define a public class, by its name."""
    found = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


def is_misnamed(module: str) -> bool:
    name = module.rpartition(".")[2]
    return name.endswith("words") or (name.endswith("ing") and name not in NOUNS_IN_ING)


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = {module: set(imported_by(tree, set(TREES))) for module, tree in TREES.items()}
    assert circle_in(imports) == []


def test_a_circle_is_found_within_functions_and_for_types_alone() -> None:
    texts = {
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.b import B",
        "a.b": "def f():\n    from a import c",
        "a.c": "import a",
        "a.d": "import a.b",
    }
    imports = {
        module: set(imported_by(ast.parse(text), set(texts))) for module, text in texts.items()
    }
    assert set(circle_in(imports)) == {"a", "a.b", "a.c"}


def test_a_name_of_a_public_class_stands_for_one_thing() -> None:
    several = {name: at for name, at in classes_by_name(TREES).items() if len(at) > 1}
    assert {name: at for name, at in several.items() if name not in HOMONYMS} == {}
    assert set(HOMONYMS) <= set(several), "these are homonyms no more: take them off the list"


def test_modules_are_called_by_nouns() -> None:
    assert [module for module in TREES if is_misnamed(module)] == []
    assert {module.rpartition(".")[2] for module in TREES} >= set(NOUNS_IN_ING)


@pytest.mark.parametrize("module", ["millstream.log.keeping", "millstream.pipeline.time_words"])
def test_gerunds_and_words_are_refused(module: str) -> None:
    assert is_misnamed(module)
