"""The programs of the document run, one after the other, in an empty folder."""

import re
import subprocess
import sys
from pathlib import Path


def test_the_programs_of_the_document_say_what_they_are_said_to(tmp_path):
    document = Path(__file__).parents[4] / "docs" / "apply.md"
    programs = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", "\n".join(programs)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "2",
        "[('pen',), ('ink',)]",
        "[(1, 'pen'), (2, 'ink')]",
        "[0]",
    ]
