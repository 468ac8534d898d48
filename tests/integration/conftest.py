"""One local stack for the whole test session, on ports of the kernel's choice; it ends with the session, also when that is killed."""

import socket

import pytest

from deploy.services import ports
from deploy.stack import Stack
from schemas.settings import Settings, StackSettings, load

#: What makes a run small; a test adds what it is about.
SMALL = {
    "generation.batch": 8, "generation.max_tokens": 50, "generation.max_model_len": 128, "generation.dtype": "float32",
    "generation.kv_cache_mb": 32, "grouping.group_size": 4, "packing.token_budget": 512, "training.batch": 32, "training.dtype": "float32",
}


def free_ports(count: int) -> list[int]:
    """Different ports nobody listens on; all are held until the last one is found."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def stack_settings(folder, **more) -> StackSettings:
    names = list(ports(StackSettings()))
    return StackSettings(**{"dir": folder, **dict(zip(names, free_ports(len(names)), strict=True)), **more})


class LocalStack:
    """The stack, and settings of runs on it: `stack.settings("run-1", **{"training.batch": 16})`."""

    def __init__(self, stack: Stack, runs):
        self.stack, self.runs = stack, runs

    def settings(self, run_id: str, **flags) -> Settings:
        """Settings with this stack's addresses; the run's folder is a temporary one unless `run.dir` is given."""
        s = self.stack.settings
        here = {"run.id": run_id, "run.dir": str(self.runs)}
        here |= {"kafka.bootstrap": self.stack.kafka_bootstrap, "mlflow.uri": self.stack.mlflow_uri}
        here |= {f"stack.{name}": value for name, value in s.model_dump(mode="json", exclude_none=True).items()}
        return load(None, here | flags)


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    with Stack(stack_settings(tmp_path_factory.mktemp("stack"), task_slots=12)).owned() as up:
        print(f"logs of the stack: {up.logs}")
        yield LocalStack(up, tmp_path_factory.mktemp("runs"))
