from operators.accounting import account
from tests.records import admission, outcome


def test_every_sample_once():
    a = account([admission(0), admission(1)],
                [*(outcome(0, i, "trained", step=1) for i in range(4)), outcome(1, 0, "stale"), outcome(1, 1, "filtered")],
                [("d/0/1", 2)])
    assert a.adds_up
    assert a.summary() == {"admitted": 8, "trained": 4, "evaluated": 0, "stale_dropped": 1, "filtered": 1, "late": 0, "aborted": 0, "dead": 0, "end_of_run": 0,
                           "buffered": 1, "in_flight": 1, "duplicates": 0}


def test_repetitions_are_harmless():
    said = [outcome(0, i, "trained", step=1) for i in range(4)]
    a = account([admission(0), admission(0)], said + said, [])
    assert a.adds_up and a.admitted == a.outcomes["trained"] == 4


def test_two_outcomes_are_named():
    a = account([admission(0)], [outcome(0, 0, "trained", step=1), outcome(0, 0, "stale")], [])
    assert not a.adds_up
    assert a.wrong == ["d/0/0#0: trained@1 and then stale"]


def test_trained_in_two_steps_is_named():
    a = account([admission(0)], [outcome(0, 0, "trained", step=1), outcome(0, 0, "trained", step=2)], [])
    assert a.wrong == ["d/0/0#0: trained@1 and then trained@2"]


def test_what_was_never_admitted_is_named():
    a = account([admission(0)], [outcome(5, 0, "stale"), outcome(0, 9, "stale")], [])
    assert len(a.wrong) == 2 and "never admitted" in a.wrong[0]


def test_duplicates_are_no_outcome():
    a = account([admission(0)], [outcome(0, 0, "duplicate")], [])
    assert (a.duplicates, a.in_flight, a.adds_up) == (1, 4, True)
