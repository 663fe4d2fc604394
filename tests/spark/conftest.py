"""One Spark session for the tests of a module: each test that starts one finds it running."""

import pytest

from millstream.spark.session import start_session, stop_session


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    session = start_session("tests", folder=tmp_path_factory.mktemp("spark"))
    yield session
    stop_session(session)
