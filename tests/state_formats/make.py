"""Keeps what an app has left on disk in the present state format, for tests of all later versions.

    python tests/state_formats/make.py

writes ``<format>.tar.gz`` beside this file, unless it is there: the folder only grows. In it are the log with the
app's state, the app, records that come later, and the rows of all views after them.

What is there of format 6 was written by the last code of that format, on Spark, with the program, the records and the
expected rows of 7. Its checkpoint is left out; the source offset after its last batch is in the status instead, as
`LocalRun` has it.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from edited_app import SOURCE, EditedApp, answers, events, texts_of

from millstream.views.state_store.program import STATE_FORMAT

FOLDER = Path(__file__).parent
MORE = """
ordered = stream.dedup(["ad", "cost"], within="20 seconds")
ordered.view("once", key="at")
stream.window(ms.session("7 seconds"), by="ad", name="visits").emit("update").agg(n=ms.count()).view("visits")
slide = ms.sliding("1 minute")
stream.window(slide, by="kind", name="slide").emit("update").agg(n=ms.count()).view("slide")
stream.window(ms.count_window(5, unbounded=True), by="ad", name="fives").agg(n=ms.list("cost")).view("fives")
quick = clicks.stream(time="at", watermark=ms.watermark("10 seconds"), name="quick")
quick.window(ms.tumbling("1 minute"), by="ad", name="closed").agg(q=ms.quantile("cost", 0.5)).view("closed")
stream.budget("ad", cost="cost", limit=pl.lit(40), zone="UTC").view("budgets", key="at")
"""


def keep(edited: EditedApp, target: Path) -> None:
    """Write the folder of the log, without what a process that is gone has left."""
    with tarfile.open(target, "w:gz") as kept:
        for path in sorted(edited.folder.rglob("*")):
            if path.is_file() and path.name != "LOCK" and not path.name.endswith(("-shm", "-wal")):
                kept.add(path, path.relative_to(edited.folder), filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    target = FOLDER / f"{STATE_FORMAT}.tar.gz"
    if target.exists():
        sys.exit(f"{target.name} is there already, and is not made again")
    before, after = events(170, 1), events(90, 2, first=170)
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as whole:
        edited, fresh = (
            EditedApp(Path(one), 4, 60, SOURCE + MORE, by_ad=True) for one in (kept, whole)
        )
        for one, rows in ((edited, before), (fresh, [*before, *after])):
            one.create()
            one.append(before)
            one.append(rows[len(before) :])
            one.run(one.write())
        expected = texts_of(fresh.views(fresh.write()))
        assert expected.items() >= texts_of(answers([*before, *after])).items()
        edited.file.write_text(edited.source)
        more = [{**row, "at": row["at"].isoformat()} for row in after]
        (edited.folder / "more.json").write_text(json.dumps(more))
        (edited.folder / "expected.json").write_text(json.dumps(expected))
        keep(edited, target)


if __name__ == "__main__":
    main()
