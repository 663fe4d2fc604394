"""A producer as the coordinator knows it: its id, its producer epoch, and the one before."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Literal, NamedTuple

from millstream.errors import ConfigError, ProducerFencedError

PRODUCER_EPOCH_MAX = (1 << 15) - 1
TIMEOUT_MS = 60_000
TIMEOUT_MS_MAX = 15 * 60_000


class ProducerIdentity(NamedTuple):
    """What a producer stamps into its batches."""

    producer_id: int
    producer_epoch: int


NOBODY = ProducerIdentity(-1, -1)


class TransactionDescription(NamedTuple):
    """A producer with a transactional id; ``open_since_ms`` is None while no transaction is open."""

    transactional_id: str
    identity: ProducerIdentity
    timeout_ms: int
    open_since_ms: int | None


@dataclass(slots=True)
class TransactionMetadata:
    """A producer as this owner knows it.

    ``previous`` is the identity before the current one, if no other producer has had the name between them: a
    producer that names it as its own gets the current one. ``begin_pending`` says that a transaction was
    requested, and could not be begun.
    """

    producer_id: int
    transactional_id: str | None
    producer_epoch: int
    timeout_ms: int
    in_process: bool
    previous: ProducerIdentity | None = None
    begin_pending: bool = False
    state: Literal["idle", "open", "ending"] = "idle"
    started_ms: int = 0  # by the wall clock, for descriptions
    began_ms: int = 0  # by the monotonic clock, for the timeout
    timed_out_epoch: int = -1

    @property
    def identity(self) -> ProducerIdentity:
        """What it stamps into its batches now."""
        return ProducerIdentity(self.producer_id, self.producer_epoch)

    @property
    def following_epoch(self) -> int:
        """The next producer epoch.

        It is higher by one, and by one more if a transaction is aborted with it: so the end by a timeout,
        which the producer does not know of, differs from that by a newer producer.
        """
        return self.producer_epoch + (1 if self.state == "idle" else 2)

    def has_followed(self, identity: ProducerIdentity | None) -> bool:
        """Return whether it was given to the producer that names this identity as its own, and can be again."""
        is_before = identity is not None and identity == self.previous
        return is_before and self.producer_epoch < PRODUCER_EPOCH_MAX

    def describe(self, name: str) -> TransactionDescription:
        """Return its description."""
        since_ms = None if self.state == "idle" else self.started_ms
        return TransactionDescription(name, self.identity, self.timeout_ms, since_ms)


def next_producer_id(connection: sqlite3.Connection) -> int:
    """Return a producer id that none has had, within a commit of control.db."""
    (producer_id,) = connection.execute(
        "INSERT INTO folder VALUES ('producer_id', 1) "
        "ON CONFLICT (key) DO UPDATE SET value = value + 1 RETURNING value"
    ).fetchone()
    return int(producer_id)


def check_registration(transactional_id: str | None, timeout_ms: int) -> None:
    """Check a transactional id and a timeout.

    Raises:
        ConfigError: one of them is not possible.
    """
    if transactional_id is not None and not transactional_id:
        raise ConfigError("transactional_id is empty; give a name, or None")
    if not 0 < timeout_ms <= TIMEOUT_MS_MAX:
        raise ConfigError(
            f"a transaction timeout of {timeout_ms} ms is not possible; give 1 to "
            f"{TIMEOUT_MS_MAX} ms"
        )


def identity_or_none(producer_id: int, producer_epoch: int) -> ProducerIdentity | None:
    """Return an identity from a row of control.db."""
    return None if producer_id < 0 else ProducerIdentity(producer_id, producer_epoch)


def check_not_replaced(known: TransactionMetadata | None, identity: ProducerIdentity) -> None:
    """Reject a producer that another one of its name has replaced.

    Raises:
        ProducerFencedError: ``identity`` is neither the current one nor the one before.
    """
    if known is None or identity not in (known.identity, known.previous):
        raise ProducerFencedError(
            f"producer {identity.producer_id} with producer epoch {identity.producer_epoch} has been replaced "
            "by a newer one; close this one"
        )
