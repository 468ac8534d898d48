"""vLLM's synchronous engine behind the interface of `operators.engine`, and the weight transfer that CPUs lack.

Promises: weights change between two steps, and every token is labelled with the weights that computed it; after a failed write the model
can be written again. Knows vLLM 0.32's `LLMEngine`; nothing of records, topics or threads. On a GPU the same transfer engine loads through
vLLM's own weight loaders, and tensor parallelism goes through vLLM's executor; neither has been run on a GPU.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs.engine import tokens_input
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from operators.loader import LoadedWeights
from operators.rollouts import Sampled
from operators.spare_weights import SpareWeights, put_back, repack_tied_head, spare_of, tied_head
from schemas.settings import GenerationSettings, ModelSettings

BACKEND = "pipelinerl"


class VLLMEngine:
    """`operators.engine.Engine` by vLLM. `name` says what it is, `stop_ids` which tokens end a sequence."""

    def __init__(self, settings: GenerationSettings, model: ModelSettings, *, seed: int = 0):
        cuda = current_platform.is_cuda_alike()
        if settings.device != "auto" and (settings.device == "cuda") != cuda:
            raise ValueError(f"generation.device is {settings.device!r}, but this vLLM runs on {current_platform.device_name}: "
                             "install the dependency group cpu or gpu accordingly, or set generation.device = auto")
        if settings.kv_cache_dtype == "fp8" and not (cuda or torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
            raise ValueError("generation.kv_cache_dtype is fp8, but vLLM keeps such a cache only on GPUs and on CPUs with AVX-512 or AMX, "
                             "and this CPU has neither: set it to model")
        memory: dict[str, Any] = {"gpu_memory_utilization": settings.gpu_memory_utilization} if cuda else {
            "kv_cache_memory_bytes": settings.kv_cache_mb << 20}
        self._llm = LLMEngine.from_engine_args(EngineArgs(
            model=model.path, dtype=settings.dtype, enforce_eager=settings.enforce_eager, max_model_len=settings.max_model_len,
            max_num_seqs=settings.batch, tensor_parallel_size=settings.tensor_parallel,
            seed=seed, trust_remote_code=model.trust_remote_code,
            kv_cache_dtype="auto" if settings.kv_cache_dtype == "model" else settings.kv_cache_dtype,
            hf_overrides={} if model.head_dtype == "model" else {"head_dtype": model.head_dtype},
            # recompute rebuilds every cache at an update, so that a shared prefix is of the held version there too
            enable_prefix_caching=True, logprobs_mode="processed_logprobs", disable_log_stats=True,
            # one step in flight at a time: with more, a write would fall between a step's forward pass and its label
            async_scheduling=False, generation_config="auto", worker_extension_cls="operators.vllm_engine.WorkerExtension",
            weight_transfer_config={"backend": BACKEND}, **memory,
        ))
        if model.head_dtype == "float32" and self._llm.model_config.head_dtype != torch.float32:
            raise ValueError(f"model.head_dtype = float32: vLLM has no such output layer on {current_platform.device_name}")
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        self._in_process = settings.tensor_parallel == 1
        self._spare: SpareWeights | None = None
        if self._in_process and settings.spare_weights:
            (self._spare,) = self._llm.collective_rpc(lambda worker: spare_of(worker.get_model(), worker.vllm_config))
        self.tokenizer = self._llm.get_tokenizer()
        self.name = f"vllm-{vllm.__version__.split('+')[0]}"
        self.stop_ids = self._stop_ids()
        self._params = SamplingParams(temperature=settings.temperature, logprobs=0, flat_logprobs=True, detokenize=False,
                                      output_kind=RequestOutputKind.FINAL_ONLY)
        if self._params.temperature != settings.temperature:
            raise ValueError(f"vLLM would sample at temperature {self._params.temperature:g}, not at generation.temperature "
                             f"{settings.temperature:g}: every log-probability would be of another distribution than it says")
        self._internal: dict[str, str] = {}  # our ident -> the engine's

    def _stop_ids(self) -> frozenset[int]:
        fields = self._llm.input_processor.generation_config_fields
        ids = fields.get("eos_token_id")
        found = set(ids if isinstance(ids, list) else [ids])
        found.add(self._llm.renderer.get_eos_token_id())
        return frozenset(i for i in found if i is not None)

    def add(self, ident: str, prompt_ids: list[int], max_tokens: int, salt: str | None, greedy: bool) -> None:
        params = self._params.clone()
        params.max_tokens = max_tokens
        if greedy:
            params.temperature = 0.0
        prompt = tokens_input(prompt_ids, cache_salt=salt)
        self._internal[ident] = self._llm.add_request(ident, prompt, params)

    def step(self) -> list[Sampled]:
        if self._spare is not None:
            self._spare.step_begins()
        return [self._sampled(output) for output in self._llm.step() if output.finished]

    def _sampled(self, output) -> Sampled:
        self._internal.pop(output.request_id, None)
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        spans = [(span.start, span.version) for span in completion.weight_versions or ()]
        logprobs = list(completion.logprobs.logprobs) if completion.logprobs else []
        if len(logprobs) > len(tokens) or (tokens and not spans):
            raise RuntimeError(f"vLLM answered request {output.request_id} with {len(tokens)} tokens, {len(logprobs)} logprobs and "
                               f"{len(spans)} version spans")
        return Sampled(output.request_id, tokens, logprobs, spans, completion.finish_reason)

    def progress(self, ident: str) -> tuple[str | None, int]:
        state = self._llm.output_processor.request_states[self._internal[ident]]
        starts = state.weight_version_starts
        return (starts[0][0] if starts else None), state.detokenizer.num_output_tokens()

    def abort(self, idents: list[str]) -> list[Sampled]:
        # The synchronous engine says nothing of an aborted request: what it had is asked for first.
        states = self._llm.output_processor.request_states
        outputs = [states[self._internal[i]].make_request_output([], None, FinishReason.ABORT, None) for i in idents]
        sampled = [self._sampled(output) for output in outputs]
        self._llm.abort_request(idents)
        return sampled

    def prepare(self, weights: LoadedWeights) -> bool:
        if self._spare is None:
            return False
        self._spare.pack(weights, weights.tensors)
        return True

    def write(self, weights: LoadedWeights) -> None:
        if self._spare is not None and self._spare.exchange(weights):
            return
        # In this process the tensors are passed as they are; workers of other processes read the same file.
        info = {"tensors": weights.tensors} if self._in_process else {"path": weights.path}
        try:
            self._llm.collective_rpc("start_weight_update")
            self._llm.collective_rpc("update_weights", kwargs={"update_info": info})
            self._llm.collective_rpc("finish_weight_update")
        except BaseException:
            self._llm.collective_rpc("abandon_weight_update")
            raise

    def set_label(self, label: str) -> None:
        self._llm.set_weight_version(label)

    def reset_cache(self) -> None:
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its KV cache")


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: the weights come by file or by reference."""


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The tensors themselves (same process) or the safetensors file that holds them."""

    tensors: Iterable[tuple[str, torch.Tensor]] | None = None
    path: str | None = None


class FileWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight transfer (its layer-wise reload through the model's own loaders) fed from a file: works on CPUs and GPUs."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._tied = tied_head(self.model)
        # The reload warns at each update of layers that have no weights of their own to load (rotary embeddings, a tied head).
        logging.getLogger(layerwise.__name__).setLevel(logging.ERROR)

    def start_weight_update(self) -> None:
        layerwise.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.model.load_weights(iter(update_info.tensors) if update_info.tensors is not None else _read(update_info.path))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if current_platform.is_cuda_alike():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self._tied)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory._registry.pop(BACKEND, None)  # a worker may import this module under spawn and by name
WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransfer)


class WorkerExtension:
    """Mixed into vLLM's worker, which imports this module for it and so learns of the transfer backend."""

    def abandon_weight_update(self) -> None:
        self._weight_update_active = False
        put_back(self.weight_transfer_engine.model)


def _read(path: str) -> Iterable[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            yield name, file.get_tensor(name)
