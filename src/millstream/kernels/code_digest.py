"""Digests of the user's Python code: equal in every process that runs the same code.

A function is its bytecode, constants, defaults, what it closes over, and whatever it names of its
own package, or of files that are not installed: functions, classes, constants, attributes of modules.
Docstrings, comments, line numbers and the names of files are left out. What a digest cannot see: the
code of other installed packages, code in C, what is found only when the function runs, and the
insides of objects whose class is another package's. Another version of Python makes other bytecode.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import sys
import sysconfig
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from io import BytesIO
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from re import Pattern
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, get_args, get_origin
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl

_DEPTH_MAX = 12  # then what is deeper is read by itself, so that no text has another many times
_DEEPER_MAX = 8  # so often
_WRAPPED = ("__func__", "__wrapped__", "func")  # where what wraps a function has it
_HAS_DOCSTRING = 0x4000000  # a flag of code
_BYTES_MIN = 48  # a list of at least so many small numbers, in polars' JSON, is bytes
_PICKLE = b"\x80\x05"  # how a pickle begins
_FUNCTIONS = ("function", "callback")  # where polars' JSON has packed functions
_TOLD_BY_REPR = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    date,  # datetimes among them
    time,
    timedelta,
    timezone,
    Decimal,
    Fraction,
    PurePath,
    Pattern,
    UUID,
    ZoneInfo,
    attrgetter,
    itemgetter,
    methodcaller,
    range,
    type(None),
    type(...),
)
_LIBRARIES = frozenset({"polars", "millstream", "numpy", "pyarrow", "cloudpickle"})
_INSTALLED = tuple({f"{sysconfig.get_path(n)}/" for n in ("stdlib", "purelib", "platlib")})
_OF_PYDANTIC = ("__pydantic_", "__signature__", "model_")  # made from what else is there
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OF_CLASSES = frozenset(  # what Python itself puts into a class
    {
        "__abstractmethods__",
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__match_args__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__static_attributes__",
        "__slotnames__",
        "__weakref__",
        "_abc_impl",
    }
)


def digest(text: str | bytes) -> str:
    """Return a short digest of a text: 16 hexadecimal digits."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:16]


def code_digest(value: Any) -> str:
    """Return a digest of a function, a class, or an object of the user's class."""
    return digest(_Reading().read(value))


def instructions_digest(function: FunctionType) -> str:
    """Return a digest of what a function itself does, whatever those do that it calls."""
    given = (function.__defaults__, function.__kwdefaults__)
    reading = _Reading()
    return digest(f"{reading.code(function.__code__, function.__doc__)}{reading.read(given)}")


def code_name(value: Any) -> str:
    """Name a function, a class or an object for people."""
    if isinstance(value, partial):
        return code_name(value.func)
    return str(getattr(value, "__name__", type(value).__name__))


@dataclass
class _Reading:
    """Reads values into text. ``own`` is the package of the user's first function or class.

    A function that is being read and names itself is replaced by its position, so that this ends. ``deeper`` has
    what was so deep that it is read by itself, and ``level`` how often that was done on the way here.
    """

    own: str | None = None
    open: list[Any] = field(default_factory=list)
    known: dict[int, tuple[Any, str]] = field(default_factory=dict)  # holds what has the id
    deeper: dict[int, tuple[Any, str]] = field(default_factory=dict)
    level: int = 0

    def read(self, value: Any) -> str:
        if isinstance(value, _TOLD_BY_REPR):
            return f"{type(value).__name__}:{value!r}"
        if (
            place := next((n for n, one in enumerate(self.open) if one is value), None)
        ) is not None:
            return f"again:{place}"
        if id(value) in self.known:
            return self.known[id(value)][1]
        if len(self.open) >= _DEPTH_MAX:
            return self._deeper(value)
        self.open.append(value)
        try:
            plain = self._container(value)
            if plain is None:
                plain = self._code_of(value)
                self.known[id(value)] = value, plain
            return plain
        finally:
            self.open.pop()

    def _deeper(self, value: Any) -> str:
        """Read by itself, and once, what is too deep to be part of the text."""
        if id(value) not in self.deeper:
            self.deeper[id(value)] = value, f"deep:{type(value).__qualname__}"  # if it names itself
            if self.level < _DEEPER_MAX:
                reading = _Reading(self.own, deeper=self.deeper, level=self.level + 1)
                self.deeper[id(value)] = value, f"deep:{digest(reading.read(value))}"
        return self.deeper[id(value)][1]

    def _code_of(self, value: Any) -> str:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType):
            return f"module:{value.__name__}"
        inside = _inside(value)
        return self._object(value) if inside is None else self._all(*inside)

    def _container(self, value: Any) -> str | None:
        made: str | None = None
        if isinstance(value, (tuple, list, deque)):
            made = f"{type(value).__name__}[{','.join(map(self.read, value))}]"
        elif isinstance(value, Mapping):
            pairs = (f"{self.read(key)}={self.read(item)}" for key, item in value.items())
            made = f"mapping[{','.join(pairs)}]"
        elif isinstance(value, (set, frozenset)):
            made = f"set[{','.join(sorted(map(self.read, value)))}]"
        elif isinstance(value, (pl.Series, pl.DataFrame)):
            made = f"table:{_table_digest(value)}"
        elif isinstance(value, np.ndarray):
            made = f"array:{value.dtype}{value.shape}{digest(value.tobytes())}"
        elif isinstance(value, np.generic):
            made = f"{type(value).__name__}:{value!r}"
        elif isinstance(value, SimpleNamespace):
            made = f"namespace:{self.read(vars(value))}"
        elif isinstance(value, pl.Expr):
            made = f"expression:{expression_digest(value)}"
        elif isinstance(value, pl.DataType):
            made = f"type:{value!r}"
        return made

    def _all(self, word: str, *values: Any) -> str:
        return f"{word}({';'.join(map(self.read, values))})"

    def _is_foreign(self, module: str | None) -> bool:
        """Return whether code is of an installed package that is not the user's own."""
        top = (module or "").partition(".")[0]
        if top in _LIBRARIES or top in sys.stdlib_module_names:
            return True
        found = getattr(sys.modules.get(module or ""), "__file__", None) or ""
        if self.own is None:
            self.own = top
        return top != self.own and found.startswith(_INSTALLED)

    def _function(self, function: FunctionType) -> str:
        cells = [_content(cell) for cell in function.__closure__ or ()]
        foreign = self._is_foreign(function.__module__)
        if foreign:
            name = f"{function.__module__}.{function.__qualname__}"
            return self._all(f"function {name}", *cells)
        code = self.code(function.__code__, function.__doc__)
        named = self._named(function)
        given = (function.__defaults__, function.__kwdefaults__)
        return self._all(f"function {code}", *given, *cells, named)

    def _named(self, function: FunctionType) -> dict[str, Any]:
        """Return what of its module a function names; of modules, the attributes that it names."""
        names = sorted(_names(function.__code__))
        found = {n: function.__globals__[n] for n in names if n in function.__globals__}
        modules = [one for one in found.values() if isinstance(one, ModuleType)]
        for module in modules:  # and of modules that these have, such as those of a package
            if not self._is_foreign(module.__name__):
                inside = {n: getattr(module, n) for n in names if hasattr(module, n)}
                found |= {f"{module.__name__}.{n}": one for n, one in inside.items()}
                modules += [
                    one
                    for one in inside.values()
                    if isinstance(one, ModuleType) and one not in modules
                ]
        return found

    def code(self, code: CodeType, doc: str | None = None) -> str:
        constants = [
            self.code(one) if isinstance(one, CodeType) else _Reading().read(one)
            for one in (None if doc is not None and one == doc else one for one in code.co_consts)
        ]
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        flags = code.co_flags & ~_HAS_DOCSTRING
        return digest(
            f"{code.co_code.hex()}{shape}{flags}{names}{constants}{code.co_exceptiontable.hex()}"
        )

    def _class(self, cls: type) -> str:
        if self._is_foreign(cls.__module__):
            return f"class {cls.__module__}.{cls.__qualname__}"
        own = {
            name: one
            for name, one in sorted(vars(cls).items())
            if name not in _OF_CLASSES and not name.startswith(_OF_PYDANTIC)
        }
        types = [f"{name}: {_type_name(one)}" for name, one in _annotations(cls).items()]
        rules = list(validators(cls))
        return self._all(f"class {cls.__qualname__}", cls.__bases__, own, types, rules)

    def _object(self, value: Any) -> str:
        cls = type(value)
        # Polars wraps the user's functions in objects of its own.
        if self._is_foreign(cls.__module__) and not cls.__module__.startswith("polars."):
            return f"object {cls.__module__}.{cls.__qualname__} {_qualified(value)}"
        return self._all("object", cls, getattr(value, "__dict__", {}), _slots(value))


def _inside(value: Any) -> tuple[Any, ...] | None:
    """Return a word for what wraps functions, and what it wraps; None for anything else."""
    if isinstance(value, partial):
        return "partial", value.func, value.args, value.keywords
    if isinstance(value, property):
        return "property", value.fget, value.fset
    bound_to = getattr(value, "__self__", None)
    if isinstance(value, MethodType):
        return "method", value.__func__, bound_to
    if bound_to is not None and not isinstance(bound_to, ModuleType):  # as that of {}.get
        return "bound", _qualified(value), bound_to
    # As staticmethod, cached_property, and functools.cache have it.
    wrapped = next((getattr(value, n) for n in _WRAPPED if hasattr(value, n)), None)
    return None if wrapped is None else (type(value).__name__, wrapped)


def _qualified(value: Any) -> str:
    """Name what is built in, such as ``str.upper``."""
    names = (getattr(value, name, None) for name in ("__module__", "__qualname__", "__name__"))
    return ".".join(name for name in names if isinstance(name, str))


def _table_digest(table: pl.Series | pl.DataFrame) -> str:
    buffer = BytesIO()
    frame = table.to_frame() if isinstance(table, pl.Series) else table
    frame.write_ipc(buffer, compression="uncompressed")
    return digest(buffer.getvalue())


def _annotations(cls: type) -> dict[str, Any]:
    found = vars(cls).get("__annotations__")
    return found if isinstance(found, dict) else {}


def _type_name(annotation: Any) -> str:
    return _ADDRESS.sub("", annotation if isinstance(annotation, str) else repr(annotation))


def validators(model: Any) -> Iterator[Any]:
    """Yield the functions by which a pydantic model validates and changes values, with their names, fields and modes.

    Those of models that its fields are made of come after its own.
    """
    yield from _own_validators(model)
    seen = {model}
    for info in _fields(model):
        yield from _nested_validators(info.annotation, seen)


def _own_validators(model: Any) -> Iterator[Any]:
    decorators = getattr(model, "__pydantic_decorators__", None)
    for kind in ("field_validators", "model_validators", "root_validators", "validators"):
        for name, decorator in sorted(getattr(decorators, kind, {}).items()):
            when = (getattr(decorator.info, "mode", None), getattr(decorator.info, "fields", None))
            yield kind, name, when, decorator.func
    for name, info in sorted(getattr(model, "__pydantic_fields__", {}).items()):
        for rule in info.metadata:
            if hasattr(rule, "func"):
                yield type(rule).__name__, name, rule.func


def _nested_validators(annotation: Any, seen: set[Any]) -> Iterator[Any]:
    """Yield the validators in an annotation: of each model in it once, and of what is annotated within lists and such."""
    if isinstance(annotation, type) and hasattr(annotation, "__pydantic_fields__"):
        if annotation not in seen:
            seen.add(annotation)
            yield from ((annotation.__qualname__, *rule) for rule in _own_validators(annotation))
            for info in _fields(annotation):
                yield from _nested_validators(info.annotation, seen)
        return
    named = annotation if hasattr(annotation, "__value__") else get_origin(annotation)
    if hasattr(named, "__value__") and named not in seen:  # the name of a type, as of type T = …
        seen.add(named)
        yield from _nested_validators(named.__value__, seen)
    for part in get_args(annotation):
        if hasattr(part, "func"):
            yield type(part).__name__, part.func
        yield from _nested_validators(part, seen)


def _fields(model: Any) -> list[Any]:
    """Return the fields of a model in the order of their names."""
    return [info for _, info in sorted(getattr(model, "__pydantic_fields__", {}).items())]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: a function that is not defined yet
        return None


def _names(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _slots(value: Any) -> dict[str, Any]:
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return {name: getattr(value, name, None) for name in names if not name.startswith("__")}


# ── expressions ─────────────────────────────────────────────────────────────────────────────


def expression_digest(expression: pl.Expr) -> str:
    """Return a digest of all that polars would write down of an expression."""
    try:
        text = expression.meta.serialize(format="json")
    except pl.exceptions.PolarsError:
        # A function that cannot be packed cannot be compared either: it counts as another one.
        return uuid.uuid4().hex
    return digest(json.dumps(_plain(json.loads(text)), sort_keys=True))


def _plain(tree: Any, key: str = "") -> Any:
    """Replace the functions packed in an expression by what they do: how they are packed may vary."""
    if isinstance(tree, dict):
        return {name: _plain(item, name) for name, item in tree.items()}
    if isinstance(tree, list):
        if len(tree) >= _BYTES_MIN and all(type(n) is int and 0 <= n < 256 for n in tree):
            data = bytes(tree)
            return _function(data) if key in _FUNCTIONS else digest(data)
        return [_plain(item) for item in tree]
    return tree


def _function(packed: bytes) -> str:
    """Unpack a function that polars packed just now, in this process; give the digest of what it does."""
    return code_digest(pickle.loads(packed[packed.index(_PICKLE) :]))  # noqa: S301 - see above
