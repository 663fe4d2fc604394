"""The durable log: one folder, one owner that writes, any number of readers without locks.

Read in this order: ``batch`` (the bytes), ``segment`` and ``index`` (the files), ``partition``
(a row of segments), ``group_commit`` (what an acknowledgement means), ``recovery`` (what a crash
leaves), ``state_file`` (what readers go by), ``writer`` and ``reader`` (the two faces), ``archive``
(closed segments as columns). ``docs/log-format.md`` describes all of it.
"""
