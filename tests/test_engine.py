"""The engine's loop: first its logic around an engine of a few lines, then vLLM itself, token by token against transformers."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from operators import engine as engine_module
from operators.engine import EngineLoop, UpdateRule
from operators.engine_frames import (
    ACK,
    RESULT,
    STATS,
    WRITING,
    pack_offer,
    pack_result,
    pack_submit,
    unpack_offer,
    unpack_result,
    unpack_submit,
)
from operators.forward import load_model
from operators.loader import Arrival, Loader, WeightFiles
from operators.rollouts import Rollouts, Sampled, label, tokenizer_digest
from operators.weights import BadWeights, publish
from schemas.record import decode, encode
from schemas.records import Ack, Dispatch, Rollout, Weights, now
from schemas.settings import GenerationSettings, ModelSettings
from tests.engine_settings import SETTINGS
from tests.records import prompt
from tests.tiny import make_tiny_model

ROOT = Path(__file__).parent.parent
STOP = 2


class FakeTokenizer:
    """A token a character."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(i) for i in ids if i != STOP)

    def apply_chat_template(self, messages, **_):
        return [1, *(ord(c) for c in messages[0]["content"]), 1]


class FakeEngine:
    """Each request runs for max_tokens steps; each token is labelled with what is in the model when it is sampled."""

    def __init__(self):
        self.running, self.weights, self.label, self.log, self.fail = {}, None, None, [], None

    def add(self, ident, prompt_ids, max_tokens, salt, greedy):
        if 0 in prompt_ids:
            raise ValueError("token 0 is not in the vocabulary")
        self.running[ident] = (max_tokens, [])
        self.log.append(("add", salt, greedy))

    def step(self):
        assert self.weights is not None, "nothing may be sampled from weights that belong to no version"
        ended = []
        for ident, (length, labels) in list(self.running.items()):
            labels.append(self.label)
            if len(labels) == length:
                ended.append(self._pop(ident, "length"))
        return ended

    def _pop(self, ident, reason):
        _, labels = self.running.pop(ident)
        spans = [(i, name) for i, name in enumerate(labels) if i == 0 or labels[i - 1] != name]
        return Sampled(ident, [65] * len(labels), [-1.0] * len(labels), spans, reason)

    def progress(self, ident):
        labels = self.running[ident][1]
        return (labels[0] if labels else None), len(labels)

    def abort(self, idents):
        return [self._pop(i, "abort") for i in idents]

    def write(self, weights):
        self.weights = None
        self.log.append(("write", weights.event.version))
        if self.fail is not None and self.fail(weights.event.version):
            raise OSError("torn")
        self.weights = weights.event.version

    def set_label(self, name):
        self.label = name

    def reset_cache(self):
        self.log.append(("reset", None))


class FakeWeights:
    def __init__(self, event):
        self.event, self.closed = event, False

    def release(self):
        pass

    def close(self):
        self.closed = True


class FakeLoader:
    """A version arrives when the test says so."""

    def __init__(self):
        self.offered, self.arrivals = [], []

    def offer(self, event, heard_at):
        self.offered.append((event, heard_at))

    def arrive(self, cause=None):
        event, heard_at = self.offered.pop(0)
        self.arrivals.append(Arrival(event, heard_at, {"fetch": 1.0, "decode": 2.0}, None if cause else FakeWeights(event), cause))
        return self.arrivals[-1].weights

    def take(self):
        return self.arrivals.pop(0) if self.arrivals else None


def weights(version: int, epoch: int = 0) -> Weights:
    return Weights(run_id="r", epoch=epoch, version=version, digest=f"digest-{epoch}-{version}", uri="", encoding="full", base_version=None,
                   bytes=1, dtype="float32", offered_at=now())


def dispatch(index: int, text: str = "abc", min_version: int = 0, **changes) -> bytes:
    return encode([Dispatch(**{
        "admission": index, "group_id": f"d/0/{index}", "sample_index": 0, "group_size": 4, "attempt": 0, "min_version": min_version,
        "policy_version": 7, "prompt": encode([prompt(index, prompt=text)]), "dispatched_at": now()} | changes)])


class Bench:
    def __init__(self, *, capacity=2, max_lag=100, mode="reuse_partial", max_tokens=4, max_model_len=64, rule=UpdateRule(),  # noqa: B008
                 gather_s=0.0, **options):
        self.settings = GenerationSettings(batch=capacity, max_tokens=max_tokens, max_model_len=max_model_len, kv_cache_mode=mode,
                                           **options)
        self.engine, self.loader, self.frames, self.time = FakeEngine(), FakeLoader(), [], 1000.0
        tokenizer = FakeTokenizer()
        tokenizer.chat_template = "{{ m }}" if self.settings.chat_template else None
        rollouts = Rollouts(self.settings, run_id="r", generator_id="g", engine="fake-1", tokenizer=tokenizer, tokenizer_digest="t",
                            stop_ids=frozenset({STOP}))
        self.loop = EngineLoop(self.engine, rollouts, self.loader, lambda kind, payload: self.frames.append((kind, payload)), run_id="r",
                               generator_id="g", capacity=capacity, max_lag=max_lag, kv_cache_mode=mode, rule=rule, gather_s=gather_s,
                               clock=lambda: self.time)

    def submit(self, index, text="abc", attempt=0, **changes):
        self.loop.submit(f"i{index}", attempt, dispatch(index, text, **changes))

    def hold(self, version=0, epoch=0):
        self.loop.offer(weights(version, epoch), 0.0)
        held = self.loader.arrive()
        self.loop.turn()
        return held

    def serving(self, version=0):
        self.loop.offer(weights(version), 0.0)
        self.loop.serve()
        self.loader.arrive()
        self.loop.turn()
        return self

    def turns(self, count):
        for _ in range(count):
            self.loop.turn()

    @property
    def results(self) -> list[Rollout]:
        return [r for k, p in self.frames if k == RESULT for r in decode(Rollout, unpack_result(p)[2])]

    @property
    def acks(self) -> list[Ack]:
        return [decode(Ack, p)[0] for k, p in self.frames if k == ACK]


def test_what_ends_within_a_moment_is_one_message_and_a_straggler_does_not_wait():
    b = Bench(max_tokens=3, capacity=3, gather_s=0.05).serving()
    for i in range(3):
        b.submit(i)
        b.turns(1)  # they end one turn after the other
    frames = lambda: [unpack_result(p)[0] for k, p in b.frames if k == RESULT]  # noqa: E731
    assert frames() == [["i0"]], "nothing was sent just before"
    b.submit(3)
    b.turns(1)
    assert frames() == [["i0"]]
    b.time += 0.06
    b.turns(1)
    assert frames() == [["i0"], ["i1", "i2"]]
    b.turns(2)
    assert frames()[2:] == [["i3"]], "and nothing waits for a sequence that may never come"
    assert [r.sample_index for r in b.results] == [0, 0, 0, 0] and len({r.rollout_id for r in b.results}) == 4


def test_a_message_holds_no_more_tokens_than_it_may(monkeypatch):
    monkeypatch.setattr(engine_module, "MESSAGE_TOKENS", 12)
    b = Bench(max_tokens=2, capacity=5).serving()
    for i in range(5):
        b.submit(i, text="abc" if i else "a" * 30)  # 5 tokens each, and one of 32
    b.turns(2)
    assert [unpack_result(p)[0] for k, p in b.frames if k == RESULT] == [["i0"], ["i1", "i2"], ["i3", "i4"]]


# --- when a version is applied


def spans(rollout: Rollout) -> list[tuple[int, int]]:
    """(tokens, version) of each span of a response."""
    starts = [s["start"] for s in rollout.version_spans] + [len(rollout.token_ids)]
    return [(end - s["start"], s["policy_version"]) for s, end in zip(rollout.version_spans, starts[1:], strict=True)]


def offered_each_turn(b: Bench, count: int) -> None:
    """A new version is offered, and ready, before each step."""
    for version in range(1, count + 1):
        b.loop.offer(weights(version), 0.0)
        b.loader.arrive()
        b.loop.turn()


def test_every_version_is_applied_by_default():
    b = Bench(max_tokens=12).serving()
    b.submit(0)
    offered_each_turn(b, 12)
    assert spans(b.results[0]) == [(1, v) for v in range(1, 13)]


def test_every_third_version_is_applied():
    b = Bench(max_tokens=12, rule=UpdateRule(3, "version")).serving()
    b.submit(0)
    b.turns(1)  # a version that finds the engine idle is applied at once: the rule begins with the sequence
    offered_each_turn(b, 11)
    assert spans(b.results[0]) == [(3, 0), (3, 3), (3, 6), (3, 9)]


def test_the_newest_version_is_applied_once_a_sequence_has_n_tokens_since():
    b = Bench(max_tokens=12, rule=UpdateRule(5, "token")).serving()
    b.submit(0)
    b.turns(1)
    offered_each_turn(b, 11)
    assert spans(b.results[0]) == [(5, 0), (5, 5), (2, 10)]
    assert [a.version for a in b.acks] == [0, 5, 10], "what was overtaken while it waited is not acknowledged"


def test_tokens_are_counted_of_the_sequence_that_has_most_of_them_since_the_update():
    b = Bench(max_tokens=12, rule=UpdateRule(4, "token")).serving()
    b.submit(0)
    b.turns(3)
    b.submit(1)  # younger than the rule's count when the first one reaches it
    offered_each_turn(b, 9)
    b.turns(3)
    first, second = b.results
    assert spans(first) == [(4, 0), (4, 2), (4, 6)]
    assert spans(second)[0] == (1, 0)


def test_no_sequence_passes_a_chunk_under_an_older_version_than_is_ready():
    b = Bench(max_tokens=12, rule=UpdateRule(100, "token", chunk=5)).serving()
    b.submit(0)
    b.turns(1)
    offered_each_turn(b, 11)
    assert spans(b.results[0]) == [(5, 0), (5, 5), (2, 10)]


def test_a_version_does_not_wait_where_nobody_needs_the_old_one():
    b = Bench(max_tokens=12, rule=UpdateRule(100, "token")).serving()
    b.hold(1)
    assert b.loop._held.event.version == 1, "nothing is in flight"
    b.submit(0)
    b.turns(1)
    b.hold(2)
    assert b.loop._held.event.version == 1
    b.submit(1, min_version=2)  # there is a slot for it
    b.turns(2)
    assert b.loop._held.event.version == 2
    b.hold(0, epoch=1)
    assert (b.loop._held.event.epoch, b.loop._held.event.version) == (1, 0), "what comes after an epoch is of another line"


def test_a_version_that_is_refused_leaves_the_one_that_waits():
    b = Bench(max_tokens=12, rule=UpdateRule(3, "token")).serving()
    b.submit(0)
    b.turns(1)
    waiting = b.hold(1)
    b.loop.offer(weights(2), 0.0)
    b.loader.arrive(cause="no such file")
    b.loop.turn()
    assert b.acks[-1].status == "failed" and not waiting.closed
    b.loop.offer(weights(1), 0.0)
    assert not b.loader.offered, "it is at hand"
    b.turns(2)
    assert b.loop._held.event.version == 1


# --- the loop


def test_slots_are_refilled_before_the_next_step():
    b = Bench(capacity=2, max_tokens=3).serving()
    for i in range(5):
        b.submit(i)
    b.turns(9)
    assert [r.prompt_ordinal for r in b.results] == [0, 1, 2, 3, 4]
    b.hold(1)
    ack = b.acks[-1]
    assert (ack.busy_steps, ack.in_flight_sum, ack.capacity_sum) == (9, 15, 15), "min(H, sequences it holds) at every step"
    assert ack.generated_tokens == 15 and ack.in_flight == 0


def test_each_sequence_is_answered_the_moment_it_ends():
    b = Bench(capacity=4, max_tokens=8, max_model_len=10).serving()
    for i, length in enumerate((2, 5, 8)):
        b.submit(i, "x" * (10 - length))
    seen = []
    for _ in range(8):
        b.turns(1)
        seen.append(len(b.results))
    assert seen == [0, 1, 1, 1, 2, 2, 2, 3]


def test_nothing_is_served_before_the_newest_version_on_offer_at_the_start_is_held():
    b = Bench()
    b.submit(0)
    b.turns(3)
    b.loop.offer(weights(3), 0.0)
    b.loader.arrive()
    b.turns(3)
    assert b.acks[-1].version == 3 and b.engine.running == {}, "held, but the operator has not read the topic to its end"
    b.loop.offer(weights(5), 0.0)
    b.loop.serve()
    b.turns(3)
    assert b.engine.running == {}
    b.loader.arrive()
    b.turns(1)
    assert b.engine.running and b.engine.label == label(0, 5)


def test_with_nothing_on_offer_the_first_version_is_waited_for_and_a_refused_one_does_not_count():
    b = Bench()
    b.loop.serve()
    b.submit(0)
    b.loop.offer(weights(0), 0.0)
    b.loader.arrive(cause="digest differs")
    b.turns(2)
    assert b.engine.running == {} and b.engine.log == []
    assert (b.acks[0].status, b.acks[0].cause) == ("failed", "digest differs")
    b.hold(1)
    assert b.engine.running and b.acks[1].status == "applied"


def test_a_sample_waits_for_its_min_version():
    b = Bench(capacity=4).serving(version=3)
    b.submit(0, min_version=5)
    b.submit(1, min_version=3)
    b.submit(2, min_version=4)
    b.turns(1)
    assert set(b.engine.running) == {"i1"}
    b.hold(4)
    assert set(b.engine.running) == {"i1", "i2"}
    b.turns(10)
    b.hold(6)
    b.turns(10)
    assert {r.prompt_ordinal: r.policy_version_min for r in b.results} == {0: 6, 1: 3, 2: 4}


def test_older_and_equal_versions_are_ignored_and_the_next_epoch_is_loaded_though_its_number_is_lower():
    b = Bench().serving(version=20)
    for version, epoch in ((20, 0), (19, 0)):
        b.loop.offer(weights(version, epoch), 0.0)
    assert b.loader.offered == []
    b.loop.offer(weights(15, 1), 0.0)
    b.loop.offer(weights(15, 1), 0.0)
    assert len(b.loader.offered) == 1, "the second of the same is a no-op"
    b.loader.arrive()
    b.turns(1)
    assert [(a.epoch, a.version) for a in b.acks] == [(0, 20), (1, 15)] and b.engine.label == label(1, 15)
    b.loop.offer(weights(21, 0), 0.0)
    assert b.loader.offered == []


def test_a_version_that_was_refused_may_be_offered_again():
    b = Bench().serving(version=1)
    b.loop.offer(weights(2), 0.0)
    b.loader.arrive(cause="not there yet")
    b.turns(1)
    b.hold(2)
    assert [(a.version, a.status) for a in b.acks] == [(1, "applied"), (2, "failed"), (2, "applied")]


def test_every_token_carries_the_version_that_computed_it():
    b = Bench(capacity=2, max_tokens=6).serving(version=1)
    b.submit(0)
    b.turns(2)
    b.hold(2)  # its turn also samples one token
    b.submit(1, "abcdef")
    b.turns(1)
    b.hold(4)
    b.turns(9)
    first, second = b.results
    assert first.version_spans == [{"start": 3, "policy_version": 1}, {"start": 5, "policy_version": 2}, {"start": 7, "policy_version": 4}]
    assert (first.policy_version_min, first.policy_version_max, first.weights_digest) == (1, 4, "digest-0-4")
    assert second.version_spans == [{"start": 6, "policy_version": 2}, {"start": 7, "policy_version": 4}]


def test_the_same_version_of_two_epochs_is_one_span():
    b = Bench(max_tokens=6).serving(version=1)
    b.submit(0)
    b.turns(2)
    b.hold(1, epoch=1)
    b.turns(6)
    assert b.results[0].version_spans == [{"start": 3, "policy_version": 1}] and b.results[0].weights_digest == "digest-1-1"


def test_a_refused_version_leaves_the_held_one_alone():
    b = Bench(max_tokens=6).serving(version=2)
    b.submit(0)
    b.turns(2)
    b.loop.offer(weights(3), 0.0)
    b.loader.arrive(cause="expected digest x, found y")
    b.turns(9)
    assert b.engine.log == [("write", 2), ("add", label(0, 2), False)], "the engine was not touched"
    assert b.results[0].policy_version_max == 2
    assert (b.acks[-1].status, b.acks[-1].version, b.acks[-1].cause) == ("failed", 3, "expected digest x, found y")


def test_a_failed_write_is_answered_by_writing_the_held_version_again():
    b = Bench(max_tokens=8).serving(version=1)
    held = b.hold(2)
    b.submit(0)
    b.turns(2)
    b.engine.fail = lambda version: version == 3
    torn = b.hold(3)
    assert b.engine.weights == 2 and b.engine.label == label(0, 2)
    assert [e for e in b.engine.log if e[0] == "write"][-2:] == [("write", 3), ("write", 2)]
    assert torn.closed and not held.closed, "the held version's file stays pinned until the next success"
    assert (b.acks[-1].status, b.acks[-1].version) == ("failed", 3) and "torn" in b.acks[-1].cause
    b.hold(4)
    assert held.closed
    b.turns(9)
    assert [s["policy_version"] for s in b.results[0].version_spans] == [2, 4]


def test_the_engine_ends_if_the_held_version_cannot_be_written_again():
    b = Bench().serving(version=1)
    b.engine.fail = lambda version: True
    with pytest.raises(RuntimeError, match=r"version 2 failed.*held version 1 could not be written again"):
        b.hold(2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_write_is_said_before_it_begins_and_answered_by_an_ack(fails):
    b = Bench().serving()
    b.frames.clear()
    b.loop.offer(weights(1), 0.0)
    said = []
    write = b.engine.write

    def written(weights):
        said.append([k for k, _ in b.frames if k in (WRITING, ACK)])
        if fails and len(said) == 1:
            raise OSError("torn")
        write(weights)

    b.engine.write = written
    b.loader.arrive()
    b.loop.turn()
    assert said == [[WRITING]] * (2 if fails else 1), "writing the held version again is part of the same pause"
    assert [(k, p if k == WRITING else decode(Ack, p)[0].status) for k, p in b.frames if k in (WRITING, ACK)] == [
        (WRITING, b"1"), (ACK, "failed" if fails else "applied")]


def test_a_first_version_that_fails_while_it_is_written_is_not_served():
    b = Bench()
    b.loop.serve()
    b.submit(0)
    b.engine.fail = lambda version: version == 0
    b.hold(0)
    b.turns(3)
    assert b.engine.running == {} and b.acks[-1].status == "failed"
    b.hold(1)
    assert b.engine.running


def test_what_happens_to_the_cache():
    for mode, salt, resets in (("reuse", None, 0), ("reuse_partial", label(0, 5), 0), ("recompute", None, 1)):
        b = Bench(mode=mode).serving(version=5)
        b.submit(0)
        b.turns(1)
        assert [x for x in b.engine.log if x[0] == "add"] == [("add", salt, False)]
        assert [x[0] for x in b.engine.log].count("reset") == resets


def test_a_sequence_older_than_max_lag_is_aborted_with_what_it_has():
    b = Bench(capacity=3, max_lag=2, max_tokens=40).serving(version=1)
    b.submit(0)
    b.turns(1)
    b.hold(2)
    b.submit(1)
    b.turns(1)
    b.hold(3)
    assert set(b.engine.running) == {"i0", "i1"}, "lag 2 is admissible: ending now it can enter the batch that version 3 trains"
    b.submit(2, min_version=9)
    b.hold(4)
    assert set(b.engine.running) == {"i1"}
    (aborted,) = b.results
    assert (aborted.finish_reason, aborted.policy_version_min, aborted.policy_version_max) == ("abort", 1, 3)
    assert "older than max_lag" in aborted.finish_cause and len(aborted.token_ids) > aborted.prompt_length
    assert not aborted.truncated and not aborted.eos_sampled
    b.hold(12)
    b.turns(1)
    assert len(b.results) == 2 and set(b.engine.running) == {"i2"}, "what still waits is not too old: it starts on the held version"


def test_a_held_out_sequence_is_never_too_old_nor_to_be_trained_on():
    b = Bench(max_lag=0, max_tokens=6).serving(version=1)
    b.submit(0, group_id="evaluation:d/1/0", greedy=True)
    b.turns(2)
    b.hold(9)
    b.turns(6)
    assert ("add", label(0, 1), True) in b.engine.log
    (r,) = b.results
    assert (r.finish_reason, r.policy_version_min, r.policy_version_max, r.sampling["temperature"]) == ("length", 1, 9, 0.0)
    assert len(r.token_ids) == 3 + 6 and not any(r.loss_mask) and r.rollout_logprobs == [None] * 9


def test_a_sequence_that_has_sampled_nothing_is_not_old():
    b = Bench(max_lag=0).serving(version=1)
    b.engine.step = lambda: []  # it is queued inside the engine
    b.submit(0)
    b.turns(1)
    b.hold(5)
    assert set(b.engine.running) == {"i0"}


def test_first_token_and_measures():
    b = Bench(capacity=2, max_tokens=5).serving()
    b.submit(0)
    b.submit(1)
    b.submit(2)
    b.turns(2)
    b.time += 1
    b.turns(1)
    stats = json.loads([p for k, p in b.frames if k == STATS][-1])
    assert stats == {"in_flight": 2, "waiting": 1, "held_version": 0, "generated_tokens": 4}
    b.turns(9)
    r = b.results[0]
    assert r.dispatched_at <= r.first_token_at <= r.finished_at


def test_an_ack_says_where_the_time_went():
    b = Bench().serving(version=0)
    event = weights(1)
    b.loop.offer(event, event.offered_at.timestamp() + 0.040)
    b.loader.arrive()
    b.time = event.offered_at.timestamp() + 0.100
    b.loop.turn()
    first, second = (dict(a.phases_ms) for a in b.acks)
    assert second == pytest.approx({"heard": 40, "fetch": 1, "decode": 2, "wait": 57, "apply": 0}, abs=1e-2)
    assert set(first) == {"fetch", "decode", "apply"}, "it was on offer before the engine listened"


def test_an_engine_is_hungry_as_long_as_slots_could_be_taken():
    b = Bench(capacity=2, max_tokens=3).serving()
    seen = []
    for i in range(3):
        seen.append(b.loop.hungry)
        b.submit(i)
    b.turns(1)
    assert [*seen, b.loop.hungry] == [True, True, False, False]
    b.turns(3)
    assert b.loop.hungry


# --- requests and records


def one(b: Bench, text="abc", **changes) -> Rollout:
    b.submit(0, text, **changes)
    b.turns(20)
    (result,) = b.results
    n = len(result.token_ids)
    assert len(result.loss_mask) == len(result.rollout_logprobs) == n
    return result


def test_a_rollout_speaks_of_every_token():
    r = one(Bench(max_tokens=4).serving(version=3), attempt=2)
    assert r.token_ids == [97, 98, 99, 65, 65, 65, 65] and r.prompt_length == 3
    assert r.loss_mask == [False] * 3 + [True] * 4
    assert r.rollout_logprobs == [None] * 3 + [-1.0] * 4
    assert (r.run_id, r.generator_id, r.engine, r.group_id, r.group_size, r.admission) == ("r", "g", "fake-1", "d/0/0", 4, 0)
    assert (r.attempt, r.policy_version_admitted, r.completion, r.kv_policy) == (2, 7, "AAAA", "reuse_partial")
    assert r.turns == [{"role": "user", "start": 0, "end": 3}, {"role": "assistant", "start": 3, "end": 7}]
    assert r.sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": None, "max_tokens": 4}
    assert (r.reward, r.reward_status, r.task, r.answer) == (None, "pending", "exact_match", "2")


def test_exactly_max_tokens_is_a_length():
    r = one(Bench(max_tokens=4).serving())
    assert (r.finish_reason, r.truncated, r.eos_sampled, len(r.token_ids)) == ("length", True, False, 7)


def test_the_context_cuts_max_tokens():
    r = one(Bench(max_tokens=8, max_model_len=10).serving(), "x" * 7)
    assert (len(r.token_ids), r.finish_reason, r.sampling["max_tokens"]) == (10, "length", 3)


@pytest.mark.parametrize(("text", "reason", "cause"), [
    ("x" * 10, "context_overflow", "prompt '0' has 10 tokens, which leaves no room for a response: generation.max_model_len is 10"),
    ("", "error", "renders to no token"),
    ("\0", "error", "the engine does not take the prompt: token 0"),
])
def test_a_prompt_that_cannot_be_served_becomes_a_rollout_that_says_why(text, reason, cause):
    b = Bench(max_tokens=8, max_model_len=10).serving(version=4)
    r = one(b, text)
    assert r.finish_reason == reason and cause in r.finish_cause
    assert (r.policy_version_min, r.version_spans, r.first_token_at, r.weights_digest) == (None, [], None, "digest-0-4")
    assert r.token_ids == [ord(c) for c in text] and not any(r.loss_mask)


def test_a_prompt_that_cannot_be_read_keeps_its_identity():
    b = Bench().serving()
    r = one(b, prompt=b"no arrow", group_id="math/v2/1/7")
    assert (r.finish_reason, r.group_id, r.dataset, r.dataset_pass, r.prompt_ordinal) == ("error", "math/v2/1/7", "math/v2", 1, 7)
    assert "cannot be read" in r.finish_cause


def test_a_chat_template_renders_a_users_turn():
    assert one(Bench(chat_template=True).serving()).token_ids[:5] == [1, 97, 98, 99, 1]


def test_a_chat_template_that_does_not_exist_is_refused_at_the_start():
    settings = GenerationSettings(chat_template=True)
    with pytest.raises(ValueError, match="no chat template"):
        Rollouts(settings, run_id="r", generator_id="g", engine="e", tokenizer=FakeTokenizer(), tokenizer_digest="t", stop_ids=frozenset())


def finished(sampled: Sampled) -> Rollout:
    maker = Rollouts(GenerationSettings(), run_id="r", generator_id="g", engine="e", tokenizer=FakeTokenizer(), tokenizer_digest="t",
                     stop_ids=frozenset({STOP, 3}))
    request = maker.request("i", 0, dispatch(0, "ab"))
    (r,) = decode(Rollout, encode([maker.finished(request, sampled, now(), {"0.1": "d1"}, "held")]))
    return r


def test_a_sampled_end_token_is_trained_on_and_an_appended_one_is_not():
    sampled = finished(Sampled("i", [65, STOP], [-1.0, -2.0], [(0, "0.1")], "stop"))
    assert (sampled.eos_sampled, sampled.loss_mask[-1], sampled.rollout_logprobs[-1], sampled.completion) == (True, True, -2.0, "A")
    appended = finished(Sampled("i", [65, STOP], [-1.0], [(0, "0.1")], "stop"))
    assert (appended.eos_sampled, appended.loss_mask[-1], appended.rollout_logprobs[-1]) == (False, False, None)


def test_a_groups_prompt_is_read_and_rendered_once():
    rendered = []

    class Counting(FakeTokenizer):
        def __call__(self, text):
            rendered.append(text)
            return super().__call__(text)

    maker = Rollouts(GenerationSettings(), run_id="r", generator_id="g", engine="e", tokenizer=Counting(), tokenizer_digest="t",
                     stop_ids=frozenset())
    same = [maker.request(f"i{i}", 0, dispatch(0, "ab", sample_index=i)) for i in range(3)]
    assert rendered == ["ab"]
    assert [r.dispatch.sample_index for r in same] == [0, 1, 2] and len({tuple(r.prompt_ids) for r in same}) == 1
    other = maker.request("j", 0, dispatch(1, "cd"))
    assert other.prompt.prompt_id == "1" and other.prompt_ids != same[0].prompt_ids
    bad = maker.request("k", 0, dispatch(2, prompt=b"no prompt"))
    assert bad.refusal[0] == "error" and maker.request("l", 0, dispatch(1, "cd")).refusal is None
    assert rendered == ["ab", "cd"]


def test_a_second_stop_token_does_not_make_it_truncated():
    r = finished(Sampled("i", [65, 3], [-1.0, -1.0], [(0, "0.1")], "stop"))
    assert (r.finish_reason, r.truncated, r.eos_sampled) == ("stop", False, True)


def test_an_unknown_finish_reason_is_an_error_with_its_name():
    r = finished(Sampled("i", [65], [-1.0], [(0, "0.1")], "repetition"))
    assert r.finish_reason == "error" and "repetition" in r.finish_cause


def test_frames_keep_what_they_are_given():
    assert unpack_submit(pack_submit("ü-1", 3, b"\0rec")) == ("ü-1", 3, b"\0rec")
    assert unpack_offer(pack_offer(12.5, b"\0event")) == (12.5, b"\0event")
    assert unpack_result(pack_result(["i", "j-1"], "d/ü/1", b"\0roll")) == (["i", "j-1"], "d/ü/1".encode(), b"\0roll")


# --- the loader


def test_versions_that_were_overtaken_are_never_read():
    busy, go, read, arrived = threading.Event(), threading.Event(), [], threading.Semaphore(0)

    def load(event):
        read.append(event.version)
        busy.set()
        assert go.wait(10)
        return FakeWeights(event), {}

    loader = Loader(load, (BadWeights,), arrived.release)
    loader.offer(weights(1), 0.0)
    assert busy.wait(10)
    for version in (2, 3, 4):
        loader.offer(weights(version), 0.0)
    go.set()
    assert arrived.acquire(timeout=10) and arrived.acquire(timeout=10)
    assert read == [1, 4] and [loader.take().event.version, loader.take().event.version, loader.take()] == [1, 4, None]


@pytest.mark.parametrize(("failures", "tries", "told"), [(0, 1, ["ok"]), (2, 3, ["away", "ok"]), (9, 4, ["away"])])
def test_a_store_that_is_away_for_a_moment_is_asked_again(failures, tries, told):
    read, arrived = [], threading.Semaphore(0)

    def load(event):
        read.append(event.version)
        if read.count(1) <= failures and event.version == 1:
            raise BadWeights("away")
        return FakeWeights(event), {}

    loader = Loader(load, (BadWeights,), arrived.release, retry_after_s=(0.01, 0.01, 0.01))
    loader.offer(weights(1), 0.0)
    for _ in told:
        assert arrived.acquire(timeout=10)
    assert [a.cause or "ok" for a in iter(loader.take, None)] == told
    until = time.monotonic() + 10
    while read.count(1) < tries:
        assert time.monotonic() < until
        time.sleep(0.005)
    loader.offer(weights(2), 0.0)
    assert arrived.acquire(timeout=10) and loader.take().event.version == 2
    assert read == [1] * tries + [2]


def test_a_newer_version_ends_the_tries_of_an_older_one():
    read, arrived = [], threading.Semaphore(0)

    def load(event):
        read.append(event.version)
        if event.version == 1:
            raise BadWeights("away")
        return FakeWeights(event), {}

    loader = Loader(load, (BadWeights,), arrived.release, retry_after_s=(60.0,))
    loader.offer(weights(1), 0.0)
    assert arrived.acquire(timeout=10) and loader.take().cause == "away"
    loader.offer(weights(2), 0.0)
    assert arrived.acquire(timeout=10) and loader.take().event.version == 2 and read == [1, 2]


def test_an_error_of_the_loader_is_raised_by_the_loop():
    told = threading.Event()

    def load(event):
        raise KeyError("a bug")

    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        loader = Loader(load, (BadWeights,), told.set)
        loader.offer(weights(1), 0.0)
        assert told.wait(10)
        with pytest.raises(RuntimeError, match="loader broke"):
            loader.take()
    finally:
        threading.excepthook = hook


@pytest.fixture
def folder(tmp_path):
    """A tied model's folder and its tensors."""
    from safetensors.torch import save_file

    tensors = {"model.embed_tokens.weight": torch.arange(8.0).reshape(4, 2), "model.norm.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    return tmp_path, tensors


def test_weights_are_checked_before_the_engine_is_touched(folder):
    path, tensors = folder
    files = WeightFiles(str(path), "float32")
    head = tensors["model.embed_tokens.weight"]
    good = publish(str(path / "w"), 0, 1, tensors, "r", "float32")
    loaded, phases = files.load(good)
    assert {n: t.tolist() for n, t in loaded.tensors} == {n: t.tolist() for n, t in tensors.items()} and set(phases) == {"fetch", "decode"}
    for bad, why in (
        (dataclasses.replace(good, digest="0" * 64), "expected digest"),
        (dataclasses.replace(good, uri=good.uri + ".gone"), "cannot be read"),
        (publish(str(path / "w"), 0, 2, {"model.norm.weight": torch.ones(2)}, "r", "float32"), "model.embed_tokens.weight is missing"),
        (publish(str(path / "w"), 0, 3, tensors | {"extra": torch.ones(1)}, "r", "float32"), "extra is not in the model"),
        (publish(str(path / "w"), 0, 4, tensors | {"model.norm.weight": torch.ones(3)}, "r", "float32"), "has shape"),
        (publish(str(path / "w"), 0, 5, tensors, "r", "bfloat16"), "torch.bfloat16, expected torch.float32"),
    ):
        with pytest.raises(BadWeights, match=why):
            files.load(bad)
    files.load(publish(str(path / "w"), 0, 6, tensors | {"lm_head.weight": head}, "r", "float32"))[0].close()


def test_the_held_versions_file_outlives_its_name(folder):
    path, tensors = folder
    event = publish(str(path / "w"), 0, 1, tensors, "r", "float32")
    loaded, _ = WeightFiles(str(path), "float32").load(event)
    loaded.release()
    os.unlink(event.uri)
    assert dict(loaded.tensors)["model.norm.weight"].tolist() == [1.0, 1.0]
    assert Path(loaded.path).stat().st_size == event.bytes
    loaded.close()


def test_weights_come_from_any_filesystem(folder):
    path, tensors = folder
    event = publish("memory://weights", 0, 1, tensors, "r", "float32")
    loaded, _ = WeightFiles(str(path), "float32").load(event)
    loaded.release()
    assert dict(loaded.tensors)["model.norm.weight"].tolist() == [1.0, 1.0]
    loaded.close()


# --- vLLM


@pytest.fixture(scope="module", params=["tied", "untied"])
def probe(request, tmp_path_factory):
    """{name: (rollouts, acks)} of tests/engine_probe.py, and the two models: one engine start for all the tests below."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    models = [make_tiny_model(folder / name, seed, tied=request.param == "tied") for seed, name in enumerate("ab")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine_probe", *map(str, models), str(folder / "weights")], cwd=ROOT, capture_output=True, text=True,
        timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1",
                          "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            found[one["name"]] = one if "rollouts" not in one else ([decode(Rollout, base64.b64decode(r))[0] for r in one["rollouts"]],
                                  [decode(Ack, base64.b64decode(a))[0] for a in one["acks"]])
    return found, [AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32) for m in models], models


@pytest.fixture(scope="module")
def heads(probe):
    """{model.head_dtype: the trainer's two models in bfloat16}, with a cache and an attention that can use one."""
    made = {head: [load_model(ModelSettings(path=str(folder), head_dtype=head), dtype="bfloat16", attention="sdpa").eval() for folder in probe[2]]
            for head in ("model", "float32")}
    for model in itertools.chain(*made.values()):
        model.config._attn_implementation, model.config.use_cache = "sdpa", True
    return made


def logprobs(model, ids, cache=None):
    """Of each of `ids` but the first, given those before it (and the cache), at the sampling temperature, which is not 1."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]), past_key_values=cache).logits[0]
    return torch.log_softmax(logits.float() / SETTINGS.temperature, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def expected(rollout: Rollout, models: dict, mode: str = "reuse") -> list[float]:
    """Behaviour log-probabilities by transformers, `models` by version: each span by its own weights, on the cache that the spans before it
    have left, or on a new one."""
    from transformers import DynamicCache

    ids, out, cache, at = rollout.token_ids, [], DynamicCache(), 0
    starts = [s["start"] for s in rollout.version_spans]
    for span, end in zip(rollout.version_spans, [*starts[1:], len(ids)], strict=True):
        model = models[span["policy_version"]]
        if mode == "recompute":
            out += logprobs(model, ids[:end])[span["start"] - 1:]
        else:  # the last token sampled by the old weights is fed to the new ones
            out += logprobs(model, ids[at:end], cache)[span["start"] - 1 - at:]
        at = end - 1
    return out


def sampled_logprobs(rollout: Rollout) -> list[float]:
    return rollout.rollout_logprobs[rollout.prompt_length:]


@pytest.mark.parametrize("how", ["", ", in place"])
@pytest.mark.parametrize("mode", ["reuse", "reuse_partial", "recompute"])
def test_tokens_before_a_switch_follow_the_old_weights_and_those_after_it_the_new(probe, mode, how):
    found, models, _ = probe
    rollouts, acks = found[f"switch {mode}{how}"]
    *crossing, after = rollouts
    old, new = (a.version for a in acks)
    for r in crossing:
        assert r.version_spans[0] == {"start": r.prompt_length, "policy_version": old}
        assert sampled_logprobs(r) == pytest.approx(expected(r, {old: models[0], new: models[1]}, mode), abs=1e-4)
    assert sum(len(r.version_spans) == 2 for r in crossing) >= 2, "else nothing was tested"
    for r in crossing:
        if len(r.version_spans) == 2:
            assert r.version_spans[1] == {"start": r.prompt_length + 6, "policy_version": new}
    assert after.version_spans == [{"start": after.prompt_length, "policy_version": new}]
    if mode != "reuse":  # there a new sequence may share a prefix that the old version computed
        assert sampled_logprobs(after) == pytest.approx(logprobs(models[1], after.token_ids)[after.prompt_length - 1:], abs=1e-4)


def test_versions_are_exchanged_and_not_written_where_they_can_be(probe):
    exchanged = probe[0]["exchanged"]["values"]
    assert all(exchanged) and len(exchanged) > 20, "each was packed beforehand"


@pytest.mark.parametrize("how", ["", ", in place"])
def test_labels_are_exact_under_an_update_every_five_tokens(probe, how):
    found, models, _ = probe
    rollouts, acks = found[f"often{how}"]
    by_version = {a.version: models[i % 2] for i, a in enumerate(acks)}
    assert len(rollouts) == 32 and sum(len(r.version_spans) >= 4 for r in rollouts) >= 16
    for r in rollouts:
        assert sampled_logprobs(r) == pytest.approx(expected(r, by_version), abs=1e-4)


def test_labels_are_exact_though_a_version_is_offered_every_step_and_packed_meanwhile(probe):
    found, models, _ = probe
    rollouts, acks = found["in a thread"]
    assert len(acks) >= 6 and {a.status for a in acks} == {"applied"}, "versions that come faster than they are packed do not keep each other off"
    assert [a.version for a in acks] == sorted({a.version for a in acks})
    exchanged = found["exchanged in a thread"]["values"]
    assert exchanged.count(True) >= 0.8 * len(exchanged), "hardly one is written in place"
    first = found["often"][1][0].digest  # of the first model's bytes
    by_version = {a.version: models[a.digest != first] for a in acks}
    assert sum(len(r.version_spans) >= 2 for r in rollouts) >= 6, "else nothing was tested"
    for r in rollouts:
        assert sampled_logprobs(r) == pytest.approx(expected(r, by_version), abs=1e-4)


@pytest.mark.parametrize("name", ["by tokens", "by chunks"])
def test_updates_come_by_tokens_in_the_real_engine(probe, name):
    found, _, _ = probe
    (r,), _ = found[name]
    response = len(r.token_ids) - r.prompt_length
    assert [s["start"] - r.prompt_length for s in r.version_spans] == list(range(0, response, 8))
    _, *later = (s["policy_version"] for s in r.version_spans)
    assert [b - a for a, b in itertools.pairwise(later)] == [8] * (len(later) - 1), "one is offered a turn, and the newest is taken"


def disagreement(rollouts: list[Rollout], models: dict) -> float:
    return float(np.mean([abs(a - b) for r in rollouts for a, b in zip(sampled_logprobs(r), expected(r, models), strict=True)]))


def test_logits_in_float32_are_the_trainers_to_the_last_bits_after_an_update(probe, heads):
    rollouts, acks = probe[0]["head in float32"]
    versions = [a.version for a in acks]
    assert {r.policy_version_max for r in rollouts} == set(versions), "else nothing was tested"
    assert disagreement(rollouts, dict(zip(versions, heads["float32"], strict=True))) < 0.05, "bfloat16 of the layers"
    logits = probe[0]["logits of ones"]
    ones = torch.ones(1, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        wide, narrow = (heads[head][1].lm_head(ones)[0].tolist() for head in ("float32", "model"))
    assert logits["dtype"] == "torch.float32"
    assert logits["values"] == pytest.approx(wide, abs=1e-5)
    assert narrow != pytest.approx(wide, abs=1e-3), "in bfloat16 they are rounded"


def test_an_fp8_cache_is_seen_in_the_mismatch_or_refused_by_a_cpu_that_has_none(probe, heads):
    found = probe[0]["cache in fp8"]
    refusal = probe[0]["cache in fp8, older CPU"]["refused"]
    assert "AVX-512 or AMX, and this CPU has neither: set it to model" in refusal
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        assert found["refused"] == refusal
        return
    rollouts, acks = found
    assert len(rollouts) == 12 and [a.status for a in acks] == ["applied"] * 2
    found = disagreement(rollouts, dict(zip([a.version for a in acks], heads["model"], strict=True)))
    assert 0.05 < found < 1.0, "about 0.02 without"


def test_there_and_back_again_is_the_same(probe):
    found, models, _ = probe
    (first, other, *later), acks = found["a b a"]
    assert [a.status for a in acks] == ["applied"] * 7 and len(later) == 5
    for r, same in zip(later, itertools.cycle((first, other))):  # by exchange and in place in turns
        assert r.token_ids == same.token_ids and r.rollout_logprobs == same.rollout_logprobs
    assert other.rollout_logprobs != first.rollout_logprobs
    assert sampled_logprobs(other) == pytest.approx(logprobs(models[1], other.token_ids)[other.prompt_length - 1:], abs=1e-4)


@pytest.mark.parametrize(("how", "cause"), [
    ("broken", r"writing version \d+ failed: OSError: tensor \d+ is torn"),
    ("torn", r"version \d+ .*cannot be packed: OSError: tensor \d+ is torn")])
def test_an_update_that_breaks_at_the_kth_tensor_leaves_the_held_version(probe, how, cause):
    found, models, _ = probe
    broken = [name for name in found if name.startswith(how)]
    assert len(broken) == 4
    for name in broken:
        (crossing, after, recovered), acks = found[name]
        assert [a.status for a in acks] == ["applied", "failed", "applied"] and re.search(cause, acks[1].cause)
        for r in (crossing, after):
            assert r.version_spans == [{"start": r.prompt_length, "policy_version": acks[0].version}]
            assert sampled_logprobs(r) == pytest.approx(logprobs(models[0], r.token_ids)[r.prompt_length - 1:], abs=1e-4)
        assert [s["policy_version"] for s in recovered.version_spans] == [acks[2].version]
        new = logprobs(models[1], recovered.token_ids)[recovered.prompt_length - 1:]
        assert sampled_logprobs(recovered) == pytest.approx(new, abs=1e-4)


def test_a_wrong_digest_is_refused(probe):
    found, models, _ = probe
    (r,), acks = found["wrong digest"]
    assert [a.status for a in acks] == ["applied", "failed"] and "expected digest 0000" in acks[1].cause
    assert r.policy_version_max == acks[0].version and r.weights_digest == acks[0].digest
    assert sampled_logprobs(r) == pytest.approx(logprobs(models[0], r.token_ids)[r.prompt_length - 1:], abs=1e-4)


def test_lengths_are_the_engines_own(probe):
    found, _, (model, _) = probe
    by_reason = {r.admission: r for r in found["lengths"][0]}
    *_, long, short, cut = (by_reason[i] for i in sorted(by_reason))
    assert (long.finish_reason, len(long.loss_mask), any(long.loss_mask)) == ("context_overflow", long.prompt_length, False)
    assert f"has {long.prompt_length} tokens" in long.finish_cause
    assert 64 - cut.prompt_length < 24
    for r, limit in ((short, 24), (cut, 64 - cut.prompt_length)):
        assert r.sampling["max_tokens"] == limit
        ended = r.token_ids[-1] == STOP
        assert (r.finish_reason, r.eos_sampled) == (("stop", True) if ended else ("length", False))
        assert ended or len(r.token_ids) == r.prompt_length + limit
    assert short.tokenizer_digest == tokenizer_digest(model) and len(short.tokenizer_digest) == 64


def test_the_engine_gives_what_an_aborted_sequence_had(probe):
    found, models, _ = probe
    (r,), acks = found["abort"]
    assert r.finish_reason == "abort" and "older than max_lag" in r.finish_cause
    assert [s["policy_version"] for s in r.version_spans] == [acks[0].version, acks[1].version]
    assert len(r.token_ids) == r.prompt_length + 5
    assert sampled_logprobs(r) == pytest.approx(expected(r, {a.version: m for a, m in zip(acks, models, strict=False)}), abs=1e-4)


def test_prompts_are_tokenised_as_the_models_tokenizer_does(probe):
    from transformers import AutoTokenizer

    found, _, (model, _) = probe
    tokenizer = AutoTokenizer.from_pretrained(model)
    rollouts, _ = found["switch reuse"]
    texts = {1: "1 + 2 =", 2: "20 + 9 = 29", 3: "7", 4: "20 + 9 = 29"}
    for r in rollouts:
        assert r.token_ids[:r.prompt_length] == tokenizer(texts[r.admission])["input_ids"]
        assert r.completion == tokenizer.decode(r.token_ids[r.prompt_length:], skip_special_tokens=True)
