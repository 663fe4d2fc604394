"""One Spark session for the tests of a module: each test that starts one finds it running."""

import sys
from pathlib import Path

import pytest

from millstream.spark.session import start_session, stop_session

sys.path.insert(
    0, str(Path(__file__).parent)
)  # for programs of tests that are modules of their own


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    session = start_session("tests", folder=tmp_path_factory.mktemp("spark"))
    yield session
    stop_session(session)
