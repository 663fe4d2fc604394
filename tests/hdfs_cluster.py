"""An HDFS of several processes for tests: two namenodes of which one is active, three datanodes, and a gateway (HttpFS), if it is started.

The namenodes share the journal of changes in a folder, as they may on NFS. Each file is on two datanodes.
"""

import os
import shutil
import subprocess
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import hdfs_server
from hdfs_server import HADOOP, OPTIONS, SERVER, START_S, USER, make_settings, write_settings

from millstream.spark.runtime.java import find_java
from millstream.testing.free_ports import free_ports
from millstream.testing.maven import JavaProgram

GATEWAY_VERSION = "3.4.2"  # the newest that Maven Central has
GATEWAY = JavaProgram(
    f"HttpFS of Apache Hadoop {GATEWAY_VERSION}",
    f"hadoop-httpfs-{GATEWAY_VERSION}",
    tuple(
        f"org.apache.hadoop:{artifact}:{GATEWAY_VERSION}"
        for artifact in ("hadoop-hdfs-httpfs", "hadoop-hdfs-client", "hadoop-common")
    ),
)
GATEWAY_PROGRAM = "org.apache.hadoop.fs.http.server.HttpFSServerWebServer"
NAMENODES = ("a", "b")
DATANODES = 3
_CLUSTER = "both"


def make_gateway(home: Path, own: dict[str, object]) -> tuple[Path, tuple[str, ...]]:
    """Make a gateway's folder; return that of its settings, which lacks those of the HDFS, and Java's options."""
    for inner in ("log", "temp"):
        (home / inner).mkdir(parents=True)
    settings = make_settings(home / "settings")
    (settings / "httpfs-signature.secret").write_text("secret of the tests")
    shutil.copy(settings / "log4j.properties", settings / "httpfs-log4j.properties")
    write_settings(settings / "httpfs-site.xml", {"httpfs.hadoop.config.dir": settings} | own)
    return settings, (
        f"-Dhttpfs.home.dir={home}",
        f"-Dhttpfs.config.dir={settings}",
        "--add-opens=java.base/java.lang=ALL-UNNAMED",  # for JAXB of its time, on Java 17
    )


class HdfsCluster:
    """The cluster in a folder, where what its processes say is, too. The namenode "a" is the active one at first."""

    def __init__(self, folder: Path, opened: ExitStack):
        self.folder, self.opened = folder, opened
        self.java = find_java(os.environ)
        self.processes: dict[str, subprocess.Popen] = {}
        ports = iter(free_ports(2 * len(NAMENODES) + 1))
        self.rpc = {name: next(ports) for name in NAMENODES}
        self.web = {name: next(ports) for name in NAMENODES}
        self.gateway_port = next(ports)
        self.settings = make_settings(folder / "settings")
        self._configure(self.settings)
        self._format()
        for name in NAMENODES:
            self.start(name, f"{SERVER}.namenode.NameNode", f"-Ddfs.ha.namenode.id={name}")
        for number in range(DATANODES):
            self._start_datanode(f"data-{number}")
        self.activate("a")
        hdfs_server.wait_until_it_serves(self.web["a"], folder, DATANODES)

    def addresses(self, *names: str) -> str:
        """Return what a client has for the namenodes, in that order."""
        return ",".join(f"http://127.0.0.1:{self.web[name]}" for name in names)

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    def activate(self, name: str, *options: str) -> None:
        """Make a namenode the active one; the other is in standby, or dead."""
        deadline, pause = time.monotonic() + START_S, threading.Event()
        tool = "org.apache.hadoop.hdfs.tools.DFSHAAdmin"
        while self.start("tool", tool, "-transitionToActive", *options, name).wait(START_S):
            assert time.monotonic() < deadline, self.said("tool", name)
            pause.wait(0.5)

    def fail_over(self) -> None:
        """Kill the namenode "a", and make the other the active one."""
        self.kill("a")
        self.activate("b", "--forceactive")

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(30)

    def start(
        self,
        name: str,
        program: str,
        *arguments: str,
        settings: Path | None = None,
        hadoop: JavaProgram = HADOOP,
        options: tuple[str, ...] = (),
    ):
        """Start a program of Hadoop's."""
        settings = settings or self.settings
        environment = {"PATH": os.environ["PATH"], "JAVA_HOME": str(self.java.home)}
        environment |= {"HADOOP_CONF_DIR": str(settings), "HADOOP_USER_NAME": USER}
        with (self.folder / f"{name}.log").open("ab") as said:
            process = subprocess.Popen(
                [
                    str(self.java.executable),
                    *OPTIONS,
                    *options,
                    "-cp",
                    f"{settings}:{hadoop.jars()}/*",
                    program,
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=environment | {"HOME": str(self.folder)},
            )
        self.processes[name] = process
        self.opened.callback(process.wait, 30)
        self.opened.callback(process.kill)
        return process

    def said(self, *names: str) -> str:
        return "".join((self.folder / f"{name}.log").read_text()[-3000:] for name in names)

    def _configure(self, settings: Path) -> None:
        proxy = f"hadoop.proxyuser.{USER}"  # the gateway asks for its users
        core = {"fs.defaultFS": f"hdfs://{_CLUSTER}", f"{proxy}.hosts": "*", f"{proxy}.groups": "*"}
        write_settings(settings / "core-site.xml", core)
        chooser = f"{SERVER}.namenode.ha.ConfiguredFailoverProxyProvider"
        both = {
            "dfs.nameservices": _CLUSTER,
            f"dfs.ha.namenodes.{_CLUSTER}": ",".join(NAMENODES),
            f"dfs.client.failover.proxy.provider.{_CLUSTER}": chooser,
            "dfs.ha.fencing.methods": "shell(/bin/true)",
            "dfs.namenode.shared.edits.dir": f"file://{self.folder}/edits",
            "dfs.ha.tail-edits.period": 1,
            "dfs.namenode.safemode.extension": 0,
            "dfs.replication": 2,
            "dfs.datanode.du.reserved": 0,
            "dfs.datanode.hostname": "127.0.0.1",
        }
        for name in NAMENODES:
            own = f"{_CLUSTER}.{name}"
            both[f"dfs.namenode.rpc-address.{own}"] = f"127.0.0.1:{self.rpc[name]}"
            both[f"dfs.namenode.http-address.{own}"] = f"127.0.0.1:{self.web[name]}"
            both[f"dfs.namenode.name.dir.{own}"] = f"{self.folder}/names-{name}"
        write_settings(settings / "hdfs-site.xml", both)

    def _format(self) -> None:
        program = f"{SERVER}.namenode.NameNode"
        arguments = ("-Ddfs.ha.namenode.id=a", "-format", "-nonInteractive")
        assert self.start("format", program, *arguments).wait(START_S) == 0, self.said("format")
        shutil.copytree(self.folder / "names-a", self.folder / "names-b")

    def _start_datanode(self, name: str) -> None:
        transfer, web, ipc = (f"127.0.0.1:{port}" for port in free_ports(3))
        self.start(
            name,
            f"{SERVER}.datanode.DataNode",
            f"-Ddfs.datanode.address={transfer}",
            f"-Ddfs.datanode.http.address={web}",
            f"-Ddfs.datanode.ipc.address={ipc}",
            f"-Ddfs.datanode.data.dir={self.folder}/{name}",
        )

    def start_gateway(self) -> None:
        home = self.folder / "gateway"
        address = {"httpfs.http.hostname": "127.0.0.1", "httpfs.http.port": self.gateway_port}
        settings, options = make_gateway(home, address)
        self._configure(settings)
        process = self.start(
            "gateway", GATEWAY_PROGRAM, settings=settings, hadoop=GATEWAY, options=options
        )
        deadline, pause = time.monotonic() + START_S, threading.Event()
        url = f"{self.gateway}/webhdfs/v1/?op=LISTSTATUS&user.name={USER}"
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(url, timeout=10):
                return
            pause.wait(0.2)
        raise AssertionError(self.said("gateway", "a"))
