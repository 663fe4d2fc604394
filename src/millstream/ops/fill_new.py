"""What a run fills before it begins: steps and views that are new behind tables that keep their state.

Nothing that was there is lost by that, and nothing of the log is read, so it needs no deployment of its own. It is one all the same: the state
of the tables is read, and the program is switched in one transaction, with the crash table of any (`ops/deploy.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.ops.deploy import DeployResult, deploy
from millstream.ops.plan import only_fills_new
from millstream.views.runs.control_files import active_runs

if TYPE_CHECKING:
    from millstream.pipeline.app import App


def fill_new(app: App, *, same_expressions: bool = False) -> DeployResult | None:
    """Fill what is new in an app, if that is all that its program changes; None if it is not, or if the app runs.

    Raises:
        ConfigError: the app is declared wrongly, or its state store cannot be read.
        ConflictError: the app was run or deployed meanwhile, or a deployment is at work.
    """
    if active_runs(app.folder) or not only_fills_new(app, same_expressions=same_expressions):
        return None
    return deploy(app, same_expressions=same_expressions, by_run=True)
