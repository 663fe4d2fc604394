"""Aggregates that merge: each is a few partial columns, a way to merge them, and a result.

Read :mod:`.protocol` for what the kernels ask of an aggregate. Each module here is one domain:
counting, sums and means, spread, extremes, order, distribution, sketches, and the user's own.
"""

from millstream.kernels.aggregates.count import Count
from millstream.kernels.aggregates.distribution import DistinctValues, Quantiles, TopValues
from millstream.kernels.aggregates.event_order import CollectList, Pick
from millstream.kernels.aggregates.extremes import Extreme
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.aggregates.sketches import FrequentItems, Hll, Kll
from millstream.kernels.aggregates.sums import Mean, Sum
from millstream.kernels.aggregates.user_defined import UserAggregate, UserDefined
from millstream.kernels.aggregates.variance import Variance

__all__ = [
    "Aggregate",
    "CollectList",
    "Count",
    "DistinctValues",
    "Extreme",
    "FrequentItems",
    "Hll",
    "Kll",
    "Mean",
    "Pick",
    "Quantiles",
    "Sum",
    "TopValues",
    "UserAggregate",
    "UserDefined",
    "Variance",
]
