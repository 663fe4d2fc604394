"""What all tests share: how Hypothesis runs, lanes, the order of files, and a PostgreSQL or an S3 server
for those that want one."""

import itertools
import os
import shutil

import azure_server
import google_server
import hdfs_server
import hypothesis
import lane
import pytest
from example_counts import some
from s3_server import HOW_TO_GET_IT, FaultProxy, environment, find_binary, s3_server

from millstream.errors import EnvironmentProblem
from millstream.testing.postgres import PostgresServer

# How long an example takes says something of the machine, and nothing of what is tested.
hypothesis.settings.register_profile("millstream", deadline=None, max_examples=some(100))
hypothesis.settings.load_profile("millstream")

# Their tests take minutes. They come first: where files are run side by side, no process is left
# alone with one of them at the end.
LONG_FILES = (
    "tests/spark/test_kill_matrix.py",
    "tests/spark/test_demo_ads.py",
    "tests/spark/test_cases.py",
    "tests/spark/test_session.py",
    "tests/spark/test_zombies.py",
    "tests/spark/test_job.py",
    "tests/apache_kafka/test_cluster.py",
    "tests/spark/test_kafka_source.py",
    "tests/spark/test_demo_document.py",
    "tests/spark/test_readme.py",
    "tests/spark/test_cluster.py",
)

_numbers = itertools.count()


def pytest_addoption(parser):
    parser.addoption("--lane", metavar="NAME", help=f"one of: {', '.join(lane.names())}")


def pytest_configure(config):
    if name := config.getoption("--lane"):
        patch = pytest.MonkeyPatch()
        config.add_cleanup(patch.undo)
        lane.load(name)(patch)


def pytest_collection_modifyitems(items):
    places = {file: place for place, file in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_runtest_setup(item):
    taken = item.config.getoption("--lane")
    for mark in item.iter_markers("not_in_lane"):
        if mark.args[0] == taken:
            pytest.skip(f"not in the lane {taken}: {mark.args[1]}")


@pytest.fixture(scope="session")
def postgres_server():
    """A server, started once; where there is none, the tests that want it are skipped."""
    pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed here")
    try:
        server = PostgresServer()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    with server:
        yield server


@pytest.fixture
def database(postgres_server):
    """The URL of an empty database."""
    return postgres_server.url(f"test{next(_numbers)}")


@pytest.fixture
def url(request):
    """A database where there is a server; what needs none is tried in any case."""
    try:
        return request.getfixturevalue("database")
    except pytest.skip.Exception:
        return None


@pytest.fixture(scope="session")
def s3_proxy(tmp_path_factory):
    if find_binary() is None:
        pytest.skip(HOW_TO_GET_IT)
    with s3_server(tmp_path_factory.mktemp("s3"), "bucket") as port, FaultProxy(port) as proxy:
        yield proxy


@pytest.fixture
def s3(s3_proxy, monkeypatch):
    """The proxy of an S3 server, without faults, and an environment in which clients go through it."""
    yield from _without_faults(s3_proxy, environment(s3_proxy.port), monkeypatch)


def _without_faults(proxy, variables, monkeypatch):
    """Give a proxy without faults, in an environment of these variables; take away those that a test lets it make."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    proxy.decide = lambda _method, _path: None
    proxy.requests.clear()
    yield proxy
    proxy.decide = lambda _method, _path: None


@pytest.fixture
def s3_url(s3):
    """A URL under which there is nothing."""
    return f"s3://bucket/test-{next(_numbers)}"


@pytest.fixture(scope="session")
def azure_proxy(tmp_path_factory):
    if azure_server.find_binary() is None:
        pytest.skip(azure_server.HOW_TO_GET_IT)
    folder = tmp_path_factory.mktemp("azure")
    with azure_server.azure_server(folder, "container") as port, FaultProxy(port) as proxy:
        yield proxy


@pytest.fixture
def azure(azure_proxy, monkeypatch):
    """The proxy of a server of Azure's protocol, without faults, and an environment in which clients go through it."""
    variables = azure_server.environment(azure_proxy.port)
    yield from _without_faults(azure_proxy, variables, monkeypatch)


@pytest.fixture
def azure_url(azure):
    """A URL under which there is nothing."""
    return f"az://container/test-{next(_numbers)}"


@pytest.fixture(scope="session")
def google_proxy():
    if not google_server.can_serve():
        pytest.skip(google_server.HOW_TO_GET_IT)
    with google_server.google_server("bucket") as (port, key), FaultProxy(port) as proxy:
        yield proxy, key


@pytest.fixture
def google(google_proxy, monkeypatch):
    """The proxy of a server of Google's protocol, without faults, and an environment in which clients go through it."""
    proxy, key = google_proxy
    variables = google_server.environment(proxy.port, key)
    yield from _without_faults(proxy, variables, monkeypatch)


@pytest.fixture
def google_url(google):
    """A URL under which there is nothing."""
    return f"gs://bucket/test-{next(_numbers)}"


@pytest.fixture(scope="session")
def hdfs_cluster(tmp_path_factory):
    if reason := hdfs_server.HADOOP.why_not():
        pytest.skip(reason)
    with hdfs_server.hdfs(tmp_path_factory.mktemp("hdfs")) as cluster:
        yield cluster


@pytest.fixture
def hdfs(hdfs_cluster, monkeypatch):
    """The proxies of an HDFS, without faults, and an environment in which clients go through them."""
    for name, value in hdfs_cluster.environment().items():
        monkeypatch.setenv(name, value)
    hdfs_cluster.forget()
    yield hdfs_cluster
    hdfs_cluster.forget()


@pytest.fixture
def hdfs_url(hdfs):
    """A URL under which there is nothing."""
    return f"hdfs://namenode/test-{next(_numbers)}"


@pytest.fixture(scope="module")
def chromium():
    """The system's Chromium, without a screen."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    # As root it runs without its sandbox, or not at all; it sees nothing but our own pages.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()
