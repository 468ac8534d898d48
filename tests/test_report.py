import pytest

from jobs.progress import Progress
from jobs.report import Spans, plot, summary
from operators.accounting import account
from schemas.records import Step, now
from tests.records import admission, outcome


def progress(steps: int) -> Progress:
    made = Progress()
    for k in range(steps + 1):
        metrics = {"reward": k / 100, "lag/mean": 1.0, "lag/max": 2.0, "ess/raw": 0.9, "lag/at_0": 1.5, "lag/at_7": 0.5, "is_ratio/at_0": 1.0,
                   "ess/at_0": 0.9, "train/tokens_per_s": 100.0}
        made.feed(Step(run_id="r", epoch=0, step=k, version_in=k - 1 if k else None, version_out=k, weights_digest="", metrics=list(metrics.items()),
                       finished_at=now()))
    return made


def test_the_summary_is_of_the_first_and_last_tenth():
    accounts = account([admission(0)], [outcome(0, i, "trained", step=1) for i in range(4)], [])
    made = summary(progress(20), accounts, Spans(rollouts=4, spanning=1, tokens=30, seen_inside={3, 4}), 1.0, None)
    assert (made["steps"], made["samples_trained"], made["accounting_adds_up"]) == (20, 4, True)
    assert (made["reward_first"], made["reward_last"]) == pytest.approx((0.015, 0.195))


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_the_picture_is_drawn_of_whatever_there_is(tmp_path, steps):
    plot(progress(steps), tmp_path / "learning.png", "a run")
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
