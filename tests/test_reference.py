import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import pytest
import torch

from operators.forward import load_model, pack, token_logprobs
from operators.reference import LOAD_TIMEOUT_S, MAX_RESTARTS, ReferenceFailed, ReferenceService, start_child
from operators.reference_child import Reference
from operators.reference_frames import READY, REFUSED, SCORED, pack_record, unpack_record
from schemas.record import BadRecord, decode, encode, encode_batch, read
from schemas.records import Rollout
from schemas.settings import ModelSettings
from tests import batches, records
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(ModelSettings(path=str(folder)), dtype="float32", attention="sdpa", token_budget=64, device="cpu")


def rollout(index, temperature=1.0, **changes):
    random = np.random.default_rng(index)
    prompt, response = int(random.integers(1, 6)), int(random.integers(1, 40))
    return records.rollout(index, response=response, **{
        "prompt_length": prompt, "token_ids": random.integers(3, 320, prompt + response).tolist(),
        "sampling": {"temperature": temperature, "top_p": 1.0, "top_k": 0, "seed": None, "max_tokens": 64}} | changes)


def expected(model, row):
    """By the trainer's forward pass, alone, under transformers' own attention."""
    ids = torch.tensor([row.token_ids])
    with torch.no_grad():
        log = torch.log_softmax(model(ids, use_cache=False).logits[0] / row.sampling["temperature"], -1)
    values = [None] + [log[i - 1, t].item() for i, t in enumerate(row.token_ids) if i]
    return [v if sampled is not None else None for v, sampled in zip(values, row.rollout_logprobs, strict=True)]


def same(found, wanted):
    assert [f is None for f in found] == [w is None for w in wanted]
    assert max(abs(f - w) for f, w in zip(found, wanted, strict=True) if w is not None) <= 1e-4


def test_sampled_tokens_get_the_models_logprobs_at_their_rows_temperature(folder, reference):
    model = load_model(ModelSettings(path=str(folder)), dtype="float32", attention="sdpa").eval()
    rows = [rollout(i, temperature) for i, temperature in enumerate([1.0, 0.6, 1.3, 1.0, 0.9])]
    found = [decode(Rollout, encode([r])) for r in rows]
    tables = reference.score([records.table(r) for r in rows])
    model.config._attn_implementation = "sdpa"
    for row, table in zip(rows, tables, strict=True):
        same(table.column("ref_logprobs").to_pylist()[0], expected(model, row))
        assert table.column("ref_model").to_pylist() == [reference.name]
    assert [t.drop(["ref_logprobs", "ref_model"]).to_pylist() for t in tables] == [
        read(Rollout, encode(f)).drop(["ref_logprobs", "ref_model"]).to_pylist() for f in found]


def test_the_trainers_forward_gives_the_same(folder, reference):
    model = load_model(ModelSettings(path=str(folder)), dtype="float32", attention="sdpa")
    row = rollout(7, 0.8)
    n = len(row.token_ids)
    targets = np.flatnonzero(row.loss_mask)
    with torch.no_grad():
        logprobs, _ = token_logprobs(model, pack(np.array(row.token_ids), np.array([0, n]), targets, np.array([0.8])))
    (table,) = reference.score([records.table(row)])
    ours = np.array([np.nan if v is None else v for v in table.column("ref_logprobs").to_pylist()[0]])
    assert np.abs(ours[targets] - logprobs.numpy()).max() <= 1e-4


def test_scores_do_not_depend_on_company_or_order(reference):
    a, b = records.table(rollout(1)), records.table(rollout(2))
    alone = reference.score([a])[0].column("ref_logprobs").to_pylist()[0]
    for together in ([a, b, a], [b, a]):
        found = reference.score(together)[together.index(a)].column("ref_logprobs").to_pylist()[0]
        same(found, alone)


def test_several_rows_a_message_and_rows_without_sampled_tokens(reference):
    aborted = rollout(3, token_ids=[5, 6, 7], prompt_length=3, loss_mask=[False] * 3, rollout_logprobs=[None] * 3, version_spans=[],
                      finish_reason="abort")
    empty = rollout(4, token_ids=[], prompt_length=0, loss_mask=[], rollout_logprobs=[], version_spans=[], finish_reason="error")
    good = rollout(5)
    table = read(Rollout, encode([aborted, good, empty]))
    scored, untouched = reference.score([table, records.table(aborted)])
    assert untouched.column("ref_logprobs").null_count == 1
    lists = scored.column("ref_logprobs").to_pylist()
    assert (lists[0], lists[2]) == (None, None) and scored.column("ref_model").to_pylist() == [None, reference.name, None]
    same(lists[1], reference.score([records.table(good)])[0].column("ref_logprobs").to_pylist()[0])
    scored.validate(full=True)


@pytest.mark.parametrize(("changes", "message"), [
    ({"token_ids": [3, 4, 999, 5], "prompt_length": 1, "loss_mask": [True] * 4, "rollout_logprobs": [-1.0] * 4},
     r"rollout d/0/1#0: token id 999 is not in the reference model's vocabulary of 320"),
    ({"rollout_logprobs": [-1.0]}, "rollout_logprobs has 1 entries"),
    ({"sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None, "max_tokens": 4}}, r"sampling\.temperature is 0\.0"),
])
def test_rows_that_cannot_be_scored_are_named(reference, changes, message):
    with pytest.raises(BadRecord, match=message):
        reference.check(records.table(rollout(1, **changes)))


def test_a_row_that_cannot_be_scored_leaves_and_the_others_stay(reference):
    rows = [rollout(0), rollout(1, rollout_logprobs=[-1.0]), rollout(2)]
    good, refused = reference.sound(read(Rollout, encode(rows)))
    assert good.column("rollout_id").to_pylist() == [rows[0].rollout_id, rows[2].rollout_id]
    assert [(cause, decode(Rollout, encode_batch(row))) for cause, row in refused] == [
        ("rollout d/0/1#0: rollout_logprobs has 1 entries for its tokens", [rows[1]])]
    alone, = reference.score([records.table(rows[2])])
    same(reference.score([good])[0].column("ref_logprobs").to_pylist()[1], alone.column("ref_logprobs").to_pylist()[0])


# The service -----------------------------------------------------------------------------------------------------------------------


class FakeChild:
    """Remembers what it was sent; the test speaks for it."""

    def __init__(self, on_frame, on_death):
        self.on_frame, self.on_death, self.sent, self.closed, self.killed = on_frame, on_death, [], False, False

    def send(self, kind, payload):
        self.sent.append(unpack_record(payload))

    def kill(self):
        self.killed = True

    def close(self):
        self.closed = True


class Bench:
    def __init__(self):
        self.children, self.dead, self.time = [], [], 0.0

        def start(on_frame, on_death):
            self.children.append(FakeChild(on_frame, on_death))
            return self.children[-1]

        self.service = ReferenceService(start, lambda cause, record: self.dead.append((cause, record)), clock=lambda: self.time)

    @property
    def child(self):
        return self.children[-1]


def test_answers_are_drained_once():
    bench = Bench()
    bench.service.submit("a", b"A", 0)
    assert bench.child.sent == [("a", b"A")] and bench.service.depth == 1
    bench.child.on_frame(READY, b"model")
    bench.child.on_frame(SCORED, pack_record("a", b"scored"))
    bench.child.on_frame(SCORED, pack_record("a", b"again"))
    assert bench.service.drain() == [("a", [b"scored"])]
    assert bench.service.drain() == [] and bench.service.depth == 0


def test_a_refused_record_goes_to_the_dead_letters_with_its_bytes():
    bench = Bench()
    bench.service.submit("a", b"A", 0)
    bench.child.on_frame(REFUSED, pack_record("why", b"a row"))
    assert bench.service.drain() == [] and bench.dead == [("reference cannot score a rollout: why", b"a row")]
    bench.child.on_frame(SCORED, pack_record("a", b"the others"))
    bench.service.submit("b", b"B", 0)
    bench.child.on_frame(SCORED, pack_record("b", b""))
    assert bench.service.drain() == [("a", [b"the others"]), ("b", [])]


def test_a_dead_child_is_replaced_and_gets_what_is_open():
    bench = Bench()
    for ident in ("a", "b"):
        bench.service.submit(ident, ident.encode(), 0)
    first = bench.child
    first.on_frame(SCORED, pack_record("a", b"scored"))
    first.on_death("killed")
    bench.service.poll()
    assert first.closed and bench.child is not first and bench.child.sent == [("b", b"b")]


def test_too_many_deaths_fail_with_the_cause():
    bench = Bench()
    for _ in range(MAX_RESTARTS):
        bench.child.on_death("out of memory")
        bench.service.poll()
    bench.time = 10_000  # long after: these count no more
    bench.child.on_frame(READY, b"model")
    for _ in range(MAX_RESTARTS):
        bench.child.on_death("out of memory")
        bench.child.on_frame(READY, b"model")
        bench.service.poll()
    bench.child.on_death("out of memory")
    with pytest.raises(ReferenceFailed, match="died 4 times within 600 s; the last time: out of memory"):
        bench.service.poll()


def test_a_child_that_never_loads_is_an_error():
    bench = Bench()
    bench.time = LOAD_TIMEOUT_S + 1
    with pytest.raises(ReferenceFailed, match="not loaded"):
        bench.service.poll()


def test_a_child_that_is_silent_while_records_wait_is_killed():
    bench = Bench()
    bench.child.on_frame(READY, b"model")
    bench.time = 10_000  # nothing waits: it owes nothing
    bench.service.poll()
    bench.service.submit("a", b"record", 0)
    bench.time += 299
    bench.service.poll()
    assert not bench.child.killed
    bench.time += 2
    bench.service.poll()
    assert bench.child.killed


def test_the_real_child_scores_refuses_and_survives_its_death(folder, tmp_path, reference):
    import threading

    answered, dead = threading.Event(), []
    children = []

    def start(on_frame, on_death):
        def frame(kind, payload):
            on_frame(kind, payload)
            if not service_box or service_box[0].depth == 0:
                answered.set()

        children.append(start_child(batches.settings(folder, tmp_path), frame, on_death))
        return children[-1]

    service_box = []
    service = ReferenceService(start, lambda cause, record: dead.append(cause))
    try:
        rows = {str(i): encode([rollout(i)]) for i in range(5)}
        for ident, record in rows.items():
            service.submit(ident, record, 0)
        service.submit("bad", b"no record", 0)
        children[0].kill()  # while it loads
        service_box.append(service)
        assert answered.wait(300)
        service.poll()
        done = dict(service.drain())
        assert done.keys() == rows.keys() | {"bad"} and done["bad"] == [] and "no Arrow IPC stream" in dead[0]
        assert len(children) == 2
        for ident, record in rows.items():
            (wanted,) = reference.score([read(Rollout, record)])
            (found,) = done[ident]
            same(read(Rollout, found).column("ref_logprobs").to_pylist()[0], wanted.column("ref_logprobs").to_pylist()[0])
    finally:
        service.close()
