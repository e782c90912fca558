"""Server-sent events: written as a server writes them, read as a browser reads them
(WHATWG HTML 9.2.6)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """A dispatched event. `id` is the client's last event id at that time ("" if there is none);
    `data` is None for an event without a data field that only moved the cursor."""

    id: str
    data: str | None
    type: str = "message"


def encode(data: str | None, id: str | None = None, type: str | None = None) -> bytes:
    """An event in the most usual form: LF line ends, id first."""
    lines = []
    if type is not None:
        lines.append(f"event: {type}")
    if id is not None:
        lines.append(f"id: {id}")
    if data is not None:
        lines.extend(f"data: {line}" for line in data.split("\n"))
    return ("\n".join(lines) + "\n\n").encode()


class Decoder:
    """Turns bytes, cut anywhere, into events. Events without data are given too, when they had
    an id: they move the cursor."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False
        self._first = True
        self._last_id = ""
        self._new_id = False
        self._type = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[Event]:
        """The events that end within this piece."""
        events = []
        for byte in piece:
            lf_of_crlf = byte == 0x0A and self._after_cr
            self._after_cr = byte == 0x0D
            if lf_of_crlf:
                continue
            if byte not in (0x0A, 0x0D):
                self._line.append(byte)
                continue
            event = self._end_of_line()
            if event is not None:
                events.append(event)
        return events

    def _end_of_line(self) -> Event | None:
        line = bytes(self._line)
        self._line.clear()
        if self._first:
            self._first = False
            if line.startswith(b"\xef\xbb\xbf"):
                line = line[3:]
        if not line:
            return self._dispatch()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._type = value
        elif name == "id" and "\0" not in value:
            self._last_id = value
            self._new_id = True
        return None

    def _dispatch(self) -> Event | None:
        data = "\n".join(self._data) if self._data else None
        event = None
        if data is not None or self._new_id:
            event = Event(self._last_id, data, self._type or "message")
        self._data, self._type, self._new_id = [], "", False
        return event
