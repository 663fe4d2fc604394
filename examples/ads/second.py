"""The same with another idea of a click rate, over the same log, beside the first version.

Wilson's lower bound: an ad has to have shown that it is clicked. It reads the log from its beginning and
keeps views of its own, so both versions can be asked:

    python examples/ads/second.py
    millstream view show ad_ctr --log ./demo-data --app ads
    millstream view show ad_ctr --log ./demo-data --app ads-second

Source: E. B. Wilson, "Probable Inference", Journal of the American Statistical Association 22 (1927).
"""

from __future__ import annotations

import polars as pl
from app import LOG, per_minute, read, unloved

import millstream as ms

Z = 1.96  # 95 of 100 intervals hold the true rate


def wilson() -> pl.Expr:
    """Return the lower bound of the rate's confidence interval."""
    clicked, shown = pl.col("clicked"), pl.col("shown")
    # A click may come in a minute in which its ad was not shown.
    trials = pl.max_horizontal(clicked, shown).cast(pl.Float64)
    rate = clicked / trials
    spread = (rate * (1 - rate) / trials + Z**2 / (4 * trials**2)).sqrt() * Z
    bound = (rate + Z**2 / (2 * trials) - spread) / (1 + Z**2 / trials)
    # What is not clicked at all comes to zero but for the last bit.
    return pl.when(trials > 0).then(bound.clip(0.0)).otherwise(0.0)


app = ms.App("ads-second", log=LOG)
events = read(app)
per_minute(events, wilson()).view("ad_ctr")
unloved(events, wilson(), floor=0.0001).view("stopped_ads", key="ad")

if __name__ == "__main__":
    print(app.run(until="caught-up"))
