"""View stores: maintained tables, their change logs, and the one commit that moves them.

`views/state_store/store.py` is the writer's and reader's contract, `reader.py` what :func:`millstream.view` returns.
"""

from millstream.views import panels
from millstream.views.reader import View, view

__all__ = ["View", "panels", "view"]
