"""The image of the Dockerfile, built and run without Docker: buildah builds it, runc runs it.

No registry of images is asked. What stands for ``python:3.11-slim`` is made of Debian's packages (mmdebstrap): the same
distribution and Python, with pip. Images and containers are in a storage of the tests' own, in the user's cache, so this stand-in
is never taken for the real one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
STORAGE = Path.home() / ".cache/millstream/images"
BASE = "docker.io/library/python:3.11-slim"
IMAGE = "registry.example.org/millstream:0.1.0"  # as in deploy/kubernetes
_PACKAGES = "python3,python3-pip,python3-venv,python-is-python3,ca-certificates"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = ("buildah", "runc", "mmdebstrap")
# pip of Debian refuses to install beside Debian's packages; that of the real image has none beside it.
_LET_PIP_INSTALL = 'rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED'


def why_not() -> str:
    """Return what keeps this user from building the image here; "" if nothing does."""
    missing = [name for name in _PROGRAMS if not shutil.which(name)]
    if missing:
        return f"what builds images is not installed: apt install {' '.join(missing)}"
    return "" if os.geteuid() == 0 else "only root can build the image here"


def buildah(*arguments: str | Path, check: bool = True) -> str:
    """Run buildah on the storage of the tests; return what it prints."""
    command = ["buildah", *storage(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def storage() -> list[str]:
    """Return the options that name the storage."""
    return [f"--root={STORAGE}/root", f"--runroot={STORAGE}/run"]


def runtime() -> str:
    """Return the option that names the program that runs containers: crun can't do with control groups of both kinds."""
    return f"--runtime={shutil.which('runc')}"


def build() -> str:
    """Build the Dockerfile of the project; return the image's name. What has not changed is not built again."""
    if not buildah("images", "--quiet", BASE, check=False):
        _make_base()
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder)
        # uv asks the certificates that this machine trusts, as pip does here.
        (settings / "uv.toml").write_text("native-tls = true\n")
        mounted = {"/etc/ssl/certs": "/etc/ssl/certs", str(settings): "/etc/uv"}
        if Path("/etc/pip.conf").exists():
            mounted["/etc/pip.conf"] = "/etc/pip.conf"
        volumes = [f"--volume={here}:{there}:ro" for here, there in mounted.items()]
        network = ["--pull-never", "--network=host", *volumes]
        buildah("build", runtime(), "--layers", *network, "--tag", IMAGE, ROOT)
    return IMAGE


def _make_base() -> None:
    STORAGE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "base.tar"
        command = ["mmdebstrap", "--variant=minbase", f"--include={_PACKAGES}"]
        command += [f"--customize-hook={_LET_PIP_INSTALL}", "bookworm", str(archive)]
        subprocess.run(command, check=True, capture_output=True)
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, archive, "/")
        buildah("config", f"--env=PATH={_PATH}", container)
        buildah("commit", "--quiet", container, BASE)
        buildah("rm", container)


def entry_point(image: str) -> list[str]:
    """Return what the image puts before the arguments of a container."""
    config = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]
    return config["Entrypoint"]


class Container:
    """A container of an image, for as long as the block lasts; its processes are on this machine's network."""

    def __init__(self, image: str) -> None:
        self._image, self.name = image, ""

    def __enter__(self) -> Self:
        self.name = buildah("from", "--pull-never", self._image)
        return self

    def __exit__(self, *_: object) -> None:
        buildah("rm", self.name)

    def command(
        self, *arguments: str, folders: tuple[Path, ...] = (), env: dict[str, str] | None = None
    ) -> list[str]:
        """Return the command that runs the entry point with these arguments; folders are there as here."""
        options = [f"--volume={folder}:{folder}" for folder in folders]
        options += [f"--env={name}={value}" for name, value in (env or {}).items()]
        way_in = entry_point(self._image)
        run = ["run", runtime(), "--network=host", *options, self.name, "--", *way_in, *arguments]
        return ["buildah", *storage(), *run]
