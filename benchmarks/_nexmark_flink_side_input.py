"""The side input of q13 for Flink: a table that can be looked up in, made from Java source with ``javac``."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pyflink

_SERVICES = "META-INF/services/org.apache.flink.table.factories.Factory"
_SOURCE = Path(__file__).with_name("SideInput.java")


def side_input_jar(folder: Path) -> Path:
    """Compile the source, unless the folder has the jar; give the jar's path."""
    jar = folder / "side-input.jar"
    if jar.exists():
        return jar
    classes = folder / "side-input-classes"
    shutil.rmtree(classes, ignore_errors=True)
    libraries = Path(pyflink.__file__).parent / "lib"
    command = ["javac", "-nowarn", "--release", "11", "-cp", f"{libraries}/*", "-d", str(classes)]
    subprocess.run([*command, str(_SOURCE)], check=True, capture_output=True)
    with zipfile.ZipFile(jar, "w") as made:
        made.writestr(_SERVICES, "SideInput\n")
        for part in sorted(classes.rglob("*.class")):
            made.write(part, part.relative_to(classes))
    return jar
