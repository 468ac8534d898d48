"""The demo's task: unary addition, `07+12=` is answered by nineteen `1`s.

Answers spread from 2 to 48 tokens, so that sequences end at different times and weight updates land inside them. The loader of prompts and
the supervised pretraining of the demo's model share the generator. Graded by the task `characters`.
"""

from __future__ import annotations

import math
from random import Random

TASK = "characters"
#: Characters the demo's model knows, a token each; more than the task needs, so that other character tasks can be tried on it.
ALPHABET = "0123456789+=>-*:,abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHORTEST, LONGEST = 2, 48


def problem(rng: Random, shortest: int = SHORTEST, longest: int = LONGEST) -> tuple[str, str]:
    """(prompt, answer); the answer's length is spread evenly on a logarithmic scale."""
    if not 0 < shortest <= longest <= 99:
        raise ValueError(f"answers of {shortest} to {longest} characters: both terms have two digits, so 0 < shortest <= longest <= 99")
    length = min(longest, max(shortest, int(math.exp(rng.uniform(math.log(shortest), math.log(longest + 1))))))
    left = rng.randint(0, length)
    return f"{left:02d}+{length - left:02d}=", "1" * length
