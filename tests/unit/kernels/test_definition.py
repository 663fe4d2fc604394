"""Descriptions: equal for what means the same, in every process, and different for all else."""

import copyreg
import os
import subprocess
import sys
import textwrap
from functools import cache, partial
from operator import itemgetter

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.kernels.code_digest import code_digest, validators
from millstream.kernels.definition import (
    canonical_text,
    definition_keys,
    describe,
    to_text,
    without_code,
)
from millstream.kernels.windows.assigners import Tumbling

ADDED = 3


def plus(x):
    """Add."""
    return x + ADDED


def compiled(text, **names):
    """Make a function of a text, as if it stood in a file of its own."""
    space = {"__name__": "program", **names}
    exec(textwrap.dedent(text), space)
    return space["f"]


COL = pl.col("a")
UNALIKE = [
    COL,
    pl.col("b"),
    COL + 1,
    COL + 1.0,
    COL.round(1),
    COL.round(2),
    COL.is_in([1, 2]),
    COL.is_in([1, 3]),
    COL.cast(pl.Int64),
    COL.cast(pl.Int64, strict=False),
    COL.cast(pl.Enum(["x", "y"])),
    COL.cast(pl.Enum(["x", "z"])),
    COL.str.strptime(pl.Datetime, "%Y"),
    COL.str.strptime(pl.Datetime, "%y"),
    pl.lit(pl.Series([1, 2])),
    pl.lit(pl.Series([1, 3])),
    COL.map_batches(lambda s: s + 1, return_dtype=pl.Int64),
    COL.map_batches(lambda s: s + 2, return_dtype=pl.Int64),
    pl.fold(pl.lit(0), lambda a, b: a + b, ["a", "b"]),
    pl.fold(pl.lit(0), lambda a, b: a - b, ["a", "b"]),
]


def test_expressions_that_differ_in_any_option_or_function_are_told_apart():
    told = [canonical_text(describe(one)) for one in UNALIKE]
    assert len(set(told)) == len(UNALIKE)


def test_an_expression_that_is_written_again_is_described_alike():
    def made():
        return (
            COL.is_in(["x"]) & (pl.col("b").map_batches(plus, return_dtype=pl.Int64) > 0)
        ).alias("c")

    assert describe(made()) == describe(made())


@pytest.mark.parametrize(
    "again",
    [
        "def f(x):\n    '''Another text.'''\n    return x + N\n",
        "# a comment\n\n\ndef f(x):\n    # another\n    return x + N\n",
    ],
    ids=["docstring", "comments"],
)
def test_what_does_nothing_is_no_part_of_a_function(again):
    first = compiled("def f(x):\n    '''A text.'''\n    return x + N\n", N=3)
    assert code_digest(first) == code_digest(compiled(again, N=3))


class Power(ms.UserAggregate):
    result_type = pl.Float64()

    def __init__(self, exponent):
        self.exponent = exponent

    def zero(self):
        return 0.0

    def add(self, state, value):
        return state + value**self.exponent

    def merge(self, state, other):
        return state + other


class Halved(Power):
    def merge(self, state, other):
        return (state + other) / 2


def closing(n):
    return lambda x: x + n


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (compiled("def f(x): return x + N", N=3), compiled("def f(x): return x + N", N=4)),
        (compiled("def f(x): return x + 3"), compiled("def f(x): return x - 3")),
        (compiled("def f(x, n=1): return x"), compiled("def f(x, n=2): return x")),
        (
            compiled("def g(x): return x\ndef f(x): return g(x)"),
            compiled("def g(x): return -x\ndef f(x): return g(x)"),
        ),
        (
            compiled("def f(x): return [y in {1, 2} for y in x]"),
            compiled("def f(x): return [y in {1, 3} for y in x]"),
        ),
        (closing(1), closing(2)),
        (str.upper, str.lower),
        ({"a": 1}.get, {"a": 2}.get),
        ({"a"}.__contains__, {"b"}.__contains__),
        (itemgetter("a"), itemgetter("b")),
        (partial(plus, 1), partial(plus, 2)),
        (cache(lambda x: x + 1), cache(lambda x: x + 2)),
        (Power(2).add, Power(3).add),
        (
            compiled(
                "from functools import cache\n@cache\ndef g(x): return x\ndef f(x): return g(x)"
            ),
            compiled(
                "from functools import cache\n@cache\ndef g(x): return -x\ndef f(x): return g(x)"
            ),
        ),
    ],
    ids=[
        *("global", "operator", "default", "helper", "inner", "closure"),
        *("built in", "bound to a dict", "bound to a set", "getter", "partial", "cached", "method"),
        "cached helper",
    ],
)
def test_whatever_a_function_does_otherwise_shows(one, other):
    assert code_digest(one) != code_digest(other)


def test_a_function_of_a_module_that_is_not_installed_is_looked_into(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # so that no older one is read

    def digest_with(body):
        (tmp_path / "rules_of_test.py").write_text(f"def rule(x):\n    return {body}\n")
        sys.modules.pop("rules_of_test", None)
        return code_digest(compiled("import rules_of_test\ndef f(x): return rules_of_test.rule(x)"))

    assert digest_with("x + 1") == digest_with("x + 1")
    assert digest_with("x + 1") != digest_with("x + 2")


def test_a_module_of_a_package_is_looked_into_by_its_whole_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # so that no older one is read
    folder = tmp_path / "package_of_test"
    folder.mkdir()
    (folder / "__init__.py").touch()

    def digest_with(factor):
        (folder / "rates.py").write_text(f"FACTOR = {factor}\n")
        for name in ("package_of_test", "package_of_test.rates"):
            sys.modules.pop(name, None)
        text = "import package_of_test.rates\ndef f(x): return x * package_of_test.rates.FACTOR"
        return code_digest(compiled(text))

    assert digest_with(2) == digest_with(2)
    assert digest_with(2) != digest_with(3)


@pytest.mark.parametrize("length", [3, 7, 8, 30])
def test_a_function_shows_however_many_others_lead_to_it(length):
    chain = "\n".join(f"def f{n}(x): return f{n + 1}(x)" for n in range(length))
    one, again, other = (
        code_digest(compiled(f"{chain}\ndef f{length}(x): return x * {factor}\nf = f0"))
        for factor in (2, 2, 3)
    )
    assert one == again != other


def test_functions_that_all_name_each_other_are_read_in_a_moment():
    named = " + ".join(f"f{n}(x)" for n in range(7))
    text = "\n".join(f"def f{n}(x): return {named}" for n in range(7)) + "\nf = f0"
    assert code_digest(compiled(text)) == code_digest(compiled(text))


@pytest.mark.parametrize(
    "made", ["np.int64({})", "np.float32({})", "SimpleNamespace(a={})", "deque([{}])"]
)
def test_a_value_that_is_no_builtin_shows(made):
    text = "import numpy as np\nfrom types import SimpleNamespace\nfrom collections import deque\n"
    one, again, other = (
        code_digest(compiled(f"{text}C = {made.format(value)}\ndef f(x): return x, C"))
        for value in (2, 2, 3)
    )
    assert one == again != other


def test_functions_that_name_each_other_come_to_an_end():
    text = "def f(x): return g(x - 1) if x else 0\ndef g(x): return f(x)"
    assert code_digest(compiled(text)) == code_digest(compiled(text))


def test_an_aggregate_of_the_users_is_its_code_and_what_it_was_made_with():
    assert code_digest(Power(2)) == code_digest(Power(2))
    assert len({code_digest(one) for one in (Power(2), Power(3), Halved(2))}) == 3


PROGRAM = """
import polars as pl
import millstream as ms
from millstream.kernels.definition import canonical_text

from enum import Enum
from functools import lru_cache
from typing import Annotated
import pydantic

WORDS = {"a", "b", "c", "d", "e"}

class Kind(Enum):
    ONE = 1
    TWO = 2

class Row(pydantic.BaseModel):
    a: Annotated[str, pydantic.AfterValidator(lambda v: v.strip())]
    kind: Kind = Kind.ONE
    b: int = 0

    @pydantic.field_validator("b")
    @classmethod
    def positive(cls, value):
        return max(value, 0)

@lru_cache
def checked(x):
    return Row(a=x, kind=Kind.TWO)
N = {"k": (1, 2), "l": 3.5}

class Longest(ms.UserAggregate):
    result_type = pl.Int64()
    def __init__(self): self.words = frozenset(WORDS)
    def zero(self): return 0
    def add(self, state, value): return max(state, len(value) if value in {"x", "yy", "zzz"} else 0)
    def merge(self, state, other): return max(state, other)

def known(x):
    return [y for y in x if y in WORDS] or checked(x) or N

one = pl.col("a").map_elements(known, return_dtype=pl.Int64).is_in([3, 1]).alias("c")
app = ms.App("a", log="x")
s = app.topic("t", Row).stream().filter(one)
s = s.map_frames(lambda f: f.with_columns(z=pl.lit(len(WORDS))))
s.window(ms.session("1 minute"), by="a").agg(n=ms.aggregate(Longest(), "a"), m=ms.sum("b")).view("v")
print(canonical_text([[m.name, m.description] for m in app.plan().program.steps.values()]), *app.plan().program.steps)
"""


def test_a_class_is_the_same_after_its_objects_were_pickled():
    class Kept:
        size = 3

    before = describe(Kept())
    copyreg._slotnames(Kept)  # what pickling an object does: the names are kept in its class
    assert "__slotnames__" in vars(Kept)
    assert describe(Kept()) == before


def test_descriptions_are_the_same_in_every_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said_by = [
        subprocess.run(
            [sys.executable, "-W", "ignore", str(program)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said_by[0] == said_by[1]
    assert "session" in said_by[0]


@given(st.permutations(range(6)))
def test_keys_do_not_depend_on_the_order_of_declaration(order):
    meanings = [
        {"text": "a", "code": "1"},
        {"text": "a", "code": "2"},
        {"text": "b", "code": "1"},
        {"class": "c"},
        {"class": "c", "n": 1},
        {"text": "a", "code": "3"},
    ]
    keys = definition_keys(meanings)
    assert len(set(keys)) == len(keys)
    assert definition_keys([meanings[n] for n in order]) == [keys[n] for n in order]


def test_what_says_the_same_has_one_key_more_for_each():
    first, second = definition_keys([{"class": "c"}, {"class": "c"}])
    assert second == f"{first}#2"


def test_a_description_is_said_in_words():
    told = describe({"n": ms.count(COL > 1), "t": Tumbling(60_000_000)})
    assert to_text(told["n"]) == 'count([(col("a")) > (dyn int: 1)])'
    assert to_text(told["t"]) == "tumbling(size=1 minute, offset=0 seconds)"
    assert "code" not in canonical_text(without_code(told))


NESTED = """
from typing import Annotated

import pydantic

class Inner(pydantic.BaseModel):
    n: int

    @pydantic.field_validator("n")
    @classmethod
    def checked(cls, value):
        return max(value, LEAST)

class Tree(pydantic.BaseModel):
    inner: Inner | None = None
    children: "list[Tree]" = []

class Row(pydantic.BaseModel):
    key: str
    inner: list[Inner]
    words: list[Annotated[str, pydantic.AfterValidator(lambda word: word.STRIP())]]
"""


def nested(least="0", strip="strip"):
    names = {"__name__": "program"}
    exec(NESTED.replace("LEAST", least).replace("STRIP", strip), names)
    return names


def test_validators_of_nested_models_and_within_lists_are_part_of_a_definition():
    def definition(**edits):
        app = ms.App("a", log="x")
        app.topic("t", nested(**edits)["Row"]).stream().view("v", key=["key"])
        return canonical_text(app.plan().program.outputs["v"])

    assert definition() == definition()
    assert len({definition(), definition(least="1"), definition(strip="lstrip")}) == 3


def test_a_model_that_has_itself_within_is_looked_into_once():
    (found,) = validators(nested()["Tree"])
    assert found[:3] == ("Inner", "field_validators", "checked")


CHECKED = """
from typing import Annotated

from pydantic import AfterValidator, BaseModel, field_validator
from typing_extensions import TypeAliasType

Named = TypeAliasType("Named", list[Annotated[int, AfterValidator(lambda value: value + ADDED)]])


class Row(BaseModel):
    key: str
    other: str
    named: Named

    @field_validator(FIELD, mode=MODE)
    @classmethod
    def checked(cls, value):
        return value.strip()
"""


def test_when_a_validator_is_called_is_part_of_a_definition_and_so_is_one_behind_the_name_of_a_type():
    def definition(added="1", field="'key'", mode="'after'"):
        text, names = CHECKED.replace("FIELD", field).replace("MODE", mode), {"__name__": "program"}
        exec(text.replace("ADDED", added), names)
        app = ms.App("a", log="x")
        app.topic("t", names["Row"]).stream().view("v", key=["key"])
        return canonical_text(app.plan().program.outputs["v"])

    assert definition() == definition()
    edits = ({"added": "2"}, {"field": "'other'"}, {"mode": "'before'"})
    assert len({definition(), *(definition(**edit) for edit in edits)}) == 4
