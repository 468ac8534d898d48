"""The demo's task: unary numbers, `19=` is answered by nineteen `1`s.

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


def problem(rng: Random, shortest: int = SHORTEST, longest: int = LONGEST, digits: int = 2) -> tuple[str, str]:
    """(prompt, answer); the answer's length is spread evenly on a logarithmic scale."""
    if not 0 < shortest <= longest < 10**digits:
        raise ValueError(f"answers of {shortest} to {longest} characters: with numbers of {digits} digits it must be "
                         f"0 < shortest <= longest < {10**digits}")
    length = min(longest, max(shortest, int(math.exp(rng.uniform(math.log(shortest), math.log(longest + 1))))))
    return f"{length:0{digits}d}=", "1" * length


def form(rng: Random) -> tuple[str, str]:
    """(prompt, a response of the right form): ones, one time in four the right number of them, otherwise as many as chance will have it.
    What the model is taught before it learns by reward."""
    prompt, answer = problem(rng)
    return prompt, answer if rng.random() < 0.25 else "1" * rng.randint(1, LONGEST)
