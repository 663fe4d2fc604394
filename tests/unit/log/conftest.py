"""kafka-python warns of its own deprecated calls while it is imported; ours stay errors."""

from __future__ import annotations

import warnings

from hypothesis import settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import aiokafka.record.default_records  # noqa: F401
    import kafka.partitioner.default
    import kafka.record.default_records  # noqa: F401


settings.register_profile("log", deadline=None)  # a busy machine is not a failure
settings.load_profile("log")
