import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest

from schemas.record import BadRecord, col, decode, encode, encode_batch, name_of, read, record
from schemas.records import RECORDS, Control, Rollout, documentation, now
from schemas.topics import topic
from tests.records import rollout

ROOT = Path(__file__).parent.parent


def test_a_record_survives_its_message():
    rows = [rollout(0, i, reward=0.5 * i) for i in range(3)]
    message = encode(rows)
    assert decode(Rollout, message) == rows
    assert name_of(message) == "rollout"


def test_any_arrow_reader_opens_a_message():
    schema = pa.ipc.open_stream(encode([rollout()])).read_all().schema
    assert schema.metadata == {b"schema": b"rollout", b"version": b"1.0"}


def test_what_does_not_exist_is_null():
    row = rollout(reward=None)
    back = decode(Rollout, encode([row]))[0]
    assert back.reward is None
    assert back.rollout_logprobs[:3] == [None] * 3


@record("thing", "1.0")
class Old:
    a: int = col(pa.int64(), "a")


@record("thing", "1.3")
class Newer:
    a: int = col(pa.int64(), "a")
    b: str | None = col(pa.string(), "came with 1.1", nullable=True)


@record("thing", "2.0")
class Other:
    a: int = col(pa.int64(), "a")


@record("thing", "1.4")
class Demanding:
    a: int = col(pa.int64(), "a")
    c: int = col(pa.int64(), "required, so not a minor change")


def test_minor_versions_understand_each_other():
    assert decode(Newer, encode([Old(a=1)])) == [Newer(a=1, b=None)]
    assert decode(Old, encode([Newer(a=1, b="x")])) == [Old(a=1)]


def test_another_major_is_refused():
    with pytest.raises(BadRecord, match="version 2.0; this reader knows major version 1"):
        decode(Old, encode([Other(a=1)]))


def test_a_required_column_that_is_lacking_or_unknown_is_refused():
    with pytest.raises(BadRecord, match="lacks the column 'c'"):
        decode(Demanding, encode([Old(a=1)]))
    with pytest.raises(BadRecord, match="required column 'c'"):
        decode(Old, encode([Demanding(a=1, c=2)]))


@pytest.mark.parametrize("message", [b"", b"\x00" * 64, b"hello", encode([rollout()])[:-200], encode([rollout()])[:100]])
def test_malformed_bytes_are_refused(message):
    with pytest.raises(BadRecord):
        read(Rollout, message)


def test_another_schema_and_a_required_null_are_refused():
    with pytest.raises(BadRecord, match="expected schema 'rollout', found 'control'"):
        decode(Rollout, encode([Control(run_id="r", kind="start", at=now())]))
    table = pa.ipc.open_stream(encode([Old(a=1)])).read_all()
    nulls = pa.Table.from_arrays([pa.array([None], pa.int64())], schema=table.schema)
    with pytest.raises(BadRecord, match="thing.a is null"):
        decode(Old, encode_batch(nulls))


def test_flipped_bytes_never_crash_the_reader():
    import random

    rng, message = random.Random(0), bytearray(encode([rollout()]))
    for _ in range(300):
        broken = bytearray(message)
        for _ in range(rng.randint(1, 8)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            decode(Rollout, bytes(broken))
        except BadRecord:
            pass  # refused, or harmless: both are right, an abort of the process or another exception is not


def test_documentation_and_specification_agree():
    assert (ROOT / "docs" / "records.md").read_text() == documentation(), "run `make docs`"


def test_every_column_is_documented():
    for cls in RECORDS:
        assert cls.__doc__
        assert all(f.metadata["doc"] for f in dataclasses.fields(cls)), cls.record_name


def test_topics_carry_the_run():
    assert topic("a", "rollouts") == "a.rollouts"
    with pytest.raises(ValueError, match="rolouts"):
        topic("a", "rolouts")
