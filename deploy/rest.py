"""HTTP to a service on this machine or in the cluster's network: no proxy, no dependency."""

from __future__ import annotations

import http.client


class Unreachable(ConnectionError):
    """The service does not answer, or answers with an error; the text says which and how."""


class NotFound(Unreachable):
    """It does not know what was asked for (404)."""


class Conflict(Unreachable):
    """What was asked for is in no state to do that (409)."""


def request(address: str, path: str, method: str = "GET", timeout_s: float = 10) -> bytes:
    """The body of an answer with a 2xx status. `address` is host:port. Raises Unreachable."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as e:
        raise Unreachable(f"http://{address} does not answer: {e}") from e
    finally:
        connection.close()
    if answer.status // 100 != 2:
        kind = {404: NotFound, 409: Conflict}.get(answer.status, Unreachable)
        raise kind(f"http://{address}{path} answers {answer.status}: {body[:300].decode(errors='replace')}")
    return body
