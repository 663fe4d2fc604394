"""Patterns with very many ways on, what a step says of its state, and a matcher that cannot be kept compiled."""

import random

import polars as pl
import pytest
from pattern_run import END, SECOND, NothingToDeclareError, as_table, kernel_of, run

import millstream as ms
from millstream.kernels import jit
from millstream.kernels.operator import BatchContext
from millstream.kernels.patterns import compiled, matcher, programs
from millstream.kernels.patterns.nfa import PatternStep, build_nfa
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.time.watermarks import NO_WATERMARK


def is_(letter):
    return pl.col("v") == letter


def row(at, letter):
    return {"at": at, "v": letter, "n": 0}


def with_alternatives(count, *, greedy):
    pattern = ms.sequence("s", is_("a"))
    for number in range(count):
        ways = [ms.sequence(f"{v}{number}", is_(v)).optional() for v in "bc"]
        pattern = pattern.followed_by(ms.either(*(w.greedy() if greedy else w for w in ways)))
    return pattern.followed_by("e", is_("e")).within("1 hour")


def test_alternatives_that_are_left_out_are_one_way():
    kernel = kernel_of(with_alternatives(25, greedy=False))
    assert max(len(kernel.nfa.leaving(state)) for state in range(51)) == 51
    found = run(kernel, {"x": [row(0, "a"), row(1, "e")]}, 1, random.Random(1))
    assert found == [("x", (("s", 0), ("e", 1)))]


def test_too_many_ways_are_refused():
    assert kernel_of(with_alternatives(4, greedy=True))
    with pytest.raises(NothingToDeclareError, match="ways on from one step"):
        kernel_of(with_alternatives(25, greedy=True))


def test_sixty_optional_steps_fit():
    steps = [PatternStep(f"s{n}", n, "relaxed", optional=n > 0) for n in range(60)]
    assert len(build_nfa(steps).leaving(0)) == 59


def test_the_gauge_counts_rows_of_all_keys_and_not_of_the_last_batch():
    kernel = kernel_of(ms.sequence("a", is_("a")).followed_by("b", is_("b")).within("1 hour"))
    store, stored, gauges = MemoryRunStore(), None, []
    steps = [({"x": [row(0, "a")]}, 5), ({"y": [row(6, "a")]}, 10), ({"y": [row(11, "b")]}, 20)]
    before = NO_WATERMARK
    for rows, until in [*steps, ({}, END // SECOND)]:
        state = OperatorState.from_message(stored, store)
        given = {0: [kernel.prepare(as_table(rows)).table]} if rows else {}
        result = kernel.process(state, given, BatchContext(before, until * SECOND, seed=7))
        stored, before = state.to_message(), until * SECOND
        gauges.append(result.gauges["partial_match_rows"])
    assert gauges == [1.0, 2.0, 1.0, 0.0]


def test_without_a_folder_to_keep_it_in_it_is_compiled_by_each_process(monkeypatch):
    made = []

    class Numba:
        @staticmethod
        def njit(*, cache=False):
            return Numba.without_folder if cache else Numba.for_this_process

        @staticmethod
        def without_folder(function):
            raise RuntimeError(f"cannot cache function {function}: no locator available")

        @staticmethod
        def for_this_process(function):
            made.append(function)
            return function

        @staticmethod
        def register_jitable(function):
            return function

    monkeypatch.setattr(jit, "import_module", lambda _: Numba)
    assert jit._compiled.__wrapped__(matcher.match_keys, (programs, matcher)) is made[0]


def test_a_process_that_has_matched_for_seconds_in_python_goes_on_compiled(monkeypatch):
    compiled_calls = []

    def compile_(function, *_, **__):
        def called(*given):
            compiled_calls.append(function)
            return function(*given)

        return called

    kernel = kernel_of(ms.sequence("a", is_("a")).followed_by("b", is_("b")).within("1 hour"))
    rows = {"x": [row(at, "a") for at in range(5)]}
    monkeypatch.setattr(jit, "is_available", lambda: True)
    monkeypatch.setattr(jit, "compiled", compile_)
    monkeypatch.setattr(compiled._Spent, "cpu_s", 0.0)
    run(kernel, rows, 1, random.Random(1))
    assert not compiled_calls
    spent = compiled._Spent.cpu_s
    assert spent > 0
    monkeypatch.setattr(compiled, "PYTHON_CPU_S_MAX_IF_KEPT", spent)
    monkeypatch.setattr(jit, "is_kept", lambda *_, **__: False)
    run(kernel, rows, 1, random.Random(1))
    assert not compiled_calls
    monkeypatch.setattr(jit, "is_kept", lambda *_, **__: True)
    run(kernel, rows, 1, random.Random(1))
    assert set(compiled_calls) == {matcher.match_keys}
    compiled_calls.clear()
    monkeypatch.setattr(compiled, "PYTHON_CPU_S_MAX_IF_KEPT", 1e9)
    run(kernel, rows, 1, random.Random(1))  # it is loaded
    assert compiled_calls


def test_without_what_was_kept_a_process_matches_longer_in_python(monkeypatch):
    compiled_calls = []

    def compile_(function, *_, **__):
        return lambda *given: (compiled_calls.append(function), function(*given))

    kernel = kernel_of(ms.sequence("a", is_("a")).followed_by("b", is_("b")).within("1 hour"))
    monkeypatch.setattr(jit, "is_available", lambda: True)
    monkeypatch.setattr(jit, "is_kept", lambda *_, **__: False)
    monkeypatch.setattr(jit, "compiled", compile_)
    monkeypatch.setattr(compiled, "PYTHON_CPU_S_MAX", compiled._Spent.cpu_s)
    run(kernel, {"x": [row(0, "a")]}, 1, random.Random(1))
    assert set(compiled_calls) == {matcher.match_keys}


def test_what_an_earlier_process_has_kept_is_seen_by_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not jit.is_kept(matcher.match_keys, programs)
    name = jit._kept_name(matcher.match_keys, (programs,), allocates=True, inlined=False)
    (tmp_path / "patterns_1").mkdir()
    (tmp_path / "patterns_1" / f"matcher.{name}-44.py312.nbi").touch()
    assert jit.is_kept(matcher.match_keys, programs)
    assert not jit.is_kept(matcher.match_keys, programs, inlined=True)
    assert not jit.is_kept(matcher.began_us, programs)
