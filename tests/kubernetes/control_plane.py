"""A real control plane of Kubernetes for tests, in a network of its own: etcd, the API server, and what acts on its objects.

etcd is Debian's; Kubernetes is built by ``tools/kubernetes_programs.py`` from the Go modules that it is published as. All processes,
and the pods' network, are in one network namespace, so no address here is one of the machine's, and nothing of it goes
anywhere else.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = Path.home() / ".cache/millstream/kubernetes-1.34.4"
NODE_IP = "10.245.0.1"
SERVICES = "10.96.0.0/16"
START_S = 300
INSTALLED = ("etcd", "ip", "openssl")
BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")


def why_not(built: tuple[str, ...] = (), installed: tuple[str, ...] = ()) -> str:
    """Return what is missing for a control plane, and for what else is named; "" if nothing is."""
    if os.geteuid() != 0:
        return "only root can make the network namespace of the cluster"
    missing = [name for name in (*INSTALLED, *installed) if not shutil.which(name, path=_path())]
    if missing:
        return f"not installed: {', '.join(missing)}"
    lacking = [name for name in (*BUILT, *built) if not (PROGRAMS / name).exists()]
    return f"not built: {', '.join(lacking)}; `make test-long` builds them" if lacking else ""


def _path() -> str:
    return os.pathsep.join([str(PROGRAMS), "/usr/sbin", "/sbin", os.environ["PATH"]])


@dataclass
class ControlPlane:
    """A cluster without nodes in ``folder``; what its processes say is there, too."""

    folder: Path
    opened: ExitStack
    network: str = field(default_factory=lambda: f"kube-{secrets.token_hex(3)}")

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.tokens = {name: secrets.token_hex(16) for name in ("admin", "node")}
        self._make_network()
        self._write_secrets()
        self.start("etcd", "etcd", *self._etcd())
        self.start("api", "kube-apiserver", *self._api_server())
        self.wait_for("the API server", lambda: self.kubectl("get", "--raw", "/readyz") == "ok")
        # What the API server has signed its own certificate with is what pods are to trust.
        config = f"--kubeconfig={self.config('admin')}"
        ca = f"--root-ca-file={self.folder}/certificates/apiserver.crt"
        key = f"--service-account-private-key-file={self.folder}/accounts.key"
        own = ["--leader-elect=false", "--use-service-account-credentials=false"]
        self.start("controllers", "kube-controller-manager", config, ca, key, *own)
        self.start("scheduler", "kube-scheduler", config, own[0])

    def _make_network(self) -> None:
        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True, capture_output=True)

        ip("netns", "add", self.network)
        self.opened.callback(lambda: ip("netns", "delete", self.network))
        inside = ("-n", self.network)
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "link", "add", "node0", "type", "bridge")
        ip(*inside, "address", "add", f"{NODE_IP}/24", "dev", "node0")
        ip(*inside, "link", "set", "node0", "up")
        ip(*inside, "route", "add", "default", "via", "10.245.0.254", "dev", "node0")
        subprocess.run(self.inside("sysctl", "-qw", "net.ipv4.ip_forward=1"), check=True)

    def _write_secrets(self) -> None:
        key = self.folder / "accounts.key"
        subprocess.run(
            ["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True
        )
        users = {"admin": "admin,1,system:masters", "node": "system:node:node-1,2,system:nodes"}
        lines = [f"{self.tokens[name]},{who}\n" for name, who in users.items()]
        (self.folder / "tokens.csv").write_text("".join(lines))

    def _etcd(self) -> list[str]:
        clients, peers = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        urls = {
            "listen-client-urls": clients,
            "advertise-client-urls": clients,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
        }
        data = f"--data-dir={self.folder}/etcd"
        return [data, *(f"--{name}={value}" for name, value in urls.items())]

    def _api_server(self) -> list[str]:
        accounts = f"{self.folder}/accounts.key"
        return [
            "--etcd-servers=http://127.0.0.1:2379",
            f"--service-cluster-ip-range={SERVICES}",
            f"--cert-dir={self.folder}/certificates",
            "--secure-port=6443",
            f"--advertise-address={NODE_IP}",
            f"--service-account-key-file={accounts}",
            f"--service-account-signing-key-file={accounts}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def config(self, user: str) -> Path:
        """Return the file that tells a program where the API server is, and who it is there."""
        path = self.folder / f"{user}.kubeconfig"
        cluster = {"server": "https://127.0.0.1:6443", "insecure-skip-tls-verify": True}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.tokens[user]}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": user}}],
        }
        path.write_text(json.dumps(content))
        return path

    def inside(self, *command: object) -> list[str]:
        """Return a command that runs in the cluster's network."""
        # not `ip netns exec`, which mounts another /sys, without control groups
        return ["nsenter", f"--net=/run/netns/{self.network}", *map(str, command)]

    def start(self, name: str, *command: object, outside: bool = False) -> subprocess.Popen[bytes]:
        """Start a program in the cluster's network, or outside of it."""
        said = self.opened.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            [*map(str, command)] if outside else self.inside(*command),
            stdout=said,
            stderr=said,
            env=os.environ | {"PATH": _path()},
            start_new_session=True,
        )
        self.processes[name] = process
        self.opened.callback(_end, process)
        return process

    def kubectl(self, *words: object, given: str | None = None, check: bool = False) -> str:
        """Run kubectl as the administrator; return what it prints, and its complaint where it fails."""
        command = ["kubectl", f"--kubeconfig={self.config('admin')}", *words]
        done = subprocess.run(
            self.inside(*command),
            input=given,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PATH": _path()},
        )
        assert not check or done.returncode == 0, done.stderr
        return (done.stdout + done.stderr).strip()

    def wait_for(self, what, is_there, seconds: float = START_S):
        """Wait until ``is_there()`` gives something true, and give it; no process may end meanwhile."""
        pause, deadline = threading.Event(), time.monotonic() + seconds
        while not (found := is_there()):
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} has ended: {self.said(name)}"
            assert time.monotonic() < deadline, f"{what} did not come: {self.state()}"
            pause.wait(0.5)
        return found

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def state(self) -> str:
        """Describe what there is, for a test that fails."""
        events = self.kubectl("get", "events", "-A", "--sort-by=.lastTimestamp")
        return f"{self.kubectl('get', 'pods', '-A', '-o', 'wide')}\n{events[-4000:]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
