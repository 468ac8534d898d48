import json

import pytest

from operators import tasks
from operators.tasks import ParseError, UnknownTask, entry_metadata, extract, grade, reasoning_gym_dataset


@pytest.mark.parametrize("completion, answer, expected", [
    ("46", "46", 1.0), (" 46\n", "46", 1.0), ("47", "46", 0.0), ("", "46", 0.0), ("46.", "46", 0.0),
])
def test_exact_match(completion, answer, expected):
    assert grade("exact_match", completion, answer) == {"exact_match": expected}


@pytest.mark.parametrize("completion, answer, expected", [
    ("1111", "1111", 1.0),
    ("11", "1111", 0.25),
    ("11111", "1111", 0.64),
    ("11111111", "1111", 0.25),  # going on costs as much as stopping early
    ("1111111111111111", "11", 1 / 64),  # hopeless, and still better than longer
    ("0110", "1111", 0.25),
    ("9999999", "1111", 0.0),
    ("", "1111", 0.0),
    ("", "", 0.0),
])
def test_characters_is_partial_credit_by_position(completion, answer, expected):
    assert grade("characters", completion, answer) == pytest.approx({"characters": expected})


@pytest.mark.parametrize("completion, answer, expected", [
    ("so it is \\boxed{\\frac{6}{14}}", "\\frac{3}{7}", 1.0),
    ("so it is \\boxed{0.5}", "\\boxed{\\frac12}", 1.0),
    ("The answer is 72.", "48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72\n#### 72", 1.0),
    ("The answer is 24.", "48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72\n#### 72", 0.0),
    ("$x^2 + 1$", "1 + x^2", 1.0),
    ("\\boxed{8}", "7", 0.0),
    ("I do not know.", "7", 0.0),  # no answer is a wrong answer
    ("", "7", 0.0),
])
def test_math_compares_what_is_meant(completion, answer, expected):
    assert grade("math", completion, answer) == {"math": expected}


@pytest.mark.parametrize("task", ["exact_match", "characters", "math"])
def test_a_prompt_without_answer_is_a_parse_error_not_a_reward(task):
    with pytest.raises(ParseError, match=task):
        grade(task, "46", None)


def test_a_gold_answer_without_mathematics_is_a_parse_error():
    with pytest.raises(ParseError, match="gold answer"):
        grade("math", "\\boxed{1}", " ")


@pytest.mark.parametrize("task, known", [("mth", "did you mean 'math'"), ("nonsense", "exact_match"), ("", "characters"),
                                         ("reasoning_gym/chain_sumo", "did you mean 'reasoning_gym/chain_sum'")])
def test_an_unknown_task_names_the_known_ones(task, known):
    with pytest.raises(UnknownTask, match=known):
        grade(task, "46", "46")


def test_a_task_of_ones_own():
    @tasks.task("test/brevity")
    def brevity(completion, answer, metadata):
        return {"short": 1.0 / (1 + len(completion)), "polite": float("please" in completion)}

    assert grade("test/brevity", "", None) == {"short": 1.0, "polite": 0.0}
    assert "test/brevity" in tasks.names()


# reasoning-gym: its own score of its own answer must survive the way through JSON. arc_agi needs tuples, graph_color integer keys.
@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "basic_arithmetic", "arc_agi", "rearc", "countdown", "maze", "mini_sudoku",
                                  "zebra_puzzles"])
def test_reasoning_gym_scores_its_own_answer_as_it_does_itself(name):
    dataset = reasoning_gym_dataset(name, size=2, seed=7)
    entry = dataset[1]
    metadata = json.loads(entry_metadata(name, entry))
    own = dataset.score_answer(entry["answer"], entry)
    assert own == 1.0
    assert grade(f"reasoning_gym/{name}", f"Thus <answer>{entry['answer']}</answer>", entry["answer"], metadata) == {"reasoning_gym": own}
    wrong = grade(f"reasoning_gym/{name}", "<answer>no such thing</answer>", entry["answer"], metadata)
    assert wrong["reasoning_gym"] < 1.0


def test_a_reasoning_gym_entry_is_rebuilt_exactly():
    entry = reasoning_gym_dataset("graph_color", size=2, seed=7)[1]
    assert any(isinstance(k, int) for k in entry["metadata"]["possible_answer"]), "the case needs integer keys"
    assert tasks._untag(json.loads(entry_metadata("graph_color", entry))["entry"]) == entry


@pytest.mark.parametrize("metadata", [None, {}, {"entry": None}, {"entry": {"answer": "4"}},
                                      {"entry": {"answer": "4", "metadata": {}}, "config": 3}])
def test_reasoning_gym_without_its_entry_is_a_parse_error(metadata):
    with pytest.raises(ParseError, match="task_metadata"):
        grade("reasoning_gym/chain_sum", "4", "4", metadata)


def test_a_reasoning_gym_configuration_that_it_refuses():
    with pytest.raises(ValueError, match="min_terms"):
        reasoning_gym_dataset("chain_sum", config={"min_terms": -1})


@pytest.mark.parametrize("completion, gold, expected", [
    ("first <answer>1</answer> then <answer> 46 </answer>", "46", "46"),
    ("12 + 34 = 46", "46", "46"),
    ("The answer is 46.", "46", "46"),
    ("It is 1,046.", "1046", "1046"),
    ("It is -3", "-3", "-3"),
    ("no number here", "46", None),
    ("Let me think.\nThe answer is: cab", "cab", "cab"),
    ("The grid:\n1 2\n3 4\n", "1 2\n3 4", "1 2\n3 4"),
    ("", "cab", None),
    ("x", None, "x"),
])
def test_the_answer_is_found_in_a_completion(completion, gold, expected):
    assert extract(completion, gold) == expected
