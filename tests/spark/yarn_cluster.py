"""Apache Hadoop YARN for tests: a real ResourceManager, and NodeManagers with a loopback address each.

If they are ``apart``, a NodeManager is a machine of its own: it has a mount namespace in which the project's folder and other machines' folders are
not there. What it starts (containers) is in the same namespace, so an executor has what YARN has brought it, and nothing else
of the driver's. ``shared`` is what all of them see: it stands for HDFS. With ``queues`` the scheduler is the one that divides the cluster
among queues (CapacityScheduler); each has that percentage of it, and may have no more. With ``common`` all of Hadoop's programs have settings of the
test's, as for Kerberos and an HDFS; ``options`` are Java's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from clusters import end

from millstream.spark.runtime.java import find_java
from millstream.testing.free_ports import free_ports
from millstream.testing.maven import JavaProgram

VERSION = "3.5.0"
HADOOP = JavaProgram(
    f"Apache Hadoop {VERSION}",
    f"hadoop-yarn-{VERSION}",
    tuple(
        f"org.apache.hadoop:{artifact}:{VERSION}"
        for artifact in (
            "hadoop-yarn-server-nodemanager",
            "hadoop-yarn-server-resourcemanager",
            "hadoop-yarn-server-timelineservice",  # the ResourceManager doesn't start without it
            "hadoop-common",
        )
    ),
)
ROOT = Path(__file__).resolve().parents[2]
MACHINES = {"one": "127.0.0.2", "two": "127.0.0.3"}
START_S = 180
YARN = "org.apache.hadoop.yarn.server"
# $0: the machine's own folder; $1: what all see; $2: the place of temporary files; $3: the project.
ENTER = """
mount -t tmpfs none /mnt && mkdir /mnt/own /mnt/shared &&
mount --bind "$0" /mnt/own && mount --bind "$1" /mnt/shared &&
mount -t tmpfs none "$2" && mkdir -p "$0" "$1" &&
mount --move /mnt/own "$0" && mount --move /mnt/shared "$1" &&
mount -t tmpfs none "$3" && cd "$0" && shift 3 && exec "$@"
"""


def _write(path, settings):
    properties = "".join(
        f"<property><name>{name}</name><value>{escape(str(value))}</value></property>\n"
        for name, value in settings.items()
    )
    path.write_text(f"<configuration>\n{properties}</configuration>\n")


@dataclass
class YarnCluster:
    """A cluster in ``root``; what its processes say is there, too."""

    root: Path
    opened: ExitStack
    apart: bool = True
    queues: dict[str, int] = field(default_factory=dict)
    common: dict[str, object] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def __post_init__(self):
        self.java, self.jars = find_java(os.environ), HADOOP.jars()
        self.shared, self.settings = self.root / "shared", self.root / "settings"
        for folder in (self.shared, self.settings, *(self.root / name for name in MACHINES)):
            folder.mkdir(parents=True)
        names = ("address", "scheduler", "resource-tracker", "admin", "webapp")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.configure(self.settings, {})
        self.manager = self._start(
            "manager", f"{YARN}.resourcemanager.ResourceManager", self.settings
        )
        for name in MACHINES:
            self.machine(name)
        self.wait_for(len(MACHINES))

    def configure(self, folder, machine):
        """Write the settings of a process; ``machine`` are those of a NodeManager."""
        # In each file, as the defaults of HDFS and of YARN are stronger than the first.
        _write(folder / "core-site.xml", {"fs.defaultFS": "file:///"} | self.common)
        _write(folder / "hdfs-site.xml", self.common)
        host = "127.0.0.1"
        scheduler = "capacity.CapacityScheduler" if self.queues else "fifo.FifoScheduler"
        manager = {
            "address": f"{host}:{self.ports['address']}",
            **{
                f"{name}.address": f"{host}:{self.ports[name]}"
                for name in ("scheduler", "resource-tracker", "admin", "webapp")
            },
            "scheduler.class": f"{YARN}.resourcemanager.scheduler.{scheduler}",
        }
        capacity = {"root.queues": ",".join(self.queues), "maximum-am-resource-percent": "0.5"}
        for name, percentage in self.queues.items():
            capacity[f"root.{name}.capacity"] = percentage
            capacity[f"root.{name}.maximum-capacity"] = percentage
        _write(
            folder / "capacity-scheduler.xml",
            {f"yarn.scheduler.capacity.{name}": value for name, value in capacity.items()},
        )
        _write(
            folder / "yarn-site.xml",
            {f"yarn.resourcemanager.{name}": value for name, value in manager.items()}
            | {f"yarn.nodemanager.{name}": value for name, value in machine.items()}
            | self.common,
        )
        (folder / "log4j.properties").write_text(
            "log4j.rootLogger=INFO,out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.out.layout=org.apache.log4j.PatternLayout\n"
            "log4j.appender.out.layout.ConversionPattern=%d %p %c: %m%n\n"
        )

    def machine(self, name):
        """Start a machine: a NodeManager with room for two small executors, or for one and the master."""
        own, host = self.root / name, MACHINES[name]
        settings = own / "settings"
        settings.mkdir()
        address, localizer, page = free_ports(3)
        self.configure(
            settings,
            {
                "hostname": host,
                "address": f"{host}:{address}",
                "localizer.address": f"{host}:{localizer}",
                "webapp.address": f"{host}:{page}",
                "local-dirs": own / "local",
                "log-dirs": own / "logs",
                "resource.memory-mb": 3072,
                "resource.cpu-vcores": 4,
                "vmem-check-enabled": "false",
                "pmem-check-enabled": "false",
                "disk-health-checker.enable": "false",
                # It is looked at once all the same: a machine whose disk is 90 % full is one without folders.
                "disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
            },
        )
        self._start(
            name,
            f"{YARN}.nodemanager.NodeManager",
            settings,
            inside=self.enter(name) if self.apart else (),
        )

    def enter(self, name):
        temporary = Path(tempfile.gettempdir())
        hidden = temporary if temporary in self.root.parents else self.root
        own = [str(self.root / name), str(self.shared), str(hidden), str(ROOT)]
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, *own]

    def _start(self, name, program, settings, inside=()):
        said = self.opened.enter_context((self.root / f"{name}.log").open("wb"))
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *self.options]
        paths = f"{settings}:{self.jars}/*"
        process = subprocess.Popen(
            [*inside, str(self.java.executable), *options, "-cp", paths, program],
            stdout=said,
            stderr=said,
            env={
                "PATH": os.environ["PATH"],
                "JAVA_HOME": str(self.java.home),
                "HADOOP_CONF_DIR": str(settings),
                "HOME": str(self.root / name),
            },
            start_new_session=True,
        )
        self.opened.callback(end, process)
        return process

    def wait_for(self, machines):
        """Wait until the ResourceManager counts so many machines."""
        pause = threading.Event()
        url = f"http://127.0.0.1:{self.ports['webapp']}/ws/v1/cluster/metrics"
        for _ in range(START_S * 5):
            assert self.manager.poll() is None, self.said("manager")
            with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                if f'"activeNodes":{machines},' in answer.read().decode():
                    return
            pause.wait(0.2)
        raise AssertionError("".join(self.said(name) for name in ("manager", *MACHINES)))

    def said(self, name):
        return (self.root / f"{name}.log").read_text()[-5000:]

    def apps(self):
        """Return what the ResourceManager says of each app, by its name."""
        url = f"http://127.0.0.1:{self.ports['webapp']}/ws/v1/cluster/apps"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)["apps"] or {"app": []}
        return {app["name"]: app for app in found["app"]}

    def executors(self, app):
        """Return how many executors an app has; its master is a container, too."""
        found = self.apps().get(app, {})
        return max(0, found.get("runningContainers", 0) - 1)

    def kill_executor(self, name):
        """Kill the JVMs of executors on a machine, with their Python workers; return how many there were."""
        killed = 0
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if "--hostname" not in command or not any(
                    "ExecutorBackend" in word for word in command
                ):
                    continue
                if not any(str(self.root / name) in word for word in command):
                    # of another cluster, at the same address
                    continue
                if (
                    command[command.index("--hostname") + 1] == MACHINES[name]
                    and "java" in command[0]
                ):
                    os.kill(int(process.name), signal.SIGKILL)
                    killed += 1
        return killed
