from hypothesis import given
from hypothesis import strategies as st

from operators.admission import Admitter, Slots
from operators.ranges import Ranges
from schemas.records import OUTCOMES
from tests.records import admission, outcome, prompt


def admitter(batch=8, max_lag=1, group_size=4) -> Admitter:
    return Admitter("r", batch=batch, max_lag=max_lag, group_size=group_size)


def test_whole_groups_up_to_the_credit():
    a = admitter()  # credit (1 + 1) * 8 = 16
    entries = [a.admit(prompt(i), i) for i in range(5)]
    assert [e.credit for e in entries[:4]] == [12, 8, 4, 0]
    assert entries[4] is None
    a.resolve(outcome(0, 0, "trained", step=1))
    assert a.credit == 1 and a.admit(prompt(4), 4) is None, "a group is admitted whole or not at all"
    for i in (1, 2, 3):
        a.resolve(outcome(0, i, "trained", step=1))
    assert a.admit(prompt(4), 4).admission == 4


def test_credit_comes_back_once_a_sample():
    a = admitter()
    a.admit(prompt(0), 0)
    for _ in range(3):
        a.resolve(outcome(0, 0, "stale"))
    a.resolve(outcome(0, 1, "duplicate"))
    a.resolve(outcome(7, 0, "stale"))
    assert a.credit == 16 - 3


def test_min_version_keeps_lag_zero_from_starting_stale():
    """Case 39: with max_lag 0 the credit of step k + 1 is used only under version k."""
    a = admitter(batch=4, max_lag=0)
    assert a.admit(prompt(0), 0).min_version == 0
    for i in range(4):
        a.resolve(outcome(0, i, "trained", step=1))
    assert a.admit(prompt(1), 1).min_version == 1


def conventional() -> Admitter:
    return Admitter("r", batch=4, max_lag=1, group_size=4, conventional=True)  # rounds of G = 2 steps of 4


def test_conventional_rounds_begin_when_the_last_one_is_trained():
    a = conventional()
    log = [a.admit(prompt(0), 0), a.admit(prompt(1), 1)]
    assert a.credit == 0
    said = [outcome(1, i, "filtered") for i in range(4)]
    for o in said:
        a.resolve(o)
    log.append(a.admit(prompt(2), 2))
    assert log[-1].min_version == 0, "what teaches nothing is replaced while the round is generated"
    said += [outcome(0, i, "trained", step=1) for i in range(4)]
    for o in said[-4:]:
        a.resolve(o)
    b = conventional()
    b.adopt(log, said)
    for each in (a, b):  # b: after a restart
        assert each.unresolved_samples == 4 and each.credit == 0 and each.admit(prompt(3), 3) is None, "the round is in training"
        for i in range(4):
            each.resolve(outcome(2, i, "trained", step=2))
        entry = each.admit(prompt(3), 3)
        assert (entry.policy_version, entry.min_version, entry.credit) == (2, 2, 4), "the next one starts under what the round left"


def test_the_ledger_is_taken_up_from_the_log():
    """A restart admits nothing twice and nobody's credit grows (case 21)."""
    a = admitter()
    log = [a.admit(prompt(i), i + 10) for i in range(4)]
    said = [outcome(0, i, "trained", step=1) for i in range(4)] + [outcome(2, 1, "filtered")]
    b = admitter()
    left = b.adopt(log, said)
    assert [x.group_id for x in left] == ["d/0/1", "d/0/2", "d/0/3"]
    assert (b.groups, b.next_offset, b.version, b.credit) == (4, 14, 1, 16 - 11)
    assert b.known(prompt(0)) and b.known(prompt(3)) and not b.known(prompt(4))
    assert not b.known(prompt(0, dataset_pass=1)), "a second pass is new"
    assert not b.known(prompt(0, dataset="other")), "the cursor belongs to a data set's fingerprint (case 22)"
    assert b.admit(prompt(4), 14).admission == 4


def test_a_repeated_entry_counts_once():
    a = admitter()
    a.adopt([admission(0), admission(0)], [])
    assert a.credit == 16 - 4 and a.groups == 1


def test_closed_and_ended_runs_admit_nothing():
    a = admitter()
    assert a.close().kind == "closed"
    assert a.admit(prompt(0), 0) is None
    b = admitter()
    b.adopt([admission(0), a.close()], [])
    assert b.closed
    c = admitter()
    c.resolve(outcome(0, 0, "end_of_run"))
    assert c.admit(prompt(1), 1) is None


def test_what_can_never_be_admitted_says_why():
    a = admitter()
    assert "credit of 16" in a.refusal(prompt(group_size=17))
    assert "identity" in a.refusal(prompt(dataset="a/b"))
    assert a.refusal(prompt(group_size=16)) is None


def test_groups_go_where_least_waits():
    slots = Slots([10, 11])
    assert [slots.take(g, 4) for g in "abc"] == [10, 11, 10]
    slots.release("a"), slots.release("c")
    assert slots.take("d", 4) == 10, "10 is empty, 11 still holds b"
    slots.release("unknown")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.sampled_from(OUTCOMES[:-1])), max_size=120))
def test_unresolved_never_exceeds_the_credit(events):
    a = admitter()
    next_prompt = 0
    for group, sample, what in events:
        while (entry := a.admit(prompt(next_prompt), next_prompt)) is not None:
            next_prompt += 1
            assert 0 <= entry.credit <= a.limit
        a.resolve(outcome(group, sample, what, step=1))
        assert 0 <= a.credit <= a.limit
        assert a.limit - a.credit == sum(map(len, a.unresolved.values()))


@given(st.lists(st.integers(0, 60)))
def test_ranges_are_a_set(numbers):
    r = Ranges()
    for n in numbers:
        r.add(n)
    assert len(r) == len(set(numbers))
    assert [n for n in range(62) if n in r] == sorted(set(numbers))
    assert r.gaps <= max(0, len(set(numbers)) - 1)
