"""Jobs on a Flink cluster: package, submit, watch, cancel.

The cluster is the local stack's, or any that `stack.flink_rest` names. Submitting runs Flink's own client, as `flink run` does; what
`bin/flink` does around it (a shell and a second JVM that parses config.yaml) is left out.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from deploy import rest
from deploy.jars import connector_jar, flink_opt, java_home
from deploy.services import HOST, flink_classpath, flink_env, flink_home, flink_java_options, with_bytecode
from schemas.settings import Settings

PACKAGES = ("schemas", "operators", "jobs", "deploy")
JOBS = ("generate", "preprocess", "train")
#: States of a job that change no more.
ENDED = ("FINISHED", "FAILED", "CANCELED", "SUSPENDED", "LOST")
CLIENT_TIMEOUT_S = 300


class SubmitFailed(RuntimeError):
    """The client did not submit the job; the text has its cause."""


def address(settings: Settings) -> str:
    """host:port of the cluster's REST interface."""
    return settings.stack.flink_rest or f"{HOST}:{settings.stack.flink_rest_port}"


def package(out: Path, packages: tuple[str, ...] = PACKAGES) -> Path:
    """The project as a zip for `flink run -pyfs`: its packages, and nothing else of the folder they lie in.

    The same sources give the same bytes.
    """
    out = Path(out).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in packages:
            folder = Path(importlib.util.find_spec(name).origin).parent
            for path in sorted(folder.rglob("*.py")):
                entry = zipfile.ZipInfo(f"{name}/{path.relative_to(folder).as_posix()}", (1980, 1, 1, 0, 0, 0))
                entry.external_attr = 0o644 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
    _write(out, content.getvalue())
    return out


def submit(name: str, settings: Settings, *, from_checkpoint: str | None = None) -> str:
    """Submit one of the three jobs, detached, and return its id. Raises SubmitFailed, rest.Unreachable, deploy.jars.JarsAway."""
    if name not in JOBS:
        raise ValueError(f"there is no job {name!r}: {', '.join(JOBS)}")
    folder = settings.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    _write(file, settings.model_dump_json(indent=1).encode())
    arguments = ["--settings-json", str(file)]
    return submit_module(f"jobs.{name}", package(folder / "pipelinerl.zip"), arguments, address(settings), folder, from_checkpoint)


def submit_module(module: str, archive: Path, arguments: list[str], cluster: str, folder: Path, from_checkpoint: str | None = None) -> str:
    """Submit a Python module out of a zip; `folder` takes the client's log and configuration."""
    rest.request(cluster, "/overview")  # a cluster that is away is said at once, not after the client's own retries
    conf = folder / "flink-client"
    conf.mkdir(parents=True, exist_ok=True)
    _write(conf / "config.yaml", f"env.java.opts.all: {flink_java_options()}\n".encode())
    host, port = cluster.rsplit(":", 1)
    java = java_home()
    command = [
        str(java / "bin" / "java"), "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
        *flink_java_options().split(), "-cp", flink_classpath(), "org.apache.flink.client.cli.CliFrontend",
        "run", "-d", "-t", "remote", "-D", f"rest.address={host}", "-D", f"rest.port={port}",
        *(["-s", from_checkpoint] if from_checkpoint else []),
        "-pyfs", str(archive), "-pym", module, "-pyexec", sys.executable, "-pyclientexec", sys.executable,
        "--jarfile", str(connector_jar()), *arguments,
    ]
    env = flink_env(with_bytecode(dict(os.environ)), conf) | {"JAVA_HOME": str(java), "FLINK_OPT_DIR": str(flink_opt(flink_home()))}
    log = folder / f"submit-{module.rsplit('.', 1)[-1]}.log"
    with log.open("w") as out:
        try:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, timeout=CLIENT_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            code = None
    said = log.read_text(errors="replace")
    found = re.search(r"Job has been submitted with JobID ([0-9a-f]{32})", said)
    if not found:
        how = f"did not end within {CLIENT_TIMEOUT_S} s" if code is None else f"ended with exit status {code}"
        raise SubmitFailed(f"{module} was not submitted to {cluster}: the client {how}; the last lines of {log}:\n{_cause(said)}")
    return found[1]


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: three submits may write the same file at once."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _cause(said: str, count: int = 20) -> str:
    """The lines that say something, each once: not the Java frames, which repeat their cause three times."""
    lines = [line for line in said.splitlines() if line.strip() and not re.match(r"\s+at [\w.$/]+\(|\s+\.\.\. \d+ more|WARNING:", line)]
    return "\n".join(list(dict.fromkeys(lines))[-count:])


def _get(settings: Settings, path: str) -> dict:
    return json.loads(rest.request(address(settings), path))


def jobs(settings: Settings) -> list[dict]:
    """Every job the cluster knows: id (jid), name, state."""
    return _get(settings, "/jobs/overview")["jobs"]


def job_state(job: str, settings: Settings) -> str:
    """RUNNING, RESTARTING, FAILED, ...; LOST if the cluster does not know the job: its job manager was started anew."""
    try:
        return _get(settings, f"/jobs/{job}/status")["status"]
    except rest.Unreachable as e:
        if not _is_unknown(e):
            raise
        return "LOST"


def exceptions(job: str, settings: Settings) -> str | None:
    """The cause of the job's latest failure, or None if it had none."""
    try:
        history = _get(settings, f"/jobs/{job}/exceptions?maxExceptions=1").get("exceptionHistory", {}).get("entries", [])
    except rest.Unreachable as e:
        if not _is_unknown(e):
            raise
        return f"the cluster at {address(settings)} does not know the job: its job manager was started anew"
    return root_cause(history[0]["stacktrace"]) if history else None


def _is_unknown(answer: rest.Unreachable) -> bool:
    return "FlinkJobNotFoundException" in str(answer)  # some paths answer 404, others 500


def root_cause(trace: str) -> str:
    """What a Java stack trace ends in: its innermost cause, with the Python traceback if that is one."""
    inner = re.split(r"^Caused by: ", trace, flags=re.M)[-1]
    return _cause(inner, 40)


def checkpoints(job: str, settings: Settings) -> list[str]:
    """Completed checkpoints that can be started from, the newest first."""
    history = _get(settings, f"/jobs/{job}/checkpoints")["history"]
    done = [c for c in history if c["status"] == "COMPLETED" and c.get("external_path")]
    return [c["external_path"] for c in sorted(done, key=lambda c: c["id"], reverse=True)]


def cancel(job: str, settings: Settings) -> None:
    """Ask the cluster to cancel a job; one that has ended, or is not known, needs none."""
    try:
        rest.request(address(settings), f"/jobs/{job}?mode=cancel", "PATCH")
    except (rest.NotFound, rest.Conflict):
        pass
