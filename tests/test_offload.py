"""Records are answered or lie in the state of their key; slots spread as Flink spreads them. No Flink runs here."""

from __future__ import annotations

import random

import pytest

from operators import offload
from operators.offload import Offload, Runtime, key_group, slot_keys, subtask_of

# (key, MathUtils.murmurHash(key)), and for keys of a PyFlink stream (key, assignToKeyGroup, [subtask at parallelism 1, 2, 3, 5, 8])
MURMUR = [(0, 593689054), (1, 68075478), (2, 1085422463), (3, 847579505), (7, 1343918321), (42, 1134849565), (127, 1931274395),
          (128, 132521001), (1000, 3506311), (65535, 1986290322), (2**31 - 1, 1653689534), (-1, 1982413648)]
FLINK = [(0, 33, [0, 0, 0, 1, 2]), (1, 44, [0, 0, 1, 1, 2]), (2, 97, [0, 1, 2, 3, 6]), (3, 104, [0, 1, 2, 4, 6]), (5, 17, [0, 0, 0, 0, 1]),
         (7, 17, [0, 0, 0, 0, 1]), (42, 26, [0, 0, 0, 1, 1]), (127, 126, [0, 1, 2, 4, 7]), (1000, 5, [0, 0, 0, 0, 0]),
         (65535, 108, [0, 1, 2, 4, 6]), (2**31 - 1, 59, [0, 0, 1, 2, 3]), (-1, 62, [0, 0, 1, 2, 3])]


class FakeState:
    """Keyed map state: one map a key; `snapshot` is what a checkpoint keeps."""

    def __init__(self, maps=None):
        self.maps = {k: dict(v) for k, v in (maps or {}).items()}
        self.key = None

    def _map(self):
        return self.maps.setdefault(self.key, {})

    def put(self, ident, value):
        self._map()[ident] = value

    def remove(self, ident):
        del self._map()[ident]  # a removal under another key than the record's is a KeyError

    def items(self):
        return list(self._map().items())

    def snapshot(self):
        return {k: dict(v) for k, v in self.maps.items()}

    def sizes(self):
        return {k: len(v) for k, v in self.maps.items() if v}


class FakeService:
    def __init__(self):
        self.submitted, self.finished, self.broken, self.closed = [], [], None, False

    def submit(self, ident, record, attempt):
        self.submitted.append((ident, record, attempt))

    def answer(self, ident, *outputs):
        self.finished.append((ident, list(outputs)))

    def drain(self):
        out, self.finished = self.finished, []
        return out

    def poll(self):
        if self.broken:
            raise RuntimeError(self.broken)

    def close(self):
        self.closed = True


class Harness:
    """The part of Flink that Offload meets: keyed state, timers on a clock that the test moves, an output."""

    def __init__(self, maps=None, timers=None, now=1_000_000, **options):
        self.state, self.now, self.timers, self.out = FakeState(maps), now, set(timers or ()), []
        self.service = FakeService()
        self.gauges = {}
        self.runtime: Runtime | None = None

        def make(runtime):
            self.runtime = runtime
            return self.service

        self.function = Offload(make, tick_ms=20, **options)
        self.function.open(self)

    # RuntimeContext
    def get_map_state(self, _):
        return self.state

    def get_metrics_group(self):
        return self

    def add_group(self, _):
        return self

    def gauge(self, name, fn):
        self.gauges[name] = fn

    def get_index_of_this_subtask(self):
        return 1

    def get_number_of_parallel_subtasks(self):
        return 4

    def get_attempt_number(self):
        return 2

    # Context
    def get_current_key(self):
        return self.state.key

    def timer_service(self):
        return self

    def current_processing_time(self):
        return self.now

    def register_processing_time_timer(self, at):
        self.timers.add((at, self.state.key))

    # the driver
    def element(self, key, value):
        self.state.key = key
        self.out += self.function.process_element(value, self) or []

    def advance(self, ms):
        """Fire what is due, in order; a timer registered meanwhile fires too if it is due."""
        until = self.now + ms
        while due := sorted(t for t in self.timers if t[0] <= until):
            at, key = due[0]
            self.timers.remove((at, key))
            self.now = max(self.now, at)
            self.state.key = key
            self.out += self.function.on_timer(at, self)
        self.now = until


@pytest.fixture(autouse=True)
def _no_lifeline(monkeypatch):
    monkeypatch.setattr(offload, "die_with_parent", lambda name, silence_s: None)


def test_an_answer_is_emitted_and_leaves_the_state_of_its_own_key():
    h = Harness()
    for key, record in ((7, b"a"), (7, b"b"), (9, b"c")):
        h.element(key, record)
    assert [(r, n) for _, r, n in h.service.submitted] == [(b"a", 0), (b"b", 0), (b"c", 0)]
    ids = [i for i, _, _ in h.service.submitted]
    assert len(set(ids)) == 3
    h.service.answer(ids[2], "C")  # the answer of key 9 is drained by the timer of key 7 first
    h.service.answer(ids[0], "A1", "A2")
    h.advance(20)
    assert sorted(h.out) == ["A1", "A2", "C"]
    assert h.state.sizes() == {7: 1}
    h.service.answer(ids[1], "B")
    h.advance(80)
    assert sorted(h.out) == ["A1", "A2", "B", "C"] and h.state.sizes() == {}


def test_records_leave_the_state_behind_the_output_that_answers_them_all():
    h = Harness()
    for key in (11, 7, 9):
        h.element(key, b"x")
    left = []
    remove = h.state.remove
    h.state.remove = lambda ident: left.append((h.state.key, list(h.out))) or remove(ident)
    of_11, of_7, of_9 = (i for i, _, _ in h.service.submitted)
    h.service.answer(of_9, "all three")
    h.service.answer(of_11)
    h.service.answer(of_7)
    h.advance(20)
    assert left == [(7, ["all three"]), (9, ["all three"]), (11, ["all three"])]
    assert h.out == ["all three"] and h.state.sizes() == {}


def test_looks_at_a_quiet_service_get_rarer_and_frequent_again_with_the_first_answer():
    h = Harness()
    looks = []
    drain = h.service.drain
    h.service.drain = lambda: looks.append(h.now) or drain()
    for key in (7, 9, 11):
        h.element(key, b"x")
    h.advance(8_000)
    assert 100 <= len(set(looks)) <= 110, "every 80 ms, all keys at once"
    h.service.answer(h.service.submitted[0][0], "X")
    looks.clear()
    h.advance(160)
    assert h.out == ["X"]
    first = next(i for i, at in enumerate(looks) if at > looks[0])
    assert looks[first] - looks[0] == 20


def test_timers_go_on_while_records_are_open_and_end_with_them():
    h = Harness()
    h.element(7, b"a")
    h.advance(5_000)
    assert {k for _, k in h.timers} == {7}
    assert max(t for t, _ in h.timers) >= h.now + 1_000, "one timer lies a second ahead: nearer ones can be missing after a restore"
    h.service.answer(h.service.submitted[0][0], "A")
    h.advance(5_000)
    assert h.out == ["A"] and h.timers == set()


def test_after_a_restore_what_lay_in_the_state_is_submitted_again_with_the_next_attempt():
    h = Harness()
    h.element(7, b"a")
    h.element(7, b"b")
    h.element(9, b"c")
    h.service.answer(h.service.submitted[0][0], "A")
    h.advance(20)
    maps, far = h.state.snapshot(), {t for t in h.timers if t[0] >= h.now + 1_000}
    for attempt in (1, 2, 3):  # each restart restores what the last one left
        h = Harness(maps, far, now=h.now + 60_000)
        assert h.service.submitted == []
        h.advance(20)
        assert sorted((r, n) for _, r, n in h.service.submitted) == [(b"b", attempt), (b"c", attempt)]
        maps, far = h.state.snapshot(), {t for t in h.timers if t[0] >= h.now + 1_000}
    for ident, record, _ in h.service.submitted:
        h.service.answer(ident, record)
    h.advance(160)
    assert sorted(h.out) == [b"b", b"c"] and h.state.sizes() == {}


def test_a_key_that_gets_a_record_before_its_timer_fires_is_restored_first_and_once():
    h = Harness()
    h.element(7, b"a")
    h = Harness(h.state.snapshot(), {(1_001_000, 7)})
    h.element(7, b"new")
    assert [(r, n) for _, r, n in h.service.submitted] == [(b"a", 1), (b"new", 0)]
    h.advance(3_000)
    assert len(h.service.submitted) == 2


def test_a_second_answer_is_dropped():
    h = Harness()
    h.element(7, b"a")
    h.element(7, b"b")
    first = h.service.submitted[0][0]
    h.service.answer(first, "A")
    h.advance(20)
    h.service.answer(first, "again")
    h.service.answer("unknown", "never asked")
    h.advance(160)
    assert h.out == ["A"] and h.state.sizes() == {7: 1}


def test_a_service_beyond_repair_fails_the_job_at_the_next_tick_or_element():
    h = Harness()
    h.element(7, b"a")
    h.service.broken = "the weights listener broke"
    with pytest.raises(RuntimeError, match="weights listener"):
        h.advance(20)
    with pytest.raises(RuntimeError, match="weights listener"):
        h.element(9, b"b")


def test_no_record_is_lost_or_doubled_whatever_the_order():
    rng = random.Random(5)
    for _ in range(20):
        h = Harness()
        waiting = []
        sent = [(rng.choice((7, 9, 11, 13)), f"{n}".encode()) for n in range(200)]
        for key, record in sent:
            h.element(key, record)
            waiting.append(h.service.submitted[-1][:2])
            while waiting and rng.random() < 0.4:
                ident, answered = waiting.pop(rng.randrange(len(waiting)))
                h.service.answer(ident, answered)
            if rng.random() < 0.5:
                h.advance(rng.randrange(50))
        for ident, record in waiting:
            h.service.answer(ident, record)
        h.advance(160)
        assert sorted(h.out) == sorted(r for _, r in sent)
        assert h.state.sizes() == {}


def test_an_empty_record_only_wakes_the_slot():
    h = Harness()
    h.element(7, b"")
    assert h.runtime is not None and h.service.submitted == [] and h.state.sizes() == {} and h.timers == set()
    h.element(7, b"x")
    assert [r for _, r, _ in h.service.submitted] == [b"x"]


def test_the_service_knows_its_subtask_and_is_closed():
    h = Harness()
    assert (h.runtime.subtask, h.runtime.parallelism, h.runtime.attempt) == (1, 4, 2)
    h.runtime.gauge("in_flight", lambda: 3)
    assert h.gauges["in_flight"]() == 3
    h.function.close()
    assert h.service.closed


def test_key_groups_are_flinks():
    assert [(k, offload._murmur(k)) for k, _ in MURMUR] == MURMUR
    assert [(k, key_group(k), [subtask_of(k, p) for p in (1, 2, 3, 5, 8)]) for k, _, _ in FLINK] == FLINK


def imbalance(count: int) -> int:
    keys = slot_keys(count)
    assert len(set(keys)) == count
    worst = 0
    for parallelism in range(1, count + 1):
        load = [0] * parallelism
        for key in keys:
            load[subtask_of(key, parallelism)] += 1
        worst = max(worst, max(load) - min(load))
    return worst


def test_slots_spread_evenly_at_every_parallelism():
    assert {count: imbalance(count) for count in (*range(1, 21), 32, 64, 128) if imbalance(count) > 1} == {}
    assert max(imbalance(count) for count in (21, 45, 61, 80, 100, 127)) == 2


@pytest.mark.parametrize("count", [2, 4, 6, 8, 16, 64])
def test_consecutive_slots_alternate_between_two_subtasks(count):
    subtasks = [subtask_of(key, 2) for key in slot_keys(count)]
    assert subtasks == [i % 2 for i in range(count)] or subtasks == [(i + 1) % 2 for i in range(count)]


def test_more_slots_than_key_groups_are_refused():
    with pytest.raises(ValueError, match="key groups"):
        slot_keys(129)
