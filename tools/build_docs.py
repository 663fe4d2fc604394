"""`make docs`: the pages as a site, in build/site, and packed into the package, which `millstream docs` serves.

Whatever Sphinx warns of is an error: a link to a page, heading or file that is not there, a page that is in no table of
contents, a docstring that cannot be read. So is a page that would load anything from another host.
"""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from processes import run, say

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / "src" / "millstream" / "site.zip"
BUILT_FOR_TOOLS = (".buildinfo", "objects.inv")  # and maps of minified files: no reader needs them
# The earliest that a zip can have: the same pages give the same file.
PACKED_DATE = (1980, 1, 1, 0, 0, 0)
SPHINX = ["-m", "sphinx", "--fail-on-warning", "--jobs", "auto", "--quiet"]
# What a browser fetches without being asked; a link is followed only by the reader.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc="(?:https?:)?//"""
    r"""|<link\b(?![^>]*rel="(?:canonical|index|search|next|prev|author|copyright)")[^>]*\bhref="(?:https?:)?//"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//|url\(["']?(?:https?:)?//"""
)


def main(arguments: list[str]) -> int:
    """Check the pages, build the site, and pack it, or as much of it as is wanted."""
    parser = argparse.ArgumentParser(prog="make docs", description="Build the site in build/site.")
    parser.add_argument("--check", action="store_true", help="check all pages, and write none")
    parser.add_argument("--unpacked", action="store_true", help="do not pack it into the package")
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build", help="folder of the site, by default build"
    )
    given = parser.parse_args(arguments)
    builder = "dummy" if given.check else "html"
    site = given.build / "site"
    # What Sphinx keeps, so that the next time it reads only what has changed.
    parsed = given.build / "site-parsed"
    paths = ["-b", builder, "-c", "docs", "-d", str(parsed), ".", str(site)]
    code = run([sys.executable, *SPHINX, *paths])
    if code or given.check:
        return code
    if foreign := list(foreign_requests(site)):
        say("docs: these pages would load something from another host:\n" + "\n".join(foreign))
        return 1
    if not given.unpacked:
        pack(site, PACKED)
        say(f"docs: {site}/index.html; packed: {PACKED.stat().st_size:,} bytes")
    return 0


def foreign_requests(site: Path) -> Iterator[str]:
    """Give each file of a site that would fetch something from another host, and what."""
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            for found in FETCHED.finditer(path.read_text()):
                yield f"  {path.relative_to(site)}: {found[0]}"


def pack(site: Path, target: Path) -> None:
    """Pack a site into a zip; the file is whole at every moment."""
    written = target.with_suffix(".new")
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(site.rglob("*")):
            if path.is_file() and path.name not in BUILT_FOR_TOOLS and path.suffix != ".map":
                about = zipfile.ZipInfo(path.relative_to(site).as_posix(), PACKED_DATE)
                about.compress_type = zipfile.ZIP_DEFLATED
                packed.writestr(about, path.read_bytes())
    written.replace(target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
