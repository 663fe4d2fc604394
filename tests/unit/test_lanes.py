"""The lanes of the tests can be taken: what they change in the code is still there under its name."""

import lane
import pytest

pytestmark = [
    pytest.mark.not_in_lane(name, "what a lane changes is changed there already")
    for name in lane.names()
]


@pytest.mark.parametrize("name", lane.names())
def test_what_a_lane_changes_is_there(name, monkeypatch):
    with monkeypatch.context() as patch:
        lane.load(name)(patch)
