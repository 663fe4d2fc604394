"""Where reading begins: at the first record, the end, a time, or offsets; for programs and for the command line.

A time is that of the first record at it or after it, by the records' timestamps, in each partition; a partition without
one begins at its end. Times are UTC unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from millstream.choices import did_you_mean, format_choices
from millstream.client.reader import Reader
from millstream.errors import ConfigError, OffsetOutOfRangeError
from millstream.record import to_timestamp_ms

StartPosition = str | datetime | Mapping[int, int]
"""``"earliest"``, ``"latest"``, a datetime or its ISO text, or offsets by partition; other partitions begin at their start."""

START_WORDS = ("earliest", "latest")
_TEXTS = (
    "a time such as 2026-11-21T10:00 (UTC, unless it says otherwise), {}, or a partition and an offset, such as "
    "clicks/0/1700"
)


def checked_start(start: StartPosition, what: str) -> StartPosition:
    """Return a position, with an ISO text as a datetime.

    Raises:
        ConfigError: it is none; the message begins with ``what``.
    """
    if isinstance(start, datetime) or (isinstance(start, str) and start in START_WORDS):
        return start
    if isinstance(start, Mapping) and all(map(_is_whole, [*start.keys(), *start.values()])):
        return dict(start)
    if isinstance(start, str):
        try:
            return datetime.fromisoformat(start)
        except ValueError:
            pass
    raise ConfigError(
        f"{what} is {start!r}; give {format_choices(START_WORDS)}, a datetime or its ISO text such as "
        '"2026-11-21T10:00", or offsets by partition such as {0: 17}.'
        + (did_you_mean(start, START_WORDS) if isinstance(start, str) else "")
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def start_offsets(
    reader: Reader, topic: str, start: StartPosition, partitions: Sequence[int], what: str
) -> dict[int, int]:
    """Return the offset at which each of some partitions begins.

    Raises:
        ConfigError: it is no position, or names another partition.
        OffsetOutOfRangeError: an offset is not among those that its partition holds, and not its end.
    """
    start = checked_start(start, what)
    bounds = reader.offsets(topic)
    if isinstance(start, datetime):
        at_ms = first_ms(start)
        return {number: reader.offset_for_time(topic, number, at_ms) for number in partitions}
    if isinstance(start, str):
        return {number: bounds[number][start == "latest"] for number in partitions}
    for number, offset in start.items():
        if number not in partitions:
            raise ConfigError(
                f"{what} names partition {number}, which is not among the partitions to read, "
                f"{sorted(partitions)}; name one of these"
            )
        check_offset(topic, number, bounds[number], offset, what)
    return {number: start.get(number, bounds[number][0]) for number in partitions}


def check_offset(topic: str, number: int, bounds: tuple[int, int], offset: int, what: str) -> None:
    """Refuse an offset that its partition does not hold, and that is not its end.

    Raises:
        OffsetOutOfRangeError: so it is.
    """
    low, end = bounds
    if not low <= offset <= end:
        raise OffsetOutOfRangeError(
            f"{what} is offset {offset} of {topic}/{number}, which holds [{low}, {end}); "
            "start within these",
            start=low,
            end=end,
        )


def first_ms(moment: datetime) -> int:
    """Return the first whole millisecond, as records have them, at a time or after it."""
    return to_timestamp_ms(moment) + bool(moment.microsecond % 1000)


@dataclass(frozen=True)
class LogStart:
    """Where to begin in the topics of a log: at ``offsets``, by topic and partition; in other partitions at ``elsewhere``.

    ``names_only``: nothing was said of other topics than those that are named.
    """

    elsewhere: str | datetime = "earliest"
    offsets: Mapping[tuple[str, int], int] = field(default_factory=dict)
    names_only: bool = False

    @classmethod
    def of_topic(cls, topic: str, start: StartPosition, what: str) -> LogStart:
        """Return where to begin in one topic.

        Raises:
            ConfigError: it is no position.
        """
        start = checked_start(start, what)
        if isinstance(start, Mapping):
            return cls(offsets={(topic, number): offset for number, offset in start.items()})
        return cls(start)

    @classmethod
    def parse(
        cls, texts: Iterable[str], option: str, words: Sequence[str] = START_WORDS
    ) -> LogStart | None:
        """Return what some texts say: a word, a time, or ``topic/partition/offset`` of each partition; None of none.

        Raises:
            ConfigError: a text is none of these, or two are of the same partitions.
        """
        offsets: dict[tuple[str, int], int] = {}
        elsewhere: str | datetime | None = None
        for text in texts:
            found = _parse(text, option, words)
            if not isinstance(found, tuple):
                if elsewhere is not None:
                    what = "two times" if isinstance(found, datetime) else "two places"
                    raise ConfigError(f"{option} has {what}, the second is {text}: give one.")
                elsewhere = found
                continue
            at, offset = found
            if at in offsets:
                raise ConfigError(f"{option} names {at[0]}/{at[1]} twice: give one offset for it.")
            offsets[at] = offset
        if elsewhere is None:
            return cls(offsets=offsets, names_only=True) if offsets else None
        return cls(elsewhere, offsets)

    def check_topics(self, topics: Collection[str], what: str) -> None:
        """Refuse offsets of other topics.

        Raises:
            ConfigError: there are some.
        """
        for topic, number in self.offsets:
            if topic not in topics:
                raise ConfigError(
                    f"{what} names {topic}/{number}, and what is read is {', '.join(sorted(topics))}. Name one of these."
                )

    def named(self, topic: str) -> dict[int, int]:
        """Return the offsets that are named of a topic, by partition."""
        return {number: offset for (name, number), offset in self.offsets.items() if name == topic}

    def text(self, topic: str) -> str:
        """Say where a topic begins."""
        named = ", ".join(f"{n}: {offset}" for n, offset in sorted(self.named(topic).items()))
        if named and self.elsewhere == "earliest":
            return named
        word = self.elsewhere if isinstance(self.elsewhere, str) else self.elsewhere.isoformat()
        return f"{word}, {named}" if named else word

    def offsets_in(self, reader: Reader, topic: str, what: str) -> list[int]:
        """Return the offset at which each partition of a topic begins.

        Raises:
            ConfigError: a partition that is named does not exist.
            OffsetOutOfRangeError: an offset is not among those that its partition holds, and not its end.
        """
        partitions = range(len(reader.offsets(topic)))
        named = self.named(topic)
        found = start_offsets(reader, topic, named, partitions, what)
        if self.elsewhere != "earliest":
            found = start_offsets(reader, topic, self.elsewhere, partitions, what) | named
        return [found[number] for number in partitions]


def asked_start(start: str | datetime | Sequence[str] | None) -> LogStart | None:
    """Return where a run is asked to begin: as one or more texts say it, or at a time; None if it is not asked to.

    Raises:
        ConfigError: a text is no position, or two are of the same partitions.
    """
    if start is None:
        return None
    texts = [start] if isinstance(start, str | datetime) else start
    if not all(isinstance(text, str | datetime) for text in texts):
        raise ConfigError(f"start is {start!r}. Give {_TEXTS.format(', '.join(START_WORDS))}.")
    return LogStart.parse([str(text) for text in texts], "start")


def _parse(
    text: str, option: str, words: Sequence[str]
) -> str | datetime | tuple[tuple[str, int], int]:
    if text in words:
        return text
    topic, slash, rest = text.partition("/")
    partition, _, offset = rest.partition("/")
    if slash and topic and _is_number(partition) and _is_number(offset):
        return (topic, int(partition)), int(offset)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option} is {text!r}: give {_TEXTS.format(', '.join(words))}."
        ) from None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
