"""Everything that `make` does, on a machine that has nothing but Python 3.11 and pip.

Here is what a machine needs before it has uv: a Python that is new enough, uv itself, the settings of
its network, a Java. uv then makes `.venv` from `uv.lock`, and a program in `tools` does the rest. This
script uses the standard library alone, and changes nothing outside this folder but the user's cache.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
STATE = ROOT / ".dev"
ENVIRONMENT = ROOT / ".venv"
# Inside an environment too, the Python that it was made with: .venv cannot make itself.
PYTHON: str = getattr(sys, "_base_executable", sys.executable)

PYTHON_MIN = (3, 11)
# as in millstream.spark.runtime.java, which cannot be asked before it is installed
JAVA_MAJOR_MIN = 17
UV_WANTED = "uv>=0.13,<0.14"
UV_VERSION_MIN = (0, 9)  # older ones on the PATH are passed over: they cannot build this project
PUBLIC_INDEXES = ("https://pypi.org/simple", "https://pypi.python.org/simple")
PACKED_SITE = ROOT / "src" / "millstream" / "site.zip"
CLEANED = (
    ".venv .dev .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist"
)

# The settings of pip that say how the network is reached, and uv's names for them.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
}

# What a command needs of `pyproject.toml`, in uv's words.
DEMO = "--extra spark --extra ui"
TEST = f"{DEMO} --extra kafka --extra s3 --extra notebook --group clients --group test"
TARGETS = "--extra redis --extra tantivy --extra iceberg --extra delta --extra mqtt --extra amqp"
DOCS = "--group docs"
ALL = (
    f"{TEST} --extra postgres --extra mysql --extra mongodb {TARGETS} "
    f"--group notebook --group browser --group check {DOCS}"
)
# Each with what it needs, what Python then runs, and what `help` says of it.
COMMANDS = {
    "setup": (ALL, "", "Make the whole environment for a developer"),
    "demo": (DEMO, "-m millstream demo", "Run one pipeline, end to end, on data of the package"),
    "test": (TEST, "tools/run_tests.py test", "Run all tests that are quick; a few need Spark"),
    "check": (ALL, "tools/check.py", "Check style, types, layers, house rules, snippets"),
    "test-all": (ALL, "tools/run_tests.py test-all", "Run every test, and some on other versions"),
    "test-long": (ALL, "tools/run_tests.py test-long", "Run every lane, images, YARN, Kubernetes"),
    "docs": (
        DOCS,
        "tools/build_docs.py",
        "Build the site of the documentation, and pack it for the wheel",
    ),
    "bench": (TEST, "tools/bench.py", "Run the programs in benchmarks/, or those named"),
    "uv": ("", "", "Run uv, with the network settings of pip"),
    "clean": ("", "", "Remove the environment, the installer and every cache in this folder"),
    "help": ("", "", "List the commands"),
}


ADVICE = {
    "certificate|UnknownIssuer": "The server's certificate is not trusted: set SSL_CERT_FILE to your "
    "organisation's certificates, then run this again.",
    "no space left": "The disk is full: about 2 GB are needed.",
    "connect|resolv|dns|timed out|unreachable|network|proxy|from versions: none": "The network did "
    "not answer: check the connection; behind a proxy or a mirror, set HTTPS_PROXY or PIP_INDEX_URL. "
    "Run this again to go on where it stopped.",
    "": "What the installer said stands above.",
}


class Problem(Exception):
    """Something that this script cannot solve; the message says what the reader can do."""


def say(text: str) -> None:
    """Print one line of progress, apart from the output of the programs."""
    print(text, file=sys.stderr, flush=True)


def run(
    command: Sequence[object], env: Mapping[str, str] | None = None, *, show: bool = False
) -> tuple[int, str]:
    """Return the exit code of a program and its output; show it too, but not each package's line."""
    lines = []
    try:
        with subprocess.Popen(
            [str(part) for part in command],
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process:
            for line in process.stdout or ():
                lines.append(line)
                if show and line.strip() and not re.match(r" [+~-] \S+", line):
                    say(f"    {line.rstrip()}")
    except OSError as error:
        return 127, str(error)
    return process.returncode, "".join(lines)


def install(command: Sequence[object], env: Mapping[str, str]) -> None:
    """Run an installer; if only this machine's own store knows the server, again with that store.

    Not at once with that store: a small machine has none, and uv brings the public certificates.
    """
    code, text = run(command, env, show=True)
    if code and "UnknownIssuer" in text and "UV_SYSTEM_CERTS" not in env:
        say("    uv does not know who issued the certificate: again, with this machine's store")
        # The second name is the older one.
        env = {**env, "UV_SYSTEM_CERTS": "true", "UV_NATIVE_TLS": "true"}
        code, text = run(command, env, show=True)
    if code:
        raise Problem(f"the installer failed. {advice(text)}")


def advice(text: str) -> str:
    """Say what to look at after a failed download, going by what the installer said."""
    return next(said for sign, said in ADVICE.items() if re.search(sign, text, re.IGNORECASE))


def use_new_enough_python() -> None:
    """Return if this Python will do; otherwise start again under one that does."""
    if sys.version_info >= PYTHON_MIN:
        return
    for name in ("python3.14", "python3.13", "python3.12", "python3.11", "python3"):
        # A name on the PATH may be a stand-in for a Python that is not installed: ask it.
        probe = "import sys; print(sys.executable) if sys.version_info >= (3, 11) else sys.exit(1)"
        code, executable = run([name, "-c", probe])
        if code == 0:
            os.execv(executable.strip(), [executable.strip(), __file__, *sys.argv[1:]])  # noqa: S606
    raise Problem(
        f"Millstream needs Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer; this one is "
        f"{sys.version.split()[0]} and no newer one is on the PATH. Install one, then run this again."
    )


def java_is_there() -> bool:
    """Say whether `JAVA_HOME` or the PATH has a Java that Spark runs on.

    The `release` file of its home is read first: starting a JVM takes longer than all else here.
    """
    home = os.environ.get("JAVA_HOME")
    for found in filter(None, (home and shutil.which(f"{home}/bin/java"), shutil.which("java"))):
        release = Path(found).resolve().parent.parent / "release"
        known = release.is_file()
        text = release.read_text(errors="replace") if known else run([found, "-version"])[1]
        major = re.search(r'(?:version |JAVA_VERSION=)"(?:1\.)?(\d+)', text)
        if major and int(major.group(1)) >= JAVA_MAJOR_MIN:
            return True
    return False


def find_uv() -> Path:
    """Return a uv that is new enough: the user's, the one in `.dev`, or one fetched by pip."""
    own = STATE / "uv" / "bin" / "uv"
    for candidate in (Path(shutil.which("uv") or own), own):
        version = re.search(r"uv (\d+)\.(\d+)", run([candidate, "--version"])[1])
        if version and tuple(map(int, version.groups())) >= UV_VERSION_MIN:
            return candidate
    if run([PYTHON, "-m", "pip", "--version"])[0]:
        raise Problem(
            f"{PYTHON} has no pip. Install it (on Debian and Ubuntu: apt install python3-pip), or "
            "put uv on the PATH, then run this again."
        )
    say("setting up: the installer, uv")
    # The user's settings for pip hold, but for two that cannot go together with a target folder.
    env = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    flags = ["--quiet", "--disable-pip-version-check", "--no-input", "--root-user-action=ignore"]
    # A uv that was installed in part only is replaced.
    target = ["--upgrade", "--target", STATE / "uv"]
    install([PYTHON, "-m", "pip", "install", *flags, *target, UV_WANTED], env)
    return own


def pip_settings() -> dict[str, str]:
    """Return how pip is told to reach the network, under uv's names.

    An environment variable beats `[install]`, which beats `[global]`, as in pip.
    """
    listing = run([PYTHON, "-m", "pip", "config", "list"])[1]
    found: dict[str, str] = {}
    for section in ("global", "install"):
        found.update(re.findall(rf"(?m)^{section}\.([a-z-]+)='(.*)'$", listing))
    for name in UV_NAMES:
        value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
        found.update({name: value} if value else {})
    # Several values are listed with line breaks between them, each written as two characters.
    return {
        UV_NAMES[name]: found[name].replace("\\n", " ").strip()
        for name in UV_NAMES.keys() & found.keys()
    }


def uv_env(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for uv: this very Python, no other one, and pip's settings.

    A setting that the user has given to uv itself stands.
    """
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    env.update(UV_PYTHON=PYTHON, UV_PYTHON_DOWNLOADS="never", UV_NO_PROGRESS="1")
    env["UV_PROJECT_ENVIRONMENT"] = str(ENVIRONMENT)
    home = env.get("XDG_CACHE_HOME") or env.get("HOME") or ""
    if "UV_CACHE_DIR" not in env and not os.access(home, os.W_OK):
        env["UV_CACHE_DIR"] = str(STATE / "cache")
    return {**settings, **env}


def prepare(needs: str) -> None:
    """Bring `.venv` to hold at least `needs`, in the versions and with the hashes of `uv.lock`.

    What is there or in the cache takes no network, and none of pip's settings: asking pip for them
    takes longer than all the rest.
    """
    java = [] if java_is_there() else ["--extra", "jre"]
    flags = ["--frozen", "--no-default-groups", *needs.split(), *java]
    uv = find_uv()
    sync = [uv, "sync", "--inexact", *flags]
    if run([*sync, "--offline"], uv_env({}))[0] == 0:
        return
    say("setting up: the packages; Spark alone is some 450 MB, so this may take minutes")
    env = uv_env(pip_settings())
    chosen = env.get("UV_DEFAULT_INDEX") or env.get("UV_INDEX_URL") or PUBLIC_INDEXES[0]
    if chosen.rstrip("/") in PUBLIC_INDEXES:
        install(sync, env)
        return
    # The lock names the files of the public index, and `uv sync` takes them from there alone. From the
    # user's own index come the same versions, with the same hashes.
    listing = STATE / "requirements.txt"
    install([uv, "export", "--quiet", *flags, "--output-file", listing], env)
    install([uv, "venv", "--quiet", "--allow-existing", ENVIRONMENT], env)
    python = ENVIRONMENT / "bin" / "python"
    install([uv, "pip", "install", "--python", python, "--requirements", listing], env)


def programs_env() -> dict[str, str]:
    """Return the variables for the project's programs.

    What Python compiles of the packages is kept, in `.dev`: a start without it takes three times as
    long, and the tests start hundreds of processes.
    """
    unwanted = ("PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env.setdefault("PYTHONPYCACHEPREFIX", str(STATE / "compiled"))
    path = os.pathsep.join([str(ENVIRONMENT / "bin"), env.get("PATH", "")])
    return {**env, "VIRTUAL_ENV": str(ENVIRONMENT), "PATH": path}


def perform(name: str, arguments: Sequence[str]) -> None:
    """Do what a command says; a program of the environment takes the place of this process."""
    if name not in COMMANDS:
        raise Problem(f"there is no command {name!r}; there are: {', '.join(COMMANDS)}.")
    needs, program, _ = COMMANDS[name]
    if needs:
        prepare(needs)
    if program:
        python = str(ENVIRONMENT / "bin" / "python")
        given = arguments or (["ads"] if name == "demo" else [])
        os.execve(python, [python, *program.split(), *given], programs_env())  # noqa: S606
    if name == "setup":
        say(f"the environment is {ENVIRONMENT}; . .venv/bin/activate enters it")
    if name == "uv":
        install([find_uv(), *arguments], uv_env(pip_settings()))
    for folder in CLEANED.split() if name == "clean" else ():
        shutil.rmtree(ROOT / folder, ignore_errors=True)
    if name == "clean":
        PACKED_SITE.unlink(missing_ok=True)
    if name == "help":
        print("make COMMAND, or python3 dev.py COMMAND [arguments]\n")
        print("\n".join(f"  {name:9} {summary}" for name, (*_, summary) in COMMANDS.items()))


def main(arguments: Sequence[str]) -> int:
    """Run one command; a problem that this script cannot solve ends as one sentence."""
    name, *rest = arguments or ["help"]
    try:
        use_new_enough_python()
        os.chdir(ROOT)
        perform("help" if name in ("-h", "--help") else name, rest)
    except Problem as problem:
        say(f"dev.py: {problem}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
