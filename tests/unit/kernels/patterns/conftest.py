"""Matchers run in Python here, however long it takes: compiling them takes longer than these tests."""

import math

import pytest

from millstream.kernels.patterns import compiled


@pytest.fixture(autouse=True)
def in_python(monkeypatch):
    monkeypatch.setattr(compiled, "PYTHON_CPU_S_MAX", math.inf)
    monkeypatch.setattr(compiled, "PYTHON_CPU_S_MAX_IF_KEPT", math.inf)
    monkeypatch.setattr(compiled._Spent, "loaded", set())
