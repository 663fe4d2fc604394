"""What Spark does with tasks, in this process."""

from __future__ import annotations

from contextlib import suppress

from millstream.errors import MillstreamError
from millstream.spark.frame_blocks import NumberedFrame


class Attempts:
    """Tries tasks again, runs them twice, and lets some go on too late.

    ``step`` is called before each attempt.
    """

    partitions = 3

    def __init__(self, generator, step):
        self.generator = generator
        self.step = step
        self.late = []

    def size_bytes(self, rows):
        return sum(len(row.frame) for row in rows)

    def map(self, function, rows):
        parts = [[] for _ in range(3)]
        for number, row in enumerate(rows):
            parts[self.generator.randrange(3)].append(NumberedFrame(number, row))
        return self._run(function, parts)

    def map_buckets(self, function, rows):
        buckets = {}
        for row in rows:
            buckets.setdefault(row.bucket, []).append(row)
        return self._run(
            function, [[NumberedFrame(*each) for each in enumerate(b)] for b in buckets.values()]
        )

    def _run(self, function, parts):
        out = []
        for part in filter(None, parts):
            for fails in self.generator.choices([True, False], k=self.generator.randrange(3)):
                self.step()
                attempt = function(iter(part))
                if fails:
                    next(iter(attempt), None)
                else:
                    list(attempt)
            self.step()
            out += list(function(iter(part)))
            if self.generator.random() < 0.5:
                self.late.append((function, part))
        return out

    def wake(self):
        """Have attempts that were held up go on; a database may have their tables no more."""
        for function, part in self.late:
            with suppress(MillstreamError):
                list(function(iter(part)))
        self.late.clear()
