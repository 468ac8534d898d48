"""Loading prompts: the sources, and that loading twice adds nothing (on a hand-written log)."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import prompts
from jobs.prompts import BadPrompts, load_prompts, prompts_of
from operators.tasks import UnknownTask, grade
from schemas.record import decode
from schemas.records import Prompt
from schemas.settings import Settings

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": 4}, {"prompt": "say hi", "answer": None}]


@pytest.fixture
def jsonl(tmp_path):
    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
        return str(path)

    return write


def test_a_jsonl_file(jsonl):
    made = list(prompts_of(jsonl(ROWS), task="exact_match"))
    assert [(p.prompt, p.answer, p.task, p.prompt_id, p.prompt_ordinal, p.dataset_pass) for p in made] == [
        ("1+1=", "2", "exact_match", "0", 0, 0), ("2+2=", "4", "exact_match", "1", 1, 0), ("say hi", None, "exact_match", "2", 2, 0)]
    assert made[0].group_id == f"{made[0].dataset}/0/0"
    assert made[0].group_size is None, "the run's setting decides"


def test_a_parquet_file_of_mathematics_as_it_is(tmp_path):
    """Columns as public data sets have them: a conversation of one turn, the answer inside a structure."""
    path = tmp_path / "maths.parquet"
    pq.write_table(pa.table({
        "prompt": [[{"role": "user", "content": "What is 6/14?"}], [{"role": "user", "content": "And 2^3?"}]],
        "reward_model": [{"ground_truth": "3/7", "style": "rule"}, {"ground_truth": "8", "style": "rule"}],
        "index": [17, 18],
        "unused": [None, b"\x00"],
    }), path)
    made = list(prompts_of(str(path), task="math", answer_column="reward_model.ground_truth", id_column="index"))
    assert [(p.prompt, p.answer, p.prompt_id) for p in made] == [("What is 6/14?", "3/7", "17"), ("And 2^3?", "8", "18")]


def test_a_task_for_each_row(jsonl):
    path = jsonl([{"q": "a", "answer": "a", "grader": "exact_match"}, {"q": "b", "answer": "b", "grader": "characters"}])
    assert [p.task for p in prompts_of(path, prompt_column="q", task_column="grader")] == ["exact_match", "characters"]


def test_the_data_set_is_known_by_its_content_and_options(jsonl):
    def fingerprint(rows, name="data.jsonl", **options):
        return next(prompts_of(jsonl(rows, name), **{"task": "exact_match"} | options)).dataset

    base = fingerprint(ROWS)
    assert fingerprint(ROWS, "renamed.jsonl") == base
    assert fingerprint(ROWS, limit=1) == base, "more of it can be loaded later"
    others = {fingerprint(ROWS[:2]), fingerprint(ROWS, task="characters"), fingerprint(ROWS, prompt_column="answer", limit=1)}
    assert len(others) == 3 and base not in others


@pytest.mark.parametrize("rows, options, says", [
    ([*ROWS, "{not json"], {}, r"data\.jsonl, line 4: not JSON"),
    ([*ROWS, "[1]"], {}, r"line 4: a JSON object"),
    ([{"prompt": "a", "answer": "b"}, {"answer": "b"}], {}, r"line 2, column 'prompt': no such column; there are answer"),
    ([{"prompt": "a", "solution": "b"}], {}, r"column 'answer': no such column; there are prompt, solution"),
    ([{"prompt": "a", "answer": "b"}], {"answer_column": "truth.value"}, r"column 'truth.value': no such column"),
    ([{"prompt": {"text": "a"}, "answer": "b"}], {}, r"line 1, column 'prompt': text is wanted, found dict"),
    ([{"prompt": "a", "answer": ["b"]}], {}, r"line 1, column 'answer': text is wanted, found list"),
    ([{"prompt": "a", "answer": True}], {}, r"column 'answer': text is wanted, found bool"),
    ([{"prompt": " ", "answer": "b"}], {}, r"column 'prompt': empty"),
    ([{"prompt": None, "answer": "b"}], {}, r"column 'prompt': text is wanted, found NoneType"),
    ([{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "b"}], {}, r"one turn of the user"),
    ([], {}, r"no rows"),
    (ROWS, {"task": None}, r"say who grades"),
    (ROWS, {"task_column": "answer"}, r"by one of them"),
    (ROWS, {"size": 3}, r"`limit` takes its first rows"),
    (ROWS, {"limit": 0}, r"at least one"),
])
def test_a_bad_row_or_option_is_named(jsonl, rows, options, says):
    with pytest.raises(BadPrompts, match=says):
        list(prompts_of(jsonl(rows), **{"task": "exact_match"} | options))


def test_an_unknown_task_names_the_row_and_the_known_ones(jsonl):
    path = jsonl([{"prompt": "a", "answer": "b", "t": "math"}, {"prompt": "a", "answer": "b", "t": "mth"}])
    with pytest.raises(UnknownTask, match=r"line 2: unknown task 'mth': did you mean 'math'"):
        list(prompts_of(path, task_column="t"))


@pytest.mark.parametrize("name, content, says", [
    ("x.csv", b"a,b", r"neither \.jsonl nor \.parquet"),
    ("x.parquet", b"no parquet", r"x\.parquet: not a Parquet file"),
    ("absent.jsonl", None, r"no such file"),
])
def test_a_file_that_cannot_be_used(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadPrompts, match=says):
        list(prompts_of(str(tmp_path / name), task="exact_match"))


def test_a_parquet_file_without_the_column_lists_those_it_has(tmp_path):
    pq.write_table(pa.table({"problem": ["a"], "solution": ["b"]}), tmp_path / "x.parquet")
    with pytest.raises(BadPrompts, match="no column 'prompt'; there are problem, solution"):
        list(prompts_of(str(tmp_path / "x.parquet"), task="math"))


def test_reasoning_gym_prompts_can_be_graded():
    made = list(prompts_of("reasoning_gym:chain_sum", size=5, seed=3))
    assert len(made) == 5 and {p.task for p in made} == {"reasoning_gym/chain_sum"}
    p = made[2]
    assert grade(p.task, f"The answer is {p.answer}.", p.answer, json.loads(p.task_metadata)) == {"reasoning_gym": 1.0}
    assert made == list(prompts_of("reasoning_gym:chain_sum", size=5, seed=3))
    assert next(prompts_of("reasoning_gym:chain_sum", size=5, seed=4)).dataset != p.dataset
    assert len(list(prompts_of("reasoning_gym:chain_sum", size=5, seed=3, limit=2))) == 2


def test_an_unknown_reasoning_gym_task():
    with pytest.raises(UnknownTask, match="did you mean 'reasoning_gym/chain_sum'"):
        next(prompts_of("reasoning_gym:chain_sums"))


def test_the_demo_goes_on_where_a_smaller_one_ended():
    small, large = list(prompts_of("demo", size=20, seed=1)), list(prompts_of("demo", size=50, seed=1))
    assert large[:20] == small and len(large) == 50
    assert grade(small[0].task, small[0].answer, small[0].answer) == {"characters": 1.0}
    other = list(prompts_of("demo", size=20, seed=2))
    assert other[0].dataset != small[0].dataset and [p.prompt for p in other] != [p.prompt for p in small]


def test_a_procedural_source_takes_no_columns():
    with pytest.raises(BadPrompts, match="names its own task"):
        list(prompts_of("demo", task="math"))


class Log(list):
    """A topic and its producer; forgets what it is told to, as an interrupted load does."""

    accepts = 10**9

    def send(self, name, key, value):
        if len(self) >= self.accepts:
            from kafka.errors import KafkaTimeoutError

            return SimpleNamespace(get=lambda timeout: (_ for _ in ()).throw(KafkaTimeoutError("away")))
        self.append((key, value))
        return SimpleNamespace(get=lambda timeout: None)

    def close(self, timeout=0):
        pass

    def prompts(self) -> list[Prompt]:
        return [p for _, value in self for p in decode(Prompt, value)]


@pytest.fixture
def log(monkeypatch):
    log = Log()
    monkeypatch.setattr(prompts, "producer", lambda kafka, **more: log)
    monkeypatch.setattr(prompts, "read", lambda kafka, name: [SimpleNamespace(value=v) for _, v in log])
    return log


SETTINGS = Settings()


def test_loading_twice_adds_nothing(log, jsonl):
    path = jsonl(ROWS)
    first = load_prompts(SETTINGS, path, task="exact_match")
    assert (first.added, first.already, first.topic) == (3, 0, "run.prompts")
    again = load_prompts(SETTINGS, path, task="exact_match")
    assert (again.added, again.already, again.dataset) == (0, 3, first.dataset)
    assert [(key.decode(), p.group_id) for (key, _), p in zip(log, log.prompts(), strict=True)] == [
        (f"{first.dataset}/0/{i}",) * 2 for i in range(3)]


def test_more_passes_add_what_is_new(log, jsonl):
    path = jsonl(ROWS)
    load_prompts(SETTINGS, path, task="exact_match")
    more = load_prompts(SETTINGS, path, task="exact_match", passes=3)
    assert (more.added, more.already) == (6, 3)
    assert [(p.dataset_pass, p.prompt_ordinal) for p in log.prompts()] == [(n, i) for n in range(3) for i in range(3)]


def test_an_interrupted_load_is_completed(log, jsonl):
    from operators.log import BrokerAway

    path = jsonl(ROWS)
    log.accepts = 2
    with pytest.raises(BrokerAway, match="load again"):
        load_prompts(SETTINGS, path, task="exact_match")
    log.accepts = 10**9
    assert load_prompts(SETTINGS, path, task="exact_match").added == 1
    assert [p.prompt_ordinal for p in log.prompts()] == [0, 1, 2]


def test_another_data_set_starts_at_its_beginning(log, jsonl):
    """Its cursor is its own: the ordinals of the first say nothing about the second."""
    load_prompts(SETTINGS, jsonl(ROWS), task="exact_match")
    assert load_prompts(SETTINGS, jsonl(ROWS[:2], "other.jsonl"), task="exact_match").added == 2


def test_what_is_no_prompt_in_the_topic_does_not_stop_the_loader(log, jsonl):
    log.append((b"k", b"garbage"))
    assert load_prompts(SETTINGS, jsonl(ROWS), task="exact_match").added == 3


def test_a_bad_row_sends_nothing(log, jsonl):
    with pytest.raises(BadPrompts, match="line 4"):
        load_prompts(SETTINGS, jsonl([*ROWS, {"prompt": ""}]), task="exact_match")
    assert log == []
