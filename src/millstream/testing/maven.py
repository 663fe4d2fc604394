"""Java programs of others for tests: Maven fetches their jars once, and they are kept in the user's cache.

Maven takes them from the repository that it is configured for. The tests then start the programs with the Java that
runs Spark; nothing else of theirs is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import EnvironmentProblem
from millstream.spark.runtime.java import find_java

_FETCH_S = 600.0
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>millstream.testing</groupId>
  <artifactId>{name}</artifactId>
  <version>1</version>
  <dependencies>{dependencies}
  </dependencies>
</project>
"""
_DEPENDENCY = """
    <dependency>
      <groupId>{0}</groupId>
      <artifactId>{1}</artifactId>
      <version>{2}</version>
    </dependency>"""


@dataclass(frozen=True)
class JavaProgram:
    """A program by its artifacts.

    ``title`` is its name for people, ``name`` that of its folder in the cache. The first of the artifacts,
    ``group:artifact:version`` each, shows that the folder is whole.
    """

    title: str
    name: str
    artifacts: tuple[str, ...]

    def why_not(self, env: Mapping[str, str] = os.environ) -> str:
        """Return what is missing on this machine to start the program; "" if nothing is."""
        try:
            find_java(env)
        except EnvironmentProblem as problem:
            return str(problem)
        if self._is_whole(self.folder(env)) or shutil.which("mvn", path=env.get("PATH")):
            return ""
        return f"Maven (mvn), which fetches {self.title}, is not installed: on Debian, apt install maven"

    def jars(self, env: Mapping[str, str] = os.environ) -> Path:
        """Return the folder of the jars, fetching them the first time.

        Raises:
            EnvironmentProblem: Maven is not installed, or could not fetch them; the message has its output.
        """
        folder = self.folder(env)
        if self._is_whole(folder):
            return folder
        missing = self.why_not(env)
        if missing:
            raise EnvironmentProblem(missing)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # 1. Fetch into a folder of its own. A crash leaves it behind, and nobody reads it.
        # 2. Rename it. A crash leaves no jars, or all; whoever was quicker has the same.
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{self.name}-"))
        try:
            dependencies = [_DEPENDENCY.format(*each.split(":")) for each in self.artifacts]
            text = _POM.format(name=self.name, dependencies="".join(dependencies))
            (made / "pom.xml").write_text(text)
            self._fetch(made)
            if not self._is_whole(folder):
                (made / "libs").rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return folder

    def _fetch(self, folder: Path) -> None:
        command = ["mvn", "-q", "-B", "-f", str(folder / "pom.xml"), "dependency:copy-dependencies"]
        command += ["-DincludeScope=runtime", f"-DoutputDirectory={folder / 'libs'}"]
        try:
            done = subprocess.run(  # noqa: S603 - Maven, with our arguments
                command, capture_output=True, check=False, timeout=_FETCH_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnvironmentProblem(f"Maven could not fetch {self.title}: {error}") from error
        if done.returncode:
            output = (done.stdout + done.stderr).decode(errors="replace")[-1000:]
            raise EnvironmentProblem(f"Maven could not fetch {self.title}: {output}")

    def folder(self, env: Mapping[str, str] = os.environ) -> Path:
        """Return where the jars are, or will be."""
        cache = env.get("XDG_CACHE_HOME") or str(
            Path(env.get("HOME") or "~").expanduser() / ".cache"
        )
        return Path(cache) / "millstream" / self.name

    def _is_whole(self, folder: Path) -> bool:
        _, artifact, version = self.artifacts[0].split(":")
        return (folder / f"{artifact}-{version}.jar").is_file()
