"""Build what the tests of deploy/kubernetes run, from the Go module proxy: Kubernetes, and what a cluster has beside it.

That is a DNS server and a registry of images.

They are published as modules, not as programs, so each build has a module of its own that names what it is made of. On two quiet
cores that takes about half an hour; the programs are kept in the user's cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import say

VERSION = "1.34.4"
FOLDER = Path.home() / f".cache/millstream/kubernetes-{VERSION}"
COMMANDS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",  # Debian's does not know all that a kustomization.yaml of today has
    "kubelet",
)
_PARTS = ("k8s.io/api", "k8s.io/apimachinery", "k8s.io/client-go")
# With the plugins that a cluster's names need; with all of them it takes five times as long to build.
_DNS_MAIN = """\
package main

import (
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
)

func main() {
	dnsserver.Directives = []string{"bind", "errors", "kubernetes"}
	coremain.Run()
}
"""
# With images in a folder; the clients of three clouds' storage are most of the rest.
_REGISTRY_MAIN = """\
package main

import (
	"os"

	"github.com/distribution/distribution/v3/registry"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
)

func main() {
	if registry.RootCmd.Execute() != nil {
		os.Exit(1)
	}
}
"""


@dataclass(frozen=True)
class Program:
    """A program that is made of the parts of a module."""

    module: str
    version: str
    main: str


# What is not Kubernetes's, by name.
OTHERS = {
    "coredns": Program("github.com/coredns/coredns", "1.12.4", _DNS_MAIN),
    "registry": Program("github.com/distribution/distribution/v3", "3.1.2", _REGISTRY_MAIN),
}


class BuildError(Exception):
    """Go could not build them; the message is its last line."""


def why_not_built() -> str:
    """Build what is missing, if Go is here; say why not, "" if all is there."""
    missing = [name for name in (*COMMANDS, *OTHERS) if not (FOLDER / name).exists()]
    if not missing:
        return ""
    if not shutil.which("go"):
        return "Kubernetes is not built, and there is no Go here to build it with"
    say(f"building {', '.join(missing)}, about half an hour")
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        # A folder beside it: what is built is renamed, so a program is there whole or not at all.
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
            if commands := [name for name in missing if name in COMMANDS]:
                keep(build_kubernetes(Path(folder), commands))
            for name in (name for name in missing if name in OTHERS):
                keep(build_other(Path(folder), name))
    except BuildError as error:
        return f"go could not build Kubernetes and said: {error}"
    return ""


def keep(built: Path) -> None:
    """Move what was built to where it is kept, also if the next one can't be built."""
    for program in built.iterdir():
        program.replace(FOLDER / program.name)


def build_kubernetes(folder: Path, commands: Sequence[str]) -> Path:
    """Build these programs of Kubernetes; return the folder that they are in.

    Its module replaces its parts by folders of its repository. They are published too, as versions 0.x of their own.
    """
    module = folder / "kubernetes"
    module.mkdir()
    go(module, "mod", "init", "kubernetes-for-tests")
    published = json.loads(go(module, "mod", "download", "-json", f"k8s.io/kubernetes@v{VERSION}"))
    replaced = json.loads(go(module, "mod", "edit", "-json", published["GoMod"]))["Replace"]
    parts = [each["Old"]["Path"] for each in replaced]
    replacements = [f"-replace={part}={part}@{part_version()}" for part in parts]
    go(module, "mod", "edit", f"-require=k8s.io/kubernetes@v{VERSION}", *replacements)
    major, minor, _ = VERSION.split(".")
    version = "k8s.io/component-base/version"
    said = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s -w", *(f"-X {version}.{name}={value}" for name, value in said.items())])
    packages = [f"k8s.io/kubernetes/cmd/{name}" for name in commands]
    go(module, "build", f"-ldflags={flags}", "-o", f"{folder}/bin/", *packages)
    return folder / "bin"


def build_other(folder: Path, name: str) -> Path:
    """Build a program that is not Kubernetes's, with the same version of Kubernetes's client; return its folder."""
    program = OTHERS[name]
    module = folder / name
    module.mkdir()
    (module / "main.go").write_text(program.main)
    go(module, "mod", "init", f"{name}-for-tests")
    replacements = [f"-replace={part}={part}@{part_version()}" for part in _PARTS]
    go(module, "mod", "edit", f"-require={program.module}@v{program.version}", *replacements)
    go(module, "build", "-ldflags=-s -w", "-o", f"{folder}/bin/{name}", ".")
    return folder / "bin"


def part_version() -> str:
    """Return the version of Kubernetes's parts: of 1.34.4 it is v0.34.4."""
    return f"v0.{VERSION.partition('.')[2]}"


def go(module: Path, *words: str) -> str:
    """Run go in the folder of a module; return what it prints."""
    done = subprocess.run(
        ["go", *words],
        cwd=module,
        env={**os.environ, "GOFLAGS": "-mod=mod -buildvcs=false"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildError((done.stderr.strip().splitlines() or ["nothing"])[-1])
    return done.stdout


if __name__ == "__main__":
    print(why_not_built() or f"all is in {FOLDER}")
