"""Clients of other languages, fetched once into the user's cache, by each language's own program.

Where one cannot be had, the tests that want it are skipped, and say why.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream" / "clients"
FETCH_S = 280
BUILDS = "MILLSTREAM_TEST_BUILDS"  # set, where what takes minutes to build is to be built
Commands = Sequence[Sequence[str]]

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion>
<groupId>millstream</groupId><artifactId>clients</artifactId><version>1</version>
<dependencies>{dependencies}</dependencies>
</project>
"""
_DEPENDENCY = """
<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>{}</dependency>"""
_ALONE = """
<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"""


def program(name: str, package: str) -> str:
    """Return the path of a program of the system's, or skip."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install {package})")
    return found


def jars(*artifacts: str, alone: bool = False) -> Path:
    """Return a folder with Java archives, given as ``group:artifact:version``, and what they need.

    Args:
        alone: Leave out what they need.
    """
    dependencies = [
        _DEPENDENCY.format(*one.split(":"), _ALONE if alone else "") for one in artifacts
    ]

    def fetch(folder: Path) -> Commands:
        (folder / "pom.xml").write_text(_POM.format(dependencies="".join(dependencies)))
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=."]
        return [[program("mvn", "maven"), "-q", "-B", "-f", "pom.xml", *goal]]

    digest = hashlib.sha256("".join(dependencies).encode()).hexdigest()[:8]
    return _fetched("-".join([*artifacts[0].split(":")[1:], digest]), fetch)


def node_package(name: str, version: str) -> Path:
    """Return a folder whose ``node_modules`` has a package for Node.js."""

    def fetch(folder: Path) -> Commands:
        quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder)]
        return [[program("npm", "npm"), "install", *quiet, f"{name}@{version}"]]

    return _fetched(f"{name}-{version}", fetch)


def go_program(source: Path, *modules: str) -> Path:
    """Return a program built from a file and modules, given as ``path@version``.

    To build takes two cores for a minute and a half, once: more than all else that is fetched here.
    """
    text = source.read_text()

    def fetch(folder: Path) -> Commands:
        if not os.environ.get(BUILDS):
            pytest.skip(f"{source.name} was not built here; with {BUILDS}=1 it is, in some minutes")
        (folder / "main.go").write_text(text)
        go = program("go", "golang")
        build = [go, "build", "-mod=mod", "-buildvcs=false", "-o", source.stem, "."]
        return [[go, "mod", "init", source.stem], [go, "get", *modules], build]

    digest = hashlib.sha256((text + " ".join(modules)).encode()).hexdigest()[:8]
    return _fetched(f"go-{source.stem}-{digest}", fetch) / source.stem


def _fetched(name: str, fetch: Callable[[Path], Commands]) -> Path:
    """Return a folder of the cache; filled beside it and renamed, so that it is there whole."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as fresh:
        for command in fetch(Path(fresh)):
            try:
                done = subprocess.run(
                    command, cwd=fresh, capture_output=True, text=True, timeout=FETCH_S, check=False
                )
            except subprocess.TimeoutExpired:
                pytest.skip(f"{name} did not come within {FETCH_S} s")
            if done.returncode:
                said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
                pytest.skip(f"{name} could not be made: {said[-1][:200]}")
        whole = CACHE / f"{name}.{os.getpid()}"
        shutil.copytree(fresh, whole)
    if folder.is_dir():  # another run was quicker
        shutil.rmtree(whole)
    else:
        whole.rename(folder)
    return folder
