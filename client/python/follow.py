"""Follows a migration by server-sent events: snapshots as they come, until it has ended."""

import json
import time
from collections.abc import Iterator

import httpx

from .client import Client
from .models import Problem, Progress

RETRY_SECONDS = 1.0


def follow_migration(client: Client, id: str, give_up_after: float = 60.0) -> Iterator[Progress]:
    """The snapshots of migration `id`; the last one has its end.

    A connection that breaks is opened again, and goes on behind the last event that came.

    Args:
        give_up_after: seconds without a connection, after which the error is raised.

    Raises:
        LookupError: the daemon refuses, for instance because it knows no such migration.
        httpx.TransportError: no connection for `give_up_after` seconds.
    """
    last_id = ""
    until = time.monotonic() + give_up_after
    while True:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": last_id}
        try:
            path = f"/v1/migrations/{id}/events"
            with client.get_httpx_client().stream("GET", path, headers=headers, timeout=give_up_after) as answer:
                if answer.status_code == 204:
                    return
                if answer.status_code >= 400:
                    problem = Problem.from_dict(json.loads(answer.read()))
                    raise LookupError(problem.message)
                for event_id, data in _events(answer.iter_lines()):
                    # Comments come while nothing changes.
                    until = time.monotonic() + give_up_after
                    if data:
                        last_id = event_id
                        yield Progress.from_dict(json.loads(data))
        except httpx.TransportError:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_SECONDS)


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """ID and data of each event; empty ones for comments, which keep the connection open."""
    event_id = data = ""
    for line in lines:
        if line == "":
            yield event_id, data
            event_id = data = ""
        elif line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
