"""Orders and first places of numbers of groups are those of NumPy's slower ways."""

import numpy as np
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.arrays import first_places, stable_order

GROUPS = st.lists(st.integers(0, 6) | st.integers(0, 2**40), max_size=60)


@settings(max_examples=some(200), deadline=None)
@given(GROUPS)
def test_equal_numbers_stay_as_they_stand(numbers):
    places = stable_order(np.array(numbers, np.int64))
    assert places.tolist() == sorted(range(len(numbers)), key=numbers.__getitem__)


@settings(max_examples=some(200), deadline=None)
@given(GROUPS)
def test_first_places_are_where_each_number_occurs_first(numbers):
    counted = {}
    groups = [counted.setdefault(number, len(counted)) for number in numbers]
    first = first_places(np.array(groups, np.int64))
    assert first.tolist() == [groups.index(number) for number in range(len(counted))]


def test_numbers_that_do_not_fit_together_with_their_places_are_a_mistake():
    with pytest.raises(AssertionError, match="numbers of groups"):
        stable_order(np.array([2**62, 1], np.int64))
    with pytest.raises(AssertionError, match="numbers of groups"):
        stable_order(np.array([-1], np.int64))
