"""deploy/kubernetes, as a real API server takes it: with its defaults, its validation and its admission."""

from __future__ import annotations

import re
from contextlib import ExitStack

import control_plane
import pytest
from control_plane import ControlPlane
from manifests import MANIFESTS

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture
def plane(tmp_path):
    if reason := control_plane.why_not():
        pytest.skip(reason)
    with ExitStack() as opened:
        plane = ControlPlane(tmp_path, opened)
        plane.kubectl("apply", "-f", MANIFESTS / "namespace.yaml", check=True)
        accounts = ("get", "serviceaccounts", "-n", "streams")
        plane.wait_for("the account of pods", lambda: "default" in plane.kubectl(*accounts))
        yield plane


def test_the_api_server_takes_every_object_and_has_no_warning(plane):
    said = plane.kubectl("apply", "--dry-run=server", "-k", MANIFESTS, check=True)
    for line in said.splitlines():
        assert re.fullmatch(r"\S+ (created|unchanged|configured) \(server dry run\)", line), line
    assert len(said.splitlines()) == 13
    # what Spark makes of executor.yaml is not in a file: the template is complete but for the image
    template = (MANIFESTS / "executor.yaml").read_text()
    template = template.replace("    - name: executor\n", "    - name: executor\n      image: a\n")
    created = plane.kubectl(
        "apply", "--dry-run=server", "-n", "streams", "-f", "-", given=template, check=True
    )
    assert created == "pod/clicks-executor created (server dry run)"


def test_the_rules_of_the_namespace_and_the_schema_are_enforced(plane):
    """What the other test relies on: a pod that may become root, and a field that there is not, are refused."""
    template = (MANIFESTS / "executor.yaml").read_text()
    template = template.replace("    - name: executor\n", "    - name: executor\n      image: a\n")
    for right, wrong, refusal in (
        ("runAsNonRoot: true", "runAsNonRoot: false", "violates PodSecurity"),
        ("mountPath: /cache", "mountpath: /cache", "unknown field"),
    ):
        assert right in template
        said = plane.kubectl(
            *("apply", "--dry-run=server", "-n", "streams", "-f", "-"),
            given=template.replace(right, wrong),
        )
        assert refusal in said
