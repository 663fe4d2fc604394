"""Fault cases 23 and 24 of docs/fault-cases.md: records that fail, and members that are late.

The same with the Java client, which is killed, too: ``tests/broker/test_share_groups.py``.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from broker.broker_process import InProcess
from broker.share_member import ACCEPT, RENEW, Member, prepare, start_and_lag, until

from millstream.broker.protocol.error_codes import ErrorCode
from millstream.log.owner import SOCKET_NAME

SOCKET = shutil.ignore_patterns(SOCKET_NAME)  # of the living; a copy of the folder has none


def test_case_23_a_record_whose_handler_fails_comes_to_an_end(tmp_path: Path) -> None:
    """case 23: and so it does from one life of the broker to the next. A copy of the folder of a broker at work is what its death would leave."""
    counts = []
    for life in range(6):
        with InProcess(tmp_path / str(life)) as broker:
            if not life:
                prepare(
                    broker.address, b"poison", b"good", errors_deadletterqueue_topic_name="dead"
                )
            with Member(broker.address) as ann:
                found = ann.acquire(max_records=1)
                counts += [count for first, _, count in found if not first]
                if life == 5:
                    assert found == [(1, 2, 1)]
                    assert ann.acknowledge((1, 2, ACCEPT)) == 0
                    until(lambda at=broker.address: start_and_lag(at) == (2, 0))
                shutil.copytree(tmp_path / str(life), tmp_path / str(life + 1), ignore=SOCKET)
    assert counts == [1, 2, 3, 4, 5]


def test_case_24_a_lock_expires_and_who_speaks_late_is_refused(tmp_path: Path) -> None:
    """case 24: unless the lock is renewed; and a record that was delivered keeps its count."""
    data = tmp_path / "data"
    with InProcess(data) as broker, contextlib.ExitStack() as stack:
        prepare(broker.address, b"0", b"1", share_record_lock_duration_ms=600)
        eve, bob = (stack.enter_context(Member(broker.address, name)) for name in ("eve", "bob"))
        assert eve.acquire(max_records=2) == [(0, 2, 1)]
        began_s = time.monotonic()
        while time.monotonic() < began_s + 1:
            assert eve.acknowledge((1, 2, RENEW), is_renew_ack=True) == 0
            time.sleep(0.05)
        assert eve.acknowledge((0, 1, ACCEPT)) == ErrorCode.INVALID_RECORD_STATE
        assert bob.acquire(max_records=1) == [(0, 1, 2)]
        assert eve.acknowledge((1, 2, ACCEPT)) == 0
        shutil.copytree(data, tmp_path / "copy", ignore=SOCKET)
    with InProcess(tmp_path / "copy") as broker, Member(broker.address) as ann:
        assert ann.acquire() == [(0, 1, 3)]
