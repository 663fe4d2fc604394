"""What a question's function reads the state of a job with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.state_query import StateQuery
from millstream.views.questions.deadline import Deadline
from millstream.views.questions.key_rows import GivenKeys, key_rows


@dataclass(frozen=True)
class StateReader:
    """The state of a job at one position of the log. All that is read with it is of that position.

    Attributes:
        position: Topic → partition → offset of the next record.
        batch_id: The last batch that the state reflects.
    """

    position: Mapping[str, Any]
    batch_id: int
    _query: StateQuery
    _deadline: Deadline | None = None

    def rows(self, name: str, keys: GivenKeys | None = None, /, **key: Any) -> pl.DataFrame:
        """Return the rows of some keys of a step, or of a view by the step that makes its rows.

        A key without rows has none here; rows come in no particular order, and each key once however often it is given.

        Args:
            name: The step or view.
            keys: A frame with the columns of the key; a list or column of values, if the key is one column;
                or a list of dicts. Without keys, the rows of all.
            key: The same, column by column: ``user=["ann", "bob"]``.

        Raises:
            ConfigError: there is no such step, it has other keys, or a value does not fit its column.
            DeadlineError: the deadline of the question has passed.

        Example::

            followers = state.rows("followers", user=["ann", "bob"])
        """
        if self._deadline is not None:
            self._deadline.check(f"its function came to read {name!r}")
        if keys is not None and key:
            raise ConfigError(
                f"rows({name!r}) has keys twice: in one argument, and as {', '.join(key)}. Give them once."
            )
        target = self._query.targets.find(name)
        given: GivenKeys | None = key or keys
        return self._query.rows(target, None if given is None else key_rows(target, given))
