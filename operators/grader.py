"""The grading process: `python -m operators.grader`, a child of `operators.reward`.

Reads requests, grades each in its main thread (graders may use SIGALRM), and says when it starts one and what came out, in order. It keeps
nothing and trusts nothing: address space is limited, and it ends when its parent does, also in the middle of a grader that never returns.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import sys
import threading

from operators import tasks
from operators.child import Parent

# Frames. To the child: GRADE. From it: READY once, then STARTED and DONE for each request, in the order of the requests.
GRADE, READY, STARTED, DONE = 1, 2, 3, 4

GRACE_S = 5.0  # processor time a grading may take beyond its time-out before the kernel ends it, should nobody else do so


def main() -> None:
    parent = Parent()
    config = parent.config
    _end_with_the_pipe()
    for module in config["modules"]:
        importlib.import_module(module)
    limit = config["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A grader that holds the interpreter lock lets no thread see the pipe end, hence the kernel's default action.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    budget_s = config["timeout_s"] + GRACE_S
    parent.send(READY, b"")
    for _, payload in parent.incoming():
        request = json.loads(payload)
        parent.send(DONE, json.dumps(_answer(parent, request, budget_s)).encode())


def _answer(parent: Parent, request: dict, budget_s: float) -> dict:
    """{"components": {name: value}} or {"failure": status, "cause": text} or {"unknown": text}."""
    task = request["task"]
    try:
        grader = tasks.grader(task)  # imports are no part of the row's time
        signal.setitimer(signal.ITIMER_PROF, budget_s)
        parent.send(STARTED, b"")
        metadata = _metadata(request["metadata"])
        components = grader(request["completion"], request["answer"], metadata)
        return {"components": {str(name): float(value) for name, value in components.items()}}
    except tasks.UnknownTask as e:
        return {"unknown": str(e)}
    except tasks.ParseError as e:
        return {"failure": "parse_error", "cause": str(e)}
    except tasks.GradingTimeout as e:
        return {"failure": "timeout", "cause": str(e)}
    except MemoryError:
        return {"failure": "error", "cause": "the grader wants more than reward.memory_mb"}
    except (Exception, SystemExit) as e:  # the boundary to code of any kind: whatever it raises is this row's failure
        return {"failure": "error", "cause": f"{type(e).__name__}: {e}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _metadata(text: str | None) -> dict | None:
    try:
        return None if text is None else json.loads(text)
    except ValueError as e:
        raise tasks.ParseError(f"task_metadata is not JSON: {e}") from e


def _end_with_the_pipe() -> None:
    """End the process when the parent's end of the pipe is closed; and keep graders from reading frames."""
    pipe = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    poll = select.poll()
    poll.register(pipe, 0)  # asks for nothing, so only the hang-up wakes it

    def watch() -> None:
        while not poll.poll():
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
