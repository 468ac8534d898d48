"""The topics of a run: `<run>.<name>`. A second run never reads the first's records."""

from __future__ import annotations

PROMPTS, ADMISSIONS, ROLLOUTS, SCORED, BATCHES = "prompts", "admissions", "rollouts", "scored", "batches"
HELD_OUT, EVALUATIONS = "prompts.held_out", "evaluations"
OUTCOMES, WEIGHTS, ACKS, STEPS, CONTROL, DEAD = "outcomes", "weights", "weights.acks", "steps", "control", "dead"
ALL = (PROMPTS, HELD_OUT, ADMISSIONS, ROLLOUTS, SCORED, BATCHES, OUTCOMES, WEIGHTS, ACKS, STEPS, EVALUATIONS, CONTROL, DEAD)
#: Topics whose rows are independent of each other; the others are logs that need one order, hence one partition.
PARTITIONED = (ROLLOUTS, SCORED)


def topic(run_id: str, name: str) -> str:
    """The full name of one of a run's topics."""
    if name not in ALL:
        raise ValueError(f"{name!r} is no topic of a run; there are: {', '.join(ALL)}")
    return f"{run_id}.{name}"
