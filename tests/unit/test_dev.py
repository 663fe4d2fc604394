"""dev.py, as far as it can be tried without a network: tests/unit runs inside what it has made."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

DEV = Path(__file__).resolve().parents[2] / "dev.py"


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load dev.py as if it lay in an empty project, for a user without settings."""
    spec = importlib.util.spec_from_file_location("dev", DEV)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)  # where its commands go too
    module.ROOT = tmp_path
    module.STATE = tmp_path / ".dev"
    module.ENVIRONMENT = tmp_path / ".venv"
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_", "JAVA_"))]:
        monkeypatch.delenv(name)
    return module


@pytest.fixture
def uv(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """Replace uv by one that has no cache; return what it is asked, and with which variables."""
    asked: list[tuple[str, dict[str, str]]] = []

    def run(command: list[object], env: dict[str, str], *, show: bool = False) -> tuple[int, str]:
        asked.append((" ".join(map(str, command)), env))
        return int("--offline" in command), ""

    monkeypatch.setattr(dev, "run", run)
    monkeypatch.setattr(dev, "find_uv", lambda: "uv")
    monkeypatch.setattr(dev, "java_is_there", lambda: True)
    monkeypatch.setattr(dev, "pip_settings", dict)
    return asked


def make_java(home: Path, release: str | None) -> Path:
    """Lay out a Java of release 8 by its own word, and by its file of the release given."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    executable.chmod(0o755)
    if release is not None:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{release}"\n')
    return home


@pytest.mark.parametrize(
    ("release", "enough"),
    [("17.0.15", True), ("21", True), ("11.0.2", False), ("1.8.0_392", False), (None, False)],
)
def test_a_java_is_known_by_its_release_file_or_is_asked(
    release: str | None,
    enough: bool,
    dev: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(make_java(tmp_path / "java", release) / "bin"))
    assert dev.java_is_there() is enough


def test_a_java_on_the_path_counts_when_java_home_is_too_old(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "old", "11.0.2")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not dev.java_is_there()
    monkeypatch.setenv("PATH", str(make_java(tmp_path / "new", "17.0.2") / "bin"))
    assert dev.java_is_there()


def test_what_pip_is_told_about_the_network_reaches_uv(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = (
        ":env:.cert='/etc/ours.pem'\n"
        "global.cert='/etc/theirs.pem'\n"
        "install.index-url='https://mirror.example/simple'\n"
        "global.index-url='https://other.example/simple'\n"
        "install.extra-index-url='https://a.example/\\nhttps://b.example/'\n"
        "global.timeout='60'\n"
    )
    monkeypatch.setattr(dev, "run", lambda _: (0, listing))
    monkeypatch.setenv("PIP_CERT", "/etc/ours.pem")
    assert dev.pip_settings() == {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://a.example/ https://b.example/",
        "SSL_CERT_FILE": "/etc/ours.pem",
    }


def test_what_uv_is_told_itself_stands_but_not_which_python(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://pypi.org/simple/")
    monkeypatch.setenv("UV_PYTHON", "3.99")
    env = dev.uv_env({"UV_DEFAULT_INDEX": "https://mirror.example/simple"})
    assert env["UV_DEFAULT_INDEX"] == "https://pypi.org/simple/"
    assert env["UV_PYTHON"] == dev.PYTHON
    assert env["UV_PYTHON_DOWNLOADS"] == "never"


def test_without_a_home_the_cache_lies_in_the_project(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "UV_CACHE_DIR" not in dev.uv_env({})
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert dev.uv_env({})["UV_CACHE_DIR"] == str(dev.STATE / "cache")


def test_what_is_in_the_cache_takes_no_network(
    dev: ModuleType, uv: list[tuple[str, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "run", lambda command, _: (uv.append((command[-1], {})), (0, ""))[1])
    dev.prepare("--extra spark")
    assert uv == [("--offline", {})]


def test_a_machine_without_java_is_given_one_from_the_lock(
    dev: ModuleType, uv: list[tuple[str, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "java_is_there", lambda: False)
    dev.prepare("--extra spark")
    wanted = "uv sync --inexact --frozen --no-default-groups --extra spark --extra jre"
    assert [command for command, _ in uv] == [f"{wanted} --offline", wanted]


def test_from_an_index_of_the_users_come_the_locked_versions(
    dev: ModuleType, uv: list[tuple[str, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = {"UV_DEFAULT_INDEX": "https://mirror.example/simple"}
    monkeypatch.setattr(dev, "pip_settings", lambda: mirror)
    dev.prepare("--extra spark")
    assert [command.split()[1] for command, _ in uv] == ["sync", "export", "venv", "pip"]
    assert uv[-1][0].endswith(f"--requirements {dev.STATE / 'requirements.txt'}")
    assert uv[-1][1].items() >= mirror.items()


def test_a_certificate_that_uv_does_not_know_is_looked_for_in_the_machines_store(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def run(command: object, env: dict[str, str], *, show: bool) -> tuple[int, str]:
        tried.append(env)
        return 1, "invalid peer certificate: UnknownIssuer"

    monkeypatch.setattr(dev, "run", run)
    with pytest.raises(dev.Problem, match="set SSL_CERT_FILE"):
        dev.install(["uv"], {"UV_PYTHON": "x"})
    assert [env.get("UV_SYSTEM_CERTS") for env in tried] == [None, "true"]


@pytest.mark.parametrize(
    ("said", "advised"),
    [
        ("tcp connect error", "check the connection"),
        ("no matching distribution (from versions: none)", "check the connection"),
        ("No space left on device (os error 28)", "about 2 GB"),
        ("hash mismatch", "stands above"),
    ],
)
def test_a_failed_install_is_followed_by_what_to_do(
    said: str, advised: str, dev: ModuleType
) -> None:
    assert advised in dev.advice(said)


def test_a_python_without_pip_is_told_what_to_install(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "run", lambda *_: (1, "No module named pip"))
    with pytest.raises(dev.Problem, match="apt install python3-pip"):
        dev.find_uv()


def test_an_old_python_without_a_newer_one_is_told_what_is_needed(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "PYTHON_MIN", (99, 1))
    monkeypatch.setattr(dev, "run", lambda *_: (127, ""))
    assert dev.main(["test"]) == 1
    assert capsys.readouterr().err.startswith("dev.py: Millstream needs Python 99.1 or newer; ")


def test_an_unknown_command_ends_as_one_sentence(
    dev: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dev.main(["tset"]) == 1
    assert capsys.readouterr().err.startswith("dev.py: there is no command 'tset'; there are: ")


def test_an_installer_is_shown_line_by_line(
    dev: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import sys; print('fetching'); print(' + package'); sys.exit(3)"
    assert dev.run([sys.executable, "-c", program], show=True) == (3, "fetching\n + package\n")
    assert capsys.readouterr().err == "    fetching\n"
