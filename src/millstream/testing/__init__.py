"""What users test their pipelines with: no services, no clock, and for the most part no JVM.

``run(app, inputs)`` puts rows through a pipeline and gives what came out; :mod:`disk` is a disk
that crashes on command.
"""

from millstream.testing.run import Result, Tick, run

__all__ = ["Result", "Tick", "run"]
