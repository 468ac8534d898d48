import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from operators import weights
from operators.weights import BadWeights
from schemas.settings import SHARED_MEMORY
from tests.object_store import ObjectStore

TENSORS = {"b.weight": torch.arange(15.0).reshape(3, 5), "a": torch.randn(7), "count": torch.arange(3), "none": torch.zeros(0, 4),
           "one": torch.tensor(2.0)}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    made = ObjectStore(tmp_path_factory.mktemp("s3") / "store")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        yield made
    made.stop()


@pytest.fixture(params=["disk", "shared memory", "memory", "s3"])
def folder(request, tmp_path):
    """A path, an open file without a name, and URLs: fsspec's own memory, and a real object store."""
    if request.param == "disk":
        return str(tmp_path / "weights")
    if request.param == "shared memory":
        request.addfinalizer(lambda: weights.prune(SHARED_MEMORY, set()))
        return SHARED_MEMORY
    return f"memory://{tmp_path.name}/weights" if request.param == "memory" else f"{request.getfixturevalue('store').url}/{tmp_path.name}/weights"


def publish(folder, version=3, tensors=TENSORS, dtype="bfloat16", epoch=0):
    return weights.publish(folder, epoch, version, tensors, "run", dtype)


def test_what_is_published_comes_back_in_its_dtype(folder):
    event = publish(folder)
    back = weights.decode(event, weights.fetch(event))
    assert back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert back[name].dtype == expected.dtype and torch.equal(back[name], expected)
    assert (event.version, event.dtype, event.bytes) == (3, "bfloat16", len(weights.fetch(event)))


def test_safetensors_reads_the_file(tmp_path):
    event = publish(str(tmp_path), dtype="float32")
    assert all(torch.equal(t, TENSORS[n]) for n, t in load_file(event.uri).items())


def test_equal_tensors_make_equal_bytes_in_any_order_and_layout(folder):
    shuffled = dict(reversed(TENSORS.items())) | {"b.weight": TENSORS["b.weight"].t().contiguous().t()}
    assert publish(folder, 3).digest == publish(folder, 4, shuffled).digest
    assert publish(folder, 5, TENSORS | {"one": torch.tensor(2.5)}).digest != publish(folder, 3).digest


def test_a_view_publishes_its_own_values_only(folder):
    base = torch.arange(20.0).reshape(4, 5)
    event = publish(folder, tensors={"column": base[:, 1]}, dtype="float32")
    assert torch.equal(weights.decode(event, weights.fetch(event))["column"], base[:, 1].contiguous())


def test_a_changed_byte_is_refused_with_version_place_and_digests(folder):
    event = publish(folder)
    buffer = weights.fetch(event)
    buffer[-1] ^= 1
    with pytest.raises(BadWeights, match=rf"version 3 .*{event.uri}.*expected digest {event.digest}, found [0-9a-f]{{64}}"):
        weights.decode(event, buffer)


def test_missing_and_short_files_are_refused(tmp_path):
    event = publish(str(tmp_path))
    os.truncate(event.uri, event.bytes - 1)
    with pytest.raises(BadWeights, match=f"expected {event.bytes} bytes, found {event.bytes - 1}"):
        weights.fetch(event)
    os.unlink(event.uri)
    with pytest.raises(BadWeights, match="cannot be read"):
        weights.fetch(event)


def test_bytes_that_are_gone_or_cut_short_are_not_there(folder):
    event = publish(folder)
    assert weights.Staged.is_there(event)
    assert not weights.Staged.is_there(dataclasses.replace(event, bytes=event.bytes + 1))
    weights.prune(folder, set())
    assert not weights.Staged.is_there(event)


def test_a_store_that_is_away_is_a_refusal_and_what_it_had_is_there_again(store, tmp_path):
    """kill -9 of the server: its client's errors are no OSErrors, and must not be the end of a loader."""
    event = publish(f"{store.url}/{tmp_path.name}")
    store.stop()
    try:
        with pytest.raises(BadWeights, match=f"version 3 .*cannot be read from {event.uri}"):
            weights.fetch(event)
        assert not weights.Staged.is_there(event)
    finally:
        store.start()
    assert weights.decode(event, weights.fetch(event)).keys() == TENSORS.keys()


def test_nothing_is_visible_before_it_is_offered(tmp_path):
    layout = weights.specs(TENSORS, "float32")
    staged = weights.stage(str(tmp_path), layout, ((n, TENSORS[n]) for n in weights.file_order(layout)), "float32")
    assert weights.versions(str(tmp_path)) == {}
    event = staged.offer(2, 7, "run")
    assert weights.versions(str(tmp_path)) == {(2, 7): event.uri}


WRITER = """
import sys, torch
from operators import weights
event = weights.publish(weights.SHARED_MEMORY, 0, 4, {"a": torch.arange(1000.0)}, "run", "float32")
print(event.uri, event.digest, event.bytes, flush=True)
sys.stdin.read()
"""


def test_shared_memory_is_read_by_others_and_gone_with_its_writer(tmp_path):
    """kill -9 of the writer leaves nothing behind; who has opened a version keeps it; a successor does not take it for its own."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        uri, digest, size = writer.stdout.readline().split()
        event = dataclasses.replace(publish(SHARED_MEMORY, 4), uri=uri, digest=digest, bytes=int(size), dtype="float32")
        assert torch.equal(weights.decode(event, weights.fetch(event))["a"], torch.arange(1000.0))
        assert not weights.Staged.is_there(event), "it is another process's"
        with open(uri, "rb") as held:
            writer.kill()
            writer.wait()
            with pytest.raises(BadWeights, match="cannot be read"):
                weights.fetch(event)
            assert len(held.read()) == event.bytes
    finally:
        writer.kill()
        weights.prune(SHARED_MEMORY, set())


def test_a_discarded_or_pruned_version_in_shared_memory_gives_its_memory_back():
    before = set(os.listdir("/proc/self/fd"))
    layout = weights.specs(TENSORS, "float32")
    weights.stage(SHARED_MEMORY, layout, ((n, TENSORS[n]) for n in weights.file_order(layout)), "float32").discard()
    with pytest.raises(BadWeights, match="never came"):
        weights.stage(SHARED_MEMORY, layout, [], "float32")
    for version in (0, 1, 2, 1):
        publish(SHARED_MEMORY, version)
    assert weights.prune(SHARED_MEMORY, {1}) == [0, 2] and weights.prune(SHARED_MEMORY, set()) == [1]
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_failed_publication_leaves_nothing_behind(tmp_path):
    layout = weights.specs(TENSORS, "float32")
    with pytest.raises(BadWeights, match="never came"):
        weights.stage(str(tmp_path), layout, [(n, TENSORS[n]) for n in weights.file_order(layout)][:2], "float32")
    with pytest.raises(BadWeights, match="expected tensor"):
        weights.stage(str(tmp_path), layout, TENSORS.items(), "float32")
    assert os.listdir(tmp_path) == []


def test_prune_keeps_what_it_is_told_and_sweep_removes_half_written_files(folder):
    for version in range(5):
        publish(folder, version)
    assert weights.prune(folder, {1, 4}) == [0, 2, 3]
    assert {v for _, v in weights.versions(folder)} == {1, 4}


def test_sweep_removes_only_half_written_files(tmp_path):
    event = publish(str(tmp_path))
    (tmp_path / "writing-x.tmp").write_bytes(b"half")
    weights.sweep(str(tmp_path))
    assert os.listdir(tmp_path) == [os.path.basename(event.uri)]


def test_expected_tensors_of_one_file_and_of_shards(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    assert weights.expected_tensors(tmp_path) == {"a": (2, 3)}
    save_file({"b": torch.zeros(4)}, tmp_path / "shard-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "shard-2.safetensors"}}))
    assert weights.expected_tensors(tmp_path) == {"a": (2, 3), "b": (4,)}


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(BadWeights, match=r"is no model folder: model\.safetensors cannot be read"):
        weights.expected_tensors(tmp_path)


def test_check_names_the_first_differences():
    expected = {"a": (2, 3), "b": (4,), "c": (1,)}
    weights.check(expected, {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)}, "float32")
    with pytest.raises(BadWeights, match=r"b is missing; d is not in the model; a has shape \(3, 2\), expected \(2, 3\); and 1 more"):
        weights.check(expected, {"a": torch.zeros(3, 2), "c": torch.zeros(1).bfloat16(), "d": torch.zeros(1)}, "float32")
