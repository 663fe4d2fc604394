"""The part of an app for those who watch it: the panels of its page, and alerts."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream.kernels.plan import ViewSinkSpec
from millstream.pipeline.background_app import BackgroundApp
from millstream.views.alerts.rule import AlertRule, check_app_rules
from millstream.views.panels import Panel, check_panel


@dataclass(repr=False)
class WatchedApp(BackgroundApp):
    """The part of an app that is about watching it."""

    panels: tuple[Panel, ...] = field(default=(), init=False)
    alert_rules: tuple[AlertRule, ...] = field(default=(), init=False, repr=False)

    def dashboard(self, *panels: Panel) -> None:
        """Declare what the page of `millstream ui` shows for this app, above what it shows for any.

        Call it after the views that the panels show have been declared. It has no part in the
        app's state or results, and may change from run to run.

        Raises:
            ConfigError: a panel shows a view or column that the app does not have in its own store.

        Example::

            clicks = ms.panels.Measure("Click rate", "clicked", per="shown", unit="percent")
            app.dashboard(ms.panels.Lines("Click rate per minute", "ad_ctr", (clicks,)))
        """
        own = [output for output in self.outputs if output.spec == ViewSinkSpec()]
        views = {output.name: [name for name, _ in output.schema] for output in own}
        for panel in panels:
            check_panel(panel, views)
        self.panels = panels

    def alerts(self, *rules: AlertRule) -> None:
        """Have somebody told when a figure of the app is too large or too small: see :func:`millstream.alert`.

        A run looks every 15 seconds, and at its end; for one that does not live see `millstream alert`.

        Raises:
            ConfigError: two rules have one name, or one is on a metric that an app does not have.
        """
        check_app_rules(rules)
        self.alert_rules = rules
