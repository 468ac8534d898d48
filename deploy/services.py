"""The services of the local stack: what each is started with, and how it says that it is ready.

Everything listens on the loopback. Nothing here starts a process: deploy/supervisor.py does.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import shlex
import socket
import struct
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from deploy import rest
from deploy.jars import cache_dir, connector_jar, flink_opt, java_home, kafka_jars
from schemas.settings import KafkaSettings, StackSettings

HOST = "127.0.0.1"
#: Set in every process of a stack, to its folder: what belongs to a stack can be found whatever became of its parents.
MARKER = "PIPELINERL_STACK"


@dataclasses.dataclass(frozen=True)
class Spec:
    """A service as it is started. `ready` answers within a second; `logs` are the files whose last lines explain a failure."""

    name: str
    port: int
    command: list[str]
    env: dict[str, str]
    logs: tuple[Path, ...]
    ready: Callable[[], bool]


def ports(settings: StackSettings) -> dict[str, int]:
    """Setting name of each port the stack listens on, and its number."""
    return {name: getattr(settings, name) for name in
            ("kafka_port", "kafka_controller_port", "flink_rest_port", "flink_rpc_port", "mlflow_port")}


def specs(settings: StackSettings) -> list[Spec]:
    """Write the configuration files and say what to start. `settings.dir` is absolute. Raises deploy.jars.JarsAway."""
    for folder in ("logs", "kafka", "flink/conf", "flink/tmp", "flink/checkpoints", "flink/savepoints", "mlflow", "torch_extensions"):
        (settings.dir / folder).mkdir(parents=True, exist_ok=True)
    java = java_home()
    env = environment(settings.dir, java)
    return [_kafka(settings, java, env), *_flink(settings, java, env), _mlflow(settings, env)]


def environment(folder: Path, java: Path) -> dict[str, str]:
    """What every process of the stack sees. Flink's Python workers inherit it from the task manager."""
    env = dict(os.environ)
    for name in ("FLINK_ENV_JAVA_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "KAFKA_OPTS"):
        env.pop(name, None)
    env |= {
        MARKER: str(folder), "JAVA_HOME": str(java), "PYTHONUNBUFFERED": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(java / "bin"), env.get("PATH", os.defpath)]),
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
        # Engines and ranks talk to each other on the loopback only.
        "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": env.get("VLLM_LOGGING_LEVEL", "WARNING"), "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if not has_gpu():
        env |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    return with_bytecode(env)


def with_bytecode(env: dict[str, str]) -> dict[str, str]:
    """Where the user wants no bytecode beside the sources it goes to the cache folder. Without any, each worker, engine and rank
    compiles torch anew, which is half of its start."""
    env = dict(env)
    if env.pop("PYTHONDONTWRITEBYTECODE", None):
        env.setdefault("PYTHONPYCACHEPREFIX", str(cache_dir() / "pycache"))
    return env


def has_gpu() -> bool:
    """Whether a CUDA device is visible, without loading torch."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(re.fullmatch(r"nvidia\d+", d) for d in os.listdir("/dev"))


def _java(java: Path, heap_mb: int, *more: str) -> list[str]:
    options = [str(java / "bin" / "java"), f"-Xmx{heap_mb}m", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError"]
    if len(os.sched_getaffinity(0)) <= 4:
        # The optimising compiler costs as much as the whole start (12 against 7 CPU-s for the three JVMs), on cores that engines want.
        options.append("-XX:TieredStopAtLevel=1")
    return [*options, *more]


LOG4J = """\
rootLogger.level = {level}
rootLogger.appenderRef.file.ref = File
appender.file.name = File
appender.file.type = RollingFile
appender.file.fileName = {file}
appender.file.filePattern = {file}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd HH:mm:ss,SSS}} %-5p %c{{1.}} %x- %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 50MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
{more}"""


def _log4j(path: Path, log: Path, level: str = "INFO", **loggers: str) -> list[str]:
    more = "".join(f"logger.{i}.name = {name}\nlogger.{i}.level = {of}\n" for i, (name, of) in enumerate(loggers.items()))
    path.write_text(LOG4J.format(level=level, file=log, more=more))
    return [f"-Dlog4j2.configurationFile={path}", f"-Dlog4j.configurationFile={path}", f"-Dlog.file={log}"]


def _logs(settings: StackSettings, name: str) -> tuple[Path, Path]:
    return settings.dir / "logs" / f"{name}.log", settings.dir / "logs" / f"{name}.out"


# --- Kafka


def kafka_properties(settings: StackSettings) -> dict[str, object]:
    """server.properties of one broker that is its own controller."""
    largest = KafkaSettings().max_message_bytes
    return {
        "process.roles": "broker,controller", "node.id": 1, "controller.quorum.voters": f"1@{HOST}:{settings.kafka_controller_port}",
        "listeners": f"PLAINTEXT://{HOST}:{settings.kafka_port},CONTROLLER://{HOST}:{settings.kafka_controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{settings.kafka_port}", "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT", "log.dirs": settings.dir / "kafka" / "data",
        "auto.create.topics.enable": "false", "num.partitions": 1, "default.replication.factor": 1,
        "log.retention.ms": -1, "log.retention.bytes": -1, "log.segment.bytes": 256 << 20,
        "message.max.bytes": largest, "replica.fetch.max.bytes": largest, "socket.request.max.bytes": 2 * largest,
        "offsets.topic.replication.factor": 1, "offsets.topic.num.partitions": 1, "group.initial.rebalance.delay.ms": 0,
        "transaction.state.log.replication.factor": 1, "transaction.state.log.min.isr": 1, "transaction.state.log.num.partitions": 1,
        "share.coordinator.state.topic.replication.factor": 1, "share.coordinator.state.topic.min.isr": 1,
        "log.cleaner.dedupe.buffer.size": 4 << 20,  # one small compacted topic; the default takes 128 MiB of heap
        "num.network.threads": 2, "num.io.threads": 4, "num.recovery.threads.per.data.dir": 2,
    }


def _kafka(settings: StackSettings, java: Path, env: dict[str, str]) -> Spec:
    folder, logs = settings.dir / "kafka", _logs(settings, "kafka")
    properties = folder / "server.properties"
    properties.write_text("".join(f"{k}={v}\n" for k, v in kafka_properties(settings).items()))
    classpath = ":".join(map(str, kafka_jars()))
    options = _log4j(folder / "log4j2.properties", logs[0], "WARN", **{"kafka.server": "INFO"})
    run = _java(java, 512, *options, "-cp", classpath)
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    # With `=`, since it may begin with a dash.
    form = [*run, "kafka.tools.StorageTool", "format", "--ignore-formatted", f"--cluster-id={cluster}", "-c", str(properties)]
    main = [*run, "kafka.Kafka", str(properties)]
    formatted = folder / "data" / "meta.properties"
    script = f"[ -f {shlex.quote(str(formatted))} ] || {shlex.join(form)} || exit 1; exec {shlex.join(main)}"
    return Spec("kafka", settings.kafka_port, ["/bin/sh", "-c", script], env, logs, lambda: kafka_answers(settings.kafka_port))


def kafka_answers(port: int) -> bool:
    """Whether a broker on the loopback is in service: its metadata names it."""
    # Metadata, version 4, no topics: api key, version, correlation id, client id, topics, whether to create them.
    request = struct.pack(">hhi", 3, 4, 1) + struct.pack(">h", 2) + b"up" + struct.pack(">i?", 0, False)
    try:
        with socket.create_connection((HOST, port), 0.5) as client:
            client.settimeout(1.0)
            client.sendall(struct.pack(">i", len(request)) + request)
            with client.makefile("rb") as answer:
                head = answer.read(16)
    except OSError:
        return False
    return len(head) == 16 and struct.unpack(">iiii", head)[3] > 0  # length, correlation id, throttling, number of brokers


# --- Flink


def flink_home() -> Path:
    """The Flink distribution inside the apache-flink wheel."""
    import importlib.util

    return Path(importlib.util.find_spec("pyflink").origin).parent


def flink_java_options() -> str:
    """The module openings Flink needs, as the wheel's own configuration has them."""
    text = (flink_home() / "conf" / "config.yaml").read_text()
    return re.search(r"^env:\n  java:\n    opts:\n      all: (.*)$", text, re.M)[1]


def flink_classpath() -> str:
    """In the order of Flink's own scripts: by name, the distribution last."""
    jars = sorted((flink_home() / "lib").glob("*.jar"))
    return ":".join(map(str, sorted(jars, key=lambda j: j.name.startswith("flink-dist"))))


def flink_env(env: dict[str, str], conf: Path) -> dict[str, str]:
    home = flink_home()
    return env | {"FLINK_HOME": str(home), "FLINK_CONF_DIR": str(conf), "FLINK_LIB_DIR": str(home / "lib"),
                  "FLINK_OPT_DIR": str(home / "opt"), "FLINK_PLUGINS_DIR": str(home / "plugins"), "FLINK_LOG_DIR": str(conf.parent)}


def flink_configuration(settings: StackSettings) -> dict[str, object]:
    """config.yaml of job manager, task manager and client."""
    folder = settings.dir / "flink"
    fixed = {"framework.off-heap.size": 128, "task.off-heap.size": 0, "network.min": 128, "network.max": 128, "managed.size": 256,
             "jvm-metaspace.size": 320, "jvm-overhead.min": 128, "jvm-overhead.max": 128, "framework.heap.size": 128}
    taken = sum(v for k, v in fixed.items() if not k.endswith(".max"))
    if settings.task_manager_mb < taken + 128:
        raise ValueError(f"stack.task_manager_mb is {settings.task_manager_mb}; the task manager needs at least {taken + 128}")
    memory = fixed | {"task.heap.size": settings.task_manager_mb - taken}
    return {
        "env.java.opts.all": flink_java_options(),
        "jobmanager.rpc.address": HOST, "jobmanager.rpc.port": settings.flink_rpc_port, "jobmanager.bind-host": HOST,
        "rest.address": HOST, "rest.bind-address": HOST, "rest.port": settings.flink_rest_port, "web.submit.enable": "false",
        "taskmanager.host": HOST, "taskmanager.bind-host": HOST, "taskmanager.numberOfTaskSlots": settings.task_slots,
        "taskmanager.cpu.cores": float(len(os.sched_getaffinity(0))),
        **{f"taskmanager.memory.{k}": f"{v}m" for k, v in memory.items()},
        "python.executable": sys.executable, "python.client.executable": sys.executable,
        "parallelism.default": 1,
        "restart-strategy.type": "fixed-delay", "restart-strategy.fixed-delay.attempts": 20, "restart-strategy.fixed-delay.delay": "1 s",
        "execution.checkpointing.dir": (folder / "checkpoints").as_uri(),
        "execution.checkpointing.savepoint-dir": (folder / "savepoints").as_uri(),
        "io.tmp.dirs": folder / "tmp", "web.tmpdir": folder / "tmp",
        # A task manager that is gone refuses connections, which two heartbeats notice; one that is only slow on busy cores is left alone.
        "heartbeat.interval": 2000, "heartbeat.timeout": 30000, "heartbeat.rpc-failure-threshold": 2,
        # Both managers start at once: the first attempt to register comes too early, the next must not wait for 10 s.
        "cluster.registration.initial-timeout": 200, "cluster.registration.error-delay": 300,
        "cluster.registration.refused-registration-delay": 300,
    }


def _flink(settings: StackSettings, java: Path, env: dict[str, str]) -> list[Spec]:
    folder = settings.dir / "flink"
    conf = folder / "conf"
    configuration = flink_configuration(settings)
    (conf / "config.yaml").write_text("".join(f"{k}: {v}\n" for k, v in configuration.items()))
    env = flink_env(env, conf)
    # What every job brings along, here once for all (Flink's own loader goes before the jobs'): loaded anew for each job it would fill
    # the metaspace, 55 MB a run, given back late or never, until the task manager ends itself.
    classpath = ":".join([flink_classpath(), *map(str, flink_opt(flink_home()).glob("*.jar")), str(connector_jar())])
    openings = flink_java_options().split()
    address = f"{HOST}:{settings.flink_rest_port}"
    memory = {k: int(str(v).rstrip("m")) for k, v in configuration.items() if k.startswith("taskmanager.memory.")}

    def spec(name: str, port: int, main: str, heap_mb: int, more: list[str], ready: Callable[[], bool]) -> Spec:
        logs = _logs(settings, name)
        loggers = {"org.apache.pekko": "WARN", "org.apache.kafka": "WARN", "PythonWorker": "INFO",
                   # At this level the output of Python workers, and of what they start, comes out with the task manager's own.
                   "org.apache.beam.runners.fnexecution.environment.ProcessManager": "DEBUG"}
        options = [*more, *openings, *_log4j(conf / f"{name}.properties", logs[0], **loggers), f"-Djava.io.tmpdir={folder / 'tmp'}"]
        command = [*_java(java, heap_mb, *options), "-cp", classpath, main, "-c", str(conf)]
        return Spec(name, port, command, env, logs, ready)

    heap = memory["taskmanager.memory.framework.heap.size"] + memory["taskmanager.memory.task.heap.size"]
    direct = memory["taskmanager.memory.framework.off-heap.size"] + memory["taskmanager.memory.network.max"]
    metaspace = f"-XX:MaxMetaspaceSize={memory['taskmanager.memory.jvm-metaspace.size']}m"
    return [
        spec("jobmanager", settings.flink_rest_port, "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint",
             512, ["-XX:MaxMetaspaceSize=320m"], lambda: _slots(address) is not None),
        spec("taskmanager", settings.flink_rpc_port, "org.apache.flink.runtime.taskexecutor.TaskManagerRunner",
             heap, [f"-XX:MaxDirectMemorySize={direct}m", metaspace], lambda: (_slots(address) or 0) >= settings.task_slots),
    ]


def _slots(address: str) -> int | None:
    """Slots of the cluster; None if its REST interface does not answer."""
    try:
        return json.loads(rest.request(address, "/overview", timeout_s=1))["slots-total"]
    except rest.Unreachable:
        return None


# --- MLflow


def _mlflow(settings: StackSettings, env: dict[str, str]) -> Spec:
    # -P: this folder must not come before site-packages in the server's path.
    port, program = settings.mlflow_port, Path(__file__).with_name("mlflow_server.py")
    command = [sys.executable, "-P", str(program), str(port), str(settings.dir / "mlflow")]
    return Spec("mlflow", port, command, env, _logs(settings, "mlflow")[1:], lambda: _healthy(port))


def _healthy(port: int) -> bool:
    try:
        return rest.request(f"{HOST}:{port}", "/health", timeout_s=1) == b"OK"
    except rest.Unreachable:
        return False
