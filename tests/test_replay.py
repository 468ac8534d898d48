"""Topics as files, from hand-written messages."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import replay as module
from jobs.replay import NoTopic, TopicInfo, export, replay, table
from operators.log import Message
from schemas.record import encode, from_table
from schemas.records import RECORDS, Control, Manifest, Outcome, Rollout, Sequence, now
from schemas.settings import KafkaSettings
from schemas.topics import ALL


def message(value: bytes, offset: int, partition: int = 0) -> Message:
    return Message("run.x", partition, offset, b"key", value, 1_700_000_000_000 + offset)


def outcome(i: int, step: int | None = None) -> Outcome:
    return Outcome(run_id="run", group_id=f"d/0/{i}", sample_index=i % 8, outcome="trained" if step else "stale", step=step,
                   decided_at=now())


def sequence(step: int, i: int) -> Sequence:
    return Sequence(step=step, micro_batch=0, group_id="d/0/1", sample_index=i, rollout_id=f"r{i}", token_ids=[1, 2, 3], prompt_length=1,
                    loss_mask=[False, True, True], rollout_logprobs=[None, -0.5, -0.25], version_spans=[{"start": 1, "policy_version": 0}],
                    advantage=1.0, reward=1.0, temperature=1.0, truncated=False)


def manifest(step: int) -> Manifest:
    return Manifest(run_id="run", kind="step", step=step, micro_batch_offsets=[0], sequences=2, groups=1, trainable_tokens=4, tokens=6,
                    samples=[{"group_id": "d/0/1", "sample_index": 0, "rollout_id": "r0"}], lag_max=1, metrics=[("reward", 0.5)],
                    formed_at=now())


def rollout(i: int, generator: str = "g") -> Rollout:
    return Rollout(
        run_id="run", group_id=f"d/0/{i}", sample_index=0, rollout_id=f"r{i}", attempt=0, admission=i, group_size=1, prompt_id="p",
        prompt_ordinal=i, dataset="d", dataset_pass=0, task="t", token_ids=[1, 2], prompt_length=1, loss_mask=[False, True],
        rollout_logprobs=[None, -0.5], version_spans=[{"start": 1, "policy_version": 0}], policy_version_admitted=0,
        finish_reason="stop", truncated=False, eos_sampled=True,
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": i, "max_tokens": 4},
        kv_policy="reuse", engine="e", generator_id=generator, weights_digest=f"w{i}", tokenizer_digest="t", completion="x",
        reward=0.5, reward_components=[("r", 0.5)], turns=[], dispatched_at=now(), finished_at=now())


def read_file(path):
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_every_row_is_there_once_with_where_it_lay(tmp_path, suffix):
    rows = [rollout(i, generator=f"g{i % 3}") for i in range(7)]
    messages = [message(encode(rows[:3]), 0), message(encode(rows[3:4]), 1), message(encode(rows[4:]), 5, partition=1)]
    to = tmp_path / f"x{suffix}"
    done = export(messages, to, Rollout)
    assert done.files == {to: 7} and done.messages == 3 and done.bad == 0
    back = read_file(to)
    assert back.column("kafka_partition").to_pylist() == [0, 0, 0, 0, 1, 1, 1]
    assert back.column("kafka_offset").to_pylist() == [0, 0, 0, 1, 5, 5, 5]
    assert back.column("kafka_timestamp")[3].as_py().timestamp() == 1_700_000_000.001
    assert back.schema.metadata[b"schema"] == b"rollout"
    columns = back.select(Rollout.arrow_schema.names)
    if suffix == ".parquet":
        assert columns.schema.equals(Rollout.arrow_schema)
    assert from_table(Rollout, columns) == rows
    assert [p.name for p in tmp_path.iterdir()] == [to.name]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_it_is_written_group_by_group(tmp_path, suffix, monkeypatch):
    """Each message has dictionaries of its own; they must not get in each other's way from one group to the next."""
    monkeypatch.setattr(module, "GROUP_ROWS", 4)
    rows = [rollout(i, generator=f"g{i}") for i in range(10)]
    to = tmp_path / f"x{suffix}"
    export((message(encode([r]), i) for i, r in enumerate(rows)), to, Rollout)
    back = read_file(to)
    assert from_table(Rollout, back.select(Rollout.arrow_schema.names)) == rows
    groups = pq.ParquetFile(to).num_row_groups if suffix == ".parquet" else pa.ipc.open_file(to).num_record_batches
    assert groups == 3


def test_large_messages_end_a_group_too(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_BYTES", 10)
    export([message(encode([outcome(i)]), i) for i in range(3)], tmp_path / "x.parquet", Outcome)
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 3


def test_a_topic_of_two_kinds_gives_two_files(tmp_path):
    messages = [message(encode([sequence(1, 0), sequence(1, 1)]), 0), message(encode([manifest(1)]), 1),
                message(encode([sequence(2, 0)]), 3), message(encode([manifest(2)]), 4)]
    done = export(messages, tmp_path / "b.parquet", Sequence)
    assert done.files == {tmp_path / "b.parquet": 3, tmp_path / "b.manifest.parquet": 2}
    assert pq.read_table(tmp_path / "b.manifest.parquet").column("step").to_pylist() == [1, 2]


def test_bad_bytes_are_counted_and_named(tmp_path):
    foreign = pa.table({"a": [1]}).replace_schema_metadata({"schema": "invoice", "version": "1.0"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, foreign.schema) as writer:
        writer.write_table(foreign)
    messages = [message(b"garbage", 0), message(encode([outcome(1)]), 1), message(sink.getvalue().to_pybytes(), 2), message(b"", 3)]
    done = export(messages, tmp_path / "x.parquet", Outcome)
    assert done.files == {tmp_path / "x.parquet": 1} and (done.messages, done.bad) == (4, 3)
    assert "offset 0" in done.bad_examples[0] and "invoice" in done.bad_examples[1]


def test_an_empty_topic_is_an_empty_file_of_its_kind(tmp_path):
    assert export([], tmp_path / "x.parquet", Outcome).files == {tmp_path / "x.parquet": 0}
    assert pq.read_table(tmp_path / "x.parquet").column_names[:3] == ["run_id", "group_id", "sample_index"]


def test_nothing_is_left_and_nothing_replaced_when_it_breaks_off(tmp_path):
    def breaks():
        yield message(encode([outcome(1)]), 0)
        raise ConnectionError("the broker went away")

    (tmp_path / "x.parquet").write_bytes(b"the one before")
    with pytest.raises(ConnectionError):
        export(breaks(), tmp_path / "x.parquet", Outcome)
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]
    assert (tmp_path / "x.parquet").read_bytes() == b"the one before"


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\.parquet, \.arrow"):
        export([], tmp_path / "x.csv", Outcome)


def test_a_topic_of_unknown_kind_is_named_by_its_first_record(tmp_path):
    assert export([message(encode([outcome(1)]), 0)], tmp_path / "x.parquet").files == {tmp_path / "x.parquet": 1}
    with pytest.raises(NoTopic):
        export([], tmp_path / "y.parquet")


def test_replay_says_what_it_put_elsewhere_and_what_it_left_out(tmp_path, monkeypatch):
    messages = [message(encode([sequence(1, 0)]), 0), message(encode([manifest(1)]), 1), message(b"garbage", 2)]
    monkeypatch.setattr(module, "read", lambda kafka, topic: iter(messages))
    said = []
    assert replay(KafkaSettings(), "run.batches", tmp_path / "b.parquet", said.append) == 1
    assert "b.manifest.parquet" in said[0] and "1 of 3 messages" in said[1] and "offset 2" in said[2]


def test_every_topic_and_record_can_be_replayed():
    assert set(module.MAIN) == set(ALL)
    assert {r.record_name for r in module.MAIN.values()} | {"manifest", "dispatch"} == {r.record_name for r in RECORDS}


class Log:
    """A consumer of one partition, and the functions of operators.log that use it; records what was read from where."""

    def __init__(self, values: list[bytes], end: int | None = None):
        self.messages = [message(v, i) for i, v in enumerate(values)]
        self.end = len(values) if end is None else end
        self.reads = []

    def beginning_offsets(self, partitions):
        return dict.fromkeys(partitions, 0)

    def install(self, monkeypatch):
        def read_with(client, name, start=None):
            self.reads.append(start)
            return (m for m in self.messages if m.offset >= (start or 0))

        monkeypatch.setattr(module, "ends", lambda client, name: {0: self.end})
        monkeypatch.setattr(module, "read_with", read_with)
        return self


def test_a_small_topic_is_counted_exactly(monkeypatch):
    """Offsets also count the marks of transactions: six here for four records."""
    values = [encode([sequence(1, 0)]), encode([manifest(1)]), encode([sequence(2, 0)]), encode([manifest(2)])]
    log = Log(values, end=6).install(monkeypatch)
    info = module._info(log, "run", "batches", {"run.batches": 1234})
    assert info == TopicInfo("run.batches", 1, 4, True, 1234, 1, 2)


def test_outcomes_without_a_step_are_passed_over(monkeypatch):
    values = [encode([outcome(0)]), encode([outcome(1, step=3), outcome(2, step=3)]), encode([outcome(3, step=4)]),
              encode([outcome(4)]), b"bad"]
    log = Log(values).install(monkeypatch)
    info = module._info(log, "run", "outcomes", {"run.outcomes": 1})
    assert (info.records, info.first_step, info.last_step) == (5, 3, 4)


def test_of_a_large_topic_only_the_ends_are_read(monkeypatch):
    values = [encode([manifest(step)]) for step in range(1, 201)]
    log = Log(values).install(monkeypatch)
    info = module._info(log, "run", "batches", {"run.batches": 1 << 40})
    assert (info.records, info.exact, info.first_step, info.last_step) == (200, False, 1, 200)
    assert log.reads == [None, 150]


def test_a_topic_without_steps_and_an_empty_one(monkeypatch):
    log = Log([encode([Control(run_id="run", kind="start", at=now())])]).install(monkeypatch)
    assert module._info(log, "run", "control", {"run.control": 9}) == TopicInfo("run.control", 1, 1, True, 9)
    empty = Log([]).install(monkeypatch)
    assert module._info(empty, "run", "steps", {}) == TopicInfo("run.steps", 1, 0, True, None)
    assert empty.reads == []


def test_the_table_lines_up():
    text = table([TopicInfo("run.batches", 1, 4000, True, 123456, 1, 20), TopicInfo("run.rollouts", 2, 7, False, None)])
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1 and "4,000" in lines[1] and "<= 7" in lines[2]
