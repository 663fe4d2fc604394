"""View stores: maintained tables, their change logs, and the one commit that moves them.

`store.py` is the writer's and reader's contract, `reading.py` what :func:`millstream.view` returns.
"""

from millstream.views import panels
from millstream.views.reading import View, view

__all__ = ["View", "panels", "view"]
