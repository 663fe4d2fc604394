"""The settings of the source as a text: the option that Spark gives to its planner and its workers."""

from __future__ import annotations

import base64
import pickle
import zlib
from functools import lru_cache

from pyspark import cloudpickle

from millstream.engine.source.planner import SourceSpec


def to_option(spec: SourceSpec) -> str:
    """Serialize a spec as a text, for a source's option."""
    # By value what no worker can import: a pydantic model of the program that runs.
    packed: bytes = cloudpickle.dumps(spec)  # type: ignore[no-untyped-call]
    # Spark copies options for every batch and task, and rows of static tables may be among them.
    return base64.b64encode(zlib.compress(packed, level=1)).decode()


@lru_cache(maxsize=2)
def from_option(option: str) -> SourceSpec:
    """Return the spec that :func:`to_option` serialized: for all tasks of a worker the same."""
    packed = zlib.decompress(base64.b64decode(option))
    spec = pickle.loads(packed)  # noqa: S301 - made by to_option, in this job
    assert isinstance(spec, SourceSpec)
    return spec
