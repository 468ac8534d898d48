"""The short form of `make chaos`: every kind of process is killed once, in an order that the seed decides, and the log is asked."""

import random

from deploy.models import make_demo_model
from tests.chaos.driver import FIND, STOPPED, chaos, verdict

SEED = 0


def test_whoever_is_killed_nothing_is_lost_and_nothing_trained_twice(stack, tmp_path):
    kills = [*FIND, STOPPED[1]]
    random.Random(SEED).shuffle(kills)
    settings, done, summary = chaos(stack, str(make_demo_model(tmp_path / "model", seed=0)), "chaos", kills, SEED)
    for k in done:
        print(f"{k.what}: generation paused for {k.generation_s:.1f} s, training for {k.training_s:.1f} s")
    assert [k.what for k in done] == kills
    found = verdict(settings)
    assert (found.lost, found.twice) == (0, 0), (found, summary["accounting"])
    assert summary["accounting_adds_up"] and summary["accounting"]["end_of_run"] > 0, "it was stopped in the middle of its prompts"
