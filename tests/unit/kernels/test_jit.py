"""What is compiled is kept for other processes: never what another version of the code, or of a part of it, has kept."""

import importlib
import subprocess
import sys

import numpy as np
import pytest

from millstream.kernels import jit
from millstream.kernels.decode import layout_scan
from millstream.kernels.patterns import matcher, programs, row_matcher, row_tables, tables

OUTER = """
from kept.inner import OFFSET, Pair, step

def run(pair, out):
    for i in range(len(out)):
        out[i] = step(i) + OFFSET + pair.first
"""
INNER = """
from typing import NamedTuple

OFFSET = {offset}

class Pair(NamedTuple):
    {fields}

def step(i):
    return i * {factor}
"""
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from kept import inner, outer
from millstream.kernels import jit
out = np.zeros(3, np.int64)
kept = jit.is_kept(outer.run, inner, outer, allocates=False, inlined=True)
jit.compiled(outer.run, inner, outer, allocates=False, inlined=True)(inner.Pair(10, 20), out)
print(kept, *out)
"""


def write(folder, *, offset=0, factor=1, fields="first: int; second: int"):
    package = folder / "kept"
    package.mkdir(exist_ok=True)
    (package / "outer.py").write_text(OUTER)
    (package / "inner.py").write_text(INNER.format(offset=offset, factor=factor, fields=fields))


def run(folder):
    done = subprocess.run(
        [sys.executable, "-B", "-c", RUN, str(folder)],
        env={"NUMBA_CACHE_DIR": str(folder / "numba")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_what_is_kept_of_an_older_version_is_not_run_and_damage_is_compiled_anew(tmp_path):
    pytest.importorskip("numba")
    write(tmp_path)
    assert run(tmp_path) == ["False", "10", "11", "12"]
    write(tmp_path, factor=7)
    assert run(tmp_path) == ["False", "10", "17", "24"]
    write(tmp_path)
    for file in tmp_path.glob("numba/*/*.nbc"):
        file.write_bytes(b"")
    assert run(tmp_path) == ["True", "10", "11", "12"]


def named(folder, monkeypatch, **version):
    write(folder, **version)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("kept", "kept.inner", "kept.outer"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    outer, inner = importlib.import_module("kept.outer"), importlib.import_module("kept.inner")
    return jit._kept_name.__wrapped__(outer.run, (inner,), allocates=False, inlined=True)


def test_what_is_kept_is_named_by_functions_constants_and_fields(tmp_path, monkeypatch):
    version = {}
    names = [named(tmp_path, monkeypatch, **version)]
    for version in (
        {"offset": 1},
        {"factor": 2},
        {"fields": "second: int; first: int"},
        {"offset": "np.int64(0)"},
    ):
        text = INNER if "np" not in str(version) else "import numpy as np\n" + INNER
        monkeypatch.setitem(globals(), "INNER", text)
        names.append(named(tmp_path, monkeypatch, **version))
        monkeypatch.undo()
    assert len(set(names)) == len(names)
    assert named(tmp_path, monkeypatch) == names[0]


@pytest.mark.parametrize(
    ("function", "modules"),
    [
        (matcher.match_keys, (programs, matcher)),
        (row_matcher.match_row_patterns, (programs, matcher, row_matcher)),
    ],
)
def test_all_that_the_matchers_are_given_and_use_has_a_part_in_the_name(
    function, modules, monkeypatch
):
    def name():
        return jit._kept_name.__wrapped__(function, modules, allocates=False, inlined=True)

    before = name()
    changes = [
        (matcher, "FULL", 77),
        (programs, "ROW_I", 99),
        (programs, "is_true", lambda: None),
        (row_tables.RowWork, "_fields", ("a",)),
        (row_tables.PatternRows, "_fields", ("a",)),
        (tables.Work, "_fields", ("a",)),
        (tables.MatcherRows, "_fields", ("a",)),
    ]
    seen = []
    for place, attribute, value in changes:
        with monkeypatch.context() as changed:
            changed.setattr(place, attribute, value)
            seen.append(name() != before)
    rows = function is row_matcher.match_row_patterns
    assert seen == [True, True, True, rows, rows, True, True]
    assert name() == before


def test_the_scanner_of_json_is_named_by_its_bytes(monkeypatch):
    def name():
        return jit._kept_name.__wrapped__(
            layout_scan.scan_objects, (layout_scan,), allocates=False, inlined=False
        )

    before = name()
    monkeypatch.setattr(layout_scan, "_TRUE", np.frombuffer(b"TRUE", np.uint8))
    assert name() != before
