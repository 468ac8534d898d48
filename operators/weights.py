"""Policy versions as files: one a version, and the event that offers it.

A file is the version's safetensors bytes (encoding full), or what changed in them since the version before (encoding delta): the
event of its base, then operators/delta.py's bytes. Either way the event's digest is that of the full bytes.

Promises: an event exists only when its bytes are complete and on disk; the same tensors make the same full bytes, hence the same
digest, whatever made them and however they travel; nothing is decoded whose digest differs from its event's. A file is written under a
temporary name and renamed, so a reader sees all of it or nothing. Folders are paths, or fsspec URLs where a name holds "://", or
`SHARED_MEMORY`: then a version is an open file of the writer's that never had a name, and is gone with the process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from operators import delta
from schemas.record import BadRecord, encode
from schemas.record import decode as decode_record
from schemas.records import Weights, now
from schemas.settings import SHARED_MEMORY

SUFFIX = {"full": ".safetensors", "delta": ".delta"}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
           "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_NAME = re.compile(r"epoch-(\d+)-version-(\d+)\.(?:safetensors|delta)")
_LENGTH = struct.Struct("<Q")
_HANDLES = "/proc/"  # what the uri of an open file begins with
FULL_EVERY = 20  # versions, where the settings do not say

_in_memory: dict[tuple[int, int], str] = {}  # (epoch, version) -> uri of what this process offers in shared memory


class BadWeights(ValueError):
    """Weights that cannot be used; the text names the version, where it lies, what was expected and what was found."""


class Spec(NamedTuple):
    """What a published tensor is, known before its values are."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Staged:
    """Complete bytes that have no name yet: the digest decides which epoch they are offered under. A delta names its base."""

    def __init__(self, folder: str, path: str, digest: str, size: int, dtype: str, base_version: int | None = None):
        self.folder, self.path, self.digest, self.size, self.dtype, self.base_version = folder, path, digest, size, dtype, base_version

    @property
    def encoding(self) -> str:
        return "full" if self.base_version is None else "delta"

    def offer(self, epoch: int, version: int, run_id: str) -> Weights:
        """Give the bytes their name and return the event that says so."""
        uri = f"{self.folder.rstrip('/')}/epoch-{epoch:04d}-version-{version:08d}{SUFFIX[self.encoding]}"
        if self.folder == SHARED_MEMORY:
            if (before := _in_memory.get((epoch, version))) is not None:
                _remove(before)  # as a rename would; who has it open keeps it
            uri = _in_memory[epoch, version] = self.path
        elif "://" in uri:
            fs, remote = _remote(uri)
            fs.makedirs(remote.rsplit("/", 1)[0], exist_ok=True)
            fs.put_file(self.path, remote)  # an object appears whole, or not at all
            os.unlink(self.path)
        else:
            os.replace(self.path, uri)
            _sync_folder(self.folder)
        return Weights(run_id=run_id, epoch=epoch, version=version, digest=self.digest, uri=uri, encoding=self.encoding,
                       base_version=self.base_version, bytes=self.size, dtype=self.dtype, offered_at=now())

    def discard(self) -> None:
        """Remove the bytes: the version is on offer already, or a delta takes their place."""
        _remove(self.path)

    @staticmethod
    def is_there(event: Weights) -> bool:
        """Whether the file of an event on offer is there, with all its bytes."""
        try:
            if "://" in event.uri:
                fs, remote = _remote(event.uri)
                return fs.size(remote) == event.bytes
            if event.uri.startswith(_HANDLES) and event.uri not in _in_memory.values():
                return False  # a predecessor's; another process may have its number by now
            return os.path.getsize(event.uri) == event.bytes
        except Exception:  # see `_fetch`
            return False


def specs(tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, Spec]:
    """Floating-point tensors are published in `dtype`, others as they are."""
    to = getattr(torch, dtype)
    return {name: Spec(tuple(t.shape), to if t.is_floating_point() else t.dtype) for name, t in tensors.items()}


def file_order(layout: Mapping[str, Spec]) -> list[str]:
    """The order of the tensors in the file: wide types first, so that each is aligned, then by name."""
    return sorted(layout, key=lambda name: (-layout[name].dtype.itemsize, name))


def stage(folder: str, layout: Mapping[str, Spec], tensors: Iterable[tuple[str, torch.Tensor]], dtype: str) -> Staged:
    """Write and hash the tensors as they come, which must be in `file_order`: never more than one of them is held here."""
    digest, size = hashlib.sha256(), 0
    with _writing(folder) as (path, put):

        def write(data: bytes | memoryview) -> None:
            nonlocal size
            size += len(data)
            digest.update(data)
            put(data)

        write(_header(layout))
        left = iter(file_order(layout))
        for name, tensor in tensors:
            expected = next(left, None)
            if name != expected or tuple(tensor.shape) != layout[name].shape:
                raise BadWeights(f"publishing {folder}: expected tensor {expected!r}, found {name!r} of shape {tuple(tensor.shape)}")
            # contiguous, or a view would be published with its neighbours' bytes
            flat = tensor.detach().to("cpu", layout[name].dtype).contiguous().reshape(-1)
            if flat.numel():
                write(memoryview(flat.view(torch.uint8).numpy()))
        if (missing := next(left, None)) is not None:
            raise BadWeights(f"publishing {folder}: tensor {missing!r} never came")
    return Staged(folder, path, digest.hexdigest(), size, dtype)


@contextlib.contextmanager
def _writing(folder: str) -> Iterator[tuple[str, Callable[[bytes | memoryview], None]]]:
    """(path, what appends to it) of a file under a temporary name, or none: complete and readable after the body, gone if that fails."""
    if folder == SHARED_MEMORY:
        handle = os.memfd_create("pipelinerl-weights")
        path = by_handle(handle)
    else:
        local = folder if "://" not in folder else tempfile.gettempdir()
        os.makedirs(local, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix="writing-", suffix=".tmp", dir=local)
    try:
        with os.fdopen(handle, "wb", buffering=0, closefd=folder != SHARED_MEMORY) as file:

            def put(data: bytes | memoryview) -> None:
                while data := memoryview(data)[file.write(data):]:  # one write takes at most 2 GiB
                    pass

            yield path, put
            os.fsync(file.fileno())
        os.chmod(path, 0o644)  # generators may run as someone else
    except BaseException:
        _remove(path)
        raise


def publish(folder: str, epoch: int, version: int, tensors: Mapping[str, torch.Tensor], run_id: str, dtype: str) -> Weights:
    """Write a version's file and return its event. `dtype` names a torch dtype: float32, bfloat16 or float16."""
    layout = specs(tensors, dtype)
    return stage(folder, layout, ((name, tensors[name]) for name in file_order(layout)), dtype).offer(epoch, version, run_id)


class Deltas:
    """Makes a staged version a delta. Keeps the full bytes of the version before, in a file that has no name.

    Versions divisible by `full_every` stay full, and so does the first one it sees: no chain of deltas is longer.
    """

    def __init__(self, full_every: int):
        self._full_every = full_every
        self._held: tuple[str, int] | None = None  # digest, descriptor

    def stage(self, full: Staged, version: int, base: Weights | None) -> Staged:
        """`full` itself, or the delta to it from `base`, the event of the version offered before."""
        before, self._held = self._held, (full.digest, os.open(full.path, os.O_RDONLY))
        if before is None:
            return full
        digest, handle = before
        try:
            if base is None or base.digest != digest or version % self._full_every == 0:
                return full
            event = encode([base])
            changes = delta.make(read(by_handle(handle)), read(full.path), getattr(torch, full.dtype).itemsize)
            with _writing(full.folder) as (path, put):
                put(_LENGTH.pack(len(event)) + event + changes)
            full.discard()
            return Staged(full.folder, path, full.digest, os.path.getsize(path), full.dtype, base.version)
        finally:
            os.close(handle)


def by_handle(handle: int) -> str:
    """A path of an open file, whatever became of its own."""
    return f"{_HANDLES}{os.getpid()}/fd/{handle}"


#: A version at hand: its digest, and what reads its full bytes.
Held = tuple[str, Callable[[], bytearray]]


def fetch(event: Weights, held: Held | None = None) -> bytearray:
    """The full bytes of an offered version. Raises BadWeights if they are not there or have another size.

    A delta is put upon the version it names, that upon its own base, and so on down to a full one, or to `held` where that is met first.
    """
    deltas: list[tuple[Weights, memoryview]] = []
    at = event
    while at.encoding == "delta" and (held is None or held[0] != at.digest):
        base, changes = _split(at, _fetch(at))
        deltas.append((at, changes))
        if base.version >= at.version:
            raise BadWeights(f"{where(at)}: its base is version {base.version}, which is none before it")
        at = base
    if held is not None and held[0] == at.digest:
        buffer = held[1]()
    elif at.encoding == "full":
        buffer = _fetch(at)
    else:
        raise BadWeights(f"{where(at)}: expected encoding full or delta, found {at.encoding!r}")
    for of, changes in reversed(deltas):
        try:
            delta.apply(buffer, changes)
        except delta.BadDelta as e:
            raise BadWeights(f"{where(of)}: {e}") from e
    return buffer


def _split(event: Weights, file: bytearray) -> tuple[Weights, memoryview]:
    """What a delta's file holds: the event of its base, and the changes."""
    try:
        (length,) = _LENGTH.unpack_from(file)
        if (start := _LENGTH.size + length) > len(file):
            raise ValueError(f"it has {len(file)} bytes, which end within its head")
        (base,) = decode_record(Weights, bytes(file[_LENGTH.size:start]))
    except (struct.error, BadRecord, ValueError) as e:
        raise BadWeights(f"{where(event)} does not name its base: {e}") from e
    return base, memoryview(file)[start:]


def where(event: Weights) -> str:
    """A version as errors name it."""
    return f"version {event.version} (epoch {event.epoch}) at {event.uri}"


def _fetch(event: Weights) -> bytearray:
    """The bytes of an event's own file."""
    try:
        if "://" in event.uri:
            fs, path = _remote(event.uri)
            buffer = bytearray(fs.cat_file(path))
        else:
            buffer = read(event.uri)
    except Exception as e:  # clients of stores raise what they like: botocore's errors are no OSErrors
        raise BadWeights(f"version {event.version} (epoch {event.epoch}) cannot be read from {event.uri}: {e}") from e
    if len(buffer) != event.bytes:
        raise BadWeights(f"{where(event)}: expected {event.bytes} bytes, found {len(buffer)}")
    return buffer


def read(path: str) -> bytearray:
    """A local file."""
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(os.fstat(file.fileno()).st_size)
        view, at = memoryview(buffer), 0
        while at < len(buffer) and (n := file.readinto(view[at:])):
            at += n
        del view
        del buffer[at:]
    return buffer


def decode(event: Weights, buffer: bytearray) -> dict[str, torch.Tensor]:
    """The tensors of what `fetch` gave, whose memory they share. Raises BadWeights if digest or layout are wrong."""
    place = where(event)
    found = hashlib.sha256(buffer).hexdigest()
    if found != event.digest:
        raise BadWeights(f"{place}: expected digest {event.digest}, found {found}")
    try:
        (length,) = _LENGTH.unpack_from(buffer)
        head = json.loads(bytes(buffer[_LENGTH.size:_LENGTH.size + length]))
        data = _LENGTH.size + length
        out = {}
        for name, entry in head.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            count = (end - start) // dtype.itemsize
            flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=data + start) if count else torch.empty(0, dtype=dtype)
            out[name] = flat.reshape(entry["shape"])
    except (struct.error, ValueError, KeyError, TypeError, RuntimeError) as e:
        raise BadWeights(f"{place} is no safetensors file: {e}") from e
    return out


def expected_tensors(model_folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a Hugging Face model folder, from the headers of its safetensors files."""
    folder = Path(model_folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    out: dict[str, tuple[int, ...]] = {}
    for name in files:
        try:
            with open(folder / name, "rb") as file:
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                head = json.loads(file.read(length))
        except (OSError, struct.error, ValueError) as e:
            raise BadWeights(f"{folder} is no model folder: {name} cannot be read ({e}); "
                             "it needs config.json, tokenizer files and model.safetensors (or its shards with an index)") from e
        out |= {n: tuple(entry["shape"]) for n, entry in head.items() if n != "__metadata__"}
    return out


def check(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor], dtype: str | None = None,
          where: str = "weights") -> None:
    """Raise BadWeights naming the first differences in names, shapes or dtype."""
    wrong = [f"{n} is missing" for n in sorted(expected.keys() - tensors.keys())]
    wrong += [f"{n} is not in the model" for n in sorted(tensors.keys() - expected.keys())]
    for n in sorted(expected.keys() & tensors.keys()):
        if tuple(tensors[n].shape) != tuple(expected[n]):
            wrong.append(f"{n} has shape {tuple(tensors[n].shape)}, expected {tuple(expected[n])}")
        elif dtype is not None and tensors[n].is_floating_point() and tensors[n].dtype != getattr(torch, dtype):
            wrong.append(f"{n} is {tensors[n].dtype}, expected torch.{dtype}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise BadWeights(f"{where} do not fit the model: {'; '.join(wrong[:3])}{more}")


def versions(folder: str) -> dict[tuple[int, int], str]:
    """(epoch, version) -> uri of what is published in the folder; in shared memory, by this process."""
    if folder == SHARED_MEMORY:
        return dict(_in_memory)
    if "://" in folder:
        fs, path = _remote(folder)
        names = [p.rsplit("/", 1)[-1] for p in fs.ls(path, detail=False)] if fs.exists(path) else []
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    found = ((m, n) for n in names if (m := _NAME.fullmatch(n)))
    return {(int(m[1]), int(m[2])): f"{folder.rstrip('/')}/{n}" for m, n in found}


def prune(folder: str, keep_versions: set[int]) -> list[int]:
    """Remove the files of all other versions. Returns the versions removed."""
    gone = []
    for (epoch, version), uri in versions(folder).items():
        if version not in keep_versions:
            _remove(uri)
            _in_memory.pop((epoch, version), None)
            gone.append(version)
    return sorted(gone)


def sweep(folder: str) -> None:
    """Remove half-written files of a writer that died. Only for the one writer, before it writes."""
    if "://" not in folder and os.path.isdir(folder):
        for name in os.listdir(folder):
            if name.startswith("writing-") and name.endswith(".tmp"):
                os.unlink(os.path.join(folder, name))


def _header(layout: Mapping[str, Spec]) -> bytes:
    at, entries = 0, {}
    for name in file_order(layout):
        shape, dtype = layout[name]
        end = at + dtype.itemsize * torch.Size(shape).numel()
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _remote(url: str):
    import fsspec

    return fsspec.core.url_to_fs(url, use_listings_cache=False)  # others write there too


def _remove(uri: str) -> None:
    if "://" in uri:
        fs, path = _remote(uri)
        fs.rm(path)
    elif uri.startswith(_HANDLES):
        os.close(int(uri.rsplit("/", 1)[-1]))
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(uri)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
