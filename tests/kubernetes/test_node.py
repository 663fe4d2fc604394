"""deploy/kubernetes on a real node: pods run the image, Spark's scheduler creates executors, and rows come out.

Everything is Kubernetes's own: the API server, controllers, scheduler, kubelet, Services and names. State is in S3, the store in
PostgreSQL, which run beside the cluster as they would elsewhere.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote, urlsplit

import control_plane
import pytest
from control_plane import ControlPlane
from machine import HOST_IP
from manifests import NAMESPACE, own_copy
from node import BUILT, INSTALLED, Node

import millstream as ms

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LOG = "kafka://broker:9092?security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN&sasl.username=streams"
WAIT_S = 900
ASK_PAGE = (
    "import urllib.request as r; "
    "print(r.urlopen('http://127.0.0.1:8400/views/clicks_by_minute?limit=1').read().decode())"
)
VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {{name: log}}
spec:
  capacity: {{storage: 50Gi}}
  accessModes: [ReadWriteOnce]
  hostPath: {{path: "{0}"}}
"""
# This node has two cores and is shared: less is asked for than a user would.
SMALLER = {
    "spark.properties": {
        "spark.executor.cores 2": "spark.executor.cores 1",
        "spark.executor.memory 2g": "spark.executor.memory 640m\nspark.kubernetes.executor.request.cores 100m\n"
        "spark.python.authenticate.socketTimeout 300s",
        "spark.executor.memoryOverhead 2g": "spark.executor.memoryOverhead 1g",
    },
    "pipeline.yaml": {'cpu: "1", memory: 3Gi': "cpu: 100m, memory: 3Gi", "--cores=4": "--cores=2"},
    "broker.yaml": {"cpu: 500m": "cpu: 100m"},
}


@pytest.fixture
def node(tmp_path, image):
    reason = control_plane.why_not(BUILT, INSTALLED)
    if reason:
        pytest.skip(reason)
    with ExitStack() as opened:
        plane = ControlPlane(tmp_path / "cluster", opened)
        Node(plane, image)
        yield plane


def let_pods_reach(plane, port):
    """Let pods reach a server of this machine, at the node's address and the server's port."""
    socket = plane.folder / f"{port}.socket"
    outside = ("socat", f"UNIX-LISTEN:{socket},fork", f"TCP:127.0.0.1:{port}")
    plane.launch(f"{port}-outside", outside)
    inside = f"TCP-LISTEN:{port},bind={HOST_IP},fork,reuseaddr"
    plane.start(f"{port}-inside", "socat", inside, f"UNIX-CONNECT:{socket}")


def event(number):
    at = NOON + timedelta(milliseconds=20 * number)
    return {"ad": f"ad-{number % 7}", "at": at.isoformat()}


def counted(events):
    counts = Counter()
    for number in range(events):
        at = NOON + timedelta(milliseconds=20 * number)
        counts[at.replace(second=0, microsecond=0), f"ad-{number % 7}"] += 1
    return dict(counts)


def minutes(store):
    with ms.view("clicks_by_minute", store=store) as view:
        rows = view.scan().select("window_start", "ad", "n").rows()
    return {(at, ad): n for at, ad, n in rows}


def users_file(folder, password):
    path = folder / "users.txt"
    command = [sys.executable, "-m", "millstream", "user", "add", "streams", "--stdin"]
    subprocess.run([*command, "--users", str(path)], input=password, text=True, check=True)
    return path


class Deployment:
    """What a user has after docs/cluster.md: the manifests applied, with addresses of their own."""

    def __init__(self, plane, folder, database, s3_port, state):
        self.plane, self.store = plane, database
        password = secrets.token_hex(8)
        self.log = f"{LOG}&sasl.password={password}"
        address = urlsplit(database)
        let_pods_reach(plane, address.port)
        let_pods_reach(plane, s3_port)
        (folder / "volume").mkdir()
        (folder / "volume").chmod(0o777)
        given = {
            "LOG": self.log,
            "STORE": f"postgresql://{address.username}@{HOST_IP}:{address.port}{address.path}",
            "PGPASSWORD": unquote(address.password),
            **{name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")},
        }
        environment = {
            "STATE=s3://bucket/clicks": f"STATE={state}\n      - AWS_ENDPOINT_URL=http://{HOST_IP}:{s3_port}"
        }
        manifests = own_copy(folder, SMALLER | {"kustomization.yaml": environment})
        self.kubectl("apply", "-f", manifests / "namespace.yaml")
        plane.kubectl("apply", "-f", "-", given=VOLUME.format(folder / "volume"), check=True)
        generic = ("create", "secret", "generic")
        self.kubectl(*generic, "broker-users", f"--from-file={users_file(folder, password)}")
        literals = [f"--from-literal={name}={value}" for name, value in given.items()]
        self.kubectl(*generic, "clicks", *literals)
        self.kubectl("apply", "-k", manifests)

    def kubectl(self, *words, given=None):
        return self.plane.kubectl("-n", NAMESPACE, *words, given=given, check=True)

    def pods(self, role):
        """Return the pods of a role that run and are ready, by name."""
        items = json.loads(
            self.kubectl("get", "pods", "-l", f"app=clicks,role={role}", "-o", "json")
        )
        return {
            pod["metadata"]["name"]: pod
            for pod in items["items"]
            if "deletionTimestamp" not in pod["metadata"]
            and all(
                each["ready"] for each in pod["status"].get("containerStatuses", [{"ready": False}])
            )
        }

    def wait_for_pods(self, role, count):
        """Wait until a role has so many pods that are ready, and return them."""
        pods = {}

        def are_there():
            nonlocal pods
            pods = self.pods(role)
            return len(pods) == count

        self.plane.wait_for(f"{count} pods of {role}", are_there, WAIT_S)
        return pods

    def send(self, first, stop):
        lines = "".join(f"{json.dumps(event(number))}\n" for number in range(first, stop))
        produce = ("millstream", "produce", "clicks", "--key-field", "ad", "--log", self.log)
        self.kubectl("exec", "-i", "broker-0", "--", *produce, given=lines)

    def wait_for_minutes(self, events):
        wanted = counted(events)

        def are_there():
            with suppress(
                ms.errors.MillstreamError
            ):  # the view is not there before the first batch
                return minutes(self.store) == wanted
            return False

        self.plane.wait_for(f"the answer of {events} events", are_there, WAIT_S)


def test_the_manifests_run_and_go_on_when_executor_and_driver_are_lost(
    node, tmp_path, database, s3_proxy, s3, s3_url, image
):
    deployed = Deployment(node, tmp_path, database, s3_proxy.port, s3_url)
    ready = ("wait", "--for=condition=Ready", f"--timeout={WAIT_S}s", "pod/broker-0")
    node.wait_for("the broker's pod", lambda: "broker-0" in deployed.kubectl("get", "pods"))
    deployed.kubectl(*ready)
    (driver,) = deployed.wait_for_pods("driver", 1)
    executors = deployed.wait_for_pods("executor", 2)
    for name, pod in executors.items():
        assert name.startswith("clicks-exec-")
        (container,) = pod["spec"]["containers"]
        assert (container["image"], container["args"]) == (image, ["executor"])
        assert [each["name"] for each in pod["metadata"]["ownerReferences"]] == [driver]
    deployed.send(0, 20_000)
    deployed.wait_for_minutes(20_000)

    now = ("--force", "--grace-period=0")
    lost = min(executors)
    deployed.kubectl("delete", "pod", lost, *now)
    deployed.send(20_000, 40_000)
    deployed.wait_for_minutes(40_000)
    assert lost not in deployed.wait_for_pods("executor", 2)

    deployed.kubectl("delete", "pod", driver, *now)
    deployed.send(40_000, 60_000)
    deployed.wait_for_minutes(60_000)
    assert driver not in deployed.wait_for_pods("driver", 1)
    page = ("exec", "deployment/page", "--", "python", "-c", ASK_PAGE)
    assert json.loads(deployed.kubectl(*page))["rows"]

    # what is deleted is gone: executors with their driver, which stops after a batch
    deployed.kubectl("delete", "deployment", "clicks")
    deployed.wait_for_pods("driver", 0)
    deployed.wait_for_pods("executor", 0)
