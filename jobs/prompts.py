"""Bring prompts into a run's topic: from a JSONL or Parquet file, a reasoning-gym task, or the demo's task.

Promises: loading twice adds nothing, and a load that was interrupted is completed by the next one, because a prompt's identity is
(fingerprint of the data set, pass, ordinal) and the topic is read before anything is sent. A bad row is an error that names file, row and
column, and then nothing of that data set has been sent.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from operators import demo_task, tasks
from operators.log import BrokerAway, producer, read
from schemas.record import BadRecord, encode, encode_batch
from schemas.record import read as read_record
from schemas.records import Prompt
from schemas.settings import Settings
from schemas.topics import HELD_OUT, PROMPTS, topic

REASONING_GYM, DEMO = "reasoning_gym:", "demo"
DEFAULT_SIZE = 10_000  # problems of a procedural source
HELD_OUT_SIZE = 64  # of them to evaluate on
AT_ONCE = 2_000  # prompts on their way to the broker


class BadPrompts(ValueError):
    """A source of prompts that cannot be used; the text names file, row and column."""


@dataclass(frozen=True)
class LoadReport:
    dataset: str
    """fingerprint of the data set"""
    added: int
    """prompts sent"""
    already: int
    """prompts that were in the topic before"""
    topic: str


def load_prompts(settings: Settings, source: str, *, prompt_column: str = "prompt", answer_column: str = "answer", task: str | None = None,
                 task_column: str | None = None, id_column: str | None = None, passes: int = 1, size: int | None = None, seed: int = 0,
                 limit: int | None = None, held_out: bool = False) -> LoadReport:
    """Send the prompts of a source to the run's topic, or to that of held-out ones, that are not there yet.

    `source` is a .jsonl or .parquet file, `reasoning_gym:<name>` or `demo`. Columns may be paths into structures (`reward_model.truth`).
    `size` and `seed` belong to procedural sources; `limit` takes the first so many prompts of any. Raises BadPrompts, UnknownTask,
    BrokerAway.
    """
    name = topic(settings.run.id, HELD_OUT if held_out else PROMPTS)
    if passes < 1:
        raise BadPrompts(f"passes = {passes}: at least one")
    options = {"prompt_column": prompt_column, "answer_column": answer_column, "task": task, "task_column": task_column,
               "id_column": id_column, "size": size, "seed": seed}
    prompts = list(prompts_of(source, **options, limit=limit))  # all rows are checked before the first is sent
    dataset = prompts[0].dataset
    known = loaded(settings, name)
    already = added = 0
    client = producer(settings.kafka, linger_ms=20, batch_size=1 << 20)
    try:
        for dataset_pass in range(passes):
            have = known.get((dataset, dataset_pass), set())
            missing = [replace(p, dataset_pass=dataset_pass) for p in prompts if p.prompt_ordinal not in have]
            already += len(prompts) - len(missing)
            for i in range(0, len(missing), AT_ONCE):
                _send(client, settings, name, missing[i:i + AT_ONCE])
            added += len(missing)
    finally:
        client.close(timeout=5)
    return LoadReport(dataset, added, already, name)


def _is_procedural(source: str) -> bool:
    return source == DEMO or source.startswith(REASONING_GYM)


def held_out_options(source: str, limit: int | None, seed: int) -> dict[str, int | None]:
    """Options of `load_prompts` for the held-out prompts of a run whose prompts have this seed: other problems than those, and few."""
    if _is_procedural(source):
        return {"size": limit or HELD_OUT_SIZE, "seed": seed + 1, "limit": None}
    return {"size": None, "seed": 0, "limit": limit}


def _send(client, settings: Settings, name: str, prompts: list[Prompt]) -> None:
    """A record a prompt; returns when the broker has them."""
    from kafka.errors import KafkaError

    table = read_record(Prompt, encode(prompts))  # together and then sliced: a tenth of the time of encoding one by one
    try:
        sent = [client.send(name, key=p.group_id.encode(), value=encode_batch(table.slice(i, 1))) for i, p in enumerate(prompts)]
        for future in sent:
            future.get(timeout=settings.kafka.timeout_s)
    except KafkaError as e:
        raise BrokerAway(f"the broker at {settings.kafka.bootstrap} did not take all prompts ({e}): load again, what is there stays") from e


def loaded(settings: Settings, name: str) -> dict[tuple[str, int], set[int]]:
    """(data set, pass) -> ordinals that are in the topic. What is no prompt there is admission's to refuse."""
    known: dict[tuple[str, int], set[int]] = defaultdict(set)
    for message in read(settings.kafka, name):
        try:
            table = read_record(Prompt, message.value).select(["dataset", "dataset_pass", "prompt_ordinal"])
        except BadRecord:
            continue
        for dataset, dataset_pass, ordinal in zip(*(c.to_pylist() for c in table.columns), strict=True):
            known[dataset, dataset_pass].add(ordinal)
    return known


def prompts_of(source: str, *, prompt_column: str = "prompt", answer_column: str = "answer", task: str | None = None,
               task_column: str | None = None, id_column: str | None = None, size: int | None = None, seed: int = 0,
               limit: int | None = None) -> Iterator[Prompt]:
    """The prompts of the first pass over a source, in order. Reads no Kafka. Raises BadPrompts, UnknownTask."""
    if any(n is not None and n < 1 for n in (limit, size)):
        raise BadPrompts(f"size {size}, limit {limit}: at least one prompt")
    if _is_procedural(source):
        procedural = _demo if source == DEMO else _reasoning_gym
        if task or task_column or id_column:
            raise BadPrompts(f"{source} names its own task and prompts: give no task, task_column or id_column")
        count = min(size or DEFAULT_SIZE, limit or size or DEFAULT_SIZE)
        yield from procedural(source.removeprefix(REASONING_GYM), size or DEFAULT_SIZE, seed, count)
        return
    if size is not None or seed:
        raise BadPrompts(f"size and seed belong to procedural sources, not to the file {source}: `limit` takes its first rows")
    yield from _file(Path(source), prompt_column, answer_column, task, task_column, id_column, limit)


def _demo(_: str, size: int, seed: int, count: int) -> Iterator[Prompt]:
    # Problem i depends on the seed and i alone, so a larger size continues the same data set.
    dataset = _fingerprint(DEMO, demo_task.SHORTEST, demo_task.LONGEST, seed)
    for i in range(count):
        prompt, answer = demo_task.problem(Random(f"{seed}/{i}"))
        yield Prompt(dataset=dataset, dataset_pass=0, prompt_ordinal=i, prompt_id=f"demo-{seed}-{i}", prompt=prompt, task=demo_task.TASK,
                     answer=answer)


def _reasoning_gym(name: str, size: int, seed: int, count: int) -> Iterator[Prompt]:
    from importlib.metadata import version

    problems = tasks.reasoning_gym_dataset(name, size=size, seed=seed)
    dataset = _fingerprint(REASONING_GYM, version("reasoning-gym"), name, size, seed)
    for i in range(count):
        entry = problems[i]
        yield Prompt(dataset=dataset, dataset_pass=0, prompt_ordinal=i, prompt_id=f"{name}-{seed}-{i}", prompt=entry["question"],
                     task=tasks.FAMILY + name, answer=None if entry["answer"] is None else str(entry["answer"]),
                     task_metadata=tasks.entry_metadata(name, entry))


def _file(path: Path, prompt_column: str, answer_column: str, task: str | None, task_column: str | None, id_column: str | None,
          limit: int | None) -> Iterator[Prompt]:
    if (task is None) == (task_column is None):
        raise BadPrompts(f"{path}: say who grades, by task or by task_column, and by one of them; tasks are {', '.join(tasks.names())}")
    columns = {"prompt": prompt_column, "answer": answer_column, "task": task_column, "id": id_column}
    wanted = {role: column for role, column in columns.items() if column}
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise BadPrompts(f"{path}: neither {' nor '.join(_READERS)}; other sources are {REASONING_GYM}<name> and {DEMO}")
    if not path.is_file():
        raise BadPrompts(f"{path}: there is no such file")
    dataset = _fingerprint("file", _digest(path), wanted, task)
    checked: set[str] = set()
    count = 0
    for ordinal, (where, row) in enumerate(reader(path, wanted)):
        if ordinal == limit:
            break
        values = {role: _value(row, column, f"{where}, column {column!r}", role) for role, column in wanted.items()}
        grader = task or values["task"]
        if grader not in checked:
            _check(grader, where)
            checked.add(grader)
        yield Prompt(dataset=dataset, dataset_pass=0, prompt_ordinal=ordinal, prompt_id=values.get("id") or str(ordinal),
                     prompt=values["prompt"], task=grader, answer=values.get("answer"))
        count += 1
    if not count:
        raise BadPrompts(f"{path}: no rows")


def _check(task: str, where: str) -> None:
    try:
        tasks.grader(task)
    except tasks.UnknownTask as e:
        raise tasks.UnknownTask(f"{where}: {e}") from e


def _jsonl(path: Path, wanted: dict[str, str]) -> Iterator[tuple[str, dict]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, UnicodeDecodeError) as e:
                raise BadPrompts(f"{path}, line {number}: not JSON: {e}") from e
            if not isinstance(row, dict):
                raise BadPrompts(f"{path}, line {number}: a JSON object is wanted, with keys like {list(wanted.values())}")
            yield f"{path}, line {number}", row


def _parquet(path: Path, wanted: dict[str, str]) -> Iterator[tuple[str, dict]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            tops = list(dict.fromkeys(c if c in names else c.split(".")[0] for c in wanted.values()))
            for column in tops:
                if column not in names:
                    raise BadPrompts(f"{path}: no column {column!r}; there are {', '.join(names)}")
            number = 0
            for batch in file.iter_batches(batch_size=1000, columns=tops):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as e:
        raise BadPrompts(f"{path}: not a Parquet file that can be read: {e}") from e


_READERS = {".jsonl": _jsonl, ".parquet": _parquet}


def _value(row: dict, column: str, where: str, role: str) -> str | None:
    """Text of a column. Numbers become text; a conversation of one user's turn becomes that turn."""
    value = row
    for part in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise BadPrompts(f"{where}: no such column; there are {', '.join(row)}")
        value = value[part]
    if role == "prompt" and isinstance(value, list):
        turns = [t for t in value if isinstance(t, dict)]
        if len(turns) != 1 or len(value) != 1 or turns[0].get("role") != "user":
            raise BadPrompts(f"{where}: a conversation must be one turn of the user, since `generation.chat_template` renders it")
        value = turns[0].get("content")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is None and role == "answer":
        return None
    if not isinstance(value, str):
        raise BadPrompts(f"{where}: text is wanted, found {type(value).__name__} {str(value)[:60]!r}")
    if role != "answer" and not value.strip():
        raise BadPrompts(f"{where}: empty")
    return value


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fingerprint(*parts: object) -> str:
    """16 hexadecimal digits of a data set's content and of the options that decide what its prompts are."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
