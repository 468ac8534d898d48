import json
import os
import queue
import subprocess
import sys
import threading
from datetime import timedelta

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

from operators import checkpoint, publication, rendezvous, weights
from operators.checkpoint import BadCheckpoint
from operators.log import BrokerAway, Message
from operators.publication import Publication
from operators.rendezvous import RanksAbsent
from operators.trainer import NotFinite, Trainer, learning_rate
from operators.training import STALLED, MissingBatches, Rank, Waker, limit
from schemas.record import BadRecord, decode, encode
from schemas.records import Control, Outcome, Weights, now
from schemas.records import Step as StepRecord
from tests import batches
from tests.rank import MICRO_BATCHES, gradient
from tests.tiny import make_tiny_model


class FakeLog:
    """Transactions in memory."""

    def __init__(self):
        self.topics: dict[str, list[bytes]] = {}
        self.transactions: list[list[str]] = []

    def read(self, name):
        return [Message(name, 0, i, None, value, 0) for i, value in enumerate(self.topics.get(name, []))]

    def append(self, records):
        records = list(records)
        if records:
            self.transactions.append([name.removeprefix("run.") for name, _, _ in records])
        for name, _, value in records:
            self.topics.setdefault(name, []).append(value)

    def rows(self, cls, name):
        return [row for value in self.topics.get(f"run.{name}", []) for row in decode(cls, value)]


class FakeStaged:
    """So many bytes, for a file in `folder`."""

    def __init__(self, folder, digest, base_version=None, size=1):
        self.folder, self.digest, self.base_version, self.size = folder, digest, base_version, size

    def offer(self, epoch, version, run_id):
        encoding = "full" if self.base_version is None else "delta"
        path = self.folder / f"{epoch}.{version}.{encoding}"
        path.write_bytes(bytes(self.size))
        return Weights(run_id=run_id, epoch=epoch, version=version, digest=self.digest, uri=str(path), encoding=encoding,
                       base_version=self.base_version, bytes=self.size, dtype="float32", offered_at=now())

    def discard(self):
        pass

    is_there = staticmethod(weights.Staged.is_there)


class FakeTrainer:
    """A version counter whose weights are their history."""

    def __init__(self, folder, *, restored=0, salt=""):
        self.version, self.checkpoints, self.salt, self.calls = 0, folder, salt, []
        self._restored = restored

    def restore(self):
        if not self._restored:
            return None
        self.version = self._restored
        return checkpoint.Marker("run", self.version, 0, self.digest(), 1, {})

    def digest(self):
        return f"{self.salt if self.version else ''}{self.version}"

    def train(self, manifest, tables):
        self.calls.append((manifest.step, [t.column("micro_batch")[0].as_py() for t in tables]))
        self.version = manifest.step
        return {"loss": 1.0}

    def stage_weights(self, base=None):
        return FakeStaged(self.checkpoints, self.digest())

    def due(self):
        return self.version % 2 == 0

    def save_checkpoint(self, epoch, digest):
        self.calls.append(("checkpoint", self.version, epoch, digest))

    def prune_weights(self, keep):
        self.kept = keep

    def export_model(self, event):
        self.calls.append(("export", event.version))
        return self.checkpoints


class Heard:
    def __init__(self):
        self.steps, self.ends = [], []

    def measures(self):
        return {"acks/applied": 2.0}

    def step(self, step, metrics):
        self.steps.append((step, metrics))

    def end(self, model_folder, event):
        self.ends.append(event.version)

    def close(self):
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def group(model, tmp_path_factory):
    """One rank is a process group too."""
    rendezvous.join(batches.settings(model, tmp_path_factory.mktemp("group")), 0, 1, "cpu")
    yield
    rendezvous.leave()


# The logic of a rank ---------------------------------------------------------------------------------------------------------------


def make_rank(tmp_path, log=None, rank=0, world=1, **trainer):
    settings = batches.settings("m", tmp_path)
    made = Rank(settings, FakeTrainer(tmp_path, **trainer), rank, world, listener=Heard() if rank == 0 else None, clock=lambda: 0.0,
                publication=Publication(settings, log if log is not None else FakeLog()) if rank == 0 else None)
    made.start()
    return made


def feed(rank, *steps, micro_batches=3):
    for number in steps:
        manifest, tables = batches.step(number, micro_batches)
        for i, message in enumerate(batches.messages(tables)):
            if i % rank.world == rank.rank:
                rank.take(message)
        rank.take(encode([manifest]))


def published(tmp_path, log, *staged):
    """A publication that has made versions 0, 1, ... out of these."""
    p = Publication(batches.settings("m", tmp_path), log)
    p.start(0, staged[0], None)
    for version, made in enumerate(staged[1:], 1):
        p.trained(batches.step(version, 1)[0], made, {}, None)
    return p


def test_the_bases_of_deltas_that_are_needed_are_kept(tmp_path, monkeypatch):
    p = published(tmp_path, FakeLog(), FakeStaged(tmp_path, "0"), *(FakeStaged(tmp_path, str(v), v - 1 if v % 5 else None) for v in range(1, 14)))
    assert (p.settings.weights.keep, p.settings.weights.keep_s) == (4, 10)
    assert p.keep([]) == set(range(14)), "all were overtaken a moment ago: somebody may be fetching one"
    monkeypatch.setattr(publication, "now", lambda: now() + timedelta(seconds=11))
    assert p.keep([]) == {10, 11, 12, 13}, "10 is full"
    assert p.keep([7]) == {5, 6, 7, 10, 11, 12, 13}


def sizes(folder):
    return {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()}


def test_the_bytes_of_a_version_on_offer_are_never_written_again(tmp_path):
    """Taken up from a checkpoint, the first version is full though it was a delta, and the delta to it names another base: whoever has
    heard the old event, or holds a delta that names it, must still find what it says."""
    log = FakeLog()
    published(tmp_path, log, FakeStaged(tmp_path, "0"), FakeStaged(tmp_path, "1", 0), FakeStaged(tmp_path, "2", 1, 50))
    before, said = sizes(tmp_path), log.rows(Weights, "weights")
    p = Publication(batches.settings("m", tmp_path), log)
    p.start(1, FakeStaged(tmp_path, "1"), "1")
    assert p.trained(batches.step(2, 1)[0], FakeStaged(tmp_path, "2", 1, 51), {}, None) == said[2]
    assert sizes(tmp_path) == before and log.rows(Weights, "weights") == said


@pytest.mark.parametrize("lost", [1, 2])
def test_a_version_whose_bytes_are_gone_is_said_again(tmp_path, lost):
    """Its own, or those of its base."""
    log = FakeLog()
    published(tmp_path, log, FakeStaged(tmp_path, "0"), FakeStaged(tmp_path, "1", 0), FakeStaged(tmp_path, "2", 1, 50))
    (tmp_path / f"0.{lost}.delta").unlink()
    p = Publication(batches.settings("m", tmp_path), log)
    p.start(1, FakeStaged(tmp_path, "1"), "1")
    p.trained(batches.step(2, 1)[0], FakeStaged(tmp_path, "2", 1, 51), {}, None)
    p.trained(batches.step(2, 1)[0], FakeStaged(tmp_path, "2", 1, 52), {}, None)
    said = [(w.version, w.encoding, w.bytes, w.epoch) for w in log.rows(Weights, "weights")[3:]]
    assert said == {1: [(1, "full", 1, 0), (2, "delta", 51, 0)], 2: [(2, "delta", 51, 0)]}[lost]
    assert len(log.rows(StepRecord, "steps")) == 3, "a step is on record once"


def test_version_0_is_offered_before_anything_is_trained(tmp_path):
    log = FakeLog()
    make_rank(tmp_path, log)
    assert [(w.epoch, w.version) for w in log.rows(Weights, "weights")] == [(0, 0)]
    assert [(s.step, s.version_in, s.version_out) for s in log.rows(StepRecord, "steps")] == [(0, None, 0)]


def test_weights_step_and_outcomes_are_one_transaction(tmp_path):
    log = FakeLog()
    rank = make_rank(tmp_path, log)
    feed(rank, 1)
    assert log.transactions[1:] == [["weights", "steps", "outcomes"]]
    (step,) = [s for s in log.rows(StepRecord, "steps") if s.step == 1]
    assert (step.version_in, step.version_out, step.weights_digest, step.checkpoint_uri) == (0, 1, "1", None)
    metrics = dict(step.metrics)
    assert metrics["loss"] == 1.0 and metrics["reward/mean"] == 0.5 and metrics["train/wait_s"] == 0 and metrics["acks/applied"] == 2
    outcomes = log.rows(Outcome, "outcomes")
    assert {(o.outcome, o.step) for o in outcomes} == {("trained", 1)} and len(outcomes) == 10
    assert [s for s, _ in rank.listener.steps] == [1]


@pytest.mark.parametrize(("rank", "world", "share"), [(0, 1, [0, 1, 2, 3, 4]), (0, 2, [0, 2, 4]), (1, 2, [1, 3]), (2, 3, [2])])
def test_a_rank_takes_the_micro_batches_of_its_residue(tmp_path, rank, world, share):
    made = make_rank(tmp_path, rank=rank, world=world)
    feed(made, 1, micro_batches=5)
    assert made.trainer.calls == [(1, share)]


def test_micro_batches_without_a_manifest_are_never_trained(tmp_path):
    rank = make_rank(tmp_path)
    for message in batches.messages(batches.step(1, 5, seed=9)[1]):  # a sequencer that died before its manifest
        rank.take(message)
    feed(rank, 1, micro_batches=3)
    assert rank.trainer.calls == [(1, [0, 1, 2])]
    assert rank.buffered == {}


def test_the_successors_rows_replace_those_of_a_dead_sequencer(tmp_path):
    rank = make_rank(tmp_path)
    seen = []
    rank.trainer.train = lambda manifest, tables: seen.extend(t.column("rollout_id")[0].as_py() for t in tables) or {}
    for message in batches.messages(batches.step(1, 2, seed=9, change=lambda i: {"rollout_id": "old"})[1]):
        rank.take(message)
    feed(rank, 1, micro_batches=2)
    assert "old" not in seen and len(seen) == 2


def test_steps_in_the_checkpoint_are_skipped_and_said_once(tmp_path):
    log = FakeLog()
    feed(make_rank(tmp_path, log), 1, 2, 3)
    before = {name: list(values) for name, values in log.topics.items()}
    again = make_rank(tmp_path, log, restored=2)
    feed(again, 1, 2, 3)
    assert again.trainer.calls == [(3, [0, 1, 2])]
    assert log.topics == before  # the same weights: nothing is offered or said again
    assert [s for s, _ in again.listener.steps] == [3]
    feed(again, 4)
    assert [w.version for w in log.rows(Weights, "weights")] == [0, 1, 2, 3, 4]


def test_other_weights_for_a_version_begin_an_epoch_and_say_no_outcome_twice(tmp_path):
    log = FakeLog()
    feed(make_rank(tmp_path, log), 1, 2, 3, 4)
    again = make_rank(tmp_path, log, restored=2)
    again.trainer.salt = "other-"
    feed(again, 3, 4, 5)
    assert [(w.epoch, w.version, w.digest) for w in log.rows(Weights, "weights")[5:]] == [
        (1, 3, "other-3"), (1, 4, "other-4"), (1, 5, "other-5")]
    assert [(s.epoch, s.step) for s in log.rows(StepRecord, "steps")[5:]] == [(1, 3), (1, 4), (1, 5)]
    outcomes = log.rows(Outcome, "outcomes")
    assert [o.step for o in outcomes] == sorted(o.step for o in outcomes) and len(outcomes) == 5 * 10
    third = make_rank(tmp_path, log, restored=2)  # falls back once more, and makes the first epoch's weights again
    feed(third, 3)
    assert [(w.epoch, w.version) for w in log.rows(Weights, "weights")[8:]] == [(2, 3)]


def test_a_checkpoint_of_another_log_is_refused(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"checkpoint of step 4 .* is not of the run that run\.steps records"):
        make_rank(tmp_path, FakeLog(), restored=4)


def test_missing_micro_batches_and_steps_are_named(tmp_path):
    rank = make_rank(tmp_path)
    manifest, tables = batches.step(1, 3)
    rank.take(batches.messages(tables)[1])
    with pytest.raises(MissingBatches, match=r"step 1 names 3 micro-batches; \[0, 2\] did not come"):
        rank.take(encode([manifest]))
    with pytest.raises(MissingBatches, match="manifest of step 3 came, but step 1 is next"):
        rank.take(encode([batches.step(3, 1)[0]]))


def test_the_end_saves_and_exports_once(tmp_path):
    rank = make_rank(tmp_path)
    feed(rank, 1, 2, 3)
    rank.take(encode([batches.end(3)]))
    rank.take(encode([batches.end(3)]))
    assert rank.trainer.calls[-3:] == [(3, [0, 1, 2]), ("checkpoint", 3, 0, "3"), ("export", 3)]
    assert rank.listener.ends == [3]


def test_an_end_after_a_step_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(MissingBatches, match="ends after step 3, but version 0 is held"):
        make_rank(tmp_path).take(encode([batches.end(3)]))


def test_control_wakes_and_other_records_are_refused(tmp_path):
    rank = make_rank(tmp_path)
    rank.take(encode([Control(run_id="run", kind="start", at=now())]))
    with pytest.raises(BadRecord, match="expected a micro-batch, a manifest or a control record, found 'weights'"):
        rank.take(encode([FakeStaged(tmp_path, "d").offer(0, 1, "run")]))


def test_bytes_are_kept_for_checkpoints_and_the_newest_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(publication, "now", lambda: now() + timedelta(seconds=11))
    rank = make_rank(tmp_path)
    path = checkpoint.clear(tmp_path, 1)
    path.mkdir(parents=True)
    checkpoint.commit(path, checkpoint.Marker("run", 1, 0, "1", 1, {}))
    feed(rank, *range(1, 8))
    assert rank.trainer.kept == {1, 4, 5, 6, 7}


def test_a_step_that_stalls_ends_the_process():
    ended = threading.Event()
    status = []
    with limit(0.01, "step 7", end=lambda code: (status.append(code), ended.set())):
        assert ended.wait(30)
    assert status == [STALLED]
    with limit(30, "step 8", end=status.append):
        pass
    assert status == [STALLED]


# Rendezvous ------------------------------------------------------------------------------------------------------------------------


def meet(file, rank, world, out, timeout_s=30):
    try:
        out[rank] = rendezvous.meet(file, rank, world, timeout_s, loopback=True)
    except RanksAbsent as e:
        out[rank] = e


def test_ranks_meet_though_a_dead_and_a_living_predecessor_left_their_traces(tmp_path):
    file, old, out = tmp_path / "rendezvous.json", {}, {}
    file.write_text(json.dumps({"id": "dead", "address": "127.0.0.1", "port": 9, "world": 2}))
    for into in (old, out):  # the second round finds the store of the first alive, with its ranks in it
        threads = [threading.Thread(target=meet, args=(file, r, 2, into)) for r in (1, 0)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert into[0].store.port == into[1].store.port and (into[0].one_host, into[1].local_rank) == (True, 1)
    assert old[0].store.port != out[0].store.port


def test_absent_ranks_are_named(tmp_path):
    out = {}
    meet(tmp_path / "r.json", 0, 3, out, 0.2)
    assert "ranks 1, 2 did not come" in str(out[0])
    meet(tmp_path / "other.json", 1, 2, out, 0.2)
    assert "rank 0 did not come" in str(out[1])


def test_the_other_jobs_are_woken_less_and_less_often_and_a_broker_that_is_away_is_no_end():
    class Quick(Waker):
        FIRST_S, LAST_S = 0.01, 0.02

    said: queue.Queue[str] = queue.Queue()

    def say(reason):
        said.put(reason)
        raise BrokerAway("no broker")

    waker = Quick(say)
    assert [said.get(timeout=10).split()[-2] for _ in range(3)] == ["0.01", "0.03", "0.05"]
    waker.close()


def test_nobody_is_woken_while_batches_come():
    class Slow(Waker):
        FIRST_S = 30.0

    said = []
    waker = Slow(said.append)
    waker.moved()
    waker.close()
    waker.thread.join(10)
    assert not waker.thread.is_alive() and said == []


# Learning rate ---------------------------------------------------------------------------------------------------------------------


def test_learning_rate_warms_up_and_decays(tmp_path):
    s = batches.settings("m", tmp_path, warmup_steps=4, decay_steps=14, lr_min_ratio=0.1)
    assert [learning_rate(k, s) for k in (1, 4, 9, 14, 99)] == pytest.approx([2.5e-4, 1e-3, 0.55e-3, 1e-4, 1e-4])
    assert [learning_rate(k, batches.settings("m", tmp_path)) for k in (1, 50)] == [1e-3, 1e-3]


# The trainer ------------------------------------------------------------------------------------------------------------------------


def trained(trainer, *steps, micro_batches=3):
    for number in steps:
        metrics = trainer.train(*batches.step(number, micro_batches))
    return metrics


def digest(trainer):
    staged = trainer.stage_weights()
    staged.discard()
    return staged.digest


def same_gradient(found, expected):
    """Within 1e-6 of the gradient's largest entry, in float32."""
    largest = max(g.abs().max() for g in expected.values())
    for name, g in expected.items():
        assert (found[name] - g).abs().max() <= 1e-6 * largest, name


def test_the_gradient_is_the_same_for_one_three_and_five_micro_batches(group, model, tmp_path):
    found = []
    for micro_batches in (1, 3, 5):
        trainer = Trainer(batches.settings(model, tmp_path, gradient_clipping=1e9))
        metrics = trained(trainer, 1, micro_batches=micro_batches)
        found.append((metrics, gradient(trainer)))
    first, reference = found[0]
    for metrics, other in found[1:]:
        assert metrics["loss"] == pytest.approx(first["loss"], rel=1e-6)
        same_gradient(other, reference)
    assert first["grad_norm"] == pytest.approx(torch.cat([g.flatten() for g in reference.values()]).norm().item(), rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_do_what_one_does_and_resume_to_the_same_bits(group, model, tmp_path, stage):
    trainer = Trainer(batches.settings(model, tmp_path, gradient_clipping=1e9))
    metrics = trained(trainer, 1, micro_batches=MICRO_BATCHES)
    alone = gradient(trainer)
    ranks = [subprocess.Popen([sys.executable, "-m", "tests.rank", str(r), "2", str(model), str(tmp_path), str(stage)],
                              env={**os.environ, "OMP_NUM_THREADS": "1"}) for r in (0, 1)]
    try:
        assert [r.wait(300) for r in ranks] == [0, 0]
    finally:
        for r in ranks:
            r.kill()
    made = torch.load(tmp_path / "made.pt")
    for name in metrics.keys() - {"train/seconds", "train/tokens_per_s"}:
        assert made["metrics"][name] == pytest.approx(metrics[name], rel=1e-5), name
    same_gradient(made["gradient"], alone)
    published = dict(trainer.module.named_parameters())
    assert made["published"].keys() >= published.keys()
    for name, p in published.items():
        assert made["published"][name].shape == p.shape
        assert (made["published"][name] - p.detach()).abs().max() <= 1e-5, f"{name}: steps are 1e-3"
    assert made["restored"] == 1 and made["digests"][0] == made["digests"][1]


def test_measures_of_a_step(group, model, tmp_path):
    change = {1: {"version_spans": [{"start": 5, "policy_version": 2}], "loss_mask": [False] * 5 + [True], "prompt_length": 5,
                  "token_ids": [3, 4, 5, 6, 7, 8], "rollout_logprobs": [None] * 5 + [-1.0], "ref_logprobs": None}}
    trainer = Trainer(batches.settings(model, tmp_path))
    trained(trainer, 1, 2, 3)
    manifest, tables = batches.step(4, 2, rows=2, change=lambda i: change.get(i, {}))
    metrics = trainer.train(manifest, tables)
    tokens = manifest.trainable_tokens  # two of them of version 2: the first of the first row, and that of the second
    assert metrics["lag/mean"] == pytest.approx(2 / tokens) and metrics["lag/max"] == 1
    assert metrics["lag/p95"] == (1 if tokens < 40 else 0)
    assert metrics["seq/spans_mean"] == 1.5
    assert metrics["train/tokens"] == manifest.tokens
    assert metrics["lr"] == 1e-3 and metrics["grad_norm"] > 0 and 0 < metrics["ess/raw"] <= 1
    assert {"loss", "ess/clipped", "is_ratio/mean", "is_ratio/max", "is_ratio/clipped_frac", "kl/ref", "kl/behaviour", "entropy",
            "seq/length_mean", "train/tokens_per_s"} <= metrics.keys()
    assert "mismatch/kl" not in metrics, "no sequence is wholly of version 3, so nothing can tell"
    whole = {"version_spans": [{"start": 5, "policy_version": 4}], **{k: v for k, v in change[1].items() if k != "version_spans"}}
    manifest, tables = batches.step(5, 2, rows=2, change=lambda i: whole if i == 1 else {})
    assert {"mismatch/kl", "mismatch/abs_mean"} <= trainer.train(manifest, tables).keys()


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")])
def test_resuming_makes_the_same_bits(group, model, tmp_path, stage, dtype):
    settings = batches.settings(model, tmp_path, dtype=dtype, zero_stage=stage)
    trainer = Trainer(settings)
    assert trainer.restore() is None
    trained(trainer, 1, 2)
    saved = digest(trainer)
    trainer.save_checkpoint(0, saved)
    trained(trainer, 3, 4)
    undisturbed = digest(trainer)
    del trainer
    resumed = Trainer(settings)
    marker = resumed.restore()
    assert (marker.version, marker.digest, resumed.version, digest(resumed)) == (2, saved, 2, saved)
    trained(resumed, 3, 4)
    assert digest(resumed) == undisturbed


def test_damaged_and_unfinished_checkpoints_are_skipped(group, model, tmp_path):
    settings = batches.settings(model, tmp_path)
    trainer = Trainer(settings)
    for number in (1, 2, 3):
        trained(trainer, number)
        path = trainer.save_checkpoint(0, digest(trainer))
    assert [m.version for _, m in checkpoint.markers(trainer.checkpoints)] == [3, 2]  # keep_checkpoints
    file = path / "mp_rank_00_model_states.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (trainer.checkpoints / checkpoint.tag(9)).mkdir()  # never finished
    resumed = Trainer(settings)
    assert resumed.restore().version == 2
    trained(resumed, 3)
    resumed.save_checkpoint(0, digest(resumed))
    assert [m.version for _, m in checkpoint.markers(resumed.checkpoints)] == [3, 2]


def test_a_checkpoint_of_other_ranks_is_refused(group, model, tmp_path):
    trainer = Trainer(batches.settings(model, tmp_path))
    path = trainer.save_checkpoint(0, digest(trainer))
    marker = json.loads((path / checkpoint.MARKER).read_text())
    (path / checkpoint.MARKER).write_text(json.dumps(marker | {"world": 2}))
    with pytest.raises(BadCheckpoint, match=r"written by 2 ranks and cannot be resumed by 1: set training\.ranks = 2"):
        trainer.restore()


def test_a_loss_that_is_not_finite_names_step_and_rows_and_changes_nothing(group, model, tmp_path):
    trainer = Trainer(batches.settings(model, tmp_path))
    before = digest(trainer)
    manifest, tables = batches.step(1, 5, change=lambda i: {"advantage": float("inf")} if i == 3 else {})
    with pytest.raises(NotFinite, match=r"loss of step 1 is not finite, among the rows d/0/0#3, d/0/2#0;"):
        trainer.train(manifest, tables)
    assert digest(trainer) == before and trainer.version == 0


def test_a_row_with_a_logprob_that_is_none_is_named(group, model, tmp_path):
    trainer = Trainer(batches.settings(model, tmp_path))
    manifest, tables = batches.step(1, 1, change=lambda i: {"rollout_logprobs": [float("nan")] * 6, "token_ids": [3] * 6, "loss_mask":
                                                            [False, *[True] * 5], "ref_logprobs": None} if i == 2 else {})
    with pytest.raises(ValueError, match="step 1, row d/0/0#2: a trainable token has no finite rollout_logprob"):
        trainer.train(manifest, tables)


def test_published_names_are_those_of_the_folder_and_the_export_is_a_model(group, model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = Trainer(batches.settings(model, tmp_path, dtype="bfloat16", zero_stage=3))
    trained(trainer, 1)
    event = trainer.stage_weights().offer(0, 1, "run")
    published = weights.decode(event, weights.fetch(event))
    assert "lm_head.weight" not in published  # tied
    weights.check(weights.expected_tensors(model), published, "bfloat16")
    folder = trainer.export_model(event)
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert exported.dtype == torch.bfloat16
    assert torch.equal(exported.model.embed_tokens.weight, published["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(folder)("1")["input_ids"]
    assert json.loads((folder / "pipelinerl.json").read_text()) == {"run_id": "run", "version": 1, "digest": event.digest}
