"""Answers requests that are rows of a batch, from the state after it: a question that is itself a stream.

The answers are records of a topic, and go there with the fence of their batch. What has no answer becomes a dead letter, which
the state store commits. A batch is repeated after a crash, and a deadline, or a function of the user's, may then say something else:

===============================================  ==================================================================
a crash after                                    leaves
===============================================  ==================================================================
1. some requests were answered                   nothing: they are answered again
2. all outcomes are in the journal               the outcomes: the repeated batch takes them, and asks nothing
3. the topic has the answers                     the same; it finds its fence, and the dead letters are the same
4. the state store committed                     the batch is done; then its journal is removed
===============================================  ==================================================================
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl

from millstream.errors import (
    ConfigError,
    CorruptionError,
    DeadlineError,
    EnvironmentProblem,
    FencedError,
    MillstreamError,
    RetriableError,
)
from millstream.kernels.code_digest import digest
from millstream.kernels.errors.dead_letter_collector import DeadLetterCollector, FailedRows
from millstream.kernels.errors.user_code import plain_value, rows_as_json
from millstream.kernels.frames import ANSWER, ORDER, SPLIT, TIME
from millstream.kernels.plan import JobPlan, QuestionPlan, SinkPlan
from millstream.kernels.state.journal import Journal
from millstream.kernels.state.sorted_runs import RunStore
from millstream.kernels.state_query import Bucket, QueryTargets, StateQuery
from millstream.log.batch import RECORD_BYTES_MAX
from millstream.views.commit.committer import BatchCommitter, BatchResult
from millstream.views.position import merge_positions
from millstream.views.questions.answer import json_of, row_texts
from millstream.views.questions.deadline import Deadline
from millstream.views.questions.key_rows import key_rows
from millstream.views.questions.service import call_question
from millstream.views.questions.state_reader import StateReader

Outcome = tuple[str, str]
"""ANSWERED, and the answer as JSON; or REFUSED, and the reason."""

ANSWERED, REFUSED = "answered", "refused"
_ENTRY = "outcomes"
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_TOGETHER = 1000  # requests whose keys are looked up at once, within one deadline
_OF_THE_STATE = (CorruptionError, RetriableError, EnvironmentProblem, FencedError)


@dataclass(frozen=True)
class StateAfterBatch:
    """The state after a batch that is not committed yet. ``journal`` opens the batch's journal of a key."""

    manifests: Mapping[Bucket, bytes]
    run_store: RunStore
    journal: Callable[[str], Journal]


def check_requests(plan: JobPlan) -> None:
    """Make sure that what requests ask can be asked, and that they have all it takes.

    Raises:
        ConfigError: something cannot be asked, or a column is missing or of another type.
    """
    targets = QueryTargets(plan)
    for sink in plan.answering:
        if not plan.stages:
            raise ConfigError(
                f"{sink.name} has no state to answer from: the app {plan.app!r} has no stateful step. Add one, such as a table."
            )
        question, columns = _question_of(sink), dict(sink.schema)
        function = question.functions.get(question.name)
        if function is not None:
            _check_arguments(sink, function)
            continue
        target = targets.find(question.name)
        missing = [name for name in target.key_names if name not in columns]
        if missing:
            raise ConfigError(
                f"{sink.name} asks by {', '.join(target.key_names)}, and its requests have no column {', '.join(missing)}. "
                f"They have {', '.join(columns)}. Rename one (rename), or make it (with_columns)."
            )
        key_rows(target, pl.DataFrame(schema={name: columns[name] for name in target.key_names}))


def _check_arguments(sink: SinkPlan, function: Callable[..., Any]) -> None:
    columns = [name for name, _ in sink.schema]
    missing = [
        one.name
        for one in _parameters(function)
        if one.default is one.empty
        and one.kind in (one.POSITIONAL_ONLY, *_BY_NAME)
        and (one.name not in columns or one.kind is one.POSITIONAL_ONLY)
    ]
    if missing:
        raise ConfigError(
            f"{sink.name} calls a function that takes {', '.join(missing)} by name, and its requests have the columns "
            f"{', '.join(columns)}. Rename one (rename), or give the parameter a default."
        )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [*inspect.signature(function).parameters.values()][1:]


def _question_of(sink: SinkPlan) -> QuestionPlan:
    assert sink.question is not None, "its rows are requests"
    return sink.question


@dataclass(frozen=True)
class RequestAnswers:
    """Answers the requests of a plan, batch by batch."""

    plan: JobPlan

    @cached_property
    def _targets(self) -> QueryTargets:
        return QueryTargets(self.plan)

    def put(
        self,
        result: BatchResult,
        batch_id: int,
        committer: BatchCommitter,
        state: Callable[[], StateAfterBatch],
    ) -> None:
        """Put answers in the place of a batch's requests, and dead letters for those that have none.

        Args:
            committer: Has the position before the batch, and knows the limits of its outputs.
            state: Gives the state after the batch; it is called if there are requests.

        Raises:
            CorruptionError: the state, or the journal, is damaged.
            RetriableError, EnvironmentProblem: the state cannot be read now.
            UserCodeError, ConfigError, DeadlineError: a request has no answer, and the app stops then
                (``on_error="stop"``).
        """
        asked = [
            sink
            for sink in self.plan.answering
            if sink.name in result.rows and result.rows[sink.name].height
        ]
        if not asked:
            return
        after = state()
        query = StateQuery(self._targets, after.manifests, after.run_store)
        position = merge_positions(committer.position, result.position)
        letters = DeadLetterCollector()
        for sink in asked:
            rows = result.rows[sink.name]
            bytes_max = committer.record_bytes_max(sink.name) or RECORD_BYTES_MAX
            answering = _Answering(
                sink.name, _question_of(sink), query, position, batch_id, bytes_max
            )
            outcomes = answering.outcomes(rows, after.journal(f"answers{digest(sink.name)}"))
            result.rows[sink.name] = _answered(rows, outcomes, answering.question.id)
            refused = [reason for kind, reason in outcomes if kind == REFUSED]
            if refused:
                failed = rows.filter(pl.Series([kind == REFUSED for kind, _ in outcomes]))
                letters.failed += _by_place(FailedRows(sink.name, failed, refused))
                result.step_counts[sink.name].update(emitted=-len(refused), dead=len(refused))
        made = letters.drain_rows(_topics(self.plan))
        if made:
            known = [] if result.dead_letters is None else [result.dead_letters]
            result.dead_letters = pl.concat([*known, *made], how="diagonal")


def _answered(rows: pl.DataFrame, outcomes: list[Outcome], request: str) -> pl.DataFrame:
    """Return the rows of the answers: the id and the text, and what orders them."""
    kept = [name for name in (request, TIME, SPLIT) if name in rows.columns]
    answers = pl.Series(
        ANSWER, [text if kind == ANSWERED else None for kind, text in outcomes], pl.String
    )
    return rows[kept].with_columns(answers).filter(answers.is_not_null())


def _by_place(failed: FailedRows) -> list[FailedRows]:
    """Return failed rows that have a place in the log, and those beside them that have none."""
    if ORDER not in failed.rows.columns or not failed.rows[ORDER].null_count():
        return [failed]
    placed = failed.rows[ORDER].is_not_null()
    reasons = pl.Series(failed.reasons)
    return [
        FailedRows(failed.step, failed.rows.filter(placed), reasons.filter(placed).to_list()),
        FailedRows(
            failed.step, failed.rows.filter(~placed).drop(ORDER), reasons.filter(~placed).to_list()
        ),
    ]


def _topics(plan: JobPlan) -> tuple[str, ...]:
    """Return the topics that are read, by number."""
    return plan.stages[0].topics


@dataclass(frozen=True)
class _Answering:
    """Answers the requests of one output in one batch."""

    step: str
    question: QuestionPlan
    query: StateQuery
    position: Mapping[str, Any]
    batch_id: int
    bytes_max: int  # that the record of an answer may have

    def outcomes(self, rows: pl.DataFrame, journal: Journal) -> list[Outcome]:
        """Return what becomes of each request: what an earlier attempt at the batch has kept, if there was one.

        That attempt may have been of a program that was edited since, in which other rows are requests. Then those that
        it has not are answered now, and all are kept in an entry of their own. No topic has the batch: an edited
        program is refused then.
        """
        asked = _identities(rows)
        kept = journal.read(_ENTRY)
        if kept is None:
            kept = journal.write(_ENTRY, _entry(asked, self._made(rows)))
        found = _taken(asked, kept)
        if None in found:
            name = f"{_ENTRY}-{digest(json.dumps(sorted(asked)))}"
            kept = journal.read(name)
            if kept is None:
                made = self._made(rows.filter(pl.Series([one is None for one in found])))
                kept = journal.write(name, _entry(asked, (one or next(made) for one in found)))
            found = _taken(asked, kept)
        outcomes = [one for one in found if one is not None]
        if len(outcomes) < rows.height:
            raise CorruptionError(
                f"The journal of batch {self.batch_id} has other requests of {self.step!r} than the batch. Nothing of the batch "
                "was committed. Please report this; the log still holds every request."
            )
        return outcomes

    def _made(self, rows: pl.DataFrame) -> Iterator[Outcome]:
        together = 1 if self._function is not None else _TOGETHER
        for some in rows.iter_slices(together):
            yield from self._outcomes(some)

    def _outcomes(self, requests: pl.DataFrame) -> list[Outcome]:
        """Return what becomes of some requests. If they have no answers together, halves of them may."""
        try:
            texts = self._answers(requests)
        except MillstreamError as error:
            if isinstance(error, _OF_THE_STATE) and not isinstance(error, DeadlineError):
                raise
            if requests.height == 1:
                return [self._refused(error)]
            middle = requests.height // 2
            return [*self._outcomes(requests[:middle]), *self._outcomes(requests[middle:])]
        head = json.dumps(
            {"name": self.question.name, "position": self.position, "batch_id": self.batch_id},
            ensure_ascii=False,
        )
        return [
            self._answered(request, f'{{"request": {request}, {head[1:-1]}, "answer": {text}}}')
            for request, text in texts
        ]

    def _answered(self, request: str, record: str) -> Outcome:
        """Return an answer, unless its record is larger than its topic allows: that would stop the job."""
        size = len(record.encode()) + len(request.encode())
        if size <= self.bytes_max:
            return ANSWERED, record
        return self._refused(
            ConfigError(
                f"The answer is a record of {size:,} bytes, and its topic takes {self.bytes_max:,}. Ask for less, or raise the "
                "topic's max.message.bytes, and send the request again."
            )
        )

    def _refused(self, error: MillstreamError) -> Outcome:
        if self.question.stops:
            raise error
        # Half of a surrogate pair, which an error of the user's may have, cannot be stored.
        return REFUSED, str(error).encode(errors="backslashreplace").decode()

    def _answers(self, requests: pl.DataFrame) -> list[tuple[str, str]]:
        """Return the ids of requests, and the answers, as JSON.

        Raises:
            MillstreamError: one of them has none.
        """
        name = self.question.name
        deadline = Deadline.of(self.question.deadline_us / 1e6)
        if requests[self.question.id].null_count():
            raise ConfigError(
                f"The request has no {self.question.id}, by which its answer is known. Give each request one."
            )
        ids = [*map(_id_text, _values(requests[self.question.id]))]
        if self._function is None:
            texts = self._looked_up(requests)
        else:
            # Its own: the function may change it, and all answers state the position.
            position = deepcopy(self.position)
            reader = StateReader(position, self.batch_id, self.query, deadline)
            arguments = {
                one.name: _values(requests[one.name])[0]
                for one in _parameters(self._function)
                if one.name in requests.columns and one.kind in _BY_NAME
            }
            texts = [json_of(call_question(name, self._function, reader, arguments), name)]
        deadline.check("its answer came too late")
        return [*zip(ids, texts, strict=True)]

    def _looked_up(self, requests: pl.DataFrame) -> list[str]:
        """Return the rows of each request's key, as JSON."""
        name, query = self.question.name, self.query
        target = query.targets.find(name)
        if not target.key:
            return [json_of(query.rows(target, None), name)] * requests.height
        keys = key_rows(target, requests[list(target.key_names)])
        found = query.rows_of_each(target, keys)
        if found is None:
            return [json_of(query.rows(target, keys[n : n + 1]), name) for n in range(keys.height)]
        of_key: dict[int, list[str]] = defaultdict(list)
        for number, text in zip(found.numbers, row_texts(found.rows, name), strict=True):
            of_key[number].append(text)
        return [f"[{', '.join(of_key[number])}]" for number in found.asked]

    @property
    def _function(self) -> Callable[..., Any] | None:
        return self.question.functions.get(self.question.name)


def _id_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=plain_value)


def _values(column: pl.Series) -> list[Any]:
    """Return a column's values as Python has them.

    Raises:
        ConfigError: it cannot hold one: of times, its own go from the year 1 to 9999.
    """
    try:
        return column.to_list()
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"The request has a {column.name} that Python cannot hold ({error}). Give it a time from the year 1 to 9999."
        ) from error


def _identities(rows: pl.DataFrame) -> list[str]:
    """Return what tells requests apart, however the batch's rows are ordered: place and content."""
    texts = rows_as_json(rows)
    if ORDER not in rows.columns:
        return texts
    return [f"{place} {text}" for place, text in zip(rows[ORDER].to_list(), texts, strict=True)]


def _entry(identities: Sequence[str], outcomes: Iterator[Outcome]) -> bytes:
    return json.dumps([*zip(identities, outcomes, strict=True)]).encode()


def _taken(identities: Sequence[str], entry: bytes) -> list[Outcome | None]:
    """Return the outcomes that an entry has for requests, each for one; None for those that it has not."""
    kept: dict[str, deque[Outcome]] = defaultdict(deque)
    for identity, (kind, text) in json.loads(entry):
        kept[identity].append((kind, text))
    return [kept[identity].popleft() if kept[identity] else None for identity in identities]
