"""A real S3 server (SeaweedFS) for tests, on the loopback; it ends with the process that started it."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.conftest import free_ports

KEY, SECRET, BUCKET = "tests", "no-secret", "runs"
PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc", "s3.iceberg", "s3.lance")
WEED = Path(sys.executable).with_name("weed")


class ObjectStore:
    """`environment` is what a client needs (s3fs reads it); `url` is a bucket's. `stop` is kill -9; `start` goes on with what is there."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        (folder / "keys.json").write_text(json.dumps({"identities": [
            {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin", "Read", "Write", "List"]}]}))
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.url = f"s3://{BUCKET}"
        self.environment = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
                            "AWS_MAX_ATTEMPTS": "1",  # the store is near: what fails once is away
                            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._ports['s3']}"}
        self.start()

    def start(self) -> None:
        ports = [f"-{name.replace('.', '.port.', 1) if '.' in name else name + '.port'}={port}" for name, port in self._ports.items()]
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            [WEED, "-logtostderr", "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=5",
             "-master.volumeSizeLimitMB=64", "-filer", "-s3", f"-s3.config={self.folder / 'keys.json'}", "-s3.autoCreateBucket", *ports],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=(self.folder / "log").open("a"),
            env=os.environ | {"GOMEMLIMIT": "256MiB"}, preexec_fn=lambda: libc.prctl(1, signal.SIGKILL, 0, 0, 0))
        deadline = time.monotonic() + 60
        while not self._is_up():
            assert time.monotonic() < deadline and self._process.poll() is None, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.1)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _is_up(self) -> bool:
        """Whether it takes an object."""
        import s3fs

        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._ports["s3"], timeout=2)
            connection.request("GET", "/")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
        store = s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=self.environment["AWS_ENDPOINT_URL"], skip_instance_cache=True)
        try:
            if not store.exists(BUCKET):
                store.mkdir(BUCKET)
            store.pipe_file(f"{BUCKET}/probe", b"up")
            return store.cat_file(f"{BUCKET}/probe") == b"up"
        except Exception:  # of many kinds while it starts
            return False
