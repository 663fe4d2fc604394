"""The public names: what a program loads and what a type checker reads are one list."""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType

import millstream as ms

TREE = ast.parse(Path(ms.__file__).read_text())


def imported_for_type_checkers() -> dict[str, str]:
    """The modules of the names that are imported as ``from module import name as name``, or with ``*``."""
    (block,) = (node for node in TREE.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    return {
        name: statement.module
        for statement in block.body
        for alias in statement.names
        for name in (defined_in(statement.module) if alias.name == "*" else [alias.name])
        # without it, mypy --strict finds that the name is private
        if alias.name == "*" or alias.asname == alias.name
    }


def defined_in(module: str) -> list[str]:
    """The public names that a module itself defines."""
    tree = ast.parse(Path(import_module(module).__file__).read_text())
    names = [
        name
        for node in tree.body
        for name in (
            [node.name]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            else [target.id for target in getattr(node, "targets", [])]
        )
    ]
    return [name for name in names if not name.startswith("_")]


def test_type_checkers_read_the_names_that_are_loaded() -> None:
    assert imported_for_type_checkers() == ms._MODULES


def test_every_name_comes_from_the_module_that_defines_it() -> None:
    for name in set(ms.__all__) - {"__version__"}:
        value, module = getattr(ms, name), ms._MODULES[name]
        if isinstance(value, ModuleType) and callable(value):  # a package that was imported before
            assert f"{value.__name__}.run" == module
            continue
        defined = getattr(value, "__module__", None) or value.__name__.rpartition(".")[0]
        assert defined == module, name


def test_only_the_table_lists_the_public_names() -> None:
    assert ms.__all__ == sorted({"__version__", *ms._MODULES})
    assert not hasattr(import_module("millstream.pipeline"), "__all__")
