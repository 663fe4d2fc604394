"""A real HDFS for tests: a namenode and a datanode of Apache Hadoop, with a proxy in front of each that makes faults.

Maven fetches Hadoop's jars once; without Maven or Java the tests are skipped. A client is led by the namenode's answers from its proxy to the
datanode's.
"""

import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from s3_server import FaultProxy

from millstream.spark.runtime.java import find_java
from millstream.testing.free_ports import free_ports
from millstream.testing.maven import JavaProgram

VERSION = "3.5.0"
HADOOP = JavaProgram(
    f"HDFS of Apache Hadoop {VERSION}",
    f"hadoop-hdfs-{VERSION}",
    tuple(
        f"org.apache.hadoop:{artifact}:{VERSION}"
        for artifact in ("hadoop-hdfs", "hadoop-hdfs-client", "hadoop-common")
    ),
)
USER = "tester"
START_S = 300
SERVER = "org.apache.hadoop.hdfs.server"
OPTIONS = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


@dataclass
class Hdfs:
    """The proxies of a cluster: one before the namenode, one before the datanode."""

    names: FaultProxy
    data: FaultProxy
    host: str = "127.0.0.1"
    url: str = ""  # what Hadoop's own clients know it by

    def environment(self):
        """Return what a client has in its environment."""
        address = f"http://{self.host}:{self.names.port}"
        return {"MILLSTREAM_WEBHDFS": address, "HADOOP_USER_NAME": USER}

    def forget(self):
        """Make no faults any more, and count from nothing."""
        for proxy in (self.names, self.data):
            proxy.decide = lambda _method, _path: None
            proxy.requests.clear()


def write_settings(path: Path, settings: dict[str, object]) -> None:
    """Write settings as Hadoop's programs read them."""
    properties = "".join(
        f"<property><name>{name}</name><value>{escape(str(value))}</value></property>\n"
        for name, value in settings.items()
    )
    path.write_text(f"<configuration>\n{properties}</configuration>\n")


def make_settings(folder: Path) -> Path:
    """Make a folder of settings, which has to be on the path of classes; what is said goes to the output."""
    for page in ("hdfs", "datanode", "static"):  # the jars have no pages, and the servers want them
        inner = folder / "webapps" / page / "WEB-INF"
        inner.mkdir(parents=True)
        (inner / "web.xml").write_text("<web-app/>")
    (folder / "log4j.properties").write_text(
        "log4j.rootLogger=WARN,out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.out.layout=org.apache.log4j.PatternLayout\n"
        "log4j.appender.out.layout.ConversionPattern=%d %p %c: %m%n\n"
    )
    return folder


def _configure(folder: Path, ports: list[int], host: str, more: dict[str, object]) -> Path:
    """Write the settings of both; return their folder."""
    rpc, web, transfer, data_web, ipc = (f"{host}:{port}" for port in ports)
    made = make_settings(folder / "settings")
    # In both files: the defaults of HDFS are stronger than the first, and Hadoop's own settings are read from it.
    write_settings(made / "core-site.xml", {"fs.defaultFS": f"hdfs://{rpc}"} | more)
    settings = {
        "dfs.replication": 1,
        "dfs.namenode.http-address": web,
        "dfs.namenode.name.dir": folder / "names",
        "dfs.namenode.safemode.extension": 0,
        "dfs.datanode.address": transfer,
        "dfs.datanode.http.address": data_web,
        "dfs.datanode.ipc.address": ipc,
        "dfs.datanode.hostname": host,
        "dfs.datanode.data.dir": folder / "data",
        "dfs.datanode.du.reserved": 0,
    }
    write_settings(made / "hdfs-site.xml", settings | more)
    return made


@contextmanager
def hdfs(
    folder: Path,
    host: str = "127.0.0.1",
    more: dict[str, object] | None = None,
    options: tuple[str, ...] = (),
    headers: Callable[[], dict[str, str]] = dict,
):
    """Serve an empty HDFS until the block ends; give its proxies.

    ``more`` are settings, and ``options`` Java's; with ``headers`` the namenode is asked how it is.
    """
    ports = free_ports(5)
    settings, java = _configure(folder, ports, host, more or {}), find_java(os.environ)
    environment = {"PATH": os.environ["PATH"], "JAVA_HOME": str(java.home), "HOME": str(folder)}
    environment |= {"HADOOP_CONF_DIR": str(settings), "HADOOP_USER_NAME": USER}
    classes = f"{settings}:{HADOOP.jars()}/*"

    def start(name, program, *arguments):
        with (folder / f"{name}.log").open("wb") as said:
            return subprocess.Popen(
                [str(java.executable), *OPTIONS, *options, "-cp", classes, program, *arguments],
                stdout=said,
                stderr=said,
                env=environment,
            )

    format_it = start("format", f"{SERVER}.namenode.NameNode", "-format", "-nonInteractive")
    assert format_it.wait(START_S) == 0, (folder / "format.log").read_text()[-3000:]
    with ExitStack() as opened:
        for name, program in (("namenode", "NameNode"), ("datanode", "DataNode")):
            process = start(name, f"{SERVER}.{name}.{program}")
            opened.callback(process.wait, 30)
            opened.callback(process.kill)
        wait_until_it_serves(ports[1], folder, headers=headers)
        data = opened.enter_context(FaultProxy(ports[3]))
        direct, around = (f"//{host}:{port}/".encode() for port in (ports[3], data.port))
        names = FaultProxy(ports[1], rewrite=lambda head: head.replace(direct, around))
        yield Hdfs(opened.enter_context(names), data, host, f"hdfs://{host}:{ports[0]}")


def wait_until_it_serves(
    port: int, folder: Path, datanodes: int = 1, headers: Callable[[], dict[str, str]] = dict
) -> None:
    """Wait until a namenode has left its safe mode, and knows its datanodes."""
    address = f"http://127.0.0.1:{port}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
    wanted = f'"NumLiveDataNodes" : {datanodes},'
    deadline, pause = time.monotonic() + START_S, threading.Event()
    while time.monotonic() < deadline:
        asked = urllib.request.Request(address, headers=headers())
        with suppress(OSError), urllib.request.urlopen(asked, timeout=10) as answer:
            said = answer.read().decode()
            if wanted in said and '"FSState" : "Operational"' in said:
                return
        pause.wait(0.2)
    raise AssertionError("".join(each.read_text()[-3000:] for each in folder.glob("*.log")))
