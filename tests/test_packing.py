import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.grouping import row_of
from operators.packing import micro_batch, pack
from schemas.record import decode, encode_batch
from schemas.records import Sequence
from tests.records import rollout, table


@pytest.mark.parametrize(("lengths", "budget", "expected"), [
    ([5, 4, 3, 6], 9, [[0, 1], [2, 3]]),
    ([], 9, []),
    ([9, 1], 9, [[0], [1]]),
    ([20, 3], 9, [[0], [1]]),  # longer than the budget: one of its own
])
def test_vectors(lengths, budget, expected):
    assert pack(lengths, budget) == expected


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 100))
def test_each_sequence_once_and_no_bin_over_budget(lengths, budget):
    bins = pack(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget or len(b) == 1 for b in bins)


def test_a_micro_batch_is_an_arrow_message_of_sequences():
    rows = [row_of(table(rollout(0, i, reward=float(i), version=i, ref_logprobs=[None] * 3 + [-2.0] * 5)))[0] for i in range(3)]
    back = decode(Sequence, encode_batch(micro_batch(7, 2, [(r, 0.5 * i) for i, r in enumerate(rows)])))
    assert [(s.step, s.micro_batch, s.sample_index, s.advantage, s.temperature) for s in back] == [(7, 2, i, 0.5 * i, 1.0) for i in range(3)]
    assert back[1].version_spans == [{"start": 3, "policy_version": 1}]
    assert back[0].ref_logprobs == [None] * 3 + [-2.0] * 5
    assert back[0].loss_mask == [False] * 3 + [True] * 5


def test_a_token_without_a_logprob_is_masked_out():
    logprobs = [None] * 3 + [-1.0, None, -1.0, -1.0, -1.0]
    row, _, _ = row_of(table(rollout(rollout_logprobs=logprobs)))
    (back,) = decode(Sequence, encode_batch(micro_batch(1, 0, [(row, 1.0)])))
    assert back.rollout_logprobs == logprobs, "null stays null"
    assert back.loss_mask == [False] * 3 + [True, False, True, True, True]
