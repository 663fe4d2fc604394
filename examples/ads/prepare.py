"""Make the demo's data: six CSV files of the Open Bandit Dataset become one small Parquet file.

The small version of the dataset lies in the wheel of the Python package obp 0.4.1. This script
downloads that wheel (or takes one already there) and writes `ads_week.parquet`: 60,000 impressions
of fashion items on the shop ZOZOTOWN, 24 to 30 November 2019, of which 287 were clicked, in the
order of time. Millstream ships the file; run this to make it again:

    python examples/ads/prepare.py src/millstream/demo/ads_week.parquet
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import polars as pl

REQUIREMENT = "obp==0.4.1"
CAMPAIGNS = ("all", "men", "women")
POLICIES = ("bts", "random")
USER_FEATURES = [f"user_feature_{number}" for number in range(4)]


def download(folder: Path) -> Path:
    """Download the wheel into a folder, without what it depends on, and return its path."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*pip, REQUIREMENT], check=False)  # noqa: S603 - our own arguments
    if done.returncode:
        sys.exit(
            f"pip could not download {REQUIREMENT}: get the wheel yourself, give it as --wheel"
        )
    return next(folder.glob("obp-*.whl"))


def read_impressions(wheel: Path) -> pl.DataFrame:
    """Return the rows of all six files, with campaign, policy and each row's place in its file."""
    parts = []
    with zipfile.ZipFile(wheel) as archive:
        for policy in POLICIES:
            for campaign in CAMPAIGNS:
                name = f"obp/dataset/obd/{policy}/{campaign}/{campaign}.csv"
                part = pl.read_csv(archive.read(name), row_index_name="place")
                parts.append(
                    part.select(
                        pl.col("timestamp").str.to_datetime("%Y-%m-%d %H:%M:%S%.f%z"),
                        pl.lit(campaign).alias("campaign"),
                        pl.lit(policy).alias("policy"),
                        *USER_FEATURES,
                        "place",
                        "item_id",
                        "position",
                        "click",
                    )
                )
    return pl.concat(parts)


def week(impressions: pl.DataFrame) -> pl.DataFrame:
    """Return the demo's table. Equal times occur, so campaign, policy and place settle the order.

    A user is what the dataset knows of one: each distinct combination of the four user features,
    numbered in sorted order.
    """
    users = impressions.select(USER_FEATURES).unique().sort(USER_FEATURES).with_row_index("user")
    return (
        impressions.join(users, on=USER_FEATURES, how="left")
        .sort("timestamp", "campaign", "policy", "place")
        .select(
            pl.col("timestamp")
            .dt.cast_time_unit("us")
            .dt.convert_time_zone("UTC")
            .alias("occurred_at"),
            pl.col("campaign").cast(pl.Categorical),
            pl.col("policy").cast(pl.Categorical),
            pl.col("item_id").cast(pl.UInt8).alias("ad"),
            pl.col("position").cast(pl.UInt8).alias("slot"),
            pl.col("user").cast(pl.UInt16),
            pl.col("click").cast(pl.Boolean).alias("clicked"),
        )
    )


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description="Make the demo's data from the obp wheel.")
    parser.add_argument("output", type=Path, help="the Parquet file to write")
    parser.add_argument("--wheel", type=Path, help="an obp wheel that is there already")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = arguments.wheel or download(Path(folder))
        table = week(read_impressions(wheel))
    table.write_parquet(arguments.output, compression="zstd", compression_level=19)
    size = arguments.output.stat().st_size
    print(f"{arguments.output}: {table.height:,} rows, {size:,} bytes")


if __name__ == "__main__":
    main()
