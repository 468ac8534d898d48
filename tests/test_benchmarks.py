"""The benchmarks' arithmetic: what they measure is not tested, how they reckon is."""

import json
import math
import random

import pytest

from tests.benchmarks import trl
from tests.benchmarks.common import Measure, alternate, mean_interval, quantile, quantiles, ratio, report, student_t
from tests.benchmarks.generation import occupancy
from tests.benchmarks.time_to_reward import CONVENTIONAL, SIDES, Curve, compare, curve_of
from tests.benchmarks.training import fill, log_uniform
from tests.benchmarks.weight_update import sampled


def test_sides_alternate():
    order = []
    found = alternate({"a": lambda i: order.append(("a", i)) or i, "b": lambda i: order.append(("b", i)) or 10 * i}, 3)
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert found == {"a": [0, 1, 2], "b": [0, 10, 20]}


def test_interval_of_a_mean():
    mean, low, high = mean_interval([1.0, 2.0, 3.0])  # deviation 1, t(2) = 4.303
    assert mean == 2.0
    assert (low, high) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert mean_interval([5.0]) == (5.0, -math.inf, math.inf)


def test_students_t_falls_to_the_normal_quantile():
    values = [student_t(n) for n in (*range(1, 40), 10_000)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(1.96, abs=1e-3)


def test_an_interval_holds_the_mean_19_times_of_20():
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):
        _, low, high = mean_interval([draw.gauss(3, 1) for _ in range(5)])
        hits += low <= 3 <= high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)


def test_a_ratio_is_of_pairs():
    drifting = [100.0, 50.0, 25.0]  # what slows both sides down cancels
    m = ratio("r", [0.9 * x for x in drifting], drifting, goal=0.98)
    assert (m.value, m.low, m.high) == pytest.approx((0.9, 0.9, 0.9))
    assert m.n == 3 and m.reached is False
    assert ratio("r", [2.0, 1.0], [1.0, 2.0]).value == pytest.approx(1.0), "a geometric mean: which side is above does not matter"


def test_quantiles():
    values = list(range(101))
    assert quantile(values, 0.5) == 50 and quantile(values, 0.99) == 99 and quantile([7], 0.99) == 7
    assert quantile([0, 10], 0.25) == 2.5
    p50, p99 = quantiles("t", values, "ms", goal_p99=98.0)
    assert p50.reached is None and p99.reached is False
    assert quantiles("t", values, "ms", goal_p99=99.0)[1].reached is True


def test_occupancy():
    # Two slots, both taken at once, until the second sequence ends after the first.
    assert occupancy([(0, 1, 5), (0, 1, 9)], 2) == 1.0
    # A slot that frees at 5 is taken at once, by a sequence of one token (the step from 5 to 6), then by another.
    assert occupancy([(0, 1, 5), (0, 1, 9), (0, 6, 6), (0, 7, 9)], 2) == 1.0
    late = occupancy([(0, 1, 5), (0, 1, 9), (6, 7, 9)], 2)
    assert late == 1.0, "what was not let in yet is no empty slot"
    idle = occupancy([(0, 1, 5), (0, 1, 9), (0, 8, 9), (0, 1, 6), (0, 1, 7)], 4)
    # Slots: four in flight from 1 to 5, then 3 of min(4, 4) to 6, 2 of 3 to 7 (the fifth begins at 7), then 2 of 2 to 9.
    assert idle == pytest.approx((4 * 4 + 3 + 2 + 2 * 2) / (4 * 4 + 4 + 3 + 2 * 2))


def test_packing_fill():
    assert fill([4, 4, 2, 2], 6) == 1.0
    assert fill([4, 4, 4], 6) == pytest.approx(12 / 18)
    draw = random.Random(0)
    lengths = [log_uniform(draw, 8, 64) for _ in range(500)]
    assert min(lengths) >= 8 and max(lengths) <= 64
    assert sum(x < 23 for x in lengths) == pytest.approx(250, abs=40), "half of them below the geometric middle"


def test_a_report_is_a_file_and_a_table(tmp_path, capsys):
    on = {"cpu": "c", "cores": 2, "memory_gib": 1.0, "cpu_busy_before": 0.5}
    path = report("x", Measure("m", 0.5, "ratio", -math.inf, math.inf, 1, 0.98), [Measure("other", 12.0, "ms", n=3, goal=50, at_most=True)],
                  sides={"a": [1]}, settings={}, seeds={"s": 0}, on=on, folder=tmp_path)
    made = json.loads(path.read_text())
    assert {"name", "value", "goal", "unit", "sides", "settings", "seeds", "machine", "versions"} <= made.keys()
    assert (made["name"], made["value"], made["goal"], made["unit"], made["reached"]) == ("x", 0.5, 0.98, "ratio", False)
    assert made["interval"] == [None, None]
    assert [m["reached"] for m in made["measures"]] == [False, True]
    assert list(tmp_path.iterdir()) == [path]
    assert "≥ 0.98" in (out := capsys.readouterr().out) and "≤ 50" in out


def test_tokens_sampled_in_a_window():
    rollouts = [(0.0, 10.0, 100), (5.0, 15.0, 50), (20.0, 20.0, 1), (30.0, 40.0, 10)]
    assert sampled(rollouts, 0, 50) == 161 and sampled(rollouts, 5, 10) == 50 + 25
    assert sum(sampled(rollouts, t, t + 4) for t in range(0, 48, 4)) == pytest.approx(161), "windows side by side miss nothing"


def test_a_learning_curve():
    rollouts = [(100.0 + i, 101.0 + i, i // 2, float(i >= 4)) for i in range(8)]
    c = curve_of(list(reversed(rollouts)), [(110.0, 0.5, 0.9), (120.0, 1.5, 0.8)], batch=10, window=2)
    assert c.reward == pytest.approx([0, 0, 0, 0.5, 1, 1, 1])
    assert c.samples == [0, 10, 10, 20, 20, 30, 30] and c.seconds == [2, 3, 4, 5, 6, 7, 8]
    assert (c.samples_per_s, c.lag, c.ess) == (1.0, [0.5, 1.5], [0.9, 0.8])
    assert c.reach(0.5) == (20, 5) and c.reach(1.1) is None
    assert (c.thin(3).samples, c.thin(7)) == ([0, 20, 30], c)


def test_no_ratio_against_a_side_that_collapsed():
    def curve(speed, reward, samples, seconds):
        return Curve([0.0, reward], [0.0, samples], [0.0, seconds], speed, [1.0], [0.9])

    good = {name: [curve(20, 0.7, 1000, 50), curve(22, 0.7, 1200, 60)] for name in SIDES if name not in CONVENTIONAL}
    curves = good | {name: [curve(10, 0.7, 900, 90), curve(10, 0.7, 900, 90)] for name in CONVENTIONAL}
    curves[CONVENTIONAL[-1]] = [curve(10, 0.7, 500, 10), curve(10, 0.3, 500, 10)]  # best where it did not collapse
    value, measures = compare(curves)
    assert value.value == pytest.approx((2 * 2.2) ** 0.5)
    ratios = [m for m in measures if "÷" in m.name]
    assert len(ratios) == 4 and not any(CONVENTIONAL[-1] in m.name for m in ratios)
    assert next(m for m in ratios if "seconds" in m.name).value < 1
    assert [m.value for m in measures if m.name == f"{CONVENTIONAL[-1]}: seeds that reached 0.6"] == [1]


def test_trl_is_compared_where_both_sides_learned():
    def curve(speed, reward):
        return Curve([0.0, reward], [0.0, 1000.0], [0.0, 100 / speed], speed, [1.0], [0.9])

    curves = {w.name: {trl.OURS: [curve(30, 0.7)], trl.THEIRS: [curve(10, 0.7)]} for w in trl.WORKLOADS}
    slow = trl.WORKLOADS[0].name
    curves[slow][trl.THEIRS] = [curve(60, 0.4)]
    value, measures = trl.compare(curves)
    assert value.value == pytest.approx(3) and value.name.startswith(trl.WORKLOADS[-1].name) and value.reached
    ratios = {m.name: m.value for m in measures if "÷" in m.name}
    assert ratios.pop(f"{slow}: samples/s, pipeline ÷ trl") == pytest.approx(0.5)
    assert not any(slow in name for name in ratios)
    assert [v for name, v in ratios.items() if "seconds to 0.5" in name] == pytest.approx([1 / 3] * 2)


def test_what_a_start_model_is_taught_has_the_share_of_right_answers():
    draw = random.Random(0)
    copying, counting, _ = trl.WORKLOADS
    assert all(answer == prompt[:4] for prompt, answer in (copying.form(draw) for _ in range(50)))
    taught = [counting.form(draw) for _ in range(2000)]
    assert 0.25 < sum(int(prompt[:3]) == len(answer) for prompt, answer in taught) / len(taught) < 0.32, "a quarter, and some by chance"
