"""What random patterns are drawn with, and the rows that they are matched in, whichever kind of pattern it is."""

import random
from dataclasses import dataclass, field


@dataclass
class RowDraw:
    """Draws rows from a seed. ``names`` are those that the pattern has so far, ``letters`` those of the rows."""

    letters = ""

    seed: int
    names: list = field(default_factory=list)

    def __post_init__(self):
        self.dice = random.Random(self.seed)

    def chance(self, share):
        return self.dice.random() < share

    def rows(self, count):
        at, made = 0, []
        for _ in range(count):
            at += self.dice.choice([0, 1, 1, 1, 2, 3])
            letter = None if self.chance(0.03) else self.dice.choice(self.letters)
            number = None if self.chance(0.1) else self.dice.randrange(6)
            made.append({"at": at, "v": letter, "n": number})
        return made
