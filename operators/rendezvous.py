"""How the ranks of a train job find each other, again after every restart.

Promises: ranks of one incarnation meet, never a predecessor that is dead or dying; a rank that does not come is named when the
deadline passes; no port is configured. Rank 0 opens a store on a port of the kernel's choice and publishes it, with an id of its own,
in a file that all ranks can read. The others join the newest id and wait until rank 0 answers *them*: attempt numbers of Flink differ
between subtasks after a rescale and are no key.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from schemas.settings import Settings

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
POLL_S = 0.05
CONNECT_S = 2.0  # a store that does not answer in this time is a dead one


class RanksAbsent(TimeoutError):
    """Ranks did not meet in time; the text names the absent ones."""


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where the ranks met."""

    store: dist.TCPStore
    address: str
    rank: int
    world: int
    local_rank: int  # among the ranks of this host
    one_host: bool


def meet(file: Path, rank: int, world: int, timeout_s: float, *, loopback: bool) -> Meeting:
    """Block until all ranks are there. Raises RanksAbsent."""
    file.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    return _host(file, world, deadline, timeout_s, loopback) if rank == 0 else _join(file, rank, world, deadline, timeout_s)


def _host(file: Path, world: int, deadline: float, timeout_s: float, loopback: bool) -> Meeting:
    address = "127.0.0.1" if loopback else socket.getfqdn()
    listener = socket.create_server(("127.0.0.1" if loopback else "", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(address, port, world, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
                          master_listen_fd=listener.detach())
    me = {"id": uuid.uuid4().hex, "address": address, "port": port, "world": world}
    temporary = file.with_name(f"{file.name}.{me['id']}")
    temporary.write_text(json.dumps(me))
    os.replace(temporary, file)
    here = socket.gethostname()
    came = {0: {"nonce": me["id"], "host": here}}
    while len(came) < world:
        for r in range(1, world):
            if r not in came and store.check([f"join/{r}"]):
                came[r] = json.loads(store.get(f"join/{r}"))
        if len(came) < world:
            if time.monotonic() > deadline:
                raise RanksAbsent(f"rank 0 waited {timeout_s:g} s for {world} ranks: {_named(set(range(world)) - set(came))} did not come "
                                  "(are there enough task slots? training.rendezvous_timeout_s is the limit)")
            time.sleep(POLL_S)
    store.set("go", json.dumps({str(r): c for r, c in came.items()}))
    return _meeting(store, address, 0, world, came)


def _join(file: Path, rank: int, world: int, deadline: float, timeout_s: float) -> Meeting:
    nonce, missed = uuid.uuid4().hex, set()
    while True:
        if time.monotonic() > deadline:
            raise RanksAbsent(f"rank {rank} waited {timeout_s:g} s: rank 0 did not come (no live store is named in {file})")
        published = _read(file)
        if published is None or published["id"] in missed:
            time.sleep(POLL_S)
            continue
        if published["world"] != world:
            missed.add(published["id"])
            continue
        try:
            # Fails fast if nobody listens any more; the store's own client would try again for long.
            socket.create_connection((published["address"], published["port"]), CONNECT_S).close()
            store = dist.TCPStore(published["address"], published["port"], world, is_master=False, wait_for_workers=False,
                                  timeout=timedelta(seconds=CONNECT_S))
            store.set(f"join/{rank}", json.dumps({"nonce": nonce, "host": socket.gethostname()}))
            while not store.check(["go"]):
                newest = _read(file)
                if time.monotonic() > deadline or (newest is not None and newest["id"] != published["id"]):
                    break
                time.sleep(POLL_S)
            else:
                came = {int(r): c for r, c in json.loads(store.get("go")).items()}
                if came[rank]["nonce"] == nonce:
                    store.set_timeout(timedelta(seconds=timeout_s))
                    return _meeting(store, published["address"], rank, world, came)
                missed.add(published["id"])  # a predecessor's store: its ranks have met already
        except (OSError, dist.DistError):
            missed.add(published["id"])


def _meeting(store: dist.TCPStore, address: str, rank: int, world: int, came: dict[int, dict]) -> Meeting:
    hosts = [came[r]["host"] for r in range(world)]
    return Meeting(store, address, rank, world, hosts[:rank].count(hosts[rank]), len(set(hosts)) == 1)


def _read(file: Path) -> dict | None:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None


def _named(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def join(settings: Settings, rank: int, world: int, device: str) -> Meeting:
    """Meet and make the process group of torch and DeepSpeed. `device` is cpu or cuda."""
    t = settings.training
    loopback = all(b.rsplit(":", 1)[0] in LOOPBACK for b in settings.kafka.bootstrap.split(","))
    met = meet(settings.run_dir / "rendezvous.json", rank, world, t.rendezvous_timeout_s, loopback=loopback)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(met.local_rank),
                   "MASTER_ADDR": met.address, "MASTER_PORT": str(met.store.port),
                   "DEEPSPEED_TIMEOUT": str(max(1, round(t.stall_timeout_s / 60)))}  # minutes, of the groups DeepSpeed makes
    if met.one_host:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    stall = timedelta(seconds=t.stall_timeout_s)
    if device == "cuda":
        import torch

        torch.cuda.set_device(met.local_rank)
        dist.init_process_group("nccl", store=met.store, rank=rank, world_size=world, timeout=stall,
                                device_id=torch.device("cuda", met.local_rank))
    else:
        dist.init_process_group("gloo", store=met.store, rank=rank, world_size=world, timeout=stall)
    import deepspeed

    if device == "cpu":
        # An operation DeepSpeed would compile (36 s, with a lock file that outlives a kill) and that gloo does not need.
        for name in deepspeed.ops.__compatible_ops__:
            deepspeed.ops.__compatible_ops__[name] = False
    deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo")
    return met


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
