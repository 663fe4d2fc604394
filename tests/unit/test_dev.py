"""dev.py, as far as it can be tried without a network: tests/unit runs inside what it has made."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

DEV = Path(__file__).resolve().parents[2] / "dev.py"


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load dev.py as if it lay in an empty project."""
    spec = importlib.util.spec_from_file_location("dev", DEV)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "dev", module)
    spec.loader.exec_module(module)
    module.ROOT = tmp_path
    module.STATE = tmp_path / ".dev"
    module.ENVIRONMENT = tmp_path / ".venv"
    module.STAMP = module.STATE / "environment.json"
    module.TESTED = module.STATE / "tested"
    module.CHECKED = module.STATE / "checked"
    module.STATE.mkdir()
    for name in ("uv.lock", "pyproject.toml"):
        (tmp_path / name).write_text(name)
    return module


def make_java(home: Path, release: str | None) -> Path:
    """Lay out a Java whose program does nothing but exist."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    executable.chmod(0o755)
    if release is not None:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{release}"\n')
    return executable


@pytest.mark.parametrize(("release", "major"), [("17.0.15", 17), ("21", 21), ("1.8.0_392", 8)])
def test_a_java_is_known_by_its_release_file(
    release: str, major: int, dev: ModuleType, tmp_path: Path
) -> None:
    assert dev.java_major(make_java(tmp_path / "java", release)) == major


def test_a_java_without_a_release_file_is_asked(dev: ModuleType, tmp_path: Path) -> None:
    assert dev.java_major(make_java(tmp_path / "java", None)) == 8


def test_a_java_on_the_path_counts_when_java_home_is_too_old(
    dev: ModuleType, tmp_path: Path
) -> None:
    old = make_java(tmp_path / "old", "11.0.2").parent
    new = make_java(tmp_path / "new", "17.0.2").parent
    assert dev.java_is_there({"JAVA_HOME": str(old.parent), "PATH": str(new)})
    assert not dev.java_is_there({"JAVA_HOME": str(old.parent), "PATH": ""})
    assert not dev.java_is_there({"PATH": str(tmp_path)})


def test_what_pip_is_told_about_the_network_reaches_uv(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = (
        ":env:.cert='/etc/ours.pem'\n"
        "global.cert='/etc/theirs.pem'\n"
        "global.index-url='https://mirror.example/simple'\n"
        "install.extra-index-url='https://a.example/\\nhttps://b.example/'\n"
        "global.timeout='60'\n"
    )
    monkeypatch.setattr(dev, "answer", lambda *_: listing)
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_"))]:
        monkeypatch.delenv(name)
    env = dev.uv_env(dev.pip_settings())
    assert env["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert env["UV_INDEX"] == "https://a.example/ https://b.example/"
    assert env["SSL_CERT_FILE"] == "/etc/ours.pem"
    assert dev.own_index(env) == "https://mirror.example/simple"


def test_what_uv_is_told_itself_stands(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://pypi.org/simple/")
    env = dev.uv_env({"index-url": "https://mirror.example/simple"})
    assert env["UV_DEFAULT_INDEX"] == "https://pypi.org/simple/"
    assert dev.own_index(env) is None


def test_no_python_is_ever_downloaded(dev: ModuleType) -> None:
    env = dev.uv_env({})
    assert env["UV_PYTHON"] == sys.executable
    assert env["UV_PYTHON_DOWNLOADS"] == "never"


@pytest.mark.skipif(os.name != "posix", reason="the cache's place depends on HOME on POSIX only")
def test_without_a_home_the_cache_lies_in_the_project(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "UV_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert dev.uv_env({})["UV_CACHE_DIR"] == str(dev.STATE / "cache")


def test_a_python_without_pip_and_without_venv_is_told_what_to_install(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "answer", lambda *_: None)
    with pytest.raises(dev.Problem, match="python3-pip"):
        dev.find_pip()


@pytest.fixture
def installed(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replace the installer by one that lays out an empty environment; return what it was asked."""
    asked: list[object] = []

    def install(environment: Path, needs: object) -> None:
        asked.append(needs)
        python = dev.python_of(environment)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text("#!/bin/sh\n")
        python.chmod(0o755)

    monkeypatch.setattr(dev, "install", install)
    monkeypatch.setattr(dev, "java_is_there", lambda _: True)
    return asked


def test_an_environment_that_holds_enough_is_left_alone(
    dev: ModuleType, installed: list[object]
) -> None:
    dev.prepare(dev.TEST)
    dev.prepare(dev.DEMO)
    assert installed == [dev.TEST]


def test_what_one_command_needed_is_kept_for_the_next(
    dev: ModuleType, installed: list[object]
) -> None:
    dev.prepare(dev.Needs(groups=("check",)))
    dev.prepare(dev.DEMO)
    assert installed[-1] == dev.Needs(extras=("spark", "ui"), groups=("check",))


def test_a_changed_lock_or_a_lost_python_means_setting_up_again(
    dev: ModuleType, installed: list[object]
) -> None:
    dev.prepare(dev.DEMO)
    (dev.ROOT / "uv.lock").write_text("changed")
    dev.prepare(dev.DEMO)
    dev.python_of(dev.ENVIRONMENT).unlink()
    dev.prepare(dev.DEMO)
    assert len(installed) == 3


def test_a_set_up_that_was_cut_short_is_not_trusted(
    dev: ModuleType, installed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    dev.prepare(dev.DEMO)

    def cut_short(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dev, "install", cut_short)
        with pytest.raises(KeyboardInterrupt):
            dev.prepare(dev.TEST)
    dev.prepare(dev.DEMO)
    assert installed == [dev.DEMO, dev.DEMO]


def test_a_machine_without_java_is_given_one(
    dev: ModuleType, installed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "java_is_there", lambda _: False)
    dev.prepare(dev.DEMO)
    assert installed == [dev.Needs(extras=("jre", "spark", "ui"))]


def test_the_demo_is_the_ads_with_their_page_unless_told_otherwise(
    dev: ModuleType, installed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(dev, "run", lambda command, _env: ran.append(command[1:]) or 0)
    assert dev.main(["demo"]) == 0
    assert dev.main(["demo", "ads", "--chaos"]) == 0
    assert installed == [dev.Needs(extras=("spark", "ui"))]
    words = ["-m", "millstream", "demo", "ads"]
    programs = [command for command in ran if command[0] == "-m"]
    assert programs == [words, [*words, "--chaos"]]


def test_one_requirement_can_take_the_place_of_a_locked_one(
    dev: ModuleType, tmp_path: Path
) -> None:
    listing = tmp_path / "requirements.txt"
    listing.write_text("py4j==0.10.9.9\npyspark==4.3.0\n    # via millstream\n")
    dev.substitute(listing, "pyspark==4.2.*")
    assert listing.read_text() == "py4j==0.10.9.9\npyspark==4.2.*\n    # via millstream\n"


def test_an_unknown_command_ends_as_one_sentence(
    dev: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dev.main(["tset"]) == 1
    assert capsys.readouterr().err.startswith("dev.py: there is no command 'tset'; there are: ")


def test_an_installer_is_shown_line_by_line(
    dev: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import sys; print('fetching'); print(' + package'); sys.exit(3)"
    assert dev.run_shown([sys.executable, "-c", program], os.environ) == (
        3,
        "fetching\n + package\n",
    )
    gc.collect()  # what was left open would be told of now, as an error
    assert capsys.readouterr().err == "    fetching\n"


@pytest.fixture
def tried(dev: ModuleType, installed: list[object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A project with tests, whose runs of pytest are noted and succeed."""
    for folder in ("unit/log", "unit", "spark", "integration/deep"):
        (dev.ROOT / "tests" / folder).mkdir(parents=True, exist_ok=True)
        (dev.ROOT / "tests" / folder / "test_it.py").touch()
    runs: list[str] = []

    def pytest_run(arguments: list[str], env: object, to: object = None) -> int:
        runs.append(" ".join(arguments))
        return 0

    monkeypatch.setattr(dev, "pytest", pytest_run)
    monkeypatch.setattr(dev, "why_not_installed", lambda *_: "it is not to be installed here")
    return runs


def test_what_make_test_passed_is_not_run_again_on_the_same_tree(
    dev: ModuleType, tried: list[str]
) -> None:
    assert dev.test([]) == 0
    tried.clear()
    assert dev.test_all([]) == 0
    files = "tests/integration/deep/test_it.py tests/spark/test_it.py"
    assert sorted(tried) == [  # both at once
        f"{files} -m not quick {' '.join(dev.FILES_SIDE_BY_SIDE)}",
        f"tests/unit -m thorough {' '.join(dev.THOROUGH_SIDE_BY_SIDE)}",
    ]
    tried.clear()
    assert dev.test_all(["--again"]) == 0
    assert tried == ["tests"]


def test_every_lane_has_a_run_of_its_own(dev: ModuleType, tried: list[str]) -> None:
    (dev.ROOT / "tests" / "lanes").mkdir()
    for name in ("thresholds", "hashes"):
        (dev.ROOT / "tests" / "lanes" / f"{name}.py").touch()
    assert dev.test_long([]) == 0
    assert [run.split("--lane ")[1].split()[0] for run in tried] == ["hashes", "thresholds"]
    assert all(run.startswith(f"tests/unit --ignore {dev.HOUSE_RULES} ") for run in tried)
    tried.clear()
    lane, (first, *_) = dev.LANES_IN_PART[0]
    (dev.ROOT / first).parent.mkdir(parents=True, exist_ok=True)
    (dev.ROOT / first).touch()
    dev.test_all([])
    assert [run.startswith(f"{first} --lane {lane} ") for run in tried] == [False, True]


def test_long_files_come_first_and_are_there(dev: ModuleType, tried: list[str]) -> None:
    named = (*dev.LONG_FILES, *(name for _, names in dev.LANES_IN_PART for name in names))
    assert all((Path(__file__).parents[2] / name).exists() for name in named)
    names = [dev.LONG_FILES[1], dev.LONG_FILES[0], "tests/spark/test_it.py"]
    for name in names:
        (dev.ROOT / name).touch()
    dev.test([])
    tried.clear()
    dev.test_all([])
    assert any(
        run.startswith(f"{names[1]} {names[0]} tests/integration/deep/test_it.py {names[2]} -m")
        for run in tried
    )


def test_things_done_together_are_shown_one_after_another_and_fail_as_one(
    dev: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "import sys, time; print(1); time.sleep(.3); print(2, flush=True); sys.exit(%d)"

    def does(code: int) -> Callable[..., int]:
        return lambda to=None: dev.run([sys.executable, "-c", program % code], os.environ, to)

    assert dev.together(does(0)) == 0
    assert dev.together(does(0), does(0), does(4)) == 4
    assert dev.together(does(3), does(4)) == 3
    assert capfd.readouterr().out == "1\n2\n" * 6

    def fails(to: object) -> int:
        raise dev.Problem("no network")

    with pytest.raises(dev.Problem, match="no network"):
        dev.together(does(0), fails)
    assert capfd.readouterr().out == "1\n2\n"


def test_what_make_check_passed_is_not_run_again_on_the_same_tree(
    dev: ModuleType, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "run", lambda *_: 0)
    dev.test([])
    assert not any("--ignore" in run for run in tried)
    dev.check([])
    tried.clear()
    dev.test([])
    assert any(f"--ignore {dev.HOUSE_RULES}" in run for run in tried)
    (dev.ROOT / "tests" / "unit" / "test_it.py").write_text("changed")
    tried.clear()
    dev.test([])
    assert not any("--ignore" in run for run in tried)


def test_on_another_tree_every_test_is_run(dev: ModuleType, tried: list[str]) -> None:
    dev.test([])
    (dev.ROOT / "tests" / "unit" / "test_it.py").write_text("changed")
    tried.clear()
    dev.test_all([])
    assert tried == ["tests"]


def test_a_failed_or_partial_run_counts_for_nothing(
    dev: ModuleType, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dev.test(["tests/unit"])
    dev.test_all([])
    assert tried[-1] == "tests"
    monkeypatch.setattr(dev, "pytest", lambda *_: 1)
    dev.test([])
    assert not dev.TESTED.exists()


@pytest.mark.parametrize("what", ["postgres", "chromium", "kcat"])
def test_the_tests_do_without_a_server_or_browser_only_for_a_reason_that_is_told(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    why_not = getattr(dev, f"why_no_{what}")
    monkeypatch.setattr(dev, f"{what}_is_there", lambda: True)
    assert why_not() == ""
    monkeypatch.setattr(dev, f"{what}_is_there", lambda: False)
    monkeypatch.setattr(dev.os, "geteuid", lambda: 1000)
    assert "only root can install it" in why_not()
    monkeypatch.setattr(dev.os, "geteuid", lambda: 0)
    monkeypatch.setattr(dev.shutil, "which", lambda *_, **__: None)
    assert "no apt-get" in why_not()
    said = []
    monkeypatch.setattr(dev.shutil, "which", lambda *_, **__: "/usr/bin/apt-get")
    monkeypatch.setattr(
        dev, "run_shown", lambda command, _: (said.append(command[1]), (1, "E: no network\n"))[1]
    )
    assert why_not().endswith("said: E: no network")
    assert said == ["install", "update", "install"]
