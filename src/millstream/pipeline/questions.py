"""Questions to an app: asked of its state from any process that has the program, and served to those that have not."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from millstream.access.tls import certificate_of
from millstream.access.tokens import tokens_of
from millstream.client.open import open_reader
from millstream.durations import Duration
from millstream.errors import ConfigError, MillstreamError
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.notebook.cells import cell_run, is_newest
from millstream.pipeline.declaration import AppDeclaration
from millstream.views.questions.answer import Answer
from millstream.views.questions.deadline import Deadline
from millstream.views.questions.key_rows import GivenKeys
from millstream.views.questions.server import QuestionServer, serve_questions
from millstream.views.questions.service import AnswerService
from millstream.views.store_location import StoreLocation

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class QueryableApp(AppDeclaration):
    """The part of an app that is about questions."""

    _service: AnswerService | None = field(default=None, init=False, repr=False)
    _question_cells: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Where the app keeps its state."""

    @property
    @abstractmethod
    def state_store(self) -> StoreLocation:
        """Where the app's state store is."""

    @abstractmethod
    def plan(self, buckets: Buckets | None = None) -> JobPlan:
        """Compile the part of the graph that leads to the outputs."""

    def drop_replaced(self) -> None:
        """Forget outputs and questions that cells of a notebook declared before they ran again."""
        super().drop_replaced()
        for name, cell in [*self._question_cells.items()]:
            if not is_newest(cell):
                del self.questions[name], self._question_cells[name]

    def question(self, name: str) -> Callable[[Function], Function]:
        """Declare a function as a question: it is called with the state as of one position, and its arguments.

        It may gather rows of any number of keys and steps. It should change nothing outside: while the job replaces what
        it reads, it is called again, with a newer state. It is no part of the app's results, and may change at any time.

        Args:
            name: What :meth:`ask` is given. It has the app's steps' and views' names beside it.

        Raises:
            ConfigError: the name is taken, or the function takes no state.

        Example::

            @app.question("reach")
            def reach(state: ms.StateReader, url: str) -> int:
                by = state.rows("tweeters", url=url)["user"]
                return state.rows("followers", by)["follower"].n_unique()
        """

        def declare(function: Function) -> Function:
            self.drop_replaced()
            if name in self.questions or any(output.name == name for output in self.outputs):
                raise ConfigError(
                    f"The question {name!r} is declared twice, or is the name of an output. Choose another name."
                )
            if not inspect.signature(function).parameters:
                raise ConfigError(
                    f"The question {name!r} has a function without parameters. The first is the state: def answer(state, …)."
                )
            if inspect.iscoroutinefunction(function):
                raise ConfigError(
                    f"The question {name!r} is an async function, and is called in a thread. Declare it with def alone."
                )
            self.questions[name] = function
            self._question_cells[name] = cell_run()
            return function

        return declare

    def ask(
        self,
        name: str,
        keys: GivenKeys | None = None,
        /,
        *,
        deadline: Duration = "5 seconds",
        at_least: Mapping[str, Any] | None = None,
        **key: Any,
    ) -> Answer:
        """Answer a question from the state that the app's job has committed, wherever that runs, and whether it runs.

        Args:
            name: A stateful step, by its name; a view, by the step that makes its rows; or a question of
                :meth:`question`. Of an open window the answer is its value so far, which may not have been emitted yet.
            keys: Many keys: a frame with the columns of the key, a list of values if that is one column, or a list of
                dicts. Of a question its arguments, as a dict.
            deadline: How long the answer may take, one hour at most.
            at_least: A position that it must reflect, such as ``{"clicks": {"0": 17}}``: topic → partition → offset of the
                next record. It is waited for, so one can ask for what one has just written.
            key: One key, or many by column: ``ad=7``, ``ad=[7, 8]``. Of a question its arguments.

        Raises:
            ConfigError: there is no such step, the key has other columns or types, or the app has not run.
            DeadlineError: the answer did not come in time.
            UserCodeError: the question's function failed.
        Guarantees: the rows are those of one commit, whose position the answer says; the job is not held up.

        Example::

            app.ask("per_minute", ad=7).rows
        """
        ends = Deadline.given(deadline, "The deadline")
        return self._answers().ask(name, keys, key, deadline=ends, at_least=at_least)

    @contextmanager
    def serve_questions(
        self,
        listen: str = "127.0.0.1:8402",
        *,
        token: str | None = None,
        token_file: Path | str | None = None,
        tls_cert: Path | str | None = None,
        tls_key: Path | str | None = None,
        insecure: bool = False,
    ) -> Iterator[QuestionServer]:
        """Answer questions over HTTP until the block ends: ``POST /ask/NAME``. See docs/ask.md.

        The app may run in the block, in another process, or not at all; any number of processes may serve.

        Args:
            listen: ``HOST:PORT``; port 0 takes one that is free.
            token: What requests must carry as ``Authorization: Bearer …``.
            token_file: A file of tokens, of which they must carry one: see ``millstream token``. Not with ``token``.
            tls_cert: The certificate, as PEM: clients must connect with TLS. A renewed one is used without a restart.
            tls_key: Its private key, if that is not in the same file.
            insecure: Allow an address that other machines reach, without a token.

        Raises:
            EnvironmentProblem: The extra ``ui`` is not installed.
            ConfigError: The address is invalid, is in use, or could be reached by other machines.
        """
        tokens = tokens_of(token, token_file)
        certificate = certificate_of(
            None if tls_cert is None else Path(tls_cert), None if tls_key is None else Path(tls_key)
        )
        with serve_questions(
            self._answers(), listen, tokens=tokens, certificate=certificate, insecure=insecure
        ) as serving:
            yield serving

    def close_questions(self) -> None:
        """Release the threads, connections and files that :meth:`ask` keeps for the next question."""
        service, self._service = self._service, None
        if service is not None:
            service.close()

    def what_can_be_asked(self) -> list[dict[str, Any]]:
        """Return the steps and views that can be asked, each with its key, and the questions with their arguments.

        Raises:
            ConfigError: the app has not run, or is not declared as it ran.
        """
        return self._answers().listing()

    def _answers(self) -> AnswerService:
        """Return what answers, as long as the app is over the same log."""
        known = self._service
        if known is None or known.location != self.state_store:
            known = self._service = AnswerService(
                self.name,
                self.state_store,
                self.folder,
                self.plan,
                self.questions,
                self._partitions_of,
            )
        return known

    def _partitions_of(self, topic: str) -> int | None:
        """Return how many partitions a topic has; None if the log is not to be seen from here: answers do not need it."""
        try:
            with closing(open_reader(self.log)) as reader:
                return len(reader.offsets(topic))
        except MillstreamError:
            return None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what answers: it belongs to this process, and functions that Spark sends away may know the app."""
        return {**vars(self), "_service": None}
