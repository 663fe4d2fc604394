"""The demo's pipeline with another click rate, over the same log, beside the first version.

The rate is Wilson's lower bound: an ad needs evidence that it is clicked. This app reads the log from the
beginning and keeps its own views, so both versions can be queried:

    python examples/ads/second_version.py
    millstream view show ad_ctr --log ./demo-data --app ads
    millstream view show ad_ctr --log ./demo-data --app ads-second

Source: E. B. Wilson, "Probable Inference", Journal of the American Statistical Association 22 (1927).
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl
from app import LOG, WEEK

import millstream as ms
from millstream.demo.ads_pipeline import add_rates, add_stopped_ads, deduplicated_events

Z = 1.96  # 95 of 100 intervals hold the true rate


def wilson() -> pl.Expr:
    """Return the lower bound of the rate's confidence interval."""
    clicked, shown = pl.col("clicked"), pl.col("shown")
    # A click may come in a minute in which its ad was not shown.
    trials = pl.max_horizontal(clicked, shown).cast(pl.Float64)
    rate = clicked / trials
    spread = (rate * (1 - rate) / trials + Z**2 / (4 * trials**2)).sqrt() * Z
    bound = (rate + Z**2 / (2 * trials) - spread) / (1 + Z**2 / trials)
    # Without any click the bound is zero but for the last bit.
    return pl.when(trials > 0).then(bound.clip(0.0)).otherwise(0.0)


app = ms.App("ads-second", log=LOG)
events = deduplicated_events(app)
add_rates(events, wilson())
add_stopped_ads(events, replace(WEEK.stop_rule, floor=0.0001), wilson())

if __name__ == "__main__":
    print(app.run(until="caught-up"))
