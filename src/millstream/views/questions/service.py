"""Answers questions about one app, from the state that its job has committed.

The job may run in another process, on another machine, or not at all: nothing is asked of it, so questions do not hold
it up. An answer is of one commit. The job removes runs of state as it replaces them, so a run that a manifest names may
be gone when it is to be opened:

===========================================  =======================================================================
a run is missing, and the job                what is done
===========================================  =======================================================================
has committed since the manifests were read  they are read again; a function starts again, from the newer commit, and
                                             what it may read is opened before it is called
has not                                      the state is damaged: that is the error
===========================================  =======================================================================
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunningError
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from millstream.choices import did_you_mean
from millstream.errors import (
    ConfigError,
    CorruptionError,
    MillstreamError,
    RetriableError,
    UserCodeError,
)
from millstream.kernels.errors.user_code import error_reason
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state_query import (
    Bucket,
    QueryTargets,
    StateQuery,
    divide_keys,
    runs_of,
)
from millstream.object_store.place import DESCRIPTION, StatePlace
from millstream.threads import Threads
from millstream.views.position import (
    check_partitions,
    check_topics,
    checked_position,
    is_reached,
)
from millstream.views.questions.answer import Answer
from millstream.views.questions.deadline import Deadline
from millstream.views.questions.key_rows import GivenKeys, key_rows
from millstream.views.questions.position_waits import PositionNotReachedError, PositionWaits
from millstream.views.questions.run_reader import QuestionRuns, RunReader
from millstream.views.questions.state_reader import StateReader
from millstream.views.runs.control_files import active_runs
from millstream.views.schema import JOB
from millstream.views.state_store.program import (
    StoredProgram,
    buckets_of_manifests,
    different_steps,
)
from millstream.views.state_store.reader import CommittedState
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import StoreLocation, open_state_store, state_store_exists

Function = Callable[..., Any]
T = TypeVar("T")
_log = logging.getLogger(__name__)

_THREADS = 8  # questions that are worked on at a time
_WAITING_MAX = 256  # behind those
GRACE_S = 0.1  # in which the thread itself says what it was waiting for
_CLOSE_S = 5.0  # in which questions that are worked on may be answered
_HOUSEKEEPING_S = 5.0


@dataclass(frozen=True)
class _Question(Generic[T]):
    """A question on its way to its answer. It may be worked on several times, until its position is reached."""

    answer: Callable[[], T]
    deadline: Deadline
    at_least: Mapping[str, Any] | None
    future: Future[T] = field(default_factory=Future)

    def is_wanted(self) -> bool:
        """Return whether anybody waits for the answer, who from here on cannot cancel it."""
        return self.future.running() or self.future.set_running_or_notify_cancel()


@dataclass(frozen=True)
class _KnownProgram:
    """What can be asked of a stored program, with its text there."""

    stored: str
    targets: QueryTargets


@dataclass
class AnswerService:
    """Answers questions about one app. Thread-safe; close it when it is not needed any more.

    ``location`` is the app's state store, ``folder`` its folder. ``compile`` gives its plan for keys that are divided in a
    certain way; ``questions`` are its functions, by name. ``partitions_of`` returns how many partitions a topic
    of its log has, or None if that cannot be seen from here.
    """

    app: str
    location: StoreLocation
    folder: Path
    compile: Callable[[Buckets], JobPlan]
    questions: Mapping[str, Function]
    partitions_of: Callable[[str], int | None]
    _store: StateStore | None = None
    _reader: RunReader | None = None
    _known: _KnownProgram | None = None
    _opening: threading.Lock = field(default_factory=threading.Lock)
    _threads: Threads = field(default_factory=lambda: Threads(_THREADS, "millstream questions"))
    _places: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(_THREADS + _WAITING_MAX)
    )
    _kept_house: float = field(default_factory=time.monotonic)
    _closed: bool = False
    _working: int = 0
    _waits: PositionWaits = field(init=False)

    def __post_init__(self) -> None:
        self._waits = PositionWaits(lambda: self._state(()).position)

    def ask(
        self,
        name: str,
        keys: GivenKeys | None,
        key: Mapping[str, Any],
        *,
        deadline: Deadline,
        at_least: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Return the rows of keys of a step or view, or the answer of a question of the app's.

        Args:
            name: What is asked.
            keys: Several keys, in any of the forms of :class:`StateReader`.
            key: One key, or several, by column; of a question, its arguments.
            deadline: Until when the answer is wanted.
            at_least: A position that the answer must reflect, which is waited for.

        Raises:
            ConfigError: nothing of the name can be asked, the keys do not fit, or the app has not run.
            DeadlineError: it took too long, or the position was not reached.
            RetriableError: too many questions are waiting, or the store is away.
            UserCodeError: the question's function failed.
        """
        future = self.submit(
            name, keys, key, deadline=deadline, at_least=at_least, then=lambda answer: answer
        )
        try:
            return future.result(max(0.0, deadline.left_s) + GRACE_S)
        except StillRunningError:
            future.cancel()  # if it has not begun
            deadline.check("it is still being worked on")
            raise

    def submit(
        self,
        name: str,
        keys: GivenKeys | None,
        key: Mapping[str, Any],
        *,
        deadline: Deadline,
        at_least: Mapping[str, Any] | None,
        then: Callable[[Answer], T],
    ) -> Future[T]:
        """Begin to answer, in a thread; the future has what ``then`` makes of the answer. Else as :meth:`ask`."""
        at_least = checked_position(at_least)
        if keys is not None and key:
            raise ConfigError(
                f"The question {name!r} has keys twice: in one argument, and as {', '.join(key)}. Give them once."
            )
        if name in self.questions:
            function = self.questions[name]
            arguments = checked_arguments(name, function, keys, key)
            return self._run(
                _Question(
                    lambda: then(self._call(name, function, arguments, deadline, at_least)),
                    deadline,
                    at_least,
                )
            )
        given = key or keys
        return self._run(
            _Question(
                lambda: then(self._look_up(name, given, deadline, at_least)), deadline, at_least
            )
        )

    def listing(self) -> list[dict[str, Any]]:
        """Return what can be asked, and by what: steps and views with state by key, and the app's questions."""
        functions = [
            {"name": name, "kind": "question", "arguments": parameters_of(function)}
            for name, function in self.questions.items()
        ]
        targets = self._program().targets.by_name
        return [
            *functions,
            *(
                {"name": name, "kind": target.kind, "key": list(target.key_names)}
                for name, target in targets.items()
            ),
        ]

    def close(self) -> None:
        """Refuse what waits, end the threads, and release what is open.

        Questions that are worked on get some seconds to be answered. A function that needs longer goes on in its thread;
        what is open is released when it returns, or never.
        """
        with self._opening:
            self._closed = True
        self._waits.close()
        if self._threads.close(wait_s=_CLOSE_S):
            self._release()
        else:
            _log.warning(
                "Questions to %s were closed, and a function that was asked has not returned within %d s. It goes on in its "
                "thread.",
                self.app,
                _CLOSE_S,
            )

    def _release(self) -> None:
        with self._opening:
            if self._reader is not None:
                self._reader.close()
            if self._store is not None:
                self._store.close()
            self._store = self._reader = None

    # ── in threads, with a deadline ─────────────────────────────────────────────────────────

    def _run(self, question: _Question[T]) -> Future[T]:
        if not self._places.acquire(blocking=False):
            raise RetriableError(
                f"{_THREADS + _WAITING_MAX} questions to {self.app} are worked on or wait. Ask again later."
            )
        question.future.add_done_callback(lambda _: self._places.release())
        self._work_on(question)
        return question.future

    def _work_on(self, question: _Question[Any]) -> None:
        try:
            self._threads.submit(self._attempt, question)
        except RuntimeError:  # they were closed meanwhile
            self._attempt(question)

    def _attempt(self, question: _Question[Any]) -> None:
        """Answer a question, or have it wait for its position."""
        with self._opening:
            self._working += 1
        try:
            if question.is_wanted():
                self._check_open()
                question.future.set_result(question.answer())
        except PositionNotReachedError:
            assert question.at_least is not None, "it has one to reach"
            self._waits.add(question.at_least, question.deadline, lambda: self._work_on(question))
        except BaseException as error:  # noqa: BLE001 - the future raises it
            question.future.set_exception(error)
        finally:
            with self._opening:
                self._working -= 1
                last = self._closed and not self._working
            if last:
                self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise RetriableError(
                f"The questions to {self.app} were closed before this one was answered. Ask again."
            )

    # ── the two kinds of questions ──────────────────────────────────────────────────────────

    def _look_up(
        self,
        name: str,
        given: GivenKeys | None,
        deadline: Deadline,
        at_least: Mapping[str, Any] | None,
    ) -> Answer:
        def wanted(targets: QueryTargets) -> list[Bucket] | None:
            target = self._find(name, targets)
            if given is None and target.key:
                raise ConfigError(
                    f"The question {name!r} gives no key. Give {', '.join(target.key_names)}: of one key a value, or of "
                    "many a list. All rows are for a question of the app's (app.question)."
                )
            if not target.key:
                return None
            return [
                *divide_keys(targets.plan, target, key_rows(target, {} if given is None else given))
            ]

        while True:
            targets, state = self._committed(wanted, deadline, at_least)
            target = self._find(name, targets)
            keys = key_rows(target, {} if given is None else given) if target.key else None
            try:
                query = StateQuery(targets, state.manifests, QuestionRuns(self._runs))
                rows = query.rows(target, keys)
            except CorruptionError:
                self._check_moved(state, deadline)
                continue
            return self._answer(name, rows, state)

    def _find(self, name: str, targets: QueryTargets) -> Any:
        if self.questions and name not in targets.by_name:
            try:
                return targets.find(name)
            except ConfigError as error:
                asked = ", ".join(map(repr, self.questions))
                near = did_you_mean(name, [*self.questions])
                raise ConfigError(f"{error} Questions of the app: {asked}.{near}") from None
        return targets.find(name)

    def _call(
        self,
        name: str,
        function: Function,
        arguments: Mapping[str, Any],
        deadline: Deadline,
        at_least: Mapping[str, Any] | None,
    ) -> Answer:
        again = False
        while True:
            targets, state = self._committed(lambda _: None, deadline, at_least)
            runs = QuestionRuns(self._runs)
            query = StateQuery(targets, state.manifests, runs)
            # Its own: the function may change it, and the answer states the position.
            reader = StateReader(deepcopy(state.position), state.batch_id, query, deadline)
            try:
                if again:
                    for run in runs_of(state.manifests):
                        runs.load(run)
                value = call_question(name, function, reader, arguments)
            except CorruptionError:
                self._check_moved(state, deadline)
                again = True
                continue
            return self._answer(name, value, state)

    def _answer(self, name: str, value: Any, state: CommittedState) -> Answer:
        self._keep_house()
        running = bool(active_runs(self.folder)) if isinstance(self.location, Path) else None
        return Answer(name, value, state.position, state.batch_id, running)

    # ── reading one commit ──────────────────────────────────────────────────────────────────

    def _committed(
        self,
        wanted: Callable[[QueryTargets], Sequence[Bucket] | None],
        deadline: Deadline,
        at_least: Mapping[str, Any] | None,
    ) -> tuple[QueryTargets, CommittedState]:
        """Return the newest commit, with the manifests of some buckets, once it has reached a position.

        Raises:
            PositionNotReachedError: it has not.
        """
        while True:
            known = self._program()
            state = self._state(wanted(known.targets))
            if state.program != known.stored:
                self._known = None
                continue
            if at_least is None or is_reached(state.position, at_least):
                return known.targets, state
            plan = known.targets.plan
            check_topics(at_least, plan.app, {source.topic for source in plan.sources})
            check_partitions(at_least, state.position, self.partitions_of)
            runs = "" if active_runs(self.folder) else ", and it does not run here"
            deadline.check(
                f"{self.app} is at {state.position}{runs}, and {dict(at_least)} was asked for"
            )
            raise PositionNotReachedError

    def _state(self, buckets: Sequence[Bucket] | None) -> CommittedState:
        state = self._opened.committed_state(self.app, JOB, buckets)
        if state is None:
            raise self._has_not_run()
        return state

    def _check_moved(self, state: CommittedState, deadline: Deadline) -> None:
        """Make sure that the job has committed since, so that it has removed a run that was missing.

        Raises:
            CorruptionError: it has not (the one that is handled).
            DeadlineError: there is no time to look again.
        """
        now = self._state(())
        if (now.run, now.batch_id, now.program) == (state.run, state.batch_id, state.program):
            raise  # noqa: PLE0704 - called where it is handled
        deadline.check("the job replaced the state while it was read")

    def _program(self) -> _KnownProgram:
        """Return what can be asked of the program that is stored; it is read again when another one is.

        Raises:
            ConfigError: the app is not declared as the one that has run.
        """
        known = self._known
        if known is None:
            stored = self._state(()).program
            plan = self._plan(StoredProgram.from_json(stored))
            known = self._known = _KnownProgram(stored, QueryTargets(plan))
        return known

    def _plan(self, stored: StoredProgram) -> JobPlan:
        plan = self.compile(buckets_of_manifests(stored))
        now = StoredProgram.of(plan, stored.partitioning)
        if stored.format != now.format:
            raise ConfigError(
                f"The state of {self.app} has format {stored.format}, of another version of Millstream; this version reads "
                f"{now.format}. Ask with the version that runs it."
            )
        if found := different_steps(stored, now):
            raise ConfigError(
                f"{self.app} is not declared as it ran: {'; '.join(found)}. Ask with the program that runs, or deploy this "
                "one first (millstream plan)."
            )
        return plan

    @property
    def _opened(self) -> StateStore:
        self._check_open()
        with self._opening:
            if self._store is None:
                if not state_store_exists(self.location):
                    raise self._has_not_run()
                self._store = open_state_store(self.location, readonly=True)
            return self._store

    @property
    def _runs(self) -> RunReader:
        store = self._opened
        with self._opening:
            if self._reader is None:
                place = StatePlace.from_message(store.description(self.app, DESCRIPTION))
                self._reader = RunReader(self.folder, place)
            return self._reader

    def _has_not_run(self) -> ConfigError:
        return ConfigError(
            f"{self.app} has not committed a batch yet, so there is no state to ask. Run it (millstream run), and ask again."
        )

    def _keep_house(self) -> None:
        """Let go of runs that the job has removed, now and then."""
        if time.monotonic() < self._kept_house + _HOUSEKEEPING_S or self._reader is None:
            return
        self._kept_house = time.monotonic()
        self._reader.keep(run.name for run in runs_of(self._state(None).manifests))


def checked_arguments(
    name: str, function: Function, keys: GivenKeys | None, key: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a question's function.

    Raises:
        ConfigError: they are not those that it takes.
    """
    if keys is not None and not isinstance(keys, Mapping):
        raise ConfigError(
            f"{name!r} is a function, and takes its arguments by name. Give them so, as name=value or in one dict."
        )
    arguments = dict(key or keys or {})
    signature = inspect.signature(function)
    try:
        signature.bind(None, **arguments)
    except TypeError as error:
        takes = ", ".join(parameters_of(function)) or "none"
        gives = ", ".join(arguments) or "none"
        raise ConfigError(
            f"The question {name!r} takes the arguments {takes}, and got {gives} ({error}). Give just those."
        ) from None
    return arguments


def parameters_of(function: Function) -> list[str]:
    """Return the parameters of a question's function, without the state, as text."""
    return [*map(str, inspect.signature(function).parameters.values())][1:]


def call_question(
    name: str, function: Function, reader: StateReader, arguments: Mapping[str, Any]
) -> Any:
    """Return what a question's function answers.

    Raises:
        UserCodeError: it failed; the message has its error.
    """
    try:
        return function(reader, **arguments)
    except MillstreamError:
        raise
    except BaseException as error:  # sys.exit() ends the question, not the program that asks
        if isinstance(error, KeyboardInterrupt) and _is_main_thread():
            raise  # of whoever stops a job that answers requests
        raise UserCodeError(
            f"The question {name!r} failed: {error_reason(error)}. Correct its function, or ask for something else.",
            step=name,
        ) from error


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
