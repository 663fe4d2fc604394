"""The test kit for pipelines: without services, without waiting, and mostly without a JVM.

``run(app, inputs)`` runs a pipeline on rows and returns its outputs; between rows, ``Tick`` advances time
and ``Watermark`` says that earlier events are complete. ``replay(app, inputs)`` runs it many times, with
random batches and crashes, and checks that the outputs are the same; it is also a pytest fixture
(:mod:`plugin`). ``replay_incident(folder, file)`` runs a batch again that was captured when it failed. :mod:`disk` is a simulated disk that crashes on command; :mod:`kafka` and :mod:`postgres`
start real servers.
"""

from millstream.testing.incident import replay_incident
from millstream.testing.inputs import Row, Tick, Watermark
from millstream.testing.replay import replay
from millstream.testing.run import Result, run

__all__ = ["Result", "Row", "Tick", "Watermark", "replay", "replay_incident", "run"]
