"""`python -m tests.benchmarks [NAME] [--quick]`: one benchmark, or all of them, each in a process of its own."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys

NAMES = ("generation", "training", "latency", "weight_sync", "weight_update", "kv_compression", "precision", "time_to_reward", "trl")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.benchmarks", description="Each prints a table and writes out/benchmarks/NAME.json.")
    parser.add_argument("name", nargs="?", choices=NAMES, help="which one; all of them without it")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: shows that it runs, its intervals are wide")
    args = parser.parse_args()
    if args.name is None:
        quick = ["--quick"] if args.quick else []
        return max(subprocess.run([sys.executable, "-m", "tests.benchmarks", name, *quick]).returncode for name in NAMES)
    # Before anything imports torch: an engine, a rank and a driver each have one thread.
    for key, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu"}.items():
        os.environ.setdefault(key, value)
    importlib.import_module(f"tests.benchmarks.{args.name}").run(quick=args.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
