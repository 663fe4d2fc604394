"""Going back to the version of an app that ran before the last deployment: `millstream rollback`.

That version is kept in ``previous/`` (`ops/previous_version.py`) until its time has run out. Its state and views go on
from where they were, so the log is read from the switch on, and never from its start. How the two versions change
places, and what a crash leaves, is as in any deployment (`ops/deploy.py`): by one transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from millstream.errors import ConfigError
from millstream.ops.deploy import KEEP, DeployResult, prepare, settle
from millstream.ops.plan import ChangePlan, plan_change
from millstream.ops.previous_version import PreviousVersion
from millstream.ops.version_retention import Keeping, utc_now
from millstream.views.coverage import STATE_STORE_VIEW, is_complete
from millstream.views.runs.control_files import hold_deployment
from millstream.views.runs.version_folders import kept_from_before_fill
from millstream.views.schema import JOB
from millstream.views.state_store.definition_comparison import same_definition
from millstream.views.state_store.program import StoredProgram, different_steps
from millstream.views.store_location import open_state_store

if TYPE_CHECKING:
    from millstream.durations import Duration
    from millstream.engine.local_run import LocalProgress
    from millstream.pipeline.app import App


def rollback(
    app: App,
    on_batch: Callable[[LocalProgress], None] | None = None,
    *,
    same_expressions: bool = False,
    rows_per_batch: int = 100_000,
    keep: Duration = KEEP,
    clock: Callable[[], datetime] = utc_now,
) -> DeployResult:
    """Let the version before the last deployment take the place of the one that is there.

    ``app`` is that version, loaded from its file as it was: no code is kept. The version that is left is kept in its
    turn, so a rollback can be undone by another one. The arguments are those of :func:`millstream.ops.deploy.deploy`.

    Raises:
        ConfigError: no version is kept, or its time has run out; the app is another one than that version; or the log no
            longer holds all that was read since. Each can be deployed instead.
        ConflictError: the app was run or deployed meanwhile: do it again. Or a deployment is at work.
    """
    keeping = Keeping.of(keep, clock)
    with hold_deployment(app.folder):
        settle(app, clock())
        plan = plan_change(app, same_expressions=same_expressions)
        previous = PreviousVersion(app.name, app.folder)
        kept = previous.program()
        if kept is None:
            raise _none_is_kept(app)
        if lacking := _lacking_rows(app, plan, previous):
            plan = plan_change(app, same_expressions=same_expressions, again=lacking)
        deployment = prepare(
            app, plan, same_expressions=same_expressions, gone_ok=True, ask_again=True
        )
        if deployment is None:
            _check_runs_something_else(app, plan)
            raise ConfigError(
                f"{app.name} runs this program now. Give the file as it was before the last deployment."
                f"{_which_is_kept(app)}"
            )
        _check_is_that_version(app, kept, deployment.program)
        return replace(deployment, keeping=keeping, back=True).complete(on_batch, rows_per_batch)


def _lacking_rows(app: App, plan: ChangePlan, previous: PreviousVersion) -> set[str]:
    """Return the views that would have fewer rows than the version that is kept.

    A deployment has computed their steps anew of what the log still held, or from a stated place on, so what is there is not
    what that version would have gone on with, although the steps are the same. Or the new program has left a view out, and run.
    """
    assert plan.boundary is not None, "a version is kept of an app that has committed batches"
    kept = previous.coverage()
    declared = kept.keys() & {output.name for output in app.outputs}
    with open_state_store(app.state_store, readonly=True) as store:
        there = store.outputs(app.name, JOB)
    found = set()
    for part in plan.change.parts:
        if part.kind != "view" or part.is_computed or part.name not in declared:
            continue
        now = there.get((part.filled_from or part.name, STATE_STORE_VIEW))
        if now is None:
            continue
        until = now.spans[-1].until
        has_missed = until is not None and until.batch_id != plan.boundary.batch_id
        has_other = until is None and not is_complete(now.spans) and now.spans != kept[part.name]
        if has_other or (has_missed and part.filled_from is None):
            found.add(part.name)
    return found


def _none_is_kept(app: App) -> ConfigError:
    return ConfigError(
        f"No version of {app.name} is kept to go back to: it was never deployed, or the time for which the version "
        "before was kept has run out. Deploy the file as it was (millstream deploy), which reads the log from its "
        "start."
    )


def _check_runs_something_else(app: App, plan: ChangePlan) -> None:
    """Say so if a program differs from the one that runs in outputs that need no deployment."""
    edited = [f"{part.kind} {part.name!r}" for part in plan.change.parts if part.why]
    if edited:
        raise ConfigError(
            f"This is not the version of {app.name} that was there before the last deployment: it has the steps of the "
            f"program that runs now, and differs from it in {', '.join(edited)}. Give the file as it was before the last "
            "deployment, with the modules that it imports. To have this program instead, run it (millstream run)."
        )


def _which_is_kept(app: App) -> str:
    """Say which version is kept, if that is from before a run which filled what was new; else nothing."""
    filled_at = kept_from_before_fill(app.folder)
    if filled_at is None:
        return ""
    return (
        f" That was a run: at {filled_at} it filled what was new in the file, and what ran until then is the one version "
        "that is kept."
    )


def _check_is_that_version(app: App, kept: StoredProgram, now: StoredProgram) -> None:
    """Make sure that a program is the one that was kept, in all its steps and outputs."""
    found = [*different_steps(kept, now)]
    found += [
        f"output {name!r}"
        for name in sorted(kept.outputs.keys() | now.outputs.keys())
        if not same_definition(kept.outputs.get(name), now.outputs.get(name))
    ]
    if found:
        raise ConfigError(
            f"This is not the version of {app.name} that was there before the last deployment; it differs in: "
            f"{'; '.join(found)}.{_which_is_kept(app)} Give the file as it was then, with the modules that it imports. To "
            "have this program instead, deploy it (millstream deploy)."
        )
