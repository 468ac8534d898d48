"""The engine's loop around a real vLLM engine, one turn at a time: run as a process of its own by test_engine.py.

    python -m tests.engine_probe MODEL_A MODEL_B FOLDER

Prints one JSON line a result: {"name": ..., "rollouts": [base64], "acks": [base64]}.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import os
import sys
import time
from unittest import mock

import torch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from operators.engine import EngineLoop, UpdateRule, prepared
from operators.engine_frames import ACK, RESULT, unpack_result
from operators.loader import Arrival, Loader, WeightFiles
from operators.rollouts import Rollouts, tokenizer_digest
from operators.vllm_engine import VLLMEngine
from operators.weights import BadWeights, publish
from schemas.record import decode, encode
from schemas.records import Ack, Dispatch, Rollout, Weights, now
from schemas.settings import GenerationSettings, ModelSettings
from tests.engine_settings import SETTINGS
from tests.records import prompt


class Broken:
    """Weights whose k-th tensor cannot be read; everything before it has been written by then."""

    def __init__(self, weights, k: int):
        self._weights, self._k = weights, k
        self.event, self.path = weights.event, weights.path

    @property
    def tensors(self):
        return self

    def __iter__(self):
        yield from itertools.islice(self._weights.tensors, self._k)
        raise OSError(f"tensor {self._k} is torn")

    def close(self):
        self._weights.close()


class DirectLoader:
    """Loads in `offer`, so that a test knows between which turns a version arrives. Tensor `torn_at` cannot be read while the engine is
    prepared for the version, tensor `broken_at` not while it is written."""

    def __init__(self, files: WeightFiles, engine: VLLMEngine):
        self._files, self._load, self._arrivals, self.torn_at, self.broken_at = files, prepared(self, engine), [], None, None
        if engine._spare is not None:
            engine._spare.WAIT_S = 0.0  # this thread is the one that would take what lies ready

    def load(self, event):
        weights, phases = self._files.load(event)
        return (weights if self.torn_at is None else Broken(weights, self.torn_at)), phases

    def offer(self, event, heard_at):
        try:
            weights, phases = self._load(event)
        except BadWeights as e:
            self._arrivals.append(Arrival(event, heard_at, {}, cause=str(e)))
            return
        if self.broken_at is not None:
            weights = Broken(weights, self.broken_at)
        self._arrivals.append(Arrival(event, heard_at, phases, weights))

    def take(self):
        return self._arrivals.pop(0) if self._arrivals else None


class Probe:
    def __init__(self, engine: VLLMEngine, model: str, mode: str = "reuse_partial", max_lag: int = 100, rule: UpdateRule = UpdateRule(),  # noqa: B008
                 settings: GenerationSettings = SETTINGS):
        self.loader = DirectLoader(WeightFiles(model, settings.dtype), engine)
        rollouts = Rollouts(settings.model_copy(update={"kv_cache_mode": mode}), run_id="r", generator_id="g", engine=engine.name,
                            tokenizer=engine.tokenizer, tokenizer_digest=tokenizer_digest(model), stop_ids=engine.stop_ids)
        self.loop = EngineLoop(engine, rollouts, self.loader, self._send, run_id="r", generator_id="g", capacity=settings.batch,
                               max_lag=max_lag, kv_cache_mode=mode, rule=rule)
        self.rollouts: list[bytes] = []
        self.acks: list[bytes] = []
        self.count = 0

    def _send(self, kind: int, payload: bytes) -> None:
        if kind == RESULT:
            self.rollouts += [encode([r]) for r in decode(Rollout, unpack_result(payload)[2])]
        elif kind == ACK:
            self.acks.append(payload)

    def submit(self, text: str) -> None:
        self.count += 1
        self.loop.submit(f"{self.count}", 0, encode([Dispatch(
            admission=self.count, group_id=f"d/0/{self.count}", sample_index=0, group_size=1, attempt=0, min_version=0, policy_version=0,
            prompt=encode([prompt(self.count, prompt=text)]), dispatched_at=now())]))

    def offer(self, event: Weights) -> None:
        self.loop.offer(event, time.time())

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()

    def finish(self) -> None:
        while len(self.rollouts) < self.count:
            self.loop.turn()

    def report(self, name: str) -> None:
        text = {"name": name} | {k: [base64.b64encode(b).decode() for b in getattr(self, k)] for k in ("rollouts", "acks")}
        print(json.dumps(text), flush=True)


def main(model_a: str, model_b: str, folder: str) -> None:
    from safetensors.torch import load_file

    a, b = (load_file(f"{m}/model.safetensors") for m in (model_a, model_b))
    versions = itertools.count()

    def event(tensors) -> Weights:
        return publish(folder, 0, next(versions), tensors, "r", settings.dtype)

    settings = SETTINGS
    engine = VLLMEngine(settings, ModelSettings(path=model_a))

    def started(**options) -> Probe:
        probe = Probe(engine, model_a, settings=settings, **options)
        probe.offer(event(a))
        probe.loop.serve()
        return probe

    spare, exchanged = engine._spare, []
    exchange = spare.exchange
    spare.exchange = lambda version: exchanged.append(exchange(version)) or exchanged[-1]
    for mode, engine._spare in itertools.product(("reuse", "reuse_partial", "recompute"), (None, spare)):
        probe = started(mode=mode)
        for text in ("1 + 2 =", "20 + 9 = 29", "7"):
            probe.submit(text)
        probe.turns(6)
        probe.offer(event(b))
        probe.finish()
        probe.submit("20 + 9 = 29")  # after the switch: its prefix lies in the cache, computed by the old version
        probe.finish()
        probe.report(f"switch {mode}" + ("" if engine._spare else ", in place"))

    for engine._spare in (None, spare):
        probe, other = started(), itertools.cycle((b, a))
        for i in range(32):
            probe.submit(f"{i} + {i * 37} = " + "1" * (i % 7))
        while len(probe.rollouts) < probe.count:
            probe.turns(5)
            probe.offer(event(next(other)))
        probe.report("often" + ("" if engine._spare else ", in place"))

    for name, rule in (("by tokens", UpdateRule(8, "token")), ("by chunks", UpdateRule(100, "version", chunk=8))):
        probe = started(rule=rule)
        probe.submit("3 + 4 =")
        while not probe.rollouts:
            probe.offer(event(next(other)))
            probe.turns(1)
        probe.report(name)

    engine._params.seed = 11  # the same request samples the same tokens, as long as the weights are the same
    probe = started()
    for tensors, engine._spare in ((None, spare), (b, spare), (a, spare), (b, None), (a, None), (b, spare), (a, None)):
        if tensors is not None:
            probe.offer(event(tensors))
        probe.submit("3 + 4 =")
        probe.finish()
    probe.report("a b a")
    engine._params.seed, engine._spare = None, spare
    print(json.dumps({"name": "exchanged", "values": exchanged}), flush=True)

    layout = list(WeightFiles(model_a, SETTINGS.dtype)._expected)
    for k, how in itertools.product((0, 1, len(layout) // 2, len(layout) - 1), ("torn", "broken")):
        probe = started()
        probe.submit("5 + 6 =")
        probe.turns(5)
        setattr(probe.loader, f"{how}_at", k)
        probe.offer(event(b))
        probe.finish()
        probe.submit("5 + 6 =")
        probe.finish()
        setattr(probe.loader, f"{how}_at", None)
        probe.offer(event(b))
        probe.submit("5 + 6 =")
        probe.finish()
        probe.report(f"{how} {k}")

    probe = started()
    spare.WAIT_S = 5.0
    probe.loop._loader = Loader(prepared(WeightFiles(model_a, settings.dtype), engine), (BadWeights,), lambda: None)
    for i in range(24):
        probe.submit(f"{i} + {i * 37} = " + "1" * (i % 7))
    exchanged.clear()
    while len(probe.rollouts) < probe.count:
        last = event(next(other))
        probe.offer(last)
        probe.turns(1)
    while decode(Ack, probe.acks[-1])[0].version < last.version:
        probe.turns(1)  # until the thread has nothing left to pack: the set is one loader's
    probe.report("in a thread")
    print(json.dumps({"name": "exchanged in a thread", "values": exchanged}), flush=True)

    probe = started()
    good = event(b)
    probe.offer(dataclasses.replace(good, digest="0" * 64))
    probe.submit("1 + 1 =")
    probe.finish()
    probe.report("wrong digest")

    probe = started()
    probe.submit("1 + 1 = " * 40)
    probe.submit("1 + 1 =")
    probe.submit("1 + 1 = " * 11)
    probe.finish()
    probe.report("lengths")

    probe = started(max_lag=1)
    probe.submit("8 + 8 =")
    probe.turns(4)
    for tensors in (b, a):
        probe.offer(event(tensors))
        probe.turns(1)
    probe.finish()
    probe.report("abort")

    for name, changes, head in (("head in float32", {}, "float32"), ("cache in fp8", {"kv_cache_dtype": "fp8"}, "model")):
        settings = SETTINGS.model_copy(update={"dtype": "bfloat16", **changes})
        try:
            engine = VLLMEngine(settings, ModelSettings(path=model_a, head_dtype=head))
        except ValueError as e:
            print(json.dumps({"name": name, "refused": str(e)}), flush=True)
            continue
        probe = started()
        for i in range(12):
            probe.submit(f"{i} + {i * 37} = ")
        probe.turns(30)  # the first four have ended
        probe.offer(event(b))
        probe.finish()
        probe.report(name)
        if head == "float32":
            (logits,) = engine._llm.collective_rpc(lambda worker: worker.get_model().compute_logits(torch.ones(1, 64, dtype=torch.bfloat16)))
            print(json.dumps({"name": "logits of ones", "dtype": str(logits.dtype), "values": logits[0].tolist()}), flush=True)

    with mock.patch.multiple(torch.cpu, _is_avx512_supported=lambda: False, _is_amx_tile_supported=lambda: False):
        try:
            VLLMEngine(settings, ModelSettings(path=model_a))
        except ValueError as e:
            print(json.dumps({"name": "cache in fp8, older CPU", "refused": str(e)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # the engine's threads have nothing to say any more
