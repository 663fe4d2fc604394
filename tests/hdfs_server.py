"""A real HDFS for tests: a namenode and a datanode of Apache Hadoop, with a proxy in front of each that makes faults.

Maven fetches Hadoop's jars once; without Maven or Java the tests are skipped. A client is led by the namenode's answers from its proxy to the
datanode's.
"""

import os
import subprocess
import threading
import time
import urllib.request
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
_START_S = 300
_SERVER = "org.apache.hadoop.hdfs.server"
_OPTIONS = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


@dataclass
class Hdfs:
    """The proxies of a cluster: one before the namenode, one before the datanode."""

    names: FaultProxy
    data: FaultProxy

    def environment(self):
        """Return what a client has in its environment."""
        address = f"http://127.0.0.1:{self.names.port}"
        return {"MILLSTREAM_WEBHDFS": address, "HADOOP_USER_NAME": USER}

    def forget(self):
        """Make no faults any more, and count from nothing."""
        for proxy in (self.names, self.data):
            proxy.decide = lambda _method, _path: None
            proxy.requests.clear()


def _write(path: Path, settings: dict[str, object]) -> None:
    properties = "".join(
        f"<property><name>{name}</name><value>{escape(str(value))}</value></property>\n"
        for name, value in settings.items()
    )
    path.write_text(f"<configuration>\n{properties}</configuration>\n")


def _configure(folder: Path, ports: list[int]) -> Path:
    """Write the settings of both; return their folder, which has to be on the path of classes."""
    rpc, web, transfer, data_web, ipc = (f"127.0.0.1:{port}" for port in ports)
    made = folder / "settings"
    for page in ("hdfs", "datanode", "static"):  # the jars have no pages, and the servers want them
        inner = made / "webapps" / page / "WEB-INF"
        inner.mkdir(parents=True)
        (inner / "web.xml").write_text("<web-app/>")
    _write(made / "core-site.xml", {"fs.defaultFS": f"hdfs://{rpc}"})
    settings = {
        "dfs.replication": 1,
        "dfs.namenode.http-address": web,
        "dfs.namenode.name.dir": folder / "names",
        "dfs.namenode.safemode.extension": 0,
        "dfs.datanode.address": transfer,
        "dfs.datanode.http.address": data_web,
        "dfs.datanode.ipc.address": ipc,
        "dfs.datanode.hostname": "127.0.0.1",
        "dfs.datanode.data.dir": folder / "data",
        "dfs.datanode.du.reserved": 0,
    }
    _write(made / "hdfs-site.xml", settings)
    (made / "log4j.properties").write_text(
        "log4j.rootLogger=WARN,out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.out.layout=org.apache.log4j.PatternLayout\n"
        "log4j.appender.out.layout.ConversionPattern=%d %p %c: %m%n\n"
    )
    return made


@contextmanager
def hdfs(folder: Path):
    """Serve an empty HDFS until the block ends; give its proxies."""
    ports = free_ports(5)
    settings, java = _configure(folder, ports), find_java(os.environ)
    environment = {"PATH": os.environ["PATH"], "JAVA_HOME": str(java.home), "HOME": str(folder)}
    environment |= {"HADOOP_CONF_DIR": str(settings), "HADOOP_USER_NAME": USER}
    classes = f"{settings}:{HADOOP.jars()}/*"

    def start(name, program, *arguments):
        with (folder / f"{name}.log").open("wb") as said:
            return subprocess.Popen(
                [str(java.executable), *_OPTIONS, "-cp", classes, program, *arguments],
                stdout=said,
                stderr=said,
                env=environment,
            )

    format_it = start("format", f"{_SERVER}.namenode.NameNode", "-format", "-nonInteractive")
    assert format_it.wait(_START_S) == 0, (folder / "format.log").read_text()[-3000:]
    with ExitStack() as opened:
        for name, program in (("namenode", "NameNode"), ("datanode", "DataNode")):
            process = start(name, f"{_SERVER}.{name}.{program}")
            opened.callback(process.wait, 30)
            opened.callback(process.kill)
        _wait_until_it_serves(ports[1], folder)
        data = opened.enter_context(FaultProxy(ports[3]))
        direct, around = (f"//127.0.0.1:{port}/".encode() for port in (ports[3], data.port))
        names = FaultProxy(ports[1], rewrite=lambda head: head.replace(direct, around))
        yield Hdfs(opened.enter_context(names), data)


def _wait_until_it_serves(port: int, folder: Path) -> None:
    """Wait until the namenode has left its safe mode, and knows its datanode."""
    address = f"http://127.0.0.1:{port}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
    deadline, pause = time.monotonic() + _START_S, threading.Event()
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(address, timeout=10) as answer:
            said = answer.read().decode()
            if '"NumLiveDataNodes" : 1' in said and '"FSState" : "Operational"' in said:
                return
        pause.wait(0.2)
    raise AssertionError("".join(each.read_text()[-3000:] for each in folder.glob("*.log")))
