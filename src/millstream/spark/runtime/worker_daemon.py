"""The parent of Spark's Python workers: imports once what each of them would import for itself.

Spark forks its workers from a daemon, which imports little; a worker then spends some two seconds of CPU on
imports. Imported before the fork, the modules cost that once per daemon, and the workers share the memory.
These imports start no thread, so forking stays safe. The processes that plan sources are forked, too: see
``fork_server.py``.
"""

from __future__ import annotations

import gc
import sys

from pyspark import daemon

from millstream.spark.runtime.fork_server import start_fork_server

_WORKERS = "pyspark.worker"  # the daemon is started for other, short-lived kinds of worker, too


def load_for_workers() -> None:
    """Import what the source and the stages use, and what PySpark uses to carry their rows."""
    import pyarrow as pa  # noqa: PLC0415 - only in the daemon that needs it

    import millstream.spark.source_spec  # noqa: PLC0415
    import millstream.spark.stage_tasks  # noqa: F401, PLC0415

    pa.array([0])  # makes pyarrow load pandas now, as its first conversion in each worker would
    # PySpark collects garbage after every task. The imported modules are never garbage, and traversing
    # them took an eighth of a worker's time.
    gc.freeze()


if __name__ == "__main__":
    if _WORKERS in sys.argv:
        load_for_workers()
        start_fork_server()
    daemon.manager()
