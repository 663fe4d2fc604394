"""What the doctor sees, and what it advises."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from millstream.cli.doctor import doctor
from millstream.engine import machine
from millstream.ops import doctor as ops

ROOT = Path(__file__).parents[3]


def test_the_versions_allowed_are_those_of_the_package_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {}
    for extra, wanted in {
        "": project["dependencies"],
        "[spark]": project["optional-dependencies"]["spark"],
    }.items():
        for requirement in wanted:
            found = re.fullmatch(r"([\w-]+)>=([\d.]+),<([\d.]+)", requirement)
            assert found is not None, requirement
            declared[found[1]] = (extra, found[2], found[3])
    assert {name: declared[name] for name in ops.PACKAGES} == ops.PACKAGES
    assert [name for name, (extra, *_) in declared.items() if extra == "[spark]"] == [
        name for name, (extra, *_) in ops.PACKAGES.items() if extra == "[spark]"
    ]


def test_importing_the_doctor_does_not_import_pyspark() -> None:
    program = "import sys, millstream.ops.doctor; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("4.1.9", False),
        ("4.2", True),
        ("4.2.0", True),
        ("4.3.0", True),
        ("4.3.1.dev0", True),
        ("4.4.0", False),
        ("4.4.0rc1", False),
        ("5", False),
    ],
)
def test_a_version_outside_the_range_is_a_problem(
    version: str, *, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    finding = ops._package("pyspark", *ops.PACKAGES["pyspark"])
    advice = 'pip install "millstream[spark]" "pyspark>=4.2,<4.4"'
    assert finding == ops.DoctorCheck("pyspark", ok, version, "" if ok else advice)


def test_a_missing_package_is_reported_with_what_to_install() -> None:
    finding = ops._package("no-such-package-anywhere", "[spark]", "1", "2")
    assert (finding.ok, finding.seen) == (False, "not installed")
    assert finding.advice.startswith('pip install "millstream[spark]"')


def test_the_file_system_is_the_deepest_mount_and_the_last_of_those_over_each_other(
    tmp_path: Path,
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/vda / ext4 rw 0 0\n"
        "server:/home /home nfs4 rw 0 0\n"
        "tmpfs /home/me/two\\040words tmpfs rw 0 0\n"
        "/dev/vdb /home/me/two\\040words xfs rw 0 0\n"
    )
    assert ops.file_system_of(Path("/var/lib"), mounts) == "ext4"
    assert ops.file_system_of(Path("/home/me"), mounts) == "nfs4"
    assert ops.file_system_of(Path("/home/me/two words/data"), mounts) == "xfs"
    assert ops.file_system_of(Path("/homeless"), mounts) == "ext4"
    assert ops.file_system_of(Path("/"), tmp_path / "none") == "unknown"


@pytest.mark.parametrize(("kind", "ok"), [("ext4", True), ("nfs4", False), ("tmpfs", False)])
def test_a_disk_that_is_far_away_or_memory_is_no_home_for_a_log(
    kind: str, *, ok: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ops, "file_system_of", lambda _: kind)
    finding = ops._file_system(tmp_path)
    assert finding.ok is ok
    assert finding.seen == f"{kind} at {tmp_path}"
    assert bool(finding.advice) is not ok


def test_too_little_memory_for_the_cores_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores_available", lambda: 32)
    monkeypatch.setattr(machine, "memory_mib", lambda: 4096)
    finding = ops._memory()
    assert not finding.ok
    assert "fewer cores" in finding.advice
    monkeypatch.setattr(machine, "memory_mib", lambda: 65536)
    assert ops._memory().ok


def test_a_worker_that_cannot_import_says_what_it_could_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "_WORKER_PROGRAM", "import no_such_module_anywhere")
    finding = ops._worker()
    assert not finding.ok
    assert finding.seen == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert sys.executable in finding.advice


def test_the_command_prints_a_line_each_and_fails_when_something_is_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    ended = CliRunner().invoke(doctor, ["--log", str(folder)])
    lines = ended.output.splitlines()
    states = [re.match(r"ok {7}|problem {2}", line) for line in lines]
    assert all(states)
    assert ended.exit_code == (1 if any(line.startswith("problem") for line in lines) else 0)
    assert [line[9:21].strip() for line in lines][-6:] == [
        "workers",
        "file system",
        "free space",
        "sync",
        "ports",
        "memory",
    ]
    assert list(tmp_path.iterdir()) == []  # it looks, and changes nothing


def test_the_command_prints_json_with_the_same_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    findings = [
        ops.DoctorCheck("a", ok=True, seen="b"),
        ops.DoctorCheck("c", ok=False, seen="", advice="d"),
    ]
    monkeypatch.setattr(ops, "diagnose", lambda _folder, _store: findings)
    ended = CliRunner().invoke(doctor, ["--json", "--log", str(tmp_path)])
    assert json.loads(ended.output) == [dataclasses.asdict(finding) for finding in findings]
    assert ended.exit_code == 1
