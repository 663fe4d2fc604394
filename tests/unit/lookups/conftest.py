import pytest

from millstream.lookups.idle import IDLE


@pytest.fixture(autouse=True)
def _no_connections_are_left():
    yield
    IDLE.close()
