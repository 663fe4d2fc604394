"""The error that a user gets for a failure inside Spark: one sentence, and never the JVM's stack."""

from pathlib import Path

from millstream.errors import FencedError, JobFailedError
from millstream.spark.failures import to_millstream_error

LOG = Path("apps/ads/spark.log")


def translated(report):
    return to_millstream_error(RuntimeError(report), "ads", LOG)


def test_that_spark_found_another_run_on_its_checkpoint_is_a_fence():
    error = translated(
        "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: "
        "[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple streaming jobs "
        "detected for 0.\nPlease make sure. SQLSTATE: 40000\n=== Streaming Query ===\n+- Empty"
    )
    assert isinstance(error, FencedError)
    assert "A newer run of the app 'ads' has begun" in str(error)


def test_where_no_python_failed_the_first_line_says_why():
    error = translated(
        "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: No space left on "
        "device SQLSTATE: XXKST\n=== Streaming Query ===\n+- LocalRelation <empty>"
    )
    assert isinstance(error, JobFailedError)
    assert str(error) == (
        "The job of the app 'ads' stopped: No space left on device SQLSTATE: XXKST. The whole "
        "report is in apps/ads/spark.log."
    )


def test_an_error_of_ours_comes_out_as_it_was_raised():
    error = translated(
        "stopped\nTraceback (most recent call last):\n"
        "millstream.errors.FencedError: Run 3 of the app has begun."
    )
    assert isinstance(error, FencedError)
    assert str(error) == "Run 3 of the app has begun."
