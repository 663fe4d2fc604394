"""Loading what needs PySpark, with a remedy where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millstream.errors import EnvironmentProblem

_OF_THE_EXTRA = ("pyspark", "py4j", "pandas", "google", "cloudpickle")


@contextmanager
def spark_extra() -> Iterator[None]:
    """Import within the block what loads PySpark.

    Raises:
        EnvironmentProblem: something of the extra ``spark`` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in _OF_THE_EXTRA:
            raise
        raise EnvironmentProblem(
            f'no module named {missing.name!r}: Spark needs pip install "millstream[spark]". Without Spark, run with '
            'engine="local", or `--engine local` on the command line'
        ) from missing
