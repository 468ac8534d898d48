"""Deltas of bytes, and of versions: always the trainer's bytes again, or a refusal."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from operators import delta, weights
from operators.delta import BadDelta
from operators.loader import WeightFiles
from operators.weights import BadWeights


@settings(deadline=None)
@given(st.data())
def test_the_new_bytes_come_back(data):
    unit = data.draw(st.sampled_from([1, 2, 4, 8]))
    base = data.draw(st.binary(max_size=200))
    new = bytearray(base)
    for i in data.draw(st.lists(st.integers(0, max(0, len(base) - 1)), max_size=20)) if base else ():
        new[i] = data.draw(st.integers(0, 255))
    made = delta.make(base, bytes(new), unit)
    buffer = bytearray(base)
    delta.apply(buffer, made)
    assert buffer == new


def test_few_small_changes_make_a_small_delta():
    rng = np.random.default_rng(0)
    base = torch.randn(1_000_000).mul(0.02).bfloat16().view(torch.uint8).numpy()
    new = base.copy()
    at = rng.choice(base.size // 2, base.size // 2 // 200, replace=False)  # half a percent of the values
    new.view(np.int16)[at] += rng.choice([-1, 1], at.size).astype(np.int16)
    made = delta.make(base.tobytes(), new.tobytes(), 2)
    # The least there is: where (entropy of the gaps, log2(e * 200) bits) and which of two ways (1 bit).
    least = at.size * (np.log2(np.e * 200) + 1) / 8
    assert least < len(made) < 1.25 * least


def test_what_is_no_delta_for_this_base_is_refused():
    base, new = bytes(100), bytes(50) + b"\1" + bytes(49)
    made = delta.make(base, new, 2)
    for bad in (b"", made[:-1], made + b"x", b"X" + made[1:], made[: len(made) // 2]):
        with pytest.raises(BadDelta, match=r"bytes that are no delta"):
            delta.apply(bytearray(base), bad)
    with pytest.raises(BadDelta, match="for a base of 100 bytes, and this one has 98"):
        delta.apply(bytearray(98), made)
    with pytest.raises(BadDelta, match="differ in length: 100 and 99"):
        delta.make(base, new[:-1], 2)


# --- versions


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    return str(tmp_path / "weights") if request.param == "disk" else f"memory://{tmp_path.name}/weights"


def trained(version: int) -> dict[str, torch.Tensor]:
    """Weights that differ a little from version to version."""
    torch.manual_seed(0)
    tensors = {"a": torch.randn(300, 40), "b": torch.randn(7), "count": torch.arange(3)}
    for v in range(version):
        tensors["a"].view(-1)[v * 17 % 12000] += 0.5
        tensors["count"][v % 3] += 1
    return tensors


class Publisher:
    def __init__(self, folder, full_every=5, dtype="bfloat16"):
        self.folder, self.dtype, self.deltas, self.events = folder, dtype, weights.Deltas(full_every), []

    def publish(self, version):
        tensors = trained(version)
        layout = weights.specs(tensors, self.dtype)
        full = weights.stage(self.folder, layout, ((n, tensors[n]) for n in weights.file_order(layout)), self.dtype)
        staged = self.deltas.stage(full, version, self.events[-1] if self.events else None)
        self.events.append(staged.offer(0, version, "run"))
        return self.events[-1]


def equal(event, version, held=None):
    got = weights.decode(event, weights.fetch(event, held))
    return all(torch.equal(got[n], t.bfloat16() if t.is_floating_point() else t) for n, t in trained(version).items())


def test_fifty_versions_end_bitwise_equal(folder):
    p = Publisher(folder, full_every=20)
    for version in range(51):
        event = p.publish(version)
        assert event.digest == weights.publish(f"{folder}-full", 0, version, trained(version), "run", "bfloat16").digest
        assert event.encoding == ("full" if version % 20 == 0 else "delta")
        assert event.base_version == (None if version % 20 == 0 else version - 1)
    sizes = {e.encoding: e.bytes for e in p.events}
    assert sizes["delta"] < 0.2 * sizes["full"]
    assert equal(p.events[50], 50) and equal(p.events[39], 39), "a newcomer takes the last full version and the chain after it"


def test_the_held_version_saves_the_chain(folder, monkeypatch):
    p = Publisher(folder, full_every=100)
    for version in range(8):
        p.publish(version)
    read = []
    fetch = weights._fetch
    monkeypatch.setattr(weights, "_fetch", lambda e: read.append(e.version) or fetch(e))
    held = p.events[5].digest, lambda: weights.fetch(p.events[5])
    full = held[1]()
    read.clear()
    assert equal(p.events[7], 7, (held[0], lambda: bytearray(full)))
    assert read == [7, 6], "two versions were missed, and no more is read"


def test_a_missing_or_wrong_link_is_refused(tmp_path):
    p = Publisher(str(tmp_path / "w"), full_every=100)
    for version in range(4):
        p.publish(version)
    with pytest.raises(BadWeights, match="version 2 .* expected digest"):
        other = weights.publish(str(tmp_path / "other"), 0, 1, trained(9), "run", "bfloat16")
        weights.decode(p.events[2], weights.fetch(p.events[2], (p.events[1].digest, lambda: weights.fetch(other))))
    os.unlink(p.events[1].uri)
    with pytest.raises(BadWeights, match="version 1 .* cannot be read"):
        weights.fetch(p.events[3])
    with open(p.events[2].uri, "r+b") as file:
        file.write(b"\xff" * 8)
    with pytest.raises(BadWeights, match="version 2 .* does not name its base"):
        weights.fetch(p.events[3])
    with pytest.raises(BadWeights, match="expected encoding full or delta, found 'int8'"):
        weights.fetch(dataclasses.replace(p.events[0], encoding="int8"))


def test_nothing_is_left_of_what_was_kept(tmp_path):
    p = Publisher(str(tmp_path / "w"))
    for version in range(4):
        p.publish(version)
    assert sorted(os.listdir(tmp_path / "w")) == sorted(os.path.basename(e.uri) for e in p.events)


def test_a_generator_puts_each_delta_upon_what_it_loaded_before(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    save_file({n: t.bfloat16() if t.is_floating_point() else t for n, t in trained(0).items()}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    p = Publisher(str(tmp_path / "w"), full_every=100)
    files = WeightFiles(str(model), "bfloat16")
    read = []
    fetch = weights._fetch
    monkeypatch.setattr(weights, "_fetch", lambda e: read.append(e.version) or fetch(e))
    for version in range(6):
        event = p.publish(version)
        if version == 3:
            continue  # overtaken before its turn
        loaded, phases = files.load(event)
        assert {n: t.tolist() for n, t in loaded.tensors} == {
            n: (t.bfloat16() if t.is_floating_point() else t).tolist() for n, t in trained(version).items()}
        assert phases.keys() == {"fetch", "decode"}
        loaded.release()
        assert torch.equal(dict(loaded.tensors)["a"], trained(version)["a"].bfloat16()), "what is written again after a failure"
        loaded.close()
    # Reading them again after `release` reads the version's own pinned file; none of them reads the chain.
    assert [v for v in read if v != 0] == [1, 1, 2, 2, 4, 3, 4, 5, 5]
