"""Grading: first its logic on a hand-written child and a clock that the test moves, then real processes and graders that misbehave."""

import json
import os
import time
from pathlib import Path

import pytest

from operators.grader import DONE, GRADE, READY, STARTED
from operators.reward import GradersDoNotStart, RewardService, Verdict, length_penalty, scored, verdict_of
from schemas.record import decode, encode, encode_batch, read
from schemas.records import Rollout, now
from schemas.settings import RewardSettings


def rollout(**changes) -> Rollout:
    prompt, response = changes.pop("prompt", 3), changes.pop("response", 4)
    n = prompt + response
    base = dict(
        run_id="run", group_id="d/0/1", sample_index=0, rollout_id="x", attempt=0, admission=0, group_size=8, prompt_id="1",
        prompt_ordinal=1, dataset="d", dataset_pass=0, task="characters", answer="1111", token_ids=list(range(n)), prompt_length=prompt,
        loss_mask=[i >= prompt for i in range(n)], rollout_logprobs=[None if i < prompt else -0.5 for i in range(n)],
        version_spans=[{"start": prompt, "policy_version": 0}], policy_version_min=0, policy_version_max=0, policy_version_admitted=0,
        finish_reason="stop", truncated=False, eos_sampled=True,
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1, "max_tokens": 10},
        kv_policy="reuse", engine="e", generator_id="g", weights_digest="w", tokenizer_digest="t", completion="1111", turns=[],
        dispatched_at=now(), finished_at=now())
    return Rollout(**base | changes)


class Dead(list):
    def __call__(self, cause, original, group_id=None, sample_index=None):
        self.append((cause, original, group_id, sample_index))


class FakeChild:
    """Says what the test makes it say; remembers what it was sent."""

    def __init__(self, module, config, *, on_frame, on_death, env):
        self.config, self.on_frame, self.on_death = config, on_frame, on_death
        self.requests, self.ended = [], False
        self.process = self
        self.stdin = os.fdopen(os.pipe()[1], "wb")

    def send(self, kind, payload):
        assert kind == GRADE
        self.requests.append(json.loads(payload))

    def kill(self):
        self.ended = True

    def close(self, grace_s=0):
        self.ended = True

    def ready(self):
        self.on_frame(READY, b"")
        return self

    def start(self):
        self.on_frame(STARTED, b"")
        return self

    def done(self, **answer):
        self.on_frame(DONE, json.dumps(answer).encode())
        return self

    def die(self, cause="signal SIGSEGV"):
        self.ended = True
        self.on_death(cause)


class Bench:
    """A service on fake children and a clock."""

    def __init__(self, **settings):
        self.now, self.children, self.dead = 0.0, [], Dead()
        self.service = RewardService(RewardSettings(**{"timeout_s": 10} | settings), self.dead,
                                     start_child=self._start, clock=lambda: self.now)

    def _start(self, *args, **more):
        self.children.append(FakeChild(*args, **more))
        return self.children[-1]

    @property
    def child(self) -> FakeChild:
        return self.children[-1]

    def drain(self) -> dict[str, list[Rollout]]:
        return {ident: [r for m in messages for r in decode(Rollout, m)] for ident, messages in self.service.drain()}


def test_a_reward_is_the_sum_of_its_components_and_nothing_else_changes():
    b = Bench()
    before = rollout()
    b.service.submit("a", encode([before]), 0)
    b.child.ready()
    assert b.drain() == {}
    assert b.child.requests == [{"task": "characters", "completion": "1111", "answer": "1111", "metadata": None}]
    b.child.start().done(components={"characters": 0.5, "style": 0.25})
    (after,) = b.drain()["a"]
    assert after.reward == 0.75 and dict(after.reward_components) == {"characters": 0.5, "style": 0.25} and after.reward_status == "ok"
    assert after.scored_at is not None
    for name in Rollout.arrow_schema.names:
        if name not in ("reward", "reward_components", "reward_status", "scored_at"):
            assert getattr(after, name) == getattr(before, name)
    assert after.rollout_logprobs[:3] == [None] * 3, "what was not sampled stays null"
    assert b.drain() == {} and b.service.depth == 0


def test_a_message_of_several_rows_comes_back_as_one_when_all_are_graded():
    b = Bench()
    b.service.submit("a", encode([rollout(sample_index=0), rollout(sample_index=1, finish_reason="abort"), rollout(sample_index=2)]), 0)
    b.child.ready()
    b.drain()
    b.child.start().done(components={"r": 1.0})
    assert b.drain() == {}
    b.child.start().done(components={"r": 0.0})
    rows = b.drain()["a"]
    assert [(r.sample_index, r.reward, r.reward_status) for r in rows] == [(0, 1.0, "ok"), (1, None, "error"), (2, 0.0, "ok")]


@pytest.mark.parametrize("reason", ["abort", "context_overflow", "timeout", "error"])
def test_what_did_not_end_by_itself_passes_through_ungraded(reason):
    b = Bench()
    b.service.submit("a", encode([rollout(finish_reason=reason, finish_cause="engine died", response=0)]), 0)
    (row,) = b.drain()["a"]
    assert (row.reward, row.reward_components, row.scored_at) == (None, None, None)
    assert (row.reward_status, row.finish_cause) == ("error", "engine died")
    assert b.child.requests == []


@pytest.mark.parametrize("answer, status", [
    ({"failure": "parse_error", "cause": "no gold"}, "parse_error"),
    ({"failure": "error", "cause": "KeyError: 3"}, "error"),
    ({"failure": "timeout", "cause": "math-verify gave up"}, "timeout"),
    ({"components": {"r": float("nan")}}, "error"),
    ({"components": {"r": float("inf")}}, "error"),
    ({"components": {"r": 1e39}}, "error"),  # finite, but no float32
    ({"components": {}}, "error"),
])
def test_a_failed_grader_is_not_a_reward_of_0(answer, status):
    b = Bench()
    b.service.submit("a", encode([rollout()]), 0)
    b.child.ready()
    b.drain()
    b.child.start().done(**answer)
    (row,) = b.drain()["a"]
    assert (row.reward, row.reward_components, row.reward_status) == (None, None, status)
    assert b.service.counts == {status: 1}


def test_a_row_that_takes_too_long_costs_itself_and_its_child_only():
    b = Bench()
    b.service.submit("slow", encode([rollout(completion="slow")]), 0)
    b.service.submit("next", encode([rollout(completion="next")]), 0)
    first = b.child.ready()
    b.drain()
    b.now = 5.0
    first.start()
    b.now = 14.9  # counted from its start, not from its submission
    assert b.drain() == {} and not first.ended
    b.now = 15.0
    (row,) = b.drain()["slow"]
    assert (row.reward, row.reward_status) == (None, "timeout")
    assert first.ended and b.child is not first
    first.done(components={"r": 1.0})  # too late: it was in the pipe when the child was killed
    b.child.ready()
    assert b.drain() == {}
    assert [r["completion"] for r in b.child.requests] == ["next"]
    b.child.start().done(components={"r": 1.0})
    assert b.drain()["next"][0].reward == 1.0


def test_an_answer_that_was_in_time_counts_though_nobody_looked_for_a_while():
    b = Bench()
    b.service.submit("a", encode([rollout()]), 0)
    b.child.ready()
    b.drain()
    b.child.start()
    b.now = 3.0
    b.child.done(components={"r": 1.0})
    b.now = 60.0
    assert b.drain()["a"][0].reward_status == "ok"


def test_a_row_that_kills_its_process_is_tried_twice_and_its_neighbours_are_graded():
    b = Bench()
    for name in ("poison", "next"):
        b.service.submit(name, encode([rollout(completion=name)]), 0)
    first = b.child.ready()
    b.drain()
    first.start().die()
    assert b.drain() == {}
    second = b.child.ready()
    b.drain()
    assert second is not first and [r["completion"] for r in second.requests] == ["poison", "next"]
    second.start().die()
    (row,) = b.drain()["poison"]
    assert (row.reward, row.reward_status) == (None, "error")
    b.child.ready()
    b.drain()
    b.child.start().done(components={"r": 1.0})
    assert b.drain()["next"][0].reward == 1.0
    assert b.service.counts == {"ok": 1, "error": 1}


def test_a_child_that_dies_idle_is_replaced():
    b = Bench()
    b.child.ready()
    b.drain()
    b.child.die()
    b.drain()
    assert len(b.children) == 2


def test_graders_that_cannot_start_fail_the_job_with_their_cause():
    b = Bench()
    with pytest.raises(GradersDoNotStart, match="No module named 'mine'"):
        for _ in range(5):
            b.child.die("exit status 1; its last words: No module named 'mine'")
            b.drain()


def test_a_grader_whose_imports_hang_is_an_error_of_the_row():
    b = Bench()
    b.service.submit("a", encode([rollout()]), 0)
    b.child.ready()
    b.drain()
    b.now = 119.0  # far beyond timeout_s, which does not count imports
    assert b.drain() == {}
    b.now = 121.0
    assert b.drain()["a"][0].reward_status == "error"
    assert b.children[0].ended


def test_what_is_no_rollout_is_a_dead_letter_and_is_answered_with_nothing():
    b = Bench()
    b.service.submit("a", b"garbage", 0)
    torn = encode([rollout()])[:-200]
    b.service.submit("b", torn, 0)
    assert b.drain() == {"a": [], "b": []}
    assert [original for _, original, *_ in b.dead] == [b"garbage", torn]
    assert all("rollout" in cause for cause, *_ in b.dead)


def test_an_unknown_task_is_a_dead_letter_and_the_row_goes_on_so_that_it_gets_its_outcome():
    b = Bench()
    record = encode([rollout(task="mth", group_id="d/0/7", sample_index=3)])
    b.service.submit("a", record, 0)
    b.child.ready()
    b.drain()
    b.child.done(unknown="unknown task 'mth': did you mean 'math'?")
    (row,) = b.drain()["a"]
    assert (row.reward, row.reward_status) == (None, "error")
    assert b.dead == [("unknown task 'mth': did you mean 'math'?", record, "d/0/7", 3)]


def test_the_same_record_is_not_graded_twice_while_it_is_in_flight():
    b = Bench()
    record = encode([rollout()])
    b.service.submit("a", record, 0)
    b.service.submit("a", record, 1)
    b.child.ready()
    b.drain()
    assert len(b.child.requests) == 1


def test_children_are_fed_ahead_as_far_as_their_pace_warrants():
    b = Bench(workers=2)
    for i in range(100):
        b.service.submit(str(i), encode([rollout()]), 0)
    for child in b.children:
        child.ready()
    b.drain()
    assert [len(c.requests) for c in b.children] == [2, 2], "a pace that is not known yet: one in work, one waiting"
    for _ in range(40):  # each takes no time at all
        for c in b.children:
            if c.requests:
                c.start().done(components={"r": 1.0})
                c.requests.pop(0)
        b.drain()
    assert b.service.depth == 20
    assert len(b.children[0].requests) + len(b.children[1].requests) == 20


def test_an_answer_is_longer_than_the_pipe():
    b = Bench()
    b.service.submit("a", encode([rollout(completion="1" * (3 << 20))]), 0)
    b.child.ready()
    b.drain()
    assert len(b.child.requests) == 1, "an idle child takes a request of any size"


@pytest.mark.parametrize("tokens, expected", [(0, 0.0), (36, 0.0), (68, -0.25), (100, -0.5), (120, -0.5)])
def test_length_penalty_is_a_ramp(tokens, expected):
    settings = RewardSettings(penalize_length=True, length_penalty=0.5, length_penalty_tokens=64)
    assert length_penalty(tokens, 100, settings) == pytest.approx(expected)


def test_length_penalty_is_a_component_of_its_own_and_counts_response_tokens():
    b = Bench(penalize_length=True, length_penalty=1.0, length_penalty_tokens=4)
    b.service.submit("a", encode([rollout(prompt=30, response=8, finish_reason="length", truncated=True)]), 0)  # max_tokens 10
    b.child.ready()
    b.drain()
    b.child.start().done(components={"characters": 1.0})
    (row,) = b.drain()["a"]
    assert dict(row.reward_components) == {"characters": 1.0, "length_penalty": -0.5} and row.reward == 0.5


def test_token_lists_keep_their_buffers():
    table = read(Rollout, encode([rollout(), rollout(sample_index=1)]))
    out = read(Rollout, scored(table, [Verdict("ok", {"r": 1.0}), Verdict("timeout")], now()))
    assert out.schema.equals(Rollout.arrow_schema)
    for name in ("token_ids", "rollout_logprobs", "loss_mask", "version_spans"):
        assert out.column(name).equals(table.column(name))
    assert out.column("reward").to_pylist() == [1.0, None]


def test_rows_that_are_not_at_the_start_of_a_buffer_are_scored():
    table = read(Rollout, encode([rollout(sample_index=i, response=i + 1) for i in range(4)])).slice(2)
    b = Bench(penalize_length=True, length_penalty_tokens=10)
    b.service.submit("a", encode_batch(table), 0)
    b.child.ready()
    b.drain()
    b.child.start().done(components={"r": 1.0}).start().done(components={"r": 1.0})
    assert [dict(r.reward_components)["length_penalty"] for r in b.drain()["a"]] == pytest.approx([-0.3, -0.4])


def test_no_components_are_no_reward():
    assert verdict_of({}).status == "error"
    assert verdict_of({"a": 1.0, "b": -0.5}).reward == 0.5


# Real grading processes.

HOSTILE = """
import os, sys, time
from operators.tasks import task

@task("hangs")
def hangs(completion, answer, metadata):
    if completion == "hang":
        while True: pass
    return {"r": 1.0}

@task("holds_the_lock")
def holds_the_lock(completion, answer, metadata):
    return {"r": float(len(str(9 ** 9 ** 8)))}

@task("sleeps")
def sleeps(completion, answer, metadata):
    open(answer, "w").write(str(os.getpid()))
    time.sleep(3600)

@task("crashes")
def crashes(completion, answer, metadata):
    if completion == "crash":
        os.kill(os.getpid(), 11)
    return {"r": 1.0}

@task("exits")
def exits(completion, answer, metadata):
    sys.exit(3)

@task("greedy")
def greedy(completion, answer, metadata):
    return {"r": float(len(bytearray(8 << 30)))}

@task("prints")
def prints(completion, answer, metadata):
    print("noise " * 1000); os.write(1, b"noise"); sys.stdin.read()
    return {"r": 1.0}

@task("says_text")
def says_text(completion, answer, metadata):
    return {"r": "much"}

@task("alarms")
def alarms(completion, answer, metadata):
    import signal
    def ring(*_): raise TimeoutError("rang")
    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while True: pass
    except TimeoutError:
        return {"r": 1.0}
"""


@pytest.fixture
def service(tmp_path, monkeypatch):
    (tmp_path / "hostile_graders.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)
    services = []

    def make(**settings):
        settings = RewardSettings(**{"timeout_s": 1, "memory_mb": 2048} | settings)
        services.append(RewardService(settings, Dead(), modules=["hostile_graders"]))
        return services[-1]

    yield make
    for s in services:
        s.close()


def grade_all(service, rows, deadline_s=60) -> list[Rollout]:
    for i, row in enumerate(rows):
        service.submit(str(i), encode([row]), 0)
    answers = {}
    end = time.monotonic() + deadline_s
    while len(answers) < len(rows):
        assert time.monotonic() < end, f"{len(answers)} of {len(rows)} rows graded in {deadline_s} s"
        answers |= dict(service.drain())
        time.sleep(0.005)  # the tick of the operator
    return [decode(Rollout, answers[str(i)][0])[0] for i in range(len(rows))]


@pytest.mark.parametrize("task, completion, status", [
    ("hangs", "hang", "timeout"),
    ("holds_the_lock", "x", "timeout"),
    ("crashes", "crash", "error"),
    ("exits", "x", "error"),
    ("greedy", "x", "error"),
    ("says_text", "x", "error"),
    ("nonsense", "x", "error"),
])
def test_a_grader_that_misbehaves_costs_its_own_row(service, task, completion, status):
    good = dict(task="hangs", completion="fine")
    rows = grade_all(service(), [rollout(**good), rollout(task=task, completion=completion), rollout(**good), rollout(**good)])
    assert [(r.reward, r.reward_status) for r in rows] == [(1.0, "ok"), (None, status), (1.0, "ok"), (1.0, "ok")]


def test_graders_may_print_read_and_use_alarms(service):
    rows = grade_all(service(), [rollout(task="prints"), rollout(task="alarms"), rollout(task="characters")])
    assert [r.reward for r in rows] == [1.0, 1.0, 1.0]


def test_mathematics_is_graded_in_a_process_of_its_own(service):
    s = service(memory_mb=4096, timeout_s=20)
    rows = grade_all(s, [rollout(task="math", completion=f"\\boxed{{{i}}}", answer="7") for i in range(10)]
                     + [rollout(task="math", answer=None), rollout(task="reasoning_gym/chain_sum", task_metadata="{", answer="4")])
    assert [r.reward for r in rows] == [float(i == 7) for i in range(10)] + [None, None]
    assert [r.reward_status for r in rows[10:]] == ["parse_error", "parse_error"]


def test_closing_ends_a_judge_that_sleeps(service, tmp_path):
    s = service(timeout_s=600)
    s.submit("a", encode([rollout(task="sleeps", answer=str(tmp_path / "pid"))]), 0)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        s.drain()
        time.sleep(0.005)
    pid = int((tmp_path / "pid").read_text())
    s.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_many_rows_over_several_children_come_out_once_each(service):
    s = service(workers=2)
    rows = grade_all(s, [rollout(sample_index=i, completion="1" * (i % 5)) for i in range(300)])
    assert [r.sample_index for r in rows] == list(range(300))
    assert [r.reward for r in rows] == pytest.approx([((i % 5) / 4) ** 2 for i in range(300)])
    assert s.counts == {"ok": 300} and s.depth == 0


def test_a_grader_in_the_middle_of_a_row_ends_with_its_parent(tmp_path, monkeypatch):
    """kill -9 of the owner: nobody asks the child to go, and its grader does not return."""
    import signal
    import subprocess
    import sys

    (tmp_path / "hostile_graders.py").write_text(HOSTILE)
    (tmp_path / "row").write_bytes(encode([rollout(task="sleeps", answer=str(tmp_path / "pid"))]))
    owner = f"""
import sys, time
sys.path[:0] = {[str(tmp_path), *sys.path]!r}
from operators.reward import RewardService
from schemas.settings import RewardSettings
s = RewardService(RewardSettings(timeout_s=600), print, modules=["hostile_graders"])
s.submit("a", open({str(tmp_path / 'row')!r}, "rb").read(), 0)
while True:
    s.drain(); time.sleep(0.01)
"""
    process = subprocess.Popen([sys.executable, "-c", owner])
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    grader = int((tmp_path / "pid").read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    while time.monotonic() < end:
        try:
            os.kill(grader, 0)
            state = Path(f"/proc/{grader}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return  # dead; whoever adopted it has not reaped it yet
        time.sleep(0.01)
    os.kill(grader, signal.SIGKILL)
    pytest.fail("the grading process outlived its owner")
