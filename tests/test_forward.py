import itertools
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import pyarrow as pa
import pytest
import torch

from operators import forward, losses, microbatch
from operators.forward import BadModel, check_packing, chosen_logprobs, lists, load_model, pack, spread, token_logprobs, with_predecessor
from operators.packed_attention import layout
from schemas.settings import CISPOLoss, GSPOLoss, ModelSettings, PPOLoss, ReinforceLoss
from tests import batches
from tests.tiny import make_tiny_model

LENGTHS = np.array([37, 300, 5, 64, 21, 1, 50, 400, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(ModelSettings(path=str(folder)), dtype="float32", attention="sdpa")


def apart(model, token_ids, offsets, targets, temperature):
    """Log-probabilities and entropies sequence by sequence, through transformers' own attention and torch's log_softmax."""
    ours, model.config._attn_implementation = model.config._attn_implementation, "sdpa"
    logprobs, entropies = [], []
    for s, (start, stop) in enumerate(itertools.pairwise(offsets)):
        ids = torch.from_numpy(token_ids[start:stop])[None]
        at = torch.from_numpy(targets[(targets >= start) & (targets < stop)] - start)
        log = torch.log_softmax(model(ids, use_cache=False).logits[0] / temperature[s], -1)
        logprobs.append(log[at - 1, ids[0, at]])
        entropies.append(-(log.exp() * log).sum(-1)[at - 1])
    model.config._attn_implementation = ours
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.fixture(scope="module")
def case():
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    token_ids = random.integers(0, 320, offsets[-1])
    targets = with_predecessor(random.random(offsets[-1]) < 0.7, offsets)
    return token_ids, offsets, targets, random.uniform(0.5, 1.5, len(LENGTHS))


def test_packed_equals_unpacked_with_gradients(model, case):
    model.zero_grad()
    logprobs, entropies = token_logprobs(model, pack(*case), entropy=True)
    weight = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))
    (logprobs @ weight + entropies @ weight.flip(0)).backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    expected, expected_entropies = apart(model, *case)
    (expected @ weight + expected_entropies @ weight.flip(0)).backward()
    assert (logprobs - expected).abs().max() <= 1e-4
    assert (entropies - expected_entropies).abs().max() <= 1e-4
    for name, parameter in model.named_parameters():
        assert (packed[name] - parameter.grad).abs().max() <= 1e-4 * max(1, parameter.grad.abs().max()), name


@pytest.mark.parametrize("implementation", ["sdpa", "packed_sdpa"])
def test_both_attentions_tell_sequences_apart(model, case, implementation):
    token_ids, offsets, targets, temperature = case
    model.config._attn_implementation = implementation
    try:
        with torch.no_grad():
            together, _ = token_logprobs(model, pack(*case))
            other = token_ids.copy()
            other[:offsets[1]] = (other[:offsets[1]] + 1) % 320  # another first sequence
            changed, _ = token_logprobs(model, pack(other, offsets, targets, temperature))
    finally:
        model.config._attn_implementation = "packed_sdpa"
    rest = torch.from_numpy(targets >= offsets[1])
    assert (together - changed)[rest].abs().max() <= 1e-4
    assert (together - changed)[~rest].abs().max() > 0.1


def test_values_lie_at_their_own_token(model, case):
    packed = pack(*case)
    with torch.no_grad():
        logprobs, _ = token_logprobs(model, packed)
    row = spread(packed, logprobs)
    assert torch.equal(row[packed.targets], logprobs)
    assert row.isnan().sum() == packed.tokens - len(logprobs)
    assert row[case[1][:-1]].isnan().all()  # the first token of a sequence has none


def test_chosen_logprobs_in_chunks_has_exact_gradients(monkeypatch):
    monkeypatch.setattr(forward, "CHUNK_ELEMENTS", 22)  # two rows at a time
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, dtype=torch.float64, generator=random, requires_grad=True)
    ids, temperature = torch.randint(0, 11, (7,), generator=random), torch.rand(7, dtype=torch.float64, generator=random) + 0.5
    assert torch.autograd.gradcheck(lambda x: chosen_logprobs(x, ids, temperature, entropy=True), (logits,))
    assert torch.autograd.gradcheck(lambda x: chosen_logprobs(x, ids, temperature)[0], (logits,))


def test_a_head_in_float32_rounds_neither_logits_nor_names(folder, case):
    narrow, wide = (load_model(ModelSettings(path=str(folder), head_dtype=d), dtype="bfloat16", attention="sdpa") for d in ("model", "float32"))
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = hidden.double() @ wide.lm_head.weight.double().T
    assert (wide.lm_head(hidden) - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (narrow.lm_head(hidden) - exact).abs().max() > 1e-3 * exact.abs().max()
    assert wide.state_dict().keys() == narrow.state_dict().keys()
    token_logprobs(wide, pack(*case))[0].sum().backward()
    assert wide.lm_head.weight.grad.dtype == torch.bfloat16 and wide.lm_head.weight.grad.abs().sum() > 0
    check_packing(wide, 0.2)


def test_a_head_that_is_no_linear_layer_is_not_taken_in_float32(folder, monkeypatch):
    monkeypatch.setattr("transformers.LlamaForCausalLM.get_output_embeddings", lambda self: torch.nn.Identity())
    with pytest.raises(BadModel, match="LlamaForCausalLM is Identity, no linear layer: set model.head_dtype = model"):
        load_model(ModelSettings(path=str(folder), head_dtype="float32"), dtype="float32", attention="sdpa")


def test_bfloat16_logits_are_taken_in_float32():
    logits = torch.randn(5, 320, generator=torch.Generator().manual_seed(0)).mul(5).bfloat16()
    ids = torch.arange(5)
    logprobs, _ = chosen_logprobs(logits, ids, torch.ones(5))
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.log_softmax(logits.float(), -1)[ids, ids])


def test_lists_of_slices_and_null_lists():
    column = pa.chunked_array([pa.array([[1, 2], None, [], [3, None]], pa.list_(pa.float32()))]).slice(1)
    values, offsets = lists(column)
    assert offsets.tolist() == [0, 0, 0, 2]
    assert values[0] == 3 and np.isnan(values[1])


def test_positions_and_targets():
    offsets = np.array([0, 3, 3, 5])  # an empty sequence between two
    targets = with_predecessor(np.array([True, True, False, True, True]), offsets)
    packed = pack(np.arange(5), offsets, targets, np.array([1.0, 1.0, 2.0]))
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.targets.tolist() == [1, 4]
    assert packed.sequence.tolist() == [0, 2]
    assert packed.temperature.tolist() == [1, 2]


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="temperatures must be greater than 0"):
        pack(np.arange(3), np.array([0, 3]), np.array([1]), np.zeros(1))


def test_blocks_hold_every_token_once_and_little_padding():
    packing = layout(np.random.default_rng(1).integers(1, 2000, 60))
    tokens = np.concatenate([b.tokens.numpy() for b in packing.blocks])
    assert sorted(tokens) == list(range(len(tokens)))
    assert sum(b.sequences * b.length for b in packing.blocks) <= 2 * len(tokens) + 512 * len(packing.blocks)
    assert tokens[packing.back.numpy()].tolist() == list(range(len(tokens)))


@pytest.mark.parametrize("loss", [ReinforceLoss(), PPOLoss(kind="ppo"), GSPOLoss(kind="gspo"), CISPOLoss(kind="cispo")],
                         ids=lambda p: p.kind)
def test_packed_loss_and_gradient_equal_unpacked_ones(model, loss):
    def gradient(micro_batches):
        model.zero_grad()
        total = 0.0
        for table in batches.step(3, micro_batches, rows=5)[1]:
            m = microbatch.read(table)
            new, entropy = token_logprobs(model, m.packed, entropy=True)
            value, _ = losses.step_loss(losses.Tokens(new, new.detach() + 0.3 * torch.sin(m.behaviour), m.advantage, m.packed.sequence,
                                                      m.packed.sequences, m.reference, entropy, m.on_policy),
                                        loss, kl_coef=0.1, entropy_coef=0.01)
            value.backward()
            total += value.item()
        return total, torch.cat([p.grad.flatten() for p in model.parameters()])

    (packed, g), (unpacked, h) = gradient(1), gradient(5)
    assert packed == pytest.approx(unpacked, rel=1e-5)
    assert (g - h).abs().max() <= 1e-5 * h.abs().max()


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(BadModel, match=r"is no model folder: it has no config\.json"):
        load_model(ModelSettings(path=str(tmp_path)), dtype="float32", attention="sdpa")


def test_a_model_that_mixes_packed_sequences_is_refused(folder):
    model = load_model(ModelSettings(path=str(folder)), dtype="float32", attention="sdpa")
    check_packing(model, 1e-4)
    model.config._attn_implementation = "sdpa"
    ordinary = model.forward
    model.forward = lambda position_ids, **kwargs: ordinary(**kwargs)  # ignores restarting positions
    model._pipelinerl_selects_logits = True
    with pytest.raises(BadModel, match="cannot be trained on packed sequences"):
        check_packing(model, 1e-4)


def test_only_sequences_wholly_of_the_training_version_tell_of_a_mismatch():
    """A token of this version on an older version's KV cache is of another distribution, whatever engine made it."""
    random = np.random.default_rng(0)
    rows = [batches.sequence(5, 0, random, version_spans=[{"start": 2, "policy_version": 4}], prompt_length=2),
            batches.sequence(5, 1, random, version_spans=[{"start": 2, "policy_version": 3}, {"start": 4, "policy_version": 4}], prompt_length=2)]
    for r in rows:
        r.loss_mask = [i >= 2 for i in range(len(r.token_ids))]
        r.rollout_logprobs = [-1.0 if i >= 2 else None for i in range(len(r.token_ids))]
    first = len(rows[0].token_ids) - 2
    read = microbatch.read(batches.table(rows)).on_policy.tolist()
    assert read == [True] * first + [False] * (len(read) - first)
