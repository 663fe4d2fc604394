"""Machines for tests, and the network that they are in: what the kernel can separate on one machine.

A machine has network, mounts and processes of its own, and runs containers (containerd and runc, Debian's). So it can be lost as a
real one is, at once and with everything on it. No address here is one of the machine that the tests run on, and nothing goes
anywhere else.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = Path.home() / ".cache/millstream/kubernetes-1.34.4"
HOST_IP = "10.245.0.1"
INSTALLED = ("containerd", "ctr", "ip", "runc", "socat")
START_S = 300
_BRIDGE = "machines0"
# What programs keep of a machine in these folders goes when the machine does, and no other one sees it.
_OWN_FOLDERS = ("/run/netns", "/run/containerd", "/var/lib/cni", "/var/log/containers")
# The first process of a machine holds its namespaces, and lets the kernel take away the processes that it inherits.
_INIT = (
    'for folder in "$@"; do mkdir -p "$folder" && mount -t tmpfs none "$folder" || exit; done; '
    "exec env --ignore-signal=CHLD sleep infinity"
)
_CONTAINERD = """\
version = 2
root = "{run}/containerd"
state = "{run}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{socket}"
"""


@dataclass
class Programs:
    """Programs in a network namespace of their own, ``name``; what they say is in ``folder``."""

    folder: Path
    opened: ExitStack
    name: str = field(default_factory=lambda: f"kube-{secrets.token_hex(3)}")

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        ip("netns", "add", self.name)
        self.opened.callback(ip, "netns", "delete", self.name)

    def make_bridge(self, bridge: str) -> None:
        """Make the network's bridge, with the address of what is on none of its machines."""
        inside = ("-n", self.name)
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "link", "add", bridge, "type", "bridge")
        ip(*inside, "address", "add", f"{HOST_IP}/24", "dev", bridge)
        ip(*inside, "link", "set", bridge, "up")
        ip(*inside, "route", "add", "default", "via", "10.245.0.254", "dev", bridge)

    def inside(self, *command: object) -> list[str]:
        """Return a command that runs in this network, on none of its machines."""
        # not `ip netns exec`, which mounts another /sys, without control groups
        return ["nsenter", f"--net=/run/netns/{self.name}", *map(str, command)]

    def start(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        """Start a program in this network, on none of its machines."""
        return self.launch(name, self.inside(*command))

    def launch(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program, wherever its command leads; what it says is in a file of its name."""
        said = self.opened.enter_context((self.folder / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            command,
            stdout=said,
            stderr=said,
            env=os.environ | {"PATH": search_path()},
            start_new_session=True,
        )
        self.processes[name] = process
        self.opened.callback(_end, process)
        return process

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
        return "\n".join(f"{name}: {self.said(name)[-1000:]}" for name in self.processes)


class Network(Programs):
    """A network of machines, and programs in it that are on none of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.make_bridge(_BRIDGE)

    def connect(self, machine: str, cable: str, address: str) -> None:
        """Connect the network namespace of a machine, which has this address then."""
        here, there = ("-n", self.name, "link"), ("-n", machine)
        ip(*here, "add", cable, "type", "veth", "peer", "name", "eth0", "netns", machine)
        ip(*here, "set", cable, "master", _BRIDGE, "up")
        ip(*there, "link", "set", "lo", "up")
        ip(*there, "address", "add", f"{address}/24", "dev", "eth0")
        ip(*there, "link", "set", "eth0", "up")
        ip(*there, "route", "add", "default", "via", HOST_IP)


class Machine:
    """A machine that runs containers."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.around, self.name, self.address = network, name, address
        number = address.rpartition(".")[2]
        self.network, self._cable = f"{network.name}-{number}", f"machine{number}"
        self.folder = network.folder / name
        self.folder.mkdir()
        # Not in the test's folder: paths of sockets must be short, and images are large.
        self.run = Path(
            network.opened.enter_context(
                tempfile.TemporaryDirectory(prefix="kube-", dir="/var/tmp")
            )
        )
        self.socket = self.run / "containerd.sock"
        (self.folder / "containerd.toml").write_text(
            _CONTAINERD.format(run=self.run, socket=self.socket)
        )
        self._machine: subprocess.Popen[bytes] | None = None
        network.opened.callback(self.lose)

    def boot(self) -> None:
        """Start the machine."""
        ip("netns", "add", self.network)
        self.around.connect(self.network, self._cable, self.address)
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["nsenter", f"--net=/run/netns/{self.network}", *enter, "sh", "-c", _INIT, "init"]
        self._machine = subprocess.Popen([*command, *_OWN_FOLDERS])
        self._init = self.around.wait_for(f"{self.name}'s first process", self._first_process)
        self.start("containerd", f"--config={self.folder}/containerd.toml")
        self.around.wait_for("containerd", self.socket.exists)

    def lose(self) -> None:
        """Take the power from the machine: every process and its address are gone at once."""
        if self._machine is None:
            return
        self.around.processes.pop(f"{self.name}-containerd", None)
        os.kill(self._init, signal.SIGKILL)
        self._machine.wait()  # the kernel has ended all others of its namespace before
        self._machine = None
        ip("-n", self.around.name, "link", "delete", self._cable)
        ip("netns", "delete", self.network)

    def inside(self, *command: object) -> list[str]:
        """Return a command that runs on the machine."""
        enter = ["nsenter", f"--target={self._init}", "--net", "--mount", "--pid"]
        return [*enter, *map(str, command)]

    def start(self, program: str, *arguments: object) -> None:
        """Start a program on the machine."""
        self.around.launch(f"{self.name}-{program}", self.inside(program, *arguments))

    def _first_process(self) -> int:
        """Return the process that is the first of the machine, once its folders are its own; else 0."""
        assert self._machine is not None
        assert self._machine.poll() is None, f"{self.name} could not start"
        for process in _descendants(self._machine.pid):
            with suppress(OSError):
                if Path(f"/proc/{process}/comm").read_text().strip() == "sleep":
                    return process
        return 0


def missing_programs(built: tuple[str, ...], installed: tuple[str, ...]) -> str:
    """Return which of these programs are missing, and what to do; "" if none is."""
    if os.geteuid() != 0:
        return "only root can make machines"
    missing = [name for name in installed if not shutil.which(name, path=search_path())]
    if missing:
        return f"not installed: {', '.join(missing)}"
    lacking = [name for name in built if not (PROGRAMS / name).exists()]
    return f"not built: {', '.join(lacking)}; `make test-long` builds them" if lacking else ""


def search_path() -> str:
    """Return where programs are looked for."""
    return os.pathsep.join([str(PROGRAMS), "/usr/sbin", "/sbin", os.environ["PATH"]])


def ip(*words: str) -> None:
    """Change the network of the machine that the tests run on, or of a namespace."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those that these have."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _descendants(child)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
