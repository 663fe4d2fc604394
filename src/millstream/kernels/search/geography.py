"""Distances and polygons on the globe, and the cells of a grid in which they are found.

A point is near another if the great circle between them is at most so long, on a sphere of the Earth's mean
radius. It is inside a polygon by the even-odd rule in the plane of latitude and longitude, where the edges
are straight lines: a line to the east crosses an odd number of them. A polygon does not go across the 180th meridian.

The grid divides the world into 2ˡ by 2ˡ cells of equal degrees, for some levels l. An area has a few cells, of one
level, that cover it; a point has one of each level. So the cells are a necessary condition.

Source: the haversine formula (Sinnott, 1984); the mean radius R₁ of the IUGG; crossings as by Shimrat, "Algorithm 112:
Position of point relative to polygon", 1962.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from millstream.kernels.arrays import Bools, Float64s, Int64s

EARTH_RADIUS_M = 6_371_008.8
LEVELS = (3, 5, 7, 9, 11, 13, 15)  # cells of 45° down to 0.011°, about 1.2 km
PAIR_LEVELS = LEVELS[
    2:
]  # whose cells are indexed together with words: a larger one leaves out little
CELLS_MAX = 9
_SLACK_DEG = 1e-9  # more than rounding can move an edge, and less than matters


def near(latitudes: Float64s, longitudes: Float64s, circle: Float64s) -> Bools:
    """Return which points are near: ``circle`` has, row by row, latitude, longitude, and metres."""
    lat, lon = np.radians(latitudes), np.radians(longitudes)
    to_lat, to_lon = np.radians(circle[:, 0]), np.radians(circle[:, 1])
    half = (
        np.sin((lat - to_lat) / 2) ** 2
        + np.cos(lat) * np.cos(to_lat) * np.sin((lon - to_lon) / 2) ** 2
    )
    distance_m = 2 * EARTH_RADIUS_M * np.arcsin(np.sqrt(np.minimum(half, 1.0)))
    is_near: Bools = distance_m <= circle[:, 2]
    return is_near


def may_be_near(latitudes: Float64s, to_latitudes: Float64s, distances_m: Float64s) -> Bools:
    """Return which points may be near, by their latitudes alone: it leaves out none that is."""
    high_deg = np.degrees(distances_m / EARTH_RADIUS_M) * (1 + 1e-6) + _SLACK_DEG
    may_be: Bools = np.abs(latitudes - to_latitudes) <= high_deg
    return may_be


def inside(latitudes: Float64s, longitudes: Float64s, polygon: Sequence[float]) -> Bools:
    """Return which points are inside of a polygon: latitude and longitude of its corners, in turn."""
    lats, lons = np.array(polygon[0::2]), np.array(polygon[1::2])
    found = np.zeros(len(latitudes), np.bool_)
    for at in range(len(lats)):
        lat, lon, to_lat, to_lon = lats[at], lons[at], lats[at - 1], lons[at - 1]
        if lat == to_lat:
            continue  # no line to the east crosses it
        between = (lat > latitudes) != (to_lat > latitudes)
        crossing = (to_lon - lon) * (latitudes - lat) / (to_lat - lat) + lon
        found ^= between & (longitudes < crossing)
    return found


def cells_of(latitudes: Float64s, longitudes: Float64s, level: int) -> tuple[Int64s, Int64s]:
    """Return the cell of each point: its row from the south pole, its column from the 180th meridian."""
    count = 1 << level
    rows = _at(latitudes, -90.0, 180.0, count)
    columns = _at(longitudes, -180.0, 360.0, count)
    return rows, columns


def _at(degrees: Float64s, first: float, span: float, count: int) -> Int64s:
    numbers = np.floor((degrees - first) / span * count).astype(np.int64)
    return np.clip(numbers, 0, count - 1)


def cells_near(
    latitude: float, longitude: float, radius_m: float, most: int = CELLS_MAX
) -> list[str] | None:
    """Return at most so many cells that cover a circle; None: it needs too many."""
    high_deg = math.degrees(radius_m / EARTH_RADIUS_M) * (1 + 1e-6) + _SLACK_DEG
    south, north = latitude - high_deg, latitude + high_deg
    if south <= -90 or north >= 90:
        return None  # it goes around the pole
    ratio = math.sin(math.radians(high_deg)) / math.cos(math.radians(latitude))
    if ratio >= 1:
        return None
    wide_deg = math.degrees(math.asin(ratio)) * (1 + 1e-6) + _SLACK_DEG
    return _covering(south, north, longitude - wide_deg, longitude + wide_deg, most)


def cells_inside(polygon: Sequence[float], most: int = CELLS_MAX) -> list[str] | None:
    """Return at most so many cells that cover a polygon; None: it needs too many."""
    lats, lons = polygon[0::2], polygon[1::2]
    return _covering(
        min(lats) - _SLACK_DEG,
        max(lats) + _SLACK_DEG,
        min(lons) - _SLACK_DEG,
        max(lons) + _SLACK_DEG,
        most,
    )


def _covering(south: float, north: float, west: float, east: float, most: int) -> list[str] | None:
    """Return the cells of the finest level of which a few cover a rectangle; it may go across the 180th meridian."""
    if east - west >= 360:
        return None
    for level in reversed(LEVELS):
        count = 1 << level
        rows = range(_row(south, count), _row(north, count) + 1)
        columns = range(_column(west, count), _column(east, count) + 1)
        if len(rows) * len(columns) <= most:
            cells = {(row, column % count) for row in rows for column in columns}
            return [cell_name(level, row, column) for row, column in sorted(cells)]
    return None


def _row(latitude: float, count: int) -> int:
    return min(max(math.floor((latitude + 90.0) / 180.0 * count), 0), count - 1)


def _column(longitude: float, count: int) -> int:
    return math.floor((longitude + 180.0) / 360.0 * count)


def cell_name(level: int, row: int, column: int) -> str:
    """Return the name of a cell, by which it is indexed."""
    return f"{level}/{row}/{column}"
