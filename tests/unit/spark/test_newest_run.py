"""A run that was replaced is kept from the state."""

from __future__ import annotations

import pytest

from millstream.errors import FencedError
from millstream.spark.newest_run import announce, require_newest


def test_a_run_goes_on_until_a_newer_one_has_begun(tmp_path):
    runs = tmp_path / "checkpoint" / "runs"
    require_newest(runs, 1)  # of an app that was never run by this version
    announce(runs, 1)
    require_newest(runs, 1)
    announce(runs, 3)
    require_newest(runs, 3)
    with pytest.raises(FencedError, match="Run 1 of the job was replaced by run 3"):
        require_newest(runs, 1)
