"""`make bench`: the programs in `benchmarks`, or those named, one after another."""

import sys
from pathlib import Path

from processes import run, say, worst

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def main(names: list[str]) -> int:
    """Run the programs; return the first exit code that is not 0."""
    programs = {path.stem: path for path in sorted(BENCHMARKS.glob("[!_]*.py"))}
    unknown = [name for name in names if name not in programs]
    if unknown:
        there = ", ".join(programs)
        say(f"benchmarks/ has no {', '.join(unknown)}; there are: {there}")
        return 1
    codes = []
    for name in names or programs:
        say(f"benchmark: {name}")
        codes.append(run([sys.executable, str(programs[name])]))
    return worst(*codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
