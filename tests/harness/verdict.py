"""What a verdict looks like to a client: the words of the contract, and a check of an answer
against them."""

from __future__ import annotations

from dataclasses import dataclass

from .gateway import Answer

CURSOR_FAULT = 400, 4400, "open_new_stream"
SESSION_FAULT = 404, 4404, "reinitialize"
"""Status, JSON-RPC code and recovery."""


@dataclass(frozen=True)
class Expected:
    """The answer that a resumption should get; `fault` is None where it passes."""

    outcome: str
    reason: str | None = None
    fault: tuple[int, int, str] | None = None

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


async def check(answer: Answer, expected: Expected) -> None:
    """Asserts that an answer to a resumption is the expected one."""
    assert answer.verdicts == [expected.header]
    if expected.fault is None:
        assert answer.status == 200
        assert answer.response.header("content-type") == "text/event-stream"
        assert answer.reached
    else:
        await check_refusal(answer, expected)
        assert answer.response.header("connection") is None


async def check_refusal(answer: Answer, expected: Expected) -> None:
    """Asserts that an answer is this refusal, its header left aside."""
    assert expected.fault is not None
    status, code, recovery = expected.fault
    assert answer.status == status
    assert answer.response.header("content-type") == "application/json"
    assert answer.response.header("cache-control") == "no-store"
    body = await answer.json()
    message = body["error"].pop("message")
    assert isinstance(message, str)
    assert message
    data = {"outcome": expected.outcome, "reason": expected.reason, "recovery": recovery}
    assert body == {"jsonrpc": "2.0", "id": None, "error": {"code": code, "data": data}}
    assert not answer.reached
