"""How the servers of the field write event ids and session ids.

Each format is a class whose instance serves one server: `session_id()` makes the next session's
name, `stream(session, standalone)` begins a stream and gives the function that makes the ids of
its events. That function is told whether the event is the answer to a call.
"""

from __future__ import annotations

import base64
import itertools
import random
import re
import time
import uuid
from collections import Counter
from typing import Callable

NextId = Callable[[bool], str]

_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"


def _random_text(alphabet: str, length: int) -> str:
    """Random text, but none that could be taken for a word with a number: one in thousands has its
    digits at one end."""
    while True:
        text = "".join(random.choices(alphabet, k=length))
        if len(re.findall(r"\d+|\D+", text)) > 2:
            return text


class EventIds:
    """What all formats share: a UUID as session id."""

    def session_id(self) -> str:
        """The next session's id."""
        return str(uuid.uuid4())

    def stream(self, session: str, standalone: bool) -> NextId:
        """Begins a stream of a session, and returns what makes the ids of its events."""
        raise NotImplementedError


class Go(EventIds):
    """`<26 base32>_<n>` from 0; the standalone stream's name is empty: `_0`."""

    def session_id(self) -> str:
        return _random_text(_BASE32, 26)

    def stream(self, session: str, standalone: bool) -> NextId:
        name = "" if standalone else _random_text(_BASE32, 26)
        index = itertools.count()
        return lambda answer: f"{name}_{next(index)}"


class Rmcp(EventIds):
    """`<n>/<request>` with a request counter per session; the standalone stream's are plain `<n>`."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()

    def stream(self, session: str, standalone: bool) -> NextId:
        index = itertools.count()
        if standalone:
            return lambda answer: str(next(index))
        request = self._requests[session]
        self._requests[session] += 1
        return lambda answer: f"{next(index)}/{request}"


class CSharp(EventIds):
    """`{base64 session}:{base64 stream}:{n}` from 1; the standalone stream is `__get__`."""

    def session_id(self) -> str:
        while True:
            id = base64.urlsafe_b64encode(random.randbytes(16)).decode().rstrip("=")
            # One in 28 looks to the guard as if it were made of words and numbers.
            if id.isalnum() and len(re.findall(r"\d+", id[1:-1])) > 2:
                return id

    def stream(self, session: str, standalone: bool) -> NextId:
        name = "__get__" if standalone else _random_text(_BASE32, 16)
        prefix = ":".join(base64.b64encode(part.encode()).decode() for part in (session, name))
        index = itertools.count(1)
        return lambda answer: f"{prefix}:{next(index)}"


class Uuid4(EventIds):
    """A UUID per event, as Python's event stores have it."""

    def stream(self, session: str, standalone: bool) -> NextId:
        return lambda answer: str(uuid.uuid4())


class TypeScript(EventIds):
    """`<stream>_<ms>_<8 base36>`; the standalone stream is `_GET_stream` in every session."""

    def stream(self, session: str, standalone: bool) -> NextId:
        name = "_GET_stream" if standalone else str(uuid.uuid4())
        return lambda answer: f"{name}_{time.time_ns() // 10**6}_{_random_text(_BASE36, 8)}"


class McpGo(EventIds):
    """A decimal counter that all sessions of the server share."""

    def __init__(self) -> None:
        self._counter = itertools.count(1)

    def session_id(self) -> str:
        return f"mcp-session-{uuid.uuid4()}"

    def stream(self, session: str, standalone: bool) -> NextId:
        return lambda answer: str(next(self._counter))


class Java(EventIds):
    """`<uuid>_<uuid>` for what the server begins; every answer's id is the session id itself."""

    def stream(self, session: str, standalone: bool) -> NextId:
        transport = uuid.uuid4()
        return lambda answer: session if answer else f"{transport}_{uuid.uuid4()}"


class PlainIndex(EventIds):
    """`<n>` from 0 on every stream, the worst there is: no namespace at all."""

    def stream(self, session: str, standalone: bool) -> NextId:
        index = itertools.count()
        return lambda answer: str(next(index))


FORMATS = (Go, Rmcp, CSharp, Uuid4, TypeScript, McpGo, Java)
"""The formats of real servers."""
