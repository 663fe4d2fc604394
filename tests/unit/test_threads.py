from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest
from after_main_thread import run_after_the_main_thread

from millstream.threads import Threads


def test_one_thread_does_what_it_is_given_in_its_order() -> None:
    done: list[int] = []
    with Threads(1, "test") as threads:
        for number in range(100):
            threads.submit(done.append, number)
    assert done == list(range(100))


def test_several_threads_work_at_the_same_time_and_not_more_than_were_asked_for() -> None:
    meeting = threading.Barrier(3, timeout=60)
    with Threads(3, "test") as threads:
        wait([threads.submit(meeting.wait) for _ in range(9)])
        names = {threads.submit(lambda: threading.current_thread().name).result() for _ in range(9)}
    assert names <= {"test_0", "test_1", "test_2"}


def test_a_thread_that_is_idle_is_given_work_before_another_one_is_started() -> None:
    def name() -> str:
        return threading.current_thread().name

    with Threads(4, "test") as threads:
        first = threads.submit(name).result()
        while not threads._free:  # its result is known just before it waits
            pass
        assert threads.submit(name).result() == first == "test_0"


def test_an_error_goes_to_who_waits_for_the_result_and_the_thread_goes_on() -> None:
    with Threads(1, "test") as threads:
        with pytest.raises(ZeroDivisionError):
            threads.submit(divmod, 1, 0).result()
        assert threads.submit(divmod, 7, 2).result() == (3, 1)


def test_what_is_cancelled_before_its_turn_is_not_done() -> None:
    go, done = threading.Event(), []
    with Threads(1, "test") as threads:
        threads.submit(go.wait, 60)
        given_up = threads.submit(done.append, "given up")
        assert given_up.cancel()
        go.set()
        assert threads.submit(done.append, "kept").result() is None
    assert done == ["kept"]


def test_a_close_waits_for_what_was_given_and_nothing_is_taken_after_it() -> None:
    go, done = threading.Event(), []
    threads = Threads(1, "test")
    threads.submit(go.wait, 60)
    threads.submit(done.append, 1)
    go.set()
    threads.close()
    assert done == [1]
    with pytest.raises(RuntimeError, match="test is closed"):
        threads.submit(done.append, 2)
    threads.close()


def test_work_is_taken_when_the_main_thread_has_ended() -> None:
    run_after_the_main_thread(
        """
        from millstream.threads import Threads
        with Threads(2, "test") as threads:
            assert [threads.submit(abs, -n).result() for n in range(5)] == [0, 1, 2, 3, 4]
        """
    )


def test_no_call_waits_behind_another_while_there_may_be_more_threads():
    for _ in range(30):  # it depends on when the first thread looks for work
        first_may_end = threading.Event()
        with Threads(2, "millstream test") as threads:
            first = threads.submit(first_may_end.wait)
            try:
                assert threads.submit(lambda: 7).result(timeout=30) == 7
            finally:
                first_may_end.set()
        assert first.result()
