"""What compose.yaml starts, started without Docker: the services' own commands, as processes.

They share a folder as the containers share a volume, beside a PostgreSQL of the tests'.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from millstream.testing.free_ports import free_ports

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
yaml = pytest.importorskip("ruamel.yaml", reason="what checks compose.yaml is not installed here")
ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES = yaml.YAML(typ="safe").load((ROOT / "compose.yaml").read_text())["services"]
WAIT_S = 600


def the_way_in():
    """What stands before every command, and the environment, as the Dockerfile has them."""
    (entry,) = re.findall(r"(?m)^ENTRYPOINT (\[.+\])$", DOCKERFILE)
    assert json.loads(entry) == ["millstream"]
    assert "MILLSTREAM_LOG=/data" in DOCKERFILE
    return [sys.executable, "-m", "millstream"]


class Services:
    """The services that are made of our image, with the names of this machine for those of theirs."""

    def __init__(self, folder, database, opened):
        self.folder, self.database, self.opened = folder, database, opened
        self.broker = f"127.0.0.1:{free_ports(1)[0]}"

    def here(self, word):
        """Translate what containers see."""
        if word == "/data":
            return str(self.folder / "log")
        (mounted,) = (each for each in SERVICES["pipeline"]["volumes"] if each.startswith("./"))
        source, target, _ = mounted.split(":")
        return (
            str(word)
            .replace(f"{target}/", f"{ROOT / source}/")
            .replace("0.0.0.0:8400", "127.0.0.1:0")
            .replace("0.0.0.0:9092", self.broker)
            .replace("broker:9092", self.broker)
        )

    def command(self, name, *words):
        """Return what runs words of the image's command line, as the service of that name would."""
        return [*the_way_in(), *words]

    def environment(self, name):
        path = os.pathsep.join([str(ROOT / "src"), *sys.path])
        return {**os.environ, "PYTHONPATH": path, **self.variables(name)}

    def variables(self, name):
        """Return what the service is given in its environment, with the names of this machine."""
        given = SERVICES[name].get("environment")
        if given is None:
            return {}
        user, password, host = (
            re.escape(SERVICES["postgres"]["environment"][f"POSTGRES_{key}"])
            for key in ("USER", "PASSWORD", "DB")
        )
        address = given["MILLSTREAM_VIEWS"]
        assert re.fullmatch(f"postgresql://{user}:{password}@postgres/{host}", address)
        return {
            "MILLSTREAM_LOG": str(self.folder / "data"),
            "BROKERS": self.here(given["BROKERS"]),
            "MILLSTREAM_VIEWS": self.database,
        }

    def start(self, name):
        said = self.folder / f"{name}.out"
        out = self.opened.enter_context(said.open("wb"))
        command = self.command(name, *map(self.here, SERVICES[name]["command"]))
        process = subprocess.Popen(command, stdout=out, stderr=out, env=self.environment(name))

        def end():
            self.stop(process)
            process.wait()

        self.opened.callback(end)
        return process, said

    def stop(self, process):
        """Ask a service to end, as `docker compose stop` does."""
        process.terminate()

    def produce(self, line):
        """Append records as docs/cluster.md says."""
        document = (ROOT / "docs" / "cluster.md").read_text()
        (words,) = re.findall(r"(?m)^docker compose run --rm -T page (.+?) <", document)
        subprocess.run(
            self.command("page", *map(self.here, shlex.split(words))),
            input=line,
            text=True,
            env=self.environment("page"),
            check=True,
        )


def wait_for(what, process, said):
    """Wait until ``what`` gives something true, and give it."""
    pause, end = threading.Event(), time.monotonic() + WAIT_S
    while True:
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < end, said.read_text()
        found = what()
        if found:
            return found
        pause.wait(0.2)


def counts(url):
    """Ask for the rows; the view is not there before the first batch."""
    with suppress(urllib.error.HTTPError), urllib.request.urlopen(url) as answer:
        return {row["ad"]: row["n"] for row in json.load(answer)["rows"]}
    return {}


def check_services(services):
    """Start them in their order, send clicks, and ask the page for what the pipeline has made of them."""
    with services.opened:
        broker, spoke = services.start("broker")
        health = map(services.here, SERVICES["broker"]["healthcheck"]["test"][2:])
        asked = services.command("broker", *health)
        wait_for(lambda: subprocess.run(asked, check=False).returncode == 0, broker, spoke)
        pipeline, said = services.start("pipeline")
        wait_for(
            (services.folder / "data" / "apps" / "clicks" / "checkpoint").exists, pipeline, said
        )
        page, output = services.start("page")
        (url,) = wait_for(lambda: re.findall(r"http://[\d.:]+", output.read_text()), page, output)
        clicks = [{"ad": ad, "at": f"2026-01-01T12:00:0{n}Z"} for n, ad in enumerate("787")]
        services.produce("\n".join(map(json.dumps, clicks)))
        view = f"{url}/views/clicks_by_minute"
        wait_for(lambda: sum(counts(view).values()) == len(clicks), page, output)
        assert counts(view) == {"7": 2, "8": 1}
        services.stop(pipeline)
        assert pipeline.wait(WAIT_S) == 0


def test_clicks_go_through_the_services_into_the_database_and_out_over_http(
    no_spark, tmp_path, database
):
    check_services(Services(tmp_path, database, ExitStack()))
