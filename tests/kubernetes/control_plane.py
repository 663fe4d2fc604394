"""A real control plane of Kubernetes for tests, in a network of its own: etcd, the API server, and what acts on its objects.

etcd is Debian's; Kubernetes is built by ``tools/kubernetes_programs.py`` from the Go modules that it is published as. All processes,
and the pods' network, are in one network namespace, so no address here is one of the machine's, and nothing of it goes
anywhere else.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from pathlib import Path

from machine import HOST_IP, Programs, missing_programs, search_path

SERVICES = "10.96.0.0/16"
INSTALLED = ("etcd", "ip", "openssl")
BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")


def why_not(built: tuple[str, ...] = (), installed: tuple[str, ...] = ()) -> str:
    """Return what is missing for a control plane, and for what else is named; "" if nothing is."""
    return missing_programs((*BUILT, *built), (*INSTALLED, *installed))


class ControlPlane(Programs):
    """A cluster without nodes in ``folder``; what its processes say is there, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens = {name: secrets.token_hex(16) for name in ("admin", "node")}
        self.make_bridge("node0")
        subprocess.run(self.inside("sysctl", "-qw", "net.ipv4.ip_forward=1"), check=True)
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
            f"--advertise-address={HOST_IP}",
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
        if path.exists():  # a program that starts may be reading it
            return path
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

    def kubectl(self, *words: object, given: str | None = None, check: bool = False) -> str:
        """Run kubectl as the administrator; return what it prints, and its complaint where it fails."""
        command = ["kubectl", f"--kubeconfig={self.config('admin')}", *words]
        done = subprocess.run(
            self.inside(*command),
            input=given,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PATH": search_path()},
        )
        assert not check or done.returncode == 0, done.stderr
        return (done.stdout + done.stderr).strip()

    def state(self) -> str:
        """Describe what there is, for a test that fails."""
        events = self.kubectl("get", "events", "-A", "--sort-by=.lastTimestamp")
        return f"{self.kubectl('get', 'pods', '-A', '-o', 'wide')}\n{events[-4000:]}"
