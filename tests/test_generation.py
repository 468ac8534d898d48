"""What the operator does on frames, deaths and deadlines: with children of a few lines, then with a real engine that is killed."""

from __future__ import annotations

import functools
import json
import os
import queue
import signal
import threading
import time

import psutil
import pytest
from safetensors.torch import load_file

from operators import generation
from operators.engine_frames import ACK, OFFER, READY, RESULT, SERVE, STATS, SUBMIT, WRITING, pack_result, unpack_offer, unpack_submit
from operators.generation import EngineService, GenerationFailed, WeightsListener, engine_config, engine_env, start_engine
from operators.log import Message
from operators.weights import publish
from schemas.record import decode, encode
from schemas.records import Ack, Dispatch, Rollout, Weights, now
from schemas.settings import Settings
from tests.records import prompt
from tests.tiny import make_tiny_model


class FakeChild:
    def __init__(self, restarts, on_frame, on_death):
        self.restarts, self.on_frame, self.on_death = restarts, on_frame, on_death
        self.sent, self.killed, self.closed = [], False, False

    def send(self, kind, payload):
        self.sent.append((kind, payload))

    def kill(self):
        self.killed = True

    def close(self):
        self.closed = True

    # what a test lets it say
    def ready(self):
        self.on_frame(READY, b"{}")

    def answer(self, *idents):
        self.on_frame(RESULT, pack_result(list(idents), "d/0/1", b"rollout of " + " ".join(idents).encode()))

    def ack(self, version, status="applied", cause=None):
        self.on_frame(ACK, encode([Ack(
            run_id="r", generator_id="g", status=status, epoch=0, version=version, digest="d", cause=cause, phases_ms=[], in_flight=0,
            waiting=0, generated_tokens=0, busy_steps=0, in_flight_sum=0, capacity_sum=0, at=now())]))

    @property
    def submitted(self):
        return [unpack_submit(p) for k, p in self.sent if k == SUBMIT]

    @property
    def offered(self):
        return [decode(Weights, unpack_offer(p)[1])[0].version for k, p in self.sent if k == OFFER]


class Operator:
    def __init__(self, max_restarts=2):
        self.children, self.acks, self.time = [], [], 0.0
        self.service = EngineService(self._start, self.acks.append, max_restarts=max_restarts, restart_window_s=100, start_timeout_s=50,
                                     clock=lambda: self.time)

    def _start(self, restarts, on_frame, on_death):
        self.children.append(FakeChild(restarts, on_frame, on_death))
        return self.children[-1]

    @property
    def child(self):
        return self.children[-1]


def weights(version, epoch=0):
    return Weights(run_id="r", epoch=epoch, version=version, digest="d", uri="", encoding="full", base_version=None, bytes=1,
                   dtype="float32", offered_at=now())


def test_answers_come_out_as_rows_of_key_and_value_once():
    o = Operator()
    o.service.submit("a", b"A", 0)
    o.service.submit("b", b"B", 3)
    assert o.child.submitted == [("a", 0, b"A"), ("b", 3, b"B")]
    o.child.answer("b")
    o.child.answer("b")
    o.child.answer("never asked")
    ((ident, rows),) = o.service.drain()
    assert ident == "b" and [tuple(r) for r in rows] == [(b"d/0/1", b"rollout of b")]
    assert o.service.drain() == []


def test_a_message_that_answers_several_samples_comes_with_the_first():
    o = Operator()
    for ident in "abc":
        o.service.submit(ident, b"", 0)
    o.child.answer("b", "never asked", "a")
    (first, rows), second = o.service.drain()
    assert (first, second) == ("b", ("a", [])) and [tuple(r) for r in rows] == [(b"d/0/1", b"rollout of b never asked a")]
    o.child.on_death("signal SIGKILL")
    assert [i for i, _, _ in o.child.submitted] == ["c"]


def test_a_dead_engine_is_replaced_with_the_newest_version_and_every_open_record():
    o = Operator()
    for version in (0, 1, 2):
        o.service.offer(weights(version), 1.0)
    o.service.caught_up()
    o.service.caught_up()
    assert [k for k, _ in o.child.sent] == [OFFER, OFFER, OFFER, SERVE]
    for ident in "abc":
        o.service.submit(ident, ident.encode(), 1)
    o.child.answer("b")
    first = o.child
    first.on_death("signal SIGKILL")
    assert first.closed and o.child.restarts == 1
    assert o.child.offered == [2] and o.child.submitted == [("a", 2, b"a"), ("c", 2, b"c")]
    assert [k for k, _ in o.child.sent].index(SERVE) < [k for k, _ in o.child.sent].index(SUBMIT)
    o.child.on_death("signal SIGKILL")
    assert [n for _, n, _ in o.child.submitted] == [3, 3]
    o.child.answer("a")
    assert [i for i, _ in o.service.drain()] == ["b", "a"]
    o.service.poll()


def test_an_engine_that_dies_before_the_topic_was_read_does_not_serve():
    o = Operator()
    o.service.offer(weights(4), 1.0)
    o.child.on_death("x")
    assert [k for k, _ in o.child.sent] == [OFFER]
    o.service.caught_up()
    assert [k for k, _ in o.child.sent] == [OFFER, SERVE]


def test_the_newest_version_is_that_of_the_newest_epoch():
    o = Operator()
    for version, epoch in ((20, 0), (15, 1), (19, 0)):
        o.service.offer(weights(version, epoch), 1.0)
    o.child.on_death("x")
    assert o.child.offered == [15]


def test_too_many_deaths_within_the_window_end_the_service_with_the_cause():
    o = Operator(max_restarts=2)
    for at in (0, 90, 180):  # never three within 100 s
        o.time = at
        o.child.on_death("no memory")
        o.service.poll()
    o.time = 185
    o.child.on_death("no memory")
    with pytest.raises(GenerationFailed, match=r"died 3 times within 100 s.*max_restarts \(2\).*no memory"):
        o.service.poll()
    assert len(o.children) == 4, "no further engine is started"


def test_a_thread_that_breaks_fails_the_job_with_its_cause():
    o = Operator()
    o.service.poll()
    o.service.fail("the weights listener broke: KeyError: 3")
    o.service.fail("a later one")
    with pytest.raises(GenerationFailed, match="weights listener broke"):
        o.service.poll()


def test_an_engine_must_load_in_time():
    o = Operator()
    o.time = 50
    o.service.poll()
    o.time = 51
    with pytest.raises(GenerationFailed, match=r"has not loaded within 50 s"):
        o.service.poll()


def test_an_engine_must_hold_a_version_in_time_once_one_is_on_offer():
    o = Operator()
    o.child.ready()
    o.time = 200
    o.child.on_frame(STATS, b"{}")
    o.service.poll()  # nothing is on offer: that is the trainer's to answer for
    o.service.offer(weights(0), 1.0)
    o.child.ack(0, "failed", "expected digest x, found y")
    o.time = 251
    with pytest.raises(GenerationFailed, match=r"holds no version.*within 50 s.*expected digest x, found y"):
        o.service.poll()


def test_deadlines_end_when_a_version_is_held_and_begin_anew_with_a_new_engine():
    o = Operator()
    o.service.offer(weights(0), 1.0)
    o.child.ready()
    o.child.ack(0)
    o.time = 200
    o.service.poll()
    o.child.on_death("x")
    o.time = 251
    with pytest.raises(GenerationFailed, match="has not loaded"):
        o.service.poll()


@pytest.mark.parametrize("status", ["applied", "failed"])
def test_an_engine_that_never_ends_a_write_is_killed(status):
    o = Operator()
    o.service.offer(weights(0), 1.0)
    o.child.ready()
    o.child.ack(0)
    for version in range(1, 4):
        o.child.on_frame(WRITING, str(version).encode())
        o.time += 59
        o.service.poll()
        o.child.ack(version, status)
        o.time += 59
        o.service.poll()
    assert not o.child.killed, "59 s is no more than pause_timeout_s, and between two writes there is no pause"
    o.child.on_frame(WRITING, b"4")
    o.time += 61
    o.service.poll()
    assert o.child.killed
    o.child.on_death("signal SIGKILL")
    o.child.ready()
    o.time += 49
    o.service.poll()
    assert not o.child.killed, "its successor has written nothing yet"


def test_an_engine_that_hangs_is_killed():
    o = Operator()
    o.service.offer(weights(0), 1.0)
    o.child.ready()
    o.child.ack(0)
    o.time = 300 - 1
    o.child.on_frame(STATS, b"{}")
    o.time += 300 - 1
    o.service.poll()
    assert not o.child.killed
    o.time += 2
    o.service.poll()
    assert o.child.killed


def test_acks_are_passed_on_and_gauges_follow_the_engine():
    o = Operator()
    assert o.service.gauge("held_version") == -1 and o.service.gauge("in_flight") == 0
    o.child.ack(3)
    o.child.on_frame(STATS, json.dumps({"in_flight": 5, "waiting": 2, "held_version": 3, "generated_tokens": 99}).encode())
    assert [decode(Ack, a)[0].version for a in o.acks] == [3]
    assert [o.service.gauge(n) for n in ("in_flight", "waiting", "held_version", "generated_tokens")] == [5, 2, 3, 99]


def test_closing_is_no_death():
    o = Operator()
    order = []
    o.service.on_close(lambda: order.append("first"))
    o.service.on_close(lambda: order.append("second"))
    o.service.submit("a", b"A", 0)
    o.service.close()
    o.child.on_death("the pipe was closed")
    assert o.child.closed and order == ["second", "first"] and len(o.children) == 1


def test_frames_of_another_version_are_an_error():
    o = Operator()
    o.child.on_frame(77, b"")
    with pytest.raises(GenerationFailed, match="unknown kind 77"):
        o.service.poll()


def test_engines_differ_in_seed_and_take_their_gpus(monkeypatch):
    settings = Settings(generation={"tensor_parallel": 2, "device": "cuda"})
    seeds = {engine_config(settings, g, i)["seed"] for g in ("generator-0", "generator-1") for i in ("0.0", "0.1")}
    assert len(seeds) == 4
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [engine_env(settings, i)["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [engine_env(settings, i)["CUDA_VISIBLE_DEVICES"] for i in (0, 1, 2)] == ["4,5", "6,7", "4,5"]
    assert "CUDA_VISIBLE_DEVICES" not in engine_env(Settings(generation={"device": "cpu"}), 0)


# --- the listener


class FakeTopic:
    """The weights topic: what `operators.log` gives of it. `position` moves past what was read, as a consumer's does."""

    def __init__(self, *messages):
        self.messages, self.position, self.error = list(messages), 0, None
        self.more = threading.Condition()

    def install(self, monkeypatch):
        monkeypatch.setattr(generation, "wait_for_topic", lambda kafka, name: None)
        monkeypatch.setattr(generation, "consumer", lambda kafka: self)
        monkeypatch.setattr(generation, "read_with", self.read_with)
        monkeypatch.setattr(generation, "follow", self.follow)

    def append(self, message):
        with self.more:
            self.messages.append(message)
            self.more.notify()

    def fail(self, error):
        with self.more:
            self.error = error
            self.more.notify()

    def read_with(self, client, name):
        end = len(self.messages)
        self.messages.append(encode([weights(7)]))  # arrives while the topic is read, and is fetched with the rest
        self.position = len(self.messages)
        for offset in range(end):
            yield Message(name, 0, offset, None, self.messages[offset], 0)

    def follow(self, client, timeout_ms):
        with self.more:
            self.more.wait_for(lambda: self.error or self.position < len(self.messages), timeout=0.05)
            if self.error:
                raise self.error
            out = [Message("", 0, i, None, self.messages[i], 0) for i in range(self.position, len(self.messages))]
            self.position = len(self.messages)
        return out

    def assignment(self):
        return ["the partition"]

    def seek(self, partition, offset):
        self.position = offset

    def close(self):
        pass


class HeardService:
    def __init__(self):
        self.heard, self.failures = queue.SimpleQueue(), queue.SimpleQueue()

    def offer(self, event, heard_at):
        self.heard.put((event.epoch, event.version))

    def caught_up(self):
        self.heard.put("caught up")

    def fail(self, cause):
        self.failures.put(cause)


def test_the_newest_version_on_offer_is_said_before_the_word_to_serve_and_none_is_missed_after_it(monkeypatch):
    stream = FakeTopic(*(encode([weights(v, e)]) for v, e in ((0, 0), (5, 0), (3, 1), (4, 0))))
    stream.install(monkeypatch)
    service = HeardService()
    listener = WeightsListener(Settings(), service)
    assert [service.heard.get(timeout=10) for _ in range(3)] == [(1, 3), "caught up", (0, 7)]
    stream.append(encode([weights(4, 1)]))
    assert service.heard.get(timeout=10) == (1, 4)
    listener.close()
    assert service.failures.empty()


def test_malformed_events_go_to_the_dead_letters_and_the_stream_goes_on(monkeypatch):
    dead = []
    monkeypatch.setattr(generation, "DeadLetters", lambda *_: lambda cause, original: dead.append(original))
    stream = FakeTopic(encode([weights(0)]), b"no event")
    stream.install(monkeypatch)
    service = HeardService()
    listener = WeightsListener(Settings(), service)
    assert [service.heard.get(timeout=10) for _ in range(3)] == [(0, 0), "caught up", (0, 7)]
    stream.append(b"garbage")
    stream.append(encode([weights(8)]))
    assert service.heard.get(timeout=10) == (0, 8)
    listener.close()
    assert dead == [b"no event", b"garbage"]


def test_a_listener_that_raises_says_so_at_once(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    stream = FakeTopic()
    stream.install(monkeypatch)
    service = HeardService()
    WeightsListener(Settings(), service)
    assert service.heard.get(timeout=10) == "caught up"
    stream.fail(KeyError("version 3"))
    assert "weights listener" in (cause := service.failures.get(timeout=10)) and "KeyError: 'version 3'" in cause


# --- a real engine


def dispatch(index):
    return encode([Dispatch(admission=index, group_id=f"d/0/{index}", sample_index=0, group_size=1, attempt=0, min_version=0,
                            policy_version=0, prompt=encode([prompt(index, prompt=f"{index} + 1 =")]), dispatched_at=now())])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("generation") / "model")


def wait_for(condition, what, deadline_s=600):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.01)


def test_a_killed_engine_leaves_nothing_behind_and_its_successor_serves_on_the_newest_version(model, tmp_path):
    settings = Settings(model={"path": str(model)}, generation={
        "batch": 4, "max_tokens": 400, "max_model_len": 512, "dtype": "float32", "kv_cache_mb": 32, "device": "cpu"})
    tensors = load_file(model / "model.safetensors")
    acks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    service = EngineService(functools.partial(start_engine, settings, "generator-0", 0, 0), acks.put, max_restarts=1, restart_window_s=600,
                            start_timeout_s=300)
    done: dict[str, Rollout] = {}

    def drain():
        service.poll()
        found = service.drain()
        rollouts = [r for _, rows in found for row in rows for r in decode(Rollout, row[1])]
        done.update((ident, r) for (ident, _), r in zip(found, rollouts, strict=True))

    try:
        service.offer(publish(str(tmp_path), 0, 0, tensors, "r", "float32"), time.time())
        service.caught_up()
        for i in range(12):
            service.submit(f"i{i}", dispatch(i), 0)
        wait_for(lambda: drain() or len(done) >= 2, "the first rollouts")
        first = psutil.Process(service._child._child.pid)
        family = [first, *first.children(recursive=True)]
        service.offer(publish(str(tmp_path), 0, 1, tensors, "r", "float32"), time.time())
        os.kill(first.pid, signal.SIGKILL)
        service.submit("late", dispatch(12), 0)
        wait_for(lambda: drain() or len(done) == 13, "the other rollouts")
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
        resubmitted = [r for r in done.values() if r.attempt == 1]
        assert resubmitted and all(r.policy_version_min == 1 for r in resubmitted)
        assert sorted(r.prompt_ordinal for r in done.values()) == list(range(13))
        versions = []
        while not acks.empty():
            versions += [a.version for a in decode(Ack, acks.get())]
        assert versions[0] == 0 and versions[-1] == 1
        last = psutil.Process(service._child._child.pid)
    finally:
        service.close()
    assert not last.is_running() or last.status() == psutil.STATUS_ZOMBIE


def test_a_model_folder_that_is_none_names_itself(tmp_path):
    settings = Settings(model={"path": str(tmp_path / "nothing")}, generation={"device": "cpu"})
    service = EngineService(functools.partial(start_engine, settings, "generator-0", 0, 0), lambda _: None, max_restarts=0,
                            restart_window_s=600, start_timeout_s=300)
    try:
        with pytest.raises(GenerationFailed, match="is no model folder"):
            wait_for(lambda: service.poll(), "the failure")
    finally:
        service.close()
