"""Published cases in process: in random batchings, with crashes, and in topics of few and of many partitions."""

from example_counts import some

from millstream import testing

BATCHINGS = some(20)
PARTITIONS = (1, 4, 7)


def replayed(app, inputs, *, partitions=PARTITIONS):
    """Run the app in so many batchings for each number of partitions; return a result of each number."""
    return [
        testing.replay(app, inputs, batchings=BATCHINGS, partitions=(count,), seed=100 * count)
        for count in partitions
    ]
