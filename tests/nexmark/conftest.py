"""Makes the queries of the benchmark known to these tests, and nothing else of its folder.

Modules there may be called as folders of tests are, which they would hide.
"""

import sys
from importlib import import_module
from pathlib import Path

_FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")

sys.path.insert(0, _FOLDER)
try:
    for _name in ("answers", "events", "expected", "queries"):
        import_module(f"_nexmark_{_name}")
finally:
    sys.path.remove(_FOLDER)
