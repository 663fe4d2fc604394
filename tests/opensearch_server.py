"""OpenSearch for tests: the real server in a folder of its own, on a free port of the loopback, without plugins of others.

Maven fetches its jars. Its own start wants the layout of an installed package, which there is none of here; the few lines of
Java below start its node, for which a Java with a compiler is needed.
"""

import json
import os
import subprocess
import time
from http.client import HTTPConnection

import pytest

from millstream.errors import EnvironmentProblem
from millstream.spark.runtime.java import find_java
from millstream.testing.free_ports import free_ports
from millstream.testing.maven import JavaProgram

VERSION = "2.19.6"
OPENSEARCH = JavaProgram(
    f"OpenSearch {VERSION}",
    f"opensearch-{VERSION}",
    (
        f"org.opensearch:opensearch:{VERSION}",
        f"org.opensearch.plugin:transport-netty4-client:{VERSION}",
        "org.apache.logging.log4j:log4j-core:2.25.4",
    ),
)
_START_S = 280.0
_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_NODE = """\
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import org.opensearch.common.logging.LogConfigurator;
import org.opensearch.common.settings.Settings;
import org.opensearch.env.Environment;
import org.opensearch.node.InternalSettingsPreparer;
import org.opensearch.node.Node;
import org.opensearch.transport.Netty4Plugin;

public class OpenSearchNode extends Node {
    OpenSearchNode(Environment environment) {
        super(environment, List.of(Netty4Plugin.class), false);
    }

    public static void main(String[] given) throws Exception {
        Path home = Path.of(given[0]);
        Settings settings = Settings.builder()
            .put("path.home", home)
            .put("node.name", "test")
            .put("cluster.name", "test")
            .put("discovery.type", "single-node")
            .put("network.host", "127.0.0.1")
            .put("http.port", given[1])
            .put("transport.port", given[2])
            .put("node.processors", 1)
            .put("cluster.routing.allocation.disk.threshold_enabled", false)
            .build();
        LogConfigurator.registerErrorListener();
        new OpenSearchNode(
            InternalSettingsPreparer.prepareEnvironment(settings, Map.of(), home.resolve("config"), () -> "test")
        ).start();
        Thread.currentThread().join();
    }
}
"""


class OpenSearchServer:
    """Use it in ``with``. ``kill`` ends it as a power failure does, ``start`` starts it again with the files that it had."""

    def __init__(self, folder, jars):
        self.folder, self._jars = folder, jars
        self.port, self._transport_port = free_ports(2)
        self.url = f"opensearch://127.0.0.1:{self.port}"
        (folder / "OpenSearchNode.java").write_text(_NODE)
        self._process = None

    def start(self):
        java = str(find_java(os.environ).executable)
        program = [*_OPTIONS, "-cp", f"{self._jars}/*", str(self.folder / "OpenSearchNode.java")]
        ports = [str(self.port), str(self._transport_port)]
        with (self.folder / "said").open("ab") as said:
            self._process = subprocess.Popen(
                [java, *program, str(self.folder), *ports], stdout=said, stderr=said
            )
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s:
            assert self._process.poll() is None, (self.folder / "said").read_text()
            try:
                # After a kill an index is there a moment later than the server.
                status, health = self.ask("GET", "/_cluster/health?wait_for_status=yellow")
            except OSError:
                time.sleep(0.2)
            else:
                if status == 200 and not health["timed_out"]:
                    return
        raise AssertionError("OpenSearch did not start")

    def kill(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, method, target, value=None):
        """Return the status of a response, and its JSON; a value that is no bytes is sent as JSON."""
        raw = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, target, raw, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        finally:
            connection.close()

    def documents(self, index):
        """Return the documents of an index by their ids."""
        self.ask("POST", f"/{index}/_refresh")
        _, found = self.ask("GET", f"/{index}/_search?size=10000")
        return {hit["_id"]: hit["_source"] for hit in found.get("hits", {}).get("hits", ())}

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()


def start(folder):
    """Return a server; where there is none, the test is skipped."""
    if missing := OPENSEARCH.why_not() or _why_no_compiler():
        pytest.skip(missing)
    try:
        return OpenSearchServer(folder, OPENSEARCH.jars())
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))


def _why_no_compiler():
    java = find_java(os.environ).executable
    listed = subprocess.run([java, "--list-modules"], capture_output=True, text=True, check=False)
    return "" if "jdk.compiler" in listed.stdout else "Java is here without its compiler"
