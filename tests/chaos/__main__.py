"""`python -m tests.chaos [--rounds N] [--only NAME ...] [--seed S]`: kill each process N times; a table, and out/chaos.json."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from tests.benchmarks.common import machine
from tests.benchmarks.generate_job import local_stack
from tests.chaos.driver import ALL, Row, Verdict, chaos, row, verdict

OUT = Path("out") / "chaos.json"


def table(rows: list[Row]) -> str:
    """As Markdown."""
    lines = ["| process | kills | lost | twice | duplicates removed | generation paused, p50 / max [s] | training paused, p50 / max [s] |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {r.process} | {r.kills} | {r.lost} | {r.twice} | {r.duplicates_removed} | {r.generation_p50_s:.1f} / "
              f"{r.generation_max_s:.1f} | {r.training_p50_s:.1f} / {r.training_max_s:.1f} |" for r in rows]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="kills of each kind")
    parser.add_argument("--only", nargs="+", choices=ALL, default=ALL, metavar="NAME", help=f"some of: {', '.join(ALL)}")
    parser.add_argument("--seed", type=int, default=0, help="of the times and choices")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from deploy.models import make_in_process

    on, rows = machine(), []
    for i, what in enumerate(args.only):
        with local_stack() as stack:  # one of its own each: a service that ends more than five times in ten minutes is given up
            model = str(make_in_process("demo", stack.runs / "model", args.seed))
            kills, found = [], []
            for part in range(0, args.rounds, 4):
                count = min(4, args.rounds - part)
                settings, done, _ = chaos(stack, model, f"chaos-{i}-{part}", [what] * count, args.seed + 1000 * i + part)
                kills += done
                found.append(dataclasses.astuple(verdict(settings)))
        rows.append(row(what, kills, Verdict(*map(sum, zip(*found, strict=True)))))
        print(table(rows), flush=True)
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(json.dumps({"rows": [dataclasses.asdict(r) for r in rows], "rounds": args.rounds, "seed": args.seed, "machine": on},
                                  indent=1))
    return int(any(r.lost or r.twice for r in rows))


if __name__ == "__main__":
    sys.exit(main())
