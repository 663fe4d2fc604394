"""What users test their pipelines with: no services, no clock, and for the most part no JVM.

``run(app, inputs)`` puts rows through a pipeline and gives what came out; between rows, ``Tick`` lets
time pass and ``Watermark`` says what is complete. ``replay(app, inputs)`` runs it many times, cut into
batches and crashed at random, and makes sure of one answer; with pytest it is a fixture, too
(:mod:`plugin`). :mod:`disk` is a disk that crashes on command.
"""

from millstream.testing.inputs import Row, Tick, Watermark
from millstream.testing.replay import replay
from millstream.testing.run import Result, run

__all__ = ["Result", "Row", "Tick", "Watermark", "replay", "run"]
