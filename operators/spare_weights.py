"""A second set of a vLLM model's weights: packed in the loader's thread while the engine steps, then exchanged with the set in use.

What takes long about applying a version on a CPU is to pack its matrices for the kernels. Here that happens beside generation, and the
pause is an exchange of references, some milliseconds whatever the model's size. It costs the memory of the weights once more, and is there
for engines of one process whose layers are unquantised (`spare_of`); vLLM's reload in place serves all others.

Promises: nothing that the engine reads is touched before `exchange`, and that waits for nobody; a version that cannot be packed leaves the
set in use as it is; after an exchange the model computes what it would compute if the version had been loaded into it. A packed version is
replaced by a newer one only after the engine went on without it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

#: What loading a version changes about a layer: its tensors, and the function that multiplies by the packed matrix.
EXCHANGED = ("_parameters", "_buffers", "cpu_linear")


class SpareWeights:
    """`pack` is called by the loader's thread, `exchange` and `step_begins` by the one that steps."""

    PASSES = 2  # of the steps that begin after a version was packed, the first may not have known of it
    WAIT_S = 5.0  # for the engine to take one or to go on without it, whatever the step it is in

    def __init__(self, model: torch.nn.Module, spare: torch.nn.Module, config: VllmConfig):
        self._spare, self._config = spare, config
        self._layers = [(layer, of) for layer, of in zip(model.modules(), spare.modules(), strict=True) if not isinstance(layer, Attention)]
        self._turn = threading.Condition()
        self._packed: object | None = None  # the version that lies ready
        self._passes = 0  # steps that began since
        self._tied: tuple[ParallelLMHead, VocabParallelEmbedding] | None = None
        self._loaded = False

    @torch.no_grad()
    def pack(self, version: object, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load and pack a version's (name, tensor) pairs. Whatever goes wrong is raised, and nothing lies ready then.

        Waits while one lies ready that the engine is about to take: else versions that come faster than they are packed would replace each
        other for ever.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._packed is None or self._passes >= self.PASSES, self.WAIT_S)
            self._packed = None  # from here on the set belongs to this thread
        if not self._loaded:
            self._spare.load_weights(iter(tensors))
            process_weights_after_loading(self._spare, self._config.model_config, torch.device("cpu"))
            self._tied = tied_head(self._spare)
            self._loaded = True
        else:
            layerwise.initialize_layerwise_reload(self._spare)
            try:
                self._spare.load_weights(iter(tensors))
                layerwise.finalize_layerwise_reload(self._spare, self._config.model_config)
            except BaseException:
                put_back(self._spare)
                raise
        repack_tied_head(self._tied)
        with self._turn:
            self._packed, self._passes = version, 0

    def step_begins(self) -> None:
        """The engine goes on with the set in use."""
        if self._packed is not None:
            with self._turn:
                self._passes += 1
                self._turn.notify()

    def exchange(self, version: object) -> bool:
        """Put a version that lies ready into use; False if it does not (a newer one took its place)."""
        with self._turn:
            if self._packed is not version:
                return False
            self._packed = None
            self._turn.notify()
            for layer, spare in self._layers:
                ours, theirs = vars(layer), vars(spare)
                for name in EXCHANGED:
                    if name in theirs:
                        ours[name], theirs[name] = theirs[name], ours[name]
            return True


def spare_of(model: torch.nn.Module, config: VllmConfig) -> SpareWeights | None:
    """A second set for a model that is loaded; None where this way of applying a version is not known to be complete."""
    if not (current_platform.is_cpu() and config.model_config.enforce_eager and config.parallel_config.world_size == 1
            and all(map(_known, model.modules()))):
        return None
    own = copy.copy(config)
    own.compilation_config = copy.copy(config.compilation_config)
    own.compilation_config.static_forward_context = {}  # attention layers enter themselves by name: the cache is that of the model in use
    with _rotary_embeddings_of_its_own(), set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        spare = initialize_model(vllm_config=own)
    shared = set(map(id, _parts(model))) & set(map(id, _parts(spare)))
    alike = [type(m) for m in model.modules()] == [type(m) for m in spare.modules()]
    return SpareWeights(model, spare, config) if alike and not shared else None


def _known(layer: torch.nn.Module) -> bool:
    """Whether loading changes nothing about a layer but EXCHANGED."""
    method = getattr(layer, "quant_method", None)
    if isinstance(layer, Attention):
        return not layer._parameters
    if isinstance(layer, LinearBase):
        return type(method) is UnquantizedLinearMethod
    if isinstance(layer, VocabParallelEmbedding):
        return type(method) is UnquantizedEmbeddingMethod
    return method is None and not hasattr(layer, "process_weights_after_loading")


def _parts(model: torch.nn.Module) -> Iterator[object]:
    yield from model.modules()
    yield from model.parameters()
    yield from model.buffers()


@contextmanager
def _rotary_embeddings_of_its_own() -> Iterator[None]:
    """vLLM gives equal rotary embeddings of a process the same module: a reload of one model would reach into the other."""
    known = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(known)


def put_back(model: torch.nn.Module) -> None:
    """After a reload that failed: forget what was buffered, put every layer's own tensors back. Their values are of no version."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()


def tied_head(model: torch.nn.Module) -> tuple[ParallelLMHead, VocabParallelEmbedding] | None:
    """Head and embedding that share a parameter while the head keeps a packed copy of it; None where nothing is to be repaired."""
    if not current_platform.is_cpu():
        return None
    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
    for head in heads:
        for embedding in embeddings:
            if head.weight is embedding.weight:
                return head, embedding
    config = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", False) and any(hasattr(head, "cpu_linear") for head in heads):
        raise RuntimeError(f"{type(model).__name__} ties its embeddings in a way that weight updates on a CPU do not know: "
                           "untie them (tie_word_embeddings = false) or use a GPU")
    return None


def repack_tied_head(tied: tuple[ParallelLMHead, VocabParallelEmbedding] | None) -> None:
    """The reload never processes a head that shares the embedding's parameter: on a CPU its packed copy would stay the old one."""
    if tied is not None:
        head, embedding = tied
        head.weight = embedding.weight
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
