"""latency: how long a rollout takes to its reader, and a policy version to the tokens, with the generate job under load.

The tiny model with H sequences in flight; this process plays the sequencer (outcomes give the credit back) and rank 0 (a version a second,
each a file of its own, offered in a transaction). One clock, since all of it runs on one machine.

Rollout: from its `finished_at` to a reader of the topic that has it in hand. Version: from the event's `offered_at`, taken before its
transaction is sent, over heard, fetch, decode, wait (for the end of the engine's step) and apply (generation stands still), as acked.
"""

from __future__ import annotations

import collections
import random
import tempfile
import threading
import time
from pathlib import Path

from operators.log import Writer
from schemas.record import decode, encode
from schemas.records import Ack, Outcome, Rollout, now
from schemas.settings import Settings
from schemas.topics import OUTCOMES, topic
from tests.benchmarks.common import Measure, machine, quantiles, report
from tests.benchmarks.generate_job import Arrival, GenerateJob, local_stack

SEED = 0
GOAL_MS = 50.0
PROMPTS = 12_000
PHASES = {"heard": "heard", "fetch": "bytes fetched", "decode": "checked and decoded", "pack": "packed", "wait": "waited for the step's end",
          "apply": "applied (generation paused)"}
FLAGS = {
    "generation.batch": 64, "generation.max_tokens": 50, "generation.max_model_len": 128, "generation.dtype": "float32",
    "generation.kv_cache_mb": 64, "training.batch": 128, "training.max_lag": 4,
}


class Sequencer:
    """Gives the credit of every complete group back, in a thread of its own: all its samples are filtered."""

    PAUSE_S = 0.1  # outcomes come in batches, as a trainer's or sequencer's do

    def __init__(self, settings: Settings):
        self._settings = settings
        self._have: collections.Counter[str] = collections.Counter()
        self._complete: collections.deque[str] = collections.deque()
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="outcomes", daemon=True)
        self._thread.start()

    def notice(self, arrival: Arrival) -> None:
        for group in arrival.table.column("group_id").to_pylist():
            self._have[group] += 1
            if self._have[group] == self._settings.grouping.group_size:
                del self._have[group]
                self._complete.append(group)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        run = self._settings.run.id
        try:
            writer = Writer(self._settings.kafka)
            while not self._stop.wait(self.PAUSE_S):
                groups = [self._complete.popleft() for _ in range(len(self._complete))]
                if groups:
                    at = now()
                    writer.write(topic(run, OUTCOMES), encode([
                        Outcome(run_id=run, group_id=g, sample_index=i, rollout_id=None, outcome="filtered", decided_at=at)
                        for g in groups for i in range(self._settings.grouping.group_size)]))
            writer.close()
        except BaseException as e:
            self.error = e
            raise


def run(*, quick: bool = False) -> None:
    from deploy.models import make_in_process
    from jobs.prompts import load_prompts
    from operators.log import ensure_topics

    on = machine()
    versions = 15 if quick else 60
    draw = random.Random(SEED)
    with tempfile.TemporaryDirectory(prefix="pipelinerl-benchmark-") as folder:
        model = make_in_process("demo", Path(folder) / "tiny", SEED)
        with local_stack() as stack:
            settings = stack.settings("latency", **FLAGS, **{"model.path": str(model)})
            ensure_topics(settings.kafka, settings.run.id)
            load_prompts(settings, "demo", size=PROMPTS, seed=SEED)
            sequencer = Sequencer(settings)
            try:
                with GenerateJob(stack, settings, sequencer.notice) as job:
                    print("starting the job ...", flush=True)
                    warm = 20 * settings.generation.batch
                    job.rollouts.wait(warm, 300, job.check)
                    print(f"under load; {versions} versions, one a second ...", flush=True)
                    committed: dict[int, tuple[float, float]] = {}  # version -> offered, committed
                    start, came = time.time(), len(job.rollouts.arrivals)
                    for i in range(versions):
                        # Not in step with the operators' ticks.
                        time.sleep(max(0.0, start + i + draw.random() * 0.5 - time.time()))
                        at = job.publish()
                        committed[job.event.version] = job.event.offered_at.timestamp(), at
                    job.applied(versions)
                    end, last = time.time(), len(job.rollouts.arrivals)
                    if sequencer.error is not None:
                        raise RuntimeError("outcomes could not be written") from sequencer.error
                    if job.rollouts.rows >= PROMPTS * settings.grouping.group_size:
                        raise RuntimeError("the prompts did not last: the load was not there to the end; raise PROMPTS")
                    begun, *acks = [(a.at, decode(Ack, a.value)[0]) for a in job.acks.arrivals]
                    rollouts = [(a.at, r) for a in job.rollouts.arrivals[came:last] for r in decode(Rollout, a.value)]
            finally:
                sequencer.close()
    first_ack, last_ack = begun[1], acks[-1][1]
    in_flight = (last_ack.in_flight_sum - first_ack.in_flight_sum) / (last_ack.busy_steps - first_ack.busy_steps)
    ms: dict[str, list[float]] = {name: [dict(a.phases_ms)[name] for _, a in acks] for name in PHASES}
    transactions = [1000 * (done - offered) for offered, done in committed.values()]
    after = [heard - 1000 * (committed[a.version][1] - committed[a.version][0]) for heard, (_, a) in zip(ms["heard"], acks, strict=True)]
    to_reader = [1000 * (at - r.finished_at.timestamp()) for at, r in rollouts]
    heard = quantiles("version: offered → heard", ms["heard"], "ms", GOAL_MS)
    more = [heard[0], *quantiles("version: of that, its transaction", transactions, "ms"),
            *quantiles("version: of that, committed → heard", after, "ms")]
    for name, text in PHASES.items():
        if name != "heard":
            more += quantiles(f"version: {text}", ms[name], "ms")
    whole = [sum(values) for values in zip(*ms.values(), strict=True)]
    more += quantiles("version: offered → applied", whole, "ms")
    more += quantiles("version: ack written → in hand", [1000 * (at - a.at.timestamp()) for at, a in acks], "ms")
    more += quantiles("rollout: ended → in hand of a reader", to_reader, "ms")
    more += [
        Measure("versions applied of those offered", len(acks) / versions, "ratio", n=versions),
        Measure("rollouts that span versions", sum(len(r.version_spans) > 1 for _, r in rollouts) / len(rollouts), "ratio", n=len(rollouts)),
        Measure("load: mean in flight ÷ min(H, credit)", in_flight / min(settings.generation.batch, settings.credit), "ratio", n=len(rollouts)),
        Measure("load: tokens/s", sum(len(r.token_ids) - r.prompt_length for _, r in rollouts) / (end - start), "tokens/s"),
    ]
    sides = {"version_ms": ms | {"transaction": transactions}, "rollout_ms": [round(x, 1) for x in to_reader]}
    report("latency", heard[1], more, sides=sides, settings=FLAGS | {"quick": quick, "versions": versions, "every_s": 1},
           seeds={"prompts": SEED, "moments": SEED, "run": 0}, on=on)
