"""The state of keys is the last that was put for each, however many are put and taken at once."""

import random

import numpy as np
import polars as pl

from millstream.kernels.frames import HASH
from millstream.kernels.process.frame_keys import FrameKeys


def test_each_key_has_what_was_put_last():
    dice = random.Random(5)
    for count in (1, 3, 40, 500):
        number = pl.Series(HASH, np.arange(count), pl.UInt64)
        held = pl.DataFrame({"n": [0] * count, "text": ["0"] * count})
        keys = FrameKeys(pl.DataFrame([number]), held, np.zeros(count, np.int64))
        model = [0] * count
        for step in range(1, 80):
            size = dice.choice([1, 1, min(3, count), dice.randint(1, count), count])
            here = np.array(sorted(dice.sample(range(count), size)))
            made = [step * 1000 + at for at in range(size)]
            texts = [*map(str, made)]
            keys.put(here, pl.DataFrame({"n": made, "text": texts}), np.array(made))
            for at, value in zip(here, made, strict=True):
                model[at] = value
            some = np.array(sorted(dice.sample(range(count), dice.randint(1, count))))
            expected = [(model[at], str(model[at])) for at in some]
            assert keys.some(some).rows() == expected
            if step % 10 == 0:
                assert keys.state["n"].to_list() == model
        assert keys.now_us.tolist() == model
