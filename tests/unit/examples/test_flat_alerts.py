"""The example of stored searches, in process: the matches are those of trying every alert on every flat."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from millstream import testing
from millstream.testing import Watermark

FOLDER = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("flat_alerts", FOLDER / "flat_alerts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["flat_alerts"] = module  # where a dataclass looks its types up
    spec.loader.exec_module(module)
    return module


def test_the_matches_of_flats_are_as_by_trying_all_alerts(example):
    wanted, offered = example.wishes(300), list(example.flats(60))
    alerts = [example.Alert(n, w.query(), example.NEW_YEAR) for n, w in enumerate(wanted)]
    later = example.NEW_YEAR.replace(year=2027)
    inputs = {
        "alerts": [*alerts, Watermark("alerts", at=later)],
        "flats": [*offered, Watermark("flats", at=later)],
    }
    found = testing.run(example.pipeline("unused"), inputs, batches=3, crash=1)["found"]
    assert example.check(found.select("id", "id_query").rows(), wanted, offered) > 20
