"""Which of the cases run on Spark in many batchings; the others without running time run there once."""

from cases import dedup, panes, patterns, process, sessions, time, windows

ON_SPARK = (
    *("A4", "A7", "B1", "B2", "C2", "C3", "C4", "D1"),
    *("D4", "E11", "E12", "E14", "F2", "F3", "G1", "G3"),
)
WITHOUT_RUNNING_TIME = [
    *windows.CASES,
    *sessions.CASES,
    *time.CASES,
    *panes.CASES,
    *dedup.CASES,
    *patterns.CASES,
    *process.CASES,
]
