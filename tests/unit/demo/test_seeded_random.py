"""Numbers that are the same for ever."""

from __future__ import annotations

import numpy as np

from millstream.demo.seeded_random import skewed, uniform, uniform_integers

SEED = 1


def test_draws_are_spread_evenly_and_do_not_depend_on_their_number():
    drawn = uniform(SEED, "test", 100_000)
    assert 0 <= drawn.min() < 0.001
    assert 0.999 < drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.005
    assert (uniform(SEED, "test", 10) == drawn[:10]).all()
    assert (uniform(SEED, "other", 10) != drawn[:10]).all()
    assert (uniform(-1, "test", 10) != drawn[:10]).all()


def test_ranges_are_half_open():
    drawn = np.array([0.0, 0.5, 1 - 2**-53])
    assert uniform_integers((10, 20), drawn).tolist() == [10, 15, 19]
    assert skewed(drawn, 8).tolist() == [0, 1, 7]
