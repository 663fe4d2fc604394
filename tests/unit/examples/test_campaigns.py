"""The example of campaigns in process: a database of SQLite is captured, and its pipeline run over the log."""

import importlib.util
import sys
from pathlib import Path

import pytest
from captured_log import inputs_of

import millstream as ms
from millstream import testing

PATH = Path(__file__).resolve().parents[3] / "examples" / "campaigns.py"
CAPTURED = ("shop.main.orders", "shop.transaction")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("campaigns", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["campaigns"] = module  # where a dataclass looks its types up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["campaigns"]


@pytest.mark.parametrize("batches", [1, 3, 8])
def test_the_view_is_what_the_database_says_after_its_corrections(example, tmp_path, batches):
    url, folder = f"sqlite:///{tmp_path}/shop.db", tmp_path / "log"
    example.execute(url, example.CREATE, *example.PLACED)
    shop = ms.capture(url, tables="orders", to=folder, name="shop")
    shop.run(until="caught-up")
    example.execute(url, *example.CORRECTED)
    shop.run(until="caught-up")
    clicks = [*example.CLICKS, example.LATE_CLICK]
    with ms.connect(folder) as log:
        inputs = {**inputs_of(log, *CAPTURED), "clicks": clicks}
    out = testing.run(
        example.pipeline(folder, shop), inputs, batches=batches, partitions=1, crash=1
    )
    found = sorted(out["revenue"].select("campaign", "orders", "cents").rows())
    assert found == [("autumn", 1, 100), ("shoes", 1, 700), ("spring", 2, 6500)]
    assert found == example.revenue(
        example.execute(url, "SELECT id, click, cents FROM orders"), clicks
    )
