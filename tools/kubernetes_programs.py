"""Build what the tests of deploy/kubernetes run: Kubernetes itself, and its DNS server, from the Go module proxy.

They are published as modules, not as programs, so each build has a module of its own that names what it is made of. On two quiet
cores that takes about twenty minutes; the programs are kept in the user's cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from processes import say

VERSION = "1.34.4"
DNS_VERSION = "1.12.4"
FOLDER = Path.home() / f".cache/millstream/kubernetes-{VERSION}"
COMMANDS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",  # Debian's does not know all that a kustomization.yaml of today has
    "kubelet",
)
DNS = "coredns"
# A DNS server with the plugins that a cluster's names need; with all of them it takes five times as long to build.
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


class BuildError(Exception):
    """Go could not build them; the message is its last line."""


def why_not_built() -> str:
    """Build what is missing, if Go is here; say why not, "" if all is there."""
    missing = [name for name in (*COMMANDS, DNS) if not (FOLDER / name).exists()]
    if not missing:
        return ""
    if not shutil.which("go"):
        return "Kubernetes is not built, and there is no Go here to build it with"
    say(f"building {', '.join(missing)}, about twenty minutes")
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        # A folder beside it: what is built is renamed, so a program is there whole or not at all.
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
            if commands := [name for name in missing if name != DNS]:
                build_kubernetes(Path(folder), commands)
            if DNS in missing:
                build_dns(Path(folder))
            for name in missing:
                (Path(folder) / "bin" / name).replace(FOLDER / name)
    except BuildError as error:
        return f"go could not build Kubernetes and said: {error}"
    return ""


def build_kubernetes(folder: Path, commands: Sequence[str]) -> None:
    """Build these programs of Kubernetes.

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


def build_dns(folder: Path) -> None:
    """Build the DNS server."""
    module = folder / "dns"
    module.mkdir()
    (module / "main.go").write_text(_DNS_MAIN)
    go(module, "mod", "init", "dns-for-tests")
    parts = ("k8s.io/api", "k8s.io/apimachinery", "k8s.io/client-go")
    replacements = [f"-replace={part}={part}@{part_version()}" for part in parts]
    needs = f"-require=github.com/coredns/coredns@v{DNS_VERSION}"
    go(module, "mod", "edit", needs, *replacements)
    go(module, "build", "-ldflags=-s -w", "-o", f"{folder}/bin/{DNS}", ".")


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
