"""A node for the control plane: containerd and runc of Debian's, the kubelet, Services (kube-proxy) and names (CoreDNS).

Pods are real containers, of the image that ``image.py`` builds, with addresses of their own on a bridge of the cluster's network.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import image as images
from control_plane import ControlPlane
from machine import HOST_IP

BUILT = ("kubelet", "kube-proxy", "coredns")
INSTALLED = ("containerd", "ctr", "runc", "iptables", "conntrack", "socat")
PODS = "10.244.0.0/24"
PAUSE = "registry.example.org/pause:1"
_PLUGINS = "/usr/lib/cni"

_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "{run}/containerd"
[grpc]
  address = "{run}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{folder}/network"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""
_NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": PODS}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}
_NAMES = """\
.:53 {{
    bind {host}
    errors
    kubernetes cluster.local {{
        kubeconfig {config}
    }}
}}
"""


class Node:
    """The one node of a cluster, with the images of the tests; it is ready when this returns."""

    def __init__(self, plane: ControlPlane, image: str) -> None:
        self.plane, self.folder = plane, plane.folder / "node"
        self.folder.mkdir()
        # Not in the test's folder: paths of sockets must be short.
        self.run = Path(
            plane.opened.enter_context(tempfile.TemporaryDirectory(prefix="kube-", dir="/var/tmp"))
        )
        self.socket = self.run / "containerd.sock"
        # What is undone last is named first: mounts when nothing runs, containers while containerd does.
        plane.opened.callback(self._unmount)
        plane.opened.callback(self._remove_networks, _networks())
        self._start_containerd()
        plane.opened.callback(self._remove_pods)
        self._load(image)
        self._start_names()
        plane.start("kubelet", "kubelet", *self._kubelet())
        plane.start("proxy", "kube-proxy", f"--config={self._proxy()}")
        plane.wait_for("the node", self._is_ready)

    def _start_containerd(self) -> None:
        network = self.folder / "network"
        network.mkdir()
        (network / "pods.conflist").write_text(json.dumps(_NETWORK))
        config = self.folder / "containerd.toml"
        config.write_text(
            _CONTAINERD.format(folder=self.folder, run=self.run, pause=PAUSE, plugins=_PLUGINS)
        )
        self.plane.start("containerd", "containerd", f"--config={config}")
        self.plane.wait_for("containerd", lambda: "Server" in self._ctr("version", check=False))

    def _ctr(self, *words: str | Path, check: bool = True) -> str:
        command = self.plane.inside(
            "ctr", "--address", self.socket, "--namespace", "k8s.io", *words
        )
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def _load(self, image: str) -> None:
        """Give containerd the image, and one whose container does nothing: it holds a pod's namespaces."""
        if not images.buildah("images", "--quiet", PAUSE, check=False):
            container = images.buildah("from", "--pull-never", images.BASE)
            images.buildah("config", "--entrypoint", '["/bin/sleep", "infinity"]', container)
            images.buildah("commit", "--quiet", container, PAUSE)
            images.buildah("rm", container)
        for name in (PAUSE, image):
            with tempfile.TemporaryDirectory() as folder:
                archive = Path(folder) / "image.tar"
                images.buildah("push", "--quiet", name, f"docker-archive:{archive}:{name}")
                self._ctr("images", "import", archive)

    def _start_names(self) -> None:
        config = self.folder / "Corefile"
        config.write_text(_NAMES.format(host=HOST_IP, config=self.plane.config("admin")))
        self.plane.start("names", "coredns", "-conf", config)

    def _kubelet(self) -> list[str]:
        config = self.folder / "kubelet.yaml"
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": HOST_IP,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "clusterDNS": [HOST_IP],
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            # What an ordinary sandbox of root's may not: change these two of the machine.
            "oomScoreAdj": 0,
            "protectKernelDefaults": False,
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "podLogsDir": str(self.folder / "logs"),
            "resolvConf": "",
            "readOnlyPort": 0,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
        }
        config.write_text(json.dumps(settings))
        return [
            f"--config={config}",
            f"--kubeconfig={self.plane.config('node')}",
            f"--root-dir={self.run}/kubelet",
            f"--node-ip={HOST_IP}",
            "--hostname-override=node-1",
        ]

    def _proxy(self) -> Path:
        config = self.folder / "proxy.yaml"
        settings = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(self.plane.config("admin"))},
            "clusterCIDR": PODS,
            "hostnameOverride": "node-1",
            "mode": "iptables",
            "conntrack": {
                "maxPerCore": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
            "oomScoreAdj": 0,
        }
        config.write_text(json.dumps(settings))
        return config

    def _is_ready(self) -> bool:
        path = '{.items[*].status.conditions[?(@.type=="Ready")].status}'
        return self.plane.kubectl("get", "nodes", "-o", f"jsonpath={path}") == "True"

    def _remove_pods(self) -> None:
        """End every container, before the runtime itself ends: they are not its children."""
        for name in self._ctr("tasks", "list", "--quiet", check=False).split():
            self._ctr("tasks", "kill", "--signal", "SIGKILL", name, check=False)
        for name in self._ctr("containers", "list", "--quiet", check=False).split():
            self._ctr("tasks", "delete", "--force", name, check=False)
            self._ctr("containers", "delete", name, check=False)

    def _remove_networks(self, before: set[str]) -> None:
        """Remove what the pods' networks have left: containers that were killed don't take theirs along."""
        for name in _networks() - before:
            subprocess.run(["ip", "netns", "delete", name], check=False)

    def _unmount(self) -> None:
        """Undo the mounts of volumes and containers, the inner ones first, and remove the control groups."""
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed([each for each in mounts if each.startswith(f"{self.run}/")]):
            subprocess.run(["umount", "--lazy", mount], check=False)
        for pods in Path("/sys/fs/cgroup").glob("*/kubepods"):
            subprocess.run(
                ["find", pods, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"], check=False
            )


def _networks() -> set[str]:
    """Return the names of network namespaces that containerd makes for pods."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in found.stdout.splitlines() if line.startswith("cni-")}
