"""Ads: click rates, budgets, and ads to stop, from a stream with duplicates, disorder and stragglers.

The pipeline is the demo's: read it in `src/millstream/demo/ads_pipeline.py`, and copy from it. This program
runs it over the log folder `./demo-data` that `millstream demo ads` has written:

    python examples/ads/app.py            or            millstream run examples/ads/app.py

It reads the topic `ad-events`, keeps four views, such as `ad_ctr`, and writes three topics, such as
`ad-stops`. It has the demo's name, and so its state and views. `second_version.py` is a second version.
"""

from __future__ import annotations

from millstream.demo.ads_input import AdsInput
from millstream.demo.ads_pipeline import build

LOG = "./demo-data"
WEEK = AdsInput()  # the clients of the real week, and its rule for stopping ads

app = build(LOG, WEEK.clients, WEEK.stop_rule)

if __name__ == "__main__":
    print(app.run(until="caught-up"))
