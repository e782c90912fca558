"""What a verdict looks like to a client: the words of the contract, and a check of an answer
against them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from . import sse
from .gateway import Answer

Fault = tuple[int, int, str]
"""Status, JSON-RPC code and recovery."""

CURSOR_FAULT: Fault = 400, 4400, "open_new_stream"
SESSION_FAULT: Fault = 404, 4404, "reinitialize"


STATUS = {"reject": {"pending_calls": "status"}}
SETTLE = {"reject": {"pending_calls": "settle"}}
"""What becomes of pending calls, as a part of a guard's configuration."""


@dataclass(frozen=True)
class Expected:
    """The answer that a resumption should get; `fault` is None where it passes."""

    outcome: str
    reason: str | None = None
    fault: Fault | None = None

    @property
    def header(self) -> str:
        """`mcp-resumption`, as in the access log too."""
        if self.reason is None:
            return self.outcome
        action = "rejected" if self.fault else "passed"
        return f"{self.outcome};reason={self.reason};action={action}"

    @property
    def metric(self) -> str:
        """The key in `Gateway.resumptions`."""
        action = "rejected" if self.fault else "passed"
        return f"{self.outcome};{self.reason or 'none'};{action}"


CONTINUE = Expected("continue")


def unverified(reason: str) -> Expected:
    """Passed, because the guard can't know."""
    return Expected("unverified", reason)


def observed(reason: str) -> Expected:
    """Passed although it's wrong."""
    return Expected("inconsistent", reason)


def refused(reason: str, *, outcome: str = "inconsistent") -> Expected:
    """Refused, the session lives."""
    return Expected(outcome, reason, CURSOR_FAULT)


def ended(reason: str = "session_terminated") -> Expected:
    """Refused, the session is over."""
    return Expected("inconsistent", reason, SESSION_FAULT)


async def check(
    answer: Answer, expected: Expected, *, reached: Sequence[int] | None = None
) -> None:
    """Asserts that an answer to a resumption is the expected one, and which of the upstreams the
    request has reached: else some if it passed, and none if it didn't."""
    assert answer.verdicts == [expected.header]
    if expected.fault is None:
        assert answer.status == 200
        assert answer.response.header("content-type") == "text/event-stream"
        assert answer.reached if reached is None else answer.places == list(reached)
    else:
        await check_refusal(answer, expected, reached=reached or ())
        assert answer.response.header("connection") is None


async def check_refusal(answer: Answer, expected: Expected, *, reached: Sequence[int] = ()) -> None:
    """Asserts that an answer is this refusal, its header left aside; and that the request has
    reached these of the upstreams before."""
    assert expected.fault is not None
    status, code, recovery = expected.fault
    assert answer.status == status
    assert answer.response.header("content-type") == "application/json"
    assert answer.response.header("cache-control") == "no-store"
    body = await answer.json()
    _check_text(body["error"].pop("message"))
    data = {"outcome": expected.outcome, "reason": expected.reason, "recovery": recovery}
    assert body == {"jsonrpc": "2.0", "id": None, "error": {"code": code, "data": data}}
    assert answer.response.ended == "complete"
    assert answer.places == list(reached)


async def settled(
    answer: Answer, reason: str, fault: Fault = CURSOR_FAULT, *, reached: Sequence[int] = ()
) -> list[str]:
    """Asserts that an answer ends calls for this reason, and is nothing else; and that the request
    has reached these of the upstreams before. Gives the calls' ids as they stand in its text."""
    assert answer.status == 200
    assert answer.response.header("content-type") == "text/event-stream"
    assert answer.response.header("cache-control") == "no-store"
    assert answer.verdicts == [f"inconsistent;reason={reason};action=settled"]
    assert answer.places == list(reached)
    ids = ended_calls(await answer.response.body(), reason, fault)
    assert answer.response.ended == "complete"
    return ids


def ended_calls(events: bytes, reason: str, fault: Fault = CURSOR_FAULT) -> list[str]:
    """Asserts that each of these events ends a call for this reason. Gives the calls' ids as they
    stand in the text."""
    _, code, recovery = fault
    ids = []
    for event in sse.Decoder().feed(events):
        assert event.type == "message"
        assert event.data is not None
        message = json.loads(event.data)
        assert set(message) == {"jsonrpc", "id", "error"}
        assert message["jsonrpc"] == "2.0"
        text = message["error"].pop("message")
        _check_text(text)
        assert "may have run" in text
        data = {"outcome": "inconsistent", "reason": reason, "recovery": recovery}
        assert message["error"] == {"code": code, "data": data}
        ids.append(event.data.split('"id":', 1)[1].split(',"error"', 1)[0])
    assert events.count(b"event: message\ndata: ") == len(ids)
    return ids


def _check_text(text: object) -> None:
    """What a person reads is there, and names no upstream."""
    assert isinstance(text, str)
    assert text
    assert "127.0.0.1" not in text
