"""The bare side of `generation`: vLLM's synchronous engine in a loop, in a child process with the settings of the job's engine.

Left out is all that the product adds: records, version labels, a pipe per sample, Flink, Kafka. H sequences are in flight, a freed slot is
taken before the next step; prompts are tokenised beforehand.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from typing import Any

from operators.child import Parent
from schemas.settings import GenerationSettings

READY, ROUND, RESULT = 1, 2, 3


def main() -> None:
    parent = Parent()
    config = parent.config
    settings = GenerationSettings.model_validate(config["generation"])

    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(
        model=config["model"], dtype=settings.dtype, enforce_eager=settings.enforce_eager, max_model_len=settings.max_model_len,
        max_num_seqs=settings.batch, seed=config["seed"], enable_prefix_caching=True, logprobs_mode="processed_logprobs",
        disable_log_stats=True, async_scheduling=False, generation_config="auto", kv_cache_memory_bytes=settings.kv_cache_mb << 20))
    tokenizer = engine.get_tokenizer()
    prompts = [_ids(tokenizer, text, settings.chat_template) for text in config["prompts"]]
    params = SamplingParams(temperature=settings.temperature, logprobs=0, flat_logprobs=True, detokenize=False,
                            max_tokens=settings.max_tokens, output_kind=RequestOutputKind.FINAL_ONLY)

    def generate(salt: str) -> dict[str, Any]:
        waiting = collections.deque(enumerate(ids for ids in prompts for _ in range(config["group_size"])))
        in_flight, first, finished, lengths, used = 0, None, 0.0, [], time.process_time()
        while waiting or in_flight:
            while waiting and in_flight < settings.batch:
                index, ids = waiting.popleft()
                engine.add_request(f"{salt}-{index}", tokens_input(ids, cache_salt=salt), params.clone())
                in_flight += 1
            outputs = engine.step()
            finished = time.time()
            first = finished if first is None else first
            for output in outputs:
                if output.finished:
                    in_flight -= 1
                    lengths.append(len(output.outputs[0].token_ids))
        return {"tokens": sum(lengths), "seconds": finished - first, "samples": len(lengths), "cpu_s": time.process_time() - used}

    parent.send(READY, b"")
    for _, payload in parent.incoming():
        parent.send(RESULT, json.dumps(generate(payload.decode())).encode())


def _ids(tokenizer, text: str, chat_template: bool) -> list[int]:
    if chat_template:
        return list(tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True,
                                                  return_dict=False))
    return list(tokenizer(text)["input_ids"])


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the engine's threads could hang an ordinary end
