"""The MLflow tracking server as one process: `python -m deploy.mlflow_server PORT FOLDER`.

`mlflow server` starts ten processes (its command, uvicorn, a job runner and seven consumers of jobs that only its judges and
gateways use) and takes 8 s; the same application under one threaded server takes 2 s and a tenth of the memory. SQLite and
artifacts lie in FOLDER; it listens on the loopback only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(port: int, folder: Path) -> None:
    store = f"sqlite:///{folder / 'mlflow.db'}"
    os.environ |= {  # how `mlflow server` hands its arguments to the application, which reads them when it is imported
        "_MLFLOW_SERVER_FILE_STORE": store,
        "_MLFLOW_SERVER_REGISTRY_STORE": store,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    from mlflow.server import app
    from mlflow.server.handlers import initialize_backend_stores
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        """Logs what went wrong, not every metric that came in."""

        def log_request(self, code="-", size="-"):
            if str(code)[:1] not in "123":
                super().log_request(code, size)

    initialize_backend_stores(store, store, "mlflow-artifacts:/")
    make_server("127.0.0.1", port, app, threaded=True, request_handler=Quiet).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
