"""The registry of graders: what a completion is worth, in components whose sum is the reward.

`grade` runs in the main thread of a grading process (`operators.grader`), which may be killed at any moment; a grader may therefore be
slow, use SIGALRM or never return, and must keep nothing that matters. Three things are kept apart:

- a wrong answer is worth 0, and so is a completion in which no answer can be found;
- `ParseError`: what the grader was given cannot be read (no answer, malformed metadata, mathematics that its parser chokes on);
- any other exception: the grader is broken.

Only the first is a reward. A module of one's own registers further tasks with `@task("name")`.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable
from typing import Any

Grader = Callable[[str, str | None, dict | None], dict[str, float]]

FAMILY = "reasoning_gym/"
_GRADERS: dict[str, Grader] = {}
#: What must be imported before the first grading, so that the time-out of a row does not count it.
_LOADERS: dict[str, Callable[[], object]] = {}


class UnknownTask(LookupError):
    """No grader has this name; the text lists those there are."""


class ParseError(ValueError):
    """The grader cannot read what it was given: no reward, status parse_error."""


class GradingTimeout(RuntimeError):
    """The grader gave up by itself: no reward, status timeout."""


def task(name: str, load: Callable[[], object] = lambda: None):
    """Decorator: register `grader(completion, answer, metadata) -> {component: value}` under a name.

    `load` imports what is heavy; it is called before the first grading and not counted in a row's time-out.

        @task("brevity")
        def brevity(completion, answer, metadata):
            return {"short": 1.0 / (1 + len(completion))}
    """

    def register(grader: Grader) -> Grader:
        _GRADERS[name], _LOADERS[name] = grader, load
        return grader

    return register


def grade(task: str, completion: str, answer: str | None, metadata: dict | None = None) -> dict[str, float]:
    """Components of the reward of a completion. Raises UnknownTask, ParseError, GradingTimeout, and whatever a broken grader raises."""
    return grader(task)(completion, answer, metadata)


def grader(task: str) -> Grader:
    """The grader of a task, ready to run: what it needs is imported. Raises UnknownTask."""
    if task.startswith(FAMILY):
        name = task.removeprefix(FAMILY)
        _dataset(name, "")
        return functools.partial(_reasoning_gym, name)
    if task not in _GRADERS:
        raise _unknown(task, names())
    _LOADERS[task]()
    return _GRADERS[task]


def names() -> list[str]:
    """The tasks there are; those of reasoning-gym as one entry."""
    return [*sorted(_GRADERS), f"{FAMILY}<name>"]


def _unknown(task: str, known: list[str]) -> UnknownTask:
    close = difflib.get_close_matches(task, known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return UnknownTask(f"unknown task {task!r}: {hint}there are: {', '.join(known)}")


def _needs(answer: str | None, task: str) -> str:
    if answer is None:
        raise ParseError(f"task {task!r} compares with an answer, and the prompt has none")
    return answer


@task("exact_match")
def exact_match(completion: str, answer: str | None, metadata: dict | None = None) -> dict[str, float]:
    """1 if completion and answer are equal but for white space around them, else 0."""
    return {"exact_match": float(completion.strip() == _needs(answer, "exact_match").strip())}


@task("characters")
def characters(completion: str, answer: str | None, metadata: dict | None = None) -> dict[str, float]:
    """Partial credit: the square of the share of positions at which completion and answer have the same character, out of the longer's
    length. It tells any two lengths apart, so that a group has a gradient however wrong its answers are; half right is a quarter."""
    answer = _needs(answer, "characters")
    same = sum(a == b for a, b in zip(completion, answer, strict=False))
    return {"characters": (same / max(len(answer), len(completion), 1)) ** 2}


def _math_verify():
    import math_verify

    return math_verify


@task("math", load=_math_verify)
def math(completion: str, answer: str | None, metadata: dict | None = None) -> dict[str, float]:
    """1 if the completion's last answer (\\boxed or otherwise) equals the gold answer mathematically, by math-verify, else 0.

    The gold answer may be bare (`\\frac12`), in dollars, boxed in a solution, or behind `####` as GSM8K has it.
    """
    gold = _gold(_needs(answer, "math"))
    found = _parse(completion)
    return {"math": float(_guarded("the comparison", lambda: _math_verify().verify(gold, found, raise_on_error=True)))}


@functools.lru_cache(maxsize=1024)  # a group shares its gold answer
def _gold(answer: str) -> list:
    text = answer.rsplit("####", 1)[-1].strip()
    # Bare LaTeX is only found between dollars.
    marked = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    parsed = _parse(text) if marked else _parse(f"${text}$") or _parse(text)
    if not parsed:
        raise ParseError(f"task 'math': no mathematics in the gold answer {answer[:200]!r}")
    return parsed


def _parse(text: str) -> list:
    return _guarded(repr(text[-200:]), lambda: _math_verify().parse(text, raise_on_error=True))


def _guarded(what: str, run: Callable[[], Any]) -> Any:
    from math_verify.errors import TimeoutException  # a BaseException

    try:
        return run()
    except TimeoutException as e:
        raise GradingTimeout(f"math-verify gave up on {what}") from e
    except MemoryError:
        raise
    except Exception as e:  # sympy and antlr raise anything on malformed input
        raise ParseError(f"math-verify cannot read {what}: {type(e).__name__}: {e}") from e


def entry_metadata(name: str, entry: dict, config: dict | None = None) -> str:
    """`task_metadata` of a reasoning-gym prompt: JSON from which the grader rebuilds the entry, with tuples and integer keys."""
    return json.dumps({"config": config or {}, "entry": _tag({**entry, "metadata": dict(entry["metadata"])})}, separators=(",", ":"))


def reasoning_gym_dataset(name: str, size: int = 1, seed: int = 0, config: dict | None = None):
    """One of reasoning-gym's procedural data sets. Raises UnknownTask, ValueError for a configuration it refuses."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise _unknown(FAMILY + name, [FAMILY + n for n in sorted(DATASETS)])
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **(config or {}))
    except (AssertionError, TypeError, ValueError) as e:
        raise ValueError(f"reasoning_gym task {name!r} refuses its configuration {config or {}}: {e}") from e


@functools.lru_cache(maxsize=256)
def _dataset(name: str, config: str):
    return reasoning_gym_dataset(name, config=json.loads(config) if config else None)


def _reasoning_gym(name: str, completion: str, answer: str | None, metadata: dict | None) -> dict[str, float]:
    entry, config = (metadata or {}).get("entry"), (metadata or {}).get("config")
    if not isinstance(entry, dict) or not {"answer", "metadata"} <= entry.keys() or not isinstance(config, dict | None):
        raise ParseError("a reasoning_gym task needs task_metadata as `pipelinerl prompts load reasoning_gym:<name>` writes it")
    entry = _untag(entry)
    dataset = _dataset(name, json.dumps(config, sort_keys=True) if config else "")
    return {"reasoning_gym": float(dataset.score_answer(extract(completion, entry["answer"]), entry))}


_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_LEAD = re.compile(r"^(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*[:=]?\s*", re.IGNORECASE)


def extract(completion: str, gold: str | None) -> str | None:
    """The answer in a completion, or None.

    What stands in the last <answer> tag; else, where the gold answer is a number, the last number; else the last lines, as many as
    the gold answer has.
    """
    from reasoning_gym.utils import extract_answer

    if (tagged := extract_answer(completion)) is not None:
        return tagged
    gold = gold if isinstance(gold, str) else ""
    if _NUMBER.fullmatch(gold.strip()):
        numbers = _NUMBER.findall(completion)
        if not numbers:
            return None
        return numbers[-1] if "," in gold else numbers[-1].replace(",", "")
    lines = [line.rstrip() for line in completion.strip().splitlines() if line.strip()]
    if not lines:
        return None
    lines = lines[-max(1, len(gold.strip().splitlines())):]
    return "\n".join([_LEAD.sub("", lines[0]), *lines[1:]]).strip()


def _tag(value: Any) -> Any:
    """What JSON would flatten, marked: tuples and keys that are no strings."""
    if isinstance(value, tuple):
        return {"__tuple__": [_tag(v) for v in value]}
    if isinstance(value, list):
        return [_tag(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return {k: _tag(v) for k, v in value.items()}
        return {"__items__": [[_tag(k), _tag(v)] for k, v in value.items()]}
    return value


def _untag(value: Any) -> Any:
    if isinstance(value, list):
        return [_untag(v) for v in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(_untag(v) for v in value["__tuple__"])
        if value.keys() == {"__items__"}:
            return {_untag(k): _untag(v) for k, v in value["__items__"]}
        return {k: _untag(v) for k, v in value.items()}
    return value
