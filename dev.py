"""Everything that `make` does, on a machine that has nothing but Python 3.11 and pip.

Uses the standard library alone and changes nothing outside this folder: `.dev` holds the installer
(uv), `.venv` the environment. Both are made when they are first needed, from the versions and
hashes in `uv.lock`, and are left alone until that file changes. Start reading at `COMMANDS`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent
STATE = ROOT / ".dev"
ENVIRONMENT = ROOT / ".venv"
STAMP = STATE / "environment.json"
TESTED = STATE / "tested"  # which tree `make test` has last passed on
CHECKED = STATE / "checked"  # which tree the house rules have last passed on

PYTHON_MIN = (3, 11)
JAVA_MAJOR_MIN = 17  # as in millstream.spark.java, which cannot be asked before it is installed
UV_WANTED = "uv>=0.13,<0.14"
UV_VERSION_MIN = (0, 9)  # older ones on the PATH are passed over: they cannot build this project
SPARK_OLDEST = "pyspark==4.2.*"
KIT_SMOKE = "tests/smoke/test_kit.py"
KIT_EXTRAS = f"{ROOT}[avro,pydantic,sketches,ui]"
KIT_TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.112", "cloudpickle>=3")
PUBLIC_INDEXES = ("https://pypi.org/simple", "https://pypi.python.org/simple")
CLEANED = (
    ".venv .dev .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist"
)

# What pip is told about the network, and what uv calls the same thing.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
}


class Problem(Exception):
    """Something that this script cannot mend; the message says what the reader can do."""


@dataclass(frozen=True)
class Needs:
    """What of `pyproject.toml` a command needs: extras of the project, groups of tools; sorted."""

    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        """Spell the needs for `uv sync` and `uv export`."""
        extras = [flag for extra in self.extras for flag in ("--extra", extra)]
        groups = [flag for group in self.groups for flag in ("--group", group)]
        return ["--no-default-groups", *extras, *groups]

    def union(self, other: Needs) -> Needs:
        """Return what serves both."""
        return Needs(
            tuple(sorted({*self.extras, *other.extras})),
            tuple(sorted({*self.groups, *other.groups})),
        )


DEMO = Needs(extras=("spark", "ui"))
TEST = Needs(extras=("kafka", "spark", "ui"), groups=("clients", "test"))
EVERYTHING = Needs(
    extras=("kafka", "mysql", "postgres", "spark", "ui"),
    groups=("browser", "check", "clients", "test"),
)


def say(text: str) -> None:
    """Print one line of progress, apart from what the programs print."""
    print(text, file=sys.stderr, flush=True)


def run(command: Sequence[str | Path], env: Mapping[str, str], to: IO[str] | None = None) -> int:
    """Run a program to its end in the project's folder and return its exit code.

    Ctrl-C reaches the program too; how to end is its decision, so it is waited for.

    Args:
        to: A file for what it prints; by default it is shown.

    """
    said = None if to is None else subprocess.STDOUT
    process = subprocess.Popen(
        [str(part) for part in command], cwd=ROOT, env=dict(env), stdout=to, stderr=said
    )
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def together(first: Callable[[], int], *others: Callable[[IO[str]], int]) -> int:
    """Do several things at once; return the first exit code that is not 0.

    What the first prints is shown as it comes, and what the others have written into their files
    when all have ended: lines of two at a time cannot be read.
    """
    with ThreadPoolExecutor() as pool, tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / str(number)).open("w+") for number in range(len(others))]
        started = [pool.submit(do, file) for do, file in zip(others, files, strict=True)]
        code = first()
        wait(started)
        for file in files:
            with file:
                file.seek(0)
                shutil.copyfileobj(file, sys.stdout)
        sys.stdout.flush()
    return worst(code, *(one.result() for one in started))


def run_shown(command: Sequence[str | Path], env: Mapping[str, str]) -> tuple[int, str]:
    """Run an installer; show what it says, but not each package, and return code and text."""
    lines = []
    with subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.strip() and not re.match(r" [+~-] \S+", line):
                say(f"    {line.rstrip()}")
        return process.wait(), "".join(lines)


def answer(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str | None:
    """Return what a program prints, or None when it cannot be run or fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=True,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def use_new_enough_python() -> None:
    """Return if this Python will do; otherwise start again under one that does."""
    if sys.version_info >= PYTHON_MIN:
        return
    for name in ("python3.14", "python3.13", "python3.12", "python3.11", "python3"):
        found = shutil.which(name)
        # A name on the PATH may be a stand-in for a Python that is not installed: ask it.
        probe = "import sys; print(sys.executable) if sys.version_info >= (3, 11) else sys.exit(1)"
        executable = (answer([found, "-c", probe]) or "").strip() if found else ""
        if executable:
            os.execv(executable, [executable, str(ROOT / "dev.py"), *sys.argv[1:]])  # noqa: S606
    raise Problem(
        f"Millstream needs Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer; this one is "
        f"{sys.version.split()[0]} and no newer one is on the PATH. Install one, then run "
        f"this again."
    )


def memory_gib() -> float:
    """Return how much memory this machine has; where that cannot be asked, none is counted on."""
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def java_is_there(env: Mapping[str, str]) -> bool:
    """Say whether `JAVA_HOME` or the PATH has a Java that Spark runs on."""
    home = env.get("JAVA_HOME")
    candidates = [Path(home) / "bin" / "java"] if home else []
    on_path = shutil.which("java", path=env.get("PATH", ""))
    candidates += [Path(on_path)] if on_path else []
    return any(java_major(candidate) >= JAVA_MAJOR_MIN for candidate in candidates)


def java_major(executable: Path) -> int:
    """Return the feature release of a Java, 0 if it is none.

    The `release` file of its home is read first: starting a JVM takes longer than all else here.
    """
    if not os.access(executable, os.X_OK):
        return 0
    try:
        text = (executable.resolve().parent.parent / "release").read_text()
    except (OSError, UnicodeDecodeError):
        text = answer([executable, "-version"]) or ""
    found = re.search(r'(?:version |JAVA_VERSION=)"(?:1\.)?(\d+)', text)
    return int(found.group(1)) if found else 0


def find_pip() -> list[str]:
    """Return the command that is pip: this Python's, or that of an environment made to have one."""
    pip = [sys.executable, "-m", "pip"]
    if answer([*pip, "--version"]) is not None:
        return pip
    carrier = STATE / "pip"
    if answer([sys.executable, "-m", "venv", "--clear", carrier]) is not None:
        return [str(python_of(carrier)), "-m", "pip"]
    raise Problem(
        f"{sys.executable} has neither pip nor the means to install it. Install one of them (on "
        "Debian and Ubuntu: apt install python3-pip), or put uv on the PATH, then run this again."
    )


def pip_settings() -> dict[str, str]:
    """Return what the user has told pip about the network, under pip's own names.

    An environment variable beats `[install]`, which beats `[global]`, as pip has it.
    """
    listing = answer([sys.executable, "-m", "pip", "config", "list"]) or ""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listing.splitlines():
            match = re.match(rf"{section}\.([a-z-]+)='(.*)'$", line)
            if match:
                found[match.group(1)] = match.group(2)
    for name in UV_NAMES:  # for a Python without pip
        value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
        if value:
            found[name] = value
    return {name: value.replace("\\n", " ").strip() for name, value in found.items()}


def find_uv(env: Mapping[str, str]) -> Path:
    """Return a uv that is new enough: the user's, the one in `.dev`, or one fetched by pip."""
    own = STATE / "uv" / "bin" / ("uv.exe" if os.name == "nt" else "uv")
    on_path = shutil.which("uv", path=env.get("PATH", ""))
    for candidate in (Path(on_path) if on_path else None, own):
        version = re.search(r"(\d+)\.(\d+)", (candidate and answer([candidate, "--version"])) or "")
        if candidate and version and tuple(map(int, version.groups())) >= UV_VERSION_MIN:
            return candidate
    return fetch_uv(own)


def fetch_uv(own: Path) -> Path:
    """Install uv into `.dev/uv` by pip; nothing else on the machine is touched.

    1. Install into a folder beside it. A crash leaves a folder that nothing reads.
    2. Rename that folder. A crash leaves no uv, or a whole one.
    """
    say("setting up: 1 of 3: the installer, uv")
    pip = find_pip()
    made = STATE / "uv.new"
    shutil.rmtree(made, ignore_errors=True)
    # The user's settings for pip hold, but for two that cannot go together with a target folder.
    env = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    flags = ["--quiet", "--disable-pip-version-check", "--no-input", "--root-user-action=ignore"]
    code, text = run_shown([*pip, "install", *flags, "--target", made, UV_WANTED], env)
    if code:
        raise Problem(f"could not fetch the installer uv. {network_advice(text)}")
    shutil.rmtree(own.parent.parent, ignore_errors=True)
    made.rename(own.parent.parent)
    return own


def network_advice(text: str) -> str:
    """Say what to look at after a failed download, going by what the installer said."""
    said = text.lower()
    if "certificate" in said or "unknownissuer" in said:
        return (
            "The server's certificate is not trusted: set SSL_CERT_FILE to your organisation's "
            "certificates, then run this again."
        )
    if re.search(r"connect|resolv|dns|timed out|unreachable|network|proxy", said):
        return (
            "The network did not answer: check the connection; behind a proxy or a mirror, set "
            "HTTPS_PROXY or PIP_INDEX_URL. Run this again to go on where it stopped."
        )
    if "no space left" in said:
        return "The disk is full: about 2 GB are needed."
    return "What the installer said stands above."


def python_of(environment: Path) -> Path:
    """Return the Python of an environment."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def programs_env(environment: Path) -> dict[str, str]:
    """Return the variables under which the project's programs run.

    What Python compiles of the packages is kept, in `.dev`: a start without it takes three times as
    long, and the tests start hundreds of processes.
    """
    unwanted = ("PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env.setdefault("PYTHONPYCACHEPREFIX", str(STATE / "compiled"))
    env["VIRTUAL_ENV"] = str(environment)
    env["PATH"] = os.pathsep.join([str(python_of(environment).parent), env.get("PATH", "")])
    return env


def uv_env(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for uv: this very Python, no other one, and pip's settings.

    A setting that the user has given to uv itself stands.
    """
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    env.update(UV_PYTHON=sys.executable, UV_PYTHON_DOWNLOADS="never", UV_NO_PROGRESS="1")
    home = env.get("XDG_CACHE_HOME") or env.get("HOME") or ""
    if "UV_CACHE_DIR" not in env and os.name == "posix" and not os.access(home, os.W_OK):
        env["UV_CACHE_DIR"] = str(STATE / "cache")
    for name, value in settings.items():
        if name in UV_NAMES:
            env.setdefault(UV_NAMES[name], value)
    return env


def prepare(needs: Needs) -> dict[str, str]:
    """Bring `.venv` to hold at least `needs`; return the variables for programs that run in it.

    1. Remove the stamp. From here on a crash leaves an environment that is not trusted.
    2. Bring the environment up to date. A crash leaves it part way; the next call goes on.
    3. Write the stamp, by a rename. It says what the environment holds, and of which lock.
    """
    if not java_is_there(os.environ):
        needs = needs.union(Needs(extras=("jre",)))
    key = environment_key()
    held = read_stamp(key)
    if held is not None and held.union(needs) == held:
        return programs_env(ENVIRONMENT)
    needs = needs.union(held or Needs())
    started = time.monotonic()
    STATE.mkdir(exist_ok=True)
    STAMP.unlink(missing_ok=True)
    install(ENVIRONMENT, needs)
    say("setting up: 3 of 3: a first import")
    env = programs_env(ENVIRONMENT)
    if run([python_of(ENVIRONMENT), "-c", "import millstream, polars, pyarrow"], env):
        raise Problem("the environment was made but does not work; `make clean`, then try again.")
    write_stamp(key, needs)
    say(f"setting up: done in {time.monotonic() - started:.0f} s")
    return env


def environment_key() -> str:
    """Return a digest of what decides the environment's contents."""
    digest = hashlib.sha256(repr(sys.version_info[:2]).encode())
    for name in ("uv.lock", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def read_stamp(key: str) -> Needs | None:
    """Return what the environment holds; None if it is of another lock, or not whole."""
    try:
        stamp = json.loads(STAMP.read_text())
        needs = Needs(tuple(stamp["extras"]), tuple(stamp["groups"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = stamp.get("key") == key and os.access(python_of(ENVIRONMENT), os.X_OK)
    return needs if whole else None


def write_stamp(key: str, needs: Needs) -> None:
    """Record what the environment holds."""
    written = STAMP.with_suffix(".new")
    written.write_text(json.dumps({"key": key, "extras": needs.extras, "groups": needs.groups}))
    written.replace(STAMP)


def install(environment: Path, needs: Needs) -> None:
    """Make or update `environment` from `uv.lock`, from where the user wants packages to come.

    The lock names the files of the public index. A user who has chosen another index gets the same
    versions, with the same hashes, from there.
    """
    env = uv_env(pip_settings())
    env["UV_PROJECT_ENVIRONMENT"] = str(environment)
    uv = find_uv(env)
    say("setting up: 2 of 3: the packages; Spark alone is some 450 MB, so this may take minutes")
    if own_index(env):
        code, text = install_from_index(uv, environment, needs, env)
    else:
        code, text = with_system_certificates([uv, "sync", "--frozen", *needs.flags()], env)
    if code:
        raise Problem(f"could not install the packages. {network_advice(text)}")


def own_index(env: Mapping[str, str]) -> str | None:
    """Return the index that the user has chosen in place of the public one, if any."""
    chosen = env.get("UV_DEFAULT_INDEX") or env.get("UV_INDEX_URL") or ""
    return chosen if chosen and chosen.rstrip("/") not in PUBLIC_INDEXES else None


def with_system_certificates(
    command: Sequence[str | Path], env: Mapping[str, str]
) -> tuple[int, str]:
    """Run uv; where only this machine's own store knows the server, run it again with that store.

    Not at once with that store: a small machine has none, and uv brings the public ones.
    """
    code, text = run_shown(command, env)
    if code and "UnknownIssuer" in text and "UV_SYSTEM_CERTS" not in env:
        say("    uv does not know who issued the certificate: again, with this machine's store")
        # The second name is what uv called it before.
        env = {**env, "UV_SYSTEM_CERTS": "true", "UV_NATIVE_TLS": "true"}
        code, text = run_shown(command, env)
    return code, text


def install_from_index(
    uv: Path, environment: Path, needs: Needs, env: Mapping[str, str], replace: str = ""
) -> tuple[int, str]:
    """Install the locked versions by name from the configured index, then the project itself.

    Args:
        replace: One requirement to take instead of the locked one of the same name.

    """
    requirements = STATE / "requirements.txt"
    hashes = ["--no-hashes"] if replace else []
    flags = ["--frozen", "--quiet", "--no-emit-project", *hashes, *needs.flags()]
    code, text = run_shown([uv, "export", *flags, "--output-file", requirements], env)
    if not code and replace:
        substitute(requirements, replace)
    if not code and not python_of(environment).exists():
        code, text = run_shown([uv, "venv", "--clear", environment], env)
    into: list[str | Path] = [uv, "pip", "install", "--python", python_of(environment)]
    if not code:
        code, text = with_system_certificates([*into, "--requirements", requirements], env)
    if not code:
        code, text = with_system_certificates([*into, "--no-deps", "--editable", ROOT], env)
    return code, text


def substitute(requirements: Path, requirement: str) -> None:
    """Put `requirement` in the place of the line that names the same package."""
    name = re.split(r"[=<>~! ]", requirement)[0]
    text = requirements.read_text()
    changed = re.sub(rf"(?m)^{re.escape(name)}==\S+", requirement, text)
    assert changed != text, f"{name} is not in the lock"
    requirements.write_text(changed)


def setup(arguments: Sequence[str]) -> int:
    """Make the whole environment for a developer."""
    del arguments
    prepare(EVERYTHING)
    say(f"the environment is {ENVIRONMENT}; . .venv/bin/activate enters it")
    return 0


def demo(arguments: Sequence[str]) -> int:
    """Run one pipeline, end to end, on data that comes with the package."""
    env = prepare(DEMO)
    return run([python_of(ENVIRONMENT), "-m", "millstream", "demo", *(arguments or ["ads"])], env)


def test(arguments: Sequence[str]) -> int:
    """Run the tests that need no Spark, the simulation, and a few quick tests on Spark.

    Of random examples it draws a part, others each time; `make test-all ARGS=--again` draws all.
    """
    env = prepare(TEST)
    if arguments:
        return pytest(arguments, env)
    env = {**ONE_THREAD_EACH, **FEW_EXAMPLES, **env}
    TESTED.unlink(missing_ok=True)
    tree = tree_key()
    known = CHECKED.is_file() and CHECKED.read_text() == tree
    left_out = ["--ignore", HOUSE_RULES] if known else []  # `make check` has just run them
    unit = [*there(*QUICK_TESTS), *left_out, "-m", "not thorough", *SIDE_BY_SIDE]
    spark = [*there("tests/spark"), "-m", "quick"]
    code = together(
        lambda: pytest(unit, env),
        *([lambda to: pytest(spark, env, to)] if there("tests/spark") else []),
    )
    if code == 0 and tree == tree_key():
        TESTED.write_text(tree)
    return code


def tree_key() -> str:
    """Return a hash of all that the tests depend on in this folder."""
    names = ("pyproject.toml", "uv.lock", "dev.py", "Makefile", "README.md")
    files = [ROOT / name for name in (*names, "Dockerfile", "compose.yaml")]
    for folder in there("src", "tests", "examples", "docs", "benchmarks"):
        files += [path for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    sums = [
        f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(files)
        if path.is_file()
    ]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def check(arguments: Sequence[str]) -> int:
    """Check style, format, types, layers, container files, house rules, and the documents' snippets."""
    del arguments
    env = prepare(EVERYTHING)
    tools = python_of(ENVIRONMENT).parent
    checks: dict[str, list[str | Path]] = {
        "style": [tools / "ruff", "check"],
        "format": [tools / "ruff", "format", "--check"],
        "types": [tools / "mypy"],
        "layers": [tools / "lint-imports", "--no-logo"],
        "Dockerfile": [tools / "hadolint", "Dockerfile"],
        "compose file": [
            tools / "check-jsonschema",
            *("--builtin-schema", "vendor.compose-spec", "compose.yaml"),
        ],
        "house rules and snippets": [*PYTEST, HOUSE_RULES, *SIDE_BY_SIDE],
    }
    failed = []
    CHECKED.unlink(missing_ok=True)
    tree = tree_key()
    for name, command in checks.items():
        say(f"check: {name}")
        if run(command, env):
            failed.append(name)
    if not failed and tree == tree_key():
        CHECKED.write_text(tree)
    say(f"check: failed: {', '.join(failed)}" if failed else "check: all good")
    return 1 if failed else 0


def test_all(arguments: Sequence[str]) -> int:
    """Run every test, and the smoke tests once more on the oldest Spark that is supported.

    What `make test` has passed on this very tree is not run again, unless `--again` is given.
    """
    env = prepare(EVERYTHING)
    again = "--again" in arguments
    given = [argument for argument in arguments if argument != "--again"]
    without_postgres, without_chromium = why_no_postgres(), why_no_chromium()
    without_kcat = why_no_kcat()
    if not given and not again and TESTED.is_file() and TESTED.read_text() == tree_key():
        code = the_rest(env)
    else:
        code = worst(pytest([*given, "tests"], env), smoke_on_oldest_spark(), smoke_at_both_ends())
    if not given:
        few = {**env, **FEW_EXAMPLES}
        parts = [in_lane(lane, there(*tests), few) for lane, tests in LANES_IN_PART]
        code = worst(code, *parts)
    if without_postgres:
        say(f"skipped: the tests on PostgreSQL: {without_postgres}")
    if without_chromium:
        say(f"skipped: the tests of the page in a browser: {without_chromium}")
    if without_kcat:
        say(f"skipped: the tests of the broker with kcat: {without_kcat}")
    return code


def the_rest(env: Mapping[str, str]) -> int:
    """Run what `make test` leaves out, and the smoke tests on the oldest Spark.

    Files are named one by one: pytest would forget their order where it is told a whole folder too.
    """
    say("make test has passed on this very tree: only the tests that it leaves out are run")
    quick = [ROOT / name for name in QUICK_TESTS]
    names = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if not any(folder in path.parents for folder in quick)
    )
    long = [name for name in LONG_FILES if name in names]
    others = [name for name in names if name not in long]
    thorough = [*there(*QUICK_TESTS), "-m", "thorough", *THOROUGH_SIDE_BY_SIDE]
    return together(
        lambda: pytest([*long, *others, "-m", "not quick", *FILES_SIDE_BY_SIDE], env),
        lambda to: worst(
            pytest(thorough, {**ONE_THREAD_EACH, **env}, to),
            smoke_on_oldest_spark(to),
            smoke_at_both_ends(to),
        ),
    )


def test_long(arguments: Sequence[str]) -> int:
    """Run the tests that need no service in every lane: what is rare in the code is made common."""
    tests = arguments or [*there(*QUICK_TESTS), "--ignore", HOUSE_RULES]
    lanes = sorted(path.stem for path in (ROOT / "tests" / "lanes").glob("*.py"))
    env = prepare(TEST)
    return worst(*(in_lane(lane, tests, env) for lane in lanes))


def in_lane(lane: str, tests: Sequence[str], env: Mapping[str, str]) -> int:
    """Run tests in one lane of `tests/lanes`."""
    if not tests:
        return 0
    say(f"the tests in the lane of {lane}")
    return pytest([*tests, "--lane", lane, *SIDE_BY_SIDE], {**ONE_THREAD_EACH, **env})


def postgres_is_there() -> bool:
    """Say whether PostgreSQL's programs are installed, where `millstream.testing` looks for them."""
    return any(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or bool(shutil.which("initdb"))


def chromium_is_there() -> bool:
    """Say whether there is a browser, where the tests of the page look for it."""
    return any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))


def why_no_postgres() -> str:
    """Install PostgreSQL's programs if root may; say why the tests must do without, "" if not.

    The tests start a server of their own, in a temporary folder; the package's own is not used.
    """
    return why_not_installed("postgresql", postgres_is_there, "the tests that need a server")


def why_no_chromium() -> str:
    """Install a browser if root may; say why the tests must do without, "" if not."""
    return why_not_installed("chromium", chromium_is_there, "the tests of the page")


def kcat_is_there() -> bool:
    """Say whether kcat is installed, a client of Kafka's in C."""
    return bool(shutil.which("kcat"))


def why_no_kcat() -> str:
    """Install kcat if root may; say why the tests must do without, "" if not."""
    return why_not_installed("kcat", kcat_is_there, "the tests of the broker with it")


def why_not_installed(package: str, is_there: Callable[[], bool], what_for: str) -> str:
    """Install a package of Debian's if root may; say why not, "" if it is there."""
    if is_there():
        return ""
    by_hand = f"install it, with: sudo apt-get install {package}"
    if os.name != "posix" or os.geteuid() != 0:
        return f"it is not installed, and only root can install it; {by_hand}"
    if not shutil.which("apt-get"):
        return "it is not installed, and there is no apt-get here to install it with"
    say(f"installing {package}, for {what_for}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install_it = ["apt-get", "install", "--yes", "--no-install-recommends", package]
    code, text = run_shown(install_it, env)
    if code:  # most often since the lists of packages are missing or old
        run_shown(["apt-get", "update"], env)
        code, text = run_shown(install_it, env)
    if code or not is_there():
        last = (text.strip().splitlines() or ["nothing"])[-1]
        return f"apt-get could not install it and said: {last}"
    return ""


def smoke_on_oldest_spark(to: IO[str] | None = None) -> int:
    """Run `tests/smoke` in an environment of its own, which differs in Spark's version alone."""
    if not there("tests/smoke"):
        say(f"skipped: the smoke run on {SPARK_OLDEST}: there is no folder tests/smoke")
        return 0
    say(f"the smoke run on {SPARK_OLDEST}, in an environment of its own")
    environment = STATE / "oldest-spark"
    needs = TEST if java_is_there(os.environ) else TEST.union(Needs(extras=("jre",)))
    stamp = environment / "made-of"
    key = f"{environment_key()} {SPARK_OLDEST} {needs}"
    if not (stamp.is_file() and stamp.read_text() == key):
        shutil.rmtree(environment, ignore_errors=True)
        env = uv_env(pip_settings())
        code, text = install_from_index(find_uv(env), environment, needs, env, SPARK_OLDEST)
        if code:
            raise Problem(f"could not install {SPARK_OLDEST}. {network_advice(text)}")
        stamp.write_text(key)
    smoke = [python_of(environment), *PYTEST[1:], "tests/smoke"]
    return run(smoke, programs_env(environment), to)


def smoke_at_both_ends(to: IO[str] | None = None) -> int:
    """Run the kit's smoke tests on the oldest and on the newest libraries that the ranges allow.

    The lock holds one version of each; a fresh `pip install millstream` takes others.
    """
    if not there(KIT_SMOKE):
        say(f"skipped: the smoke runs at both ends of the ranges: there is no {KIT_SMOKE}")
        return 0
    return worst(*(smoke_at(end, to) for end in ("lowest-direct", "highest")))


def smoke_at(end: str, to: IO[str] | None = None) -> int:
    """Run the kit's smoke tests on what uv resolves the ranges to, at one of their ends."""
    say(f"the smoke run of the kit on the {end} versions, in an environment of its own")
    environment = STATE / f"{end}-libraries"
    env = uv_env(pip_settings())
    uv = find_uv(env)
    code, text = run_shown([uv, "venv", "--clear", environment], env)
    if not code:
        into: list[str | Path] = [
            uv,
            "pip",
            "install",
            "--python",
            python_of(environment),
            "--resolution",
            end,
        ]
        code, text = with_system_certificates([*into, KIT_EXTRAS, *KIT_TOOLS], env)
    if code:
        raise Problem(f"could not install the {end} versions. {network_advice(text)}")
    # Not all that runs there is ours: that one of them warns of its own age fails nothing.
    smoke = [python_of(environment), *PYTEST[1:], "-W", "default", KIT_SMOKE]
    return run(smoke, programs_env(environment), to)


def bench(arguments: Sequence[str]) -> int:
    """Run the programs in `benchmarks/`, or those named."""
    programs = [ROOT / "benchmarks" / f"{name}.py" for name in arguments]
    programs = programs or sorted((ROOT / "benchmarks").glob("[!_]*.py"))
    missing = [program.name for program in programs if not program.is_file()]
    if missing or not programs:
        raise Problem(f"benchmarks/ has no {', '.join(missing) or 'program'}.")
    env = prepare(TEST)
    codes = []
    for program in programs:
        say(f"benchmark: {program.stem}")
        codes.append(run([python_of(ENVIRONMENT), program], env))
    return worst(*codes)


def clean(arguments: Sequence[str]) -> int:
    """Remove the environment, the installer and every cache in this folder."""
    del arguments
    for name in CLEANED.split():
        shutil.rmtree(ROOT / name, ignore_errors=True)
    return 0


def usage(arguments: Sequence[str]) -> int:
    """List the commands."""
    del arguments
    print("make COMMAND, or python3 dev.py COMMAND [arguments]\n")
    for name, command in COMMANDS.items():
        print(f"  {name:9} {(command.__doc__ or '').splitlines()[0]}")
    return 0


# One process more than there are cores, as many tests wait: for a disk, a server, another process.
SIDE_BY_SIDE = ("-n", str(min(4, (os.cpu_count() or 1) + 1)), "--dist", "worksteal")
# The processes take all cores: threads of polars would only wait for each other (a quarter of the CPU).
ONE_THREAD_EACH = {"POLARS_MAX_THREADS": "1"}
FEW_EXAMPLES = {"MILLSTREAM_TEST_EXAMPLES_PERCENT": "20"}
THOROUGH_SIDE_BY_SIDE = ("-n", "1")  # beside the files below
# Each may have two JVMs and a cluster at a time: three, and the thorough tests, took 8 GiB.
FILES_PROCESSES = 3 if memory_gib() > 12 else 2
# A session of Spark belongs to a file. Files are taken in the order given: those that take minutes come
# first, so that at the end no process waits for the others.
FILES_SIDE_BY_SIDE = ("-n", str(FILES_PROCESSES), "--dist", "loadfile", "--no-loadscope-reorder")
LONG_FILES = (
    "tests/spark/test_kill_matrix.py",
    "tests/spark/test_demo_ads.py",
    "tests/spark/test_cases.py",
    "tests/spark/test_session.py",
    "tests/spark/test_zombies.py",
    "tests/spark/test_job.py",
    "tests/apache_kafka/test_cluster.py",
    "tests/spark/test_kafka_source.py",
    "tests/spark/test_demo_document.py",
    "tests/spark/test_readme.py",
    "tests/spark/test_cluster.py",
)
# What `make test-all` runs in each lane; `make test-long` runs all.
LANES_IN_PART = (
    (
        "one_bit_hashes",
        (
            "tests/unit/kernels/test_budget.py",
            "tests/unit/kernels/test_count_windows.py",
            "tests/unit/kernels/test_dedup.py",
            "tests/unit/kernels/test_panes.py",
            "tests/unit/kernels/test_repeated_batches.py",
            "tests/unit/kernels/test_sessions.py",
            "tests/unit/kernels/test_sliding.py",
            "tests/unit/kernels/test_windowing.py",
        ),
    ),
    (
        "thresholds",
        (
            "tests/unit/kernels/test_keyed_rows.py",
            "tests/unit/kernels/test_pane_folds.py",
            "tests/unit/kernels/test_session_model.py",
            "tests/unit/kernels/test_sorted_runs.py",
        ),
    ),
    ("types", ("tests/unit/pipeline/test_column_types.py",)),
)
HOUSE_RULES = "tests/unit/test_frame.py"
QUICK_TESTS = (
    "tests/unit",
    "tests/cases",
    "tests/contract",
    "tests/faults",
    "tests/simulation",
    "tests/soak",
)
PYTEST: tuple[str | Path, ...] = (python_of(ENVIRONMENT), "-m", "pytest", "-q")
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "setup": setup,
    "demo": demo,
    "test": test,
    "check": check,
    "test-all": test_all,
    "test-long": test_long,
    "bench": bench,
    "clean": clean,
    "help": usage,
}


def pytest(arguments: Sequence[str], env: Mapping[str, str], to: IO[str] | None = None) -> int:
    """Run pytest and return its exit code."""
    return run([*PYTEST, *arguments], env, to)


def there(*folders: str) -> list[str]:
    """Return those folders and files that exist."""
    return [name for name in folders if (ROOT / name).exists()]


def worst(*codes: int) -> int:
    """Return the first exit code that is not 0."""
    return next((code for code in codes if code), 0)


def command_named(name: str) -> Callable[[Sequence[str]], int]:
    """Return the command of this name."""
    if name not in COMMANDS:
        raise Problem(f"there is no command {name!r}; there are: {', '.join(COMMANDS)}.")
    return COMMANDS[name]


def main(arguments: Sequence[str]) -> int:
    """Run one command; a problem that this script cannot mend ends as one sentence."""
    name = arguments[0] if arguments else "help"
    name = "help" if name in ("-h", "--help") else name
    try:
        use_new_enough_python()
        return command_named(name)(arguments[1:])
    except Problem as problem:
        say(f"dev.py: {problem}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
