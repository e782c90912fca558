"""What the module does for a unit of work: its WebAssembly instructions, and its calls to the host.

Both are counted, not timed, so they are the same in every run, on every machine. The module runs on
Wasmtime, whose fuel is one for each instruction (but for blocks, `nop` and `drop`), before a host that
keeps shared data and hands over headers and bodies as Envoy does, and does nothing else.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import wasmtime

from .contestants import Contestant
from .processes import WrongAnswer

WARM_UP = 100
UNITS = 200
"""Of each work. They are alike, so that more would tell no more."""

PLUGIN = 1
"""Its context."""

OK, NOT_FOUND, CAS_MISMATCH = 0, 1, 8
REQUEST_BODY, RESPONSE_BODY, PLUGIN_CONFIGURATION = 0, 1, 7
REQUEST_HEADERS, RESPONSE_HEADERS = 0, 2
CLOCK_STEP_NS = 20_000
"""So much time passes between two looks at the clock."""

SESSION = ("mcp-session-id", "550e8400-e29b-41d4-a716-446655440000")
STREAM = "8c5d1f6e2b3a49c7a1d2e3f4a5b6c7d8"
CALL = json.dumps(
    {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "e", "arguments": {}}}
).encode()
INITIALIZE = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'


@dataclass
class Count:
    """Of one unit, on average."""

    instructions: float
    calls: dict[str, float]

    def calls_text(self) -> str:
        """The calls to the host of which there is one in ten units at least."""
        often = {name: count for name, count in self.calls.items() if count >= 0.1}
        return ", ".join(
            name if count == 1 else f"{count:g} {name}" for name, count in often.items()
        )


@dataclass(frozen=True)
class Work:
    """What is done, how its ids are made, and how long its events and chunks are."""

    what: str
    kind: str
    ids: str = "index"
    event_bytes: int = 200
    events: int = 1
    """In a chunk; the unit is an event."""


WORKS = {
    "post": Work("a POST of a call, answered with JSON", "post"),
    "event": Work("an event of 200 bytes, alone in its chunk, with an index as id", "events"),
    "event_uuid": Work("the same with a UUID as id", "events", ids="uuid"),
    "event_small": Work("an event of 200 bytes in a chunk of 64 KiB", "events", events=327),
    "event_large": Work("an event of 16 KiB", "events", event_bytes=16384),
    "resume": Work("an honest resumption that brings a missed event and a new one", "resume"),
    "refuse": Work("a resumption from an event that was never issued", "refuse"),
}

Counts = dict[str, dict[str, Count]]
"""By work and contestant."""


def measure(contestants: Iterable[Contestant]) -> Counts:
    """Counts for each contestant that is a module."""
    engine = wasmtime.Engine(_consuming_fuel())
    found: Counts = {name: {} for name in WORKS}
    for one in contestants:
        if one.module is None:
            continue
        module = wasmtime.Module.from_file(engine, str(one.module))
        for name, work in WORKS.items():
            host = Host(engine, module, one.configuration())
            found[name][one.name] = _count(host, work)
            if one.is_guard:
                _check(host, work)
    return found


def _consuming_fuel() -> wasmtime.Config:
    config = wasmtime.Config()
    config.consume_fuel = True
    return config


def _count(host: Host, work: Work) -> Count:
    do = _unit(host, work)
    for number in range(WARM_UP):
        do(number)
    host.calls.clear()
    before = host.fuel()
    for number in range(WARM_UP, WARM_UP + UNITS):
        do(number)
    units = UNITS * work.events
    calls = {name: count / units for name, count in sorted(host.calls.items())}
    return Count((before - host.fuel()) / units, calls)


def _check(host: Host, work: Work) -> None:
    """A guard that skips work can't look good."""
    expected = {"resume": {"continue"}, "refuse": {"inconsistent;reason=never_issued"}}
    verdicts = {verdict.removesuffix(";action=rejected") for verdict in host.verdicts}
    if verdicts != expected.get(work.kind, set()):
        raise WrongAnswer(f"{work.what}: the guard said {verdicts or 'nothing'}")


def _unit(host: Host, work: Work) -> Callable[[int], None]:
    """What does the unit of this number."""
    exchange = host.exchange("POST", (), INITIALIZE)
    exchange.answer("application/json", SESSION)
    exchange.body(b"{}", end=True)
    exchange.close()

    def post(_: int) -> None:
        exchange = host.exchange("POST", (SESSION,), CALL)
        exchange.answer("application/json")
        exchange.body(CALL, end=True)
        exchange.close()

    def resume(number: int) -> None:
        exchange = host.exchange("GET", (SESSION, ("last-event-id", _id("index", number))))
        exchange.answer("text/event-stream")
        exchange.body(_event(work, number + 1))
        exchange.body(_event(work, number + 2), end=True)
        exchange.close()

    def refuse(number: int) -> None:
        host.exchange("GET", (SESSION, ("last-event-id", _id("uuid", number)))).close()

    if work.kind == "post":
        return post
    stream = host.exchange("POST", (SESSION,), CALL)
    stream.answer("text/event-stream")
    if work.kind == "events":

        def events(chunk: int) -> None:
            numbers = range(chunk * work.events, (chunk + 1) * work.events)
            stream.body(b"".join(_event(work, number) for number in numbers))

        return events
    stream.body(_event(work, 0) + _event(work, 1))
    stream.close()
    return {"resume": resume, "refuse": refuse}[work.kind]


def _id(kind: str, number: int) -> str:
    if kind == "index":
        return f"{STREAM}_{number}"
    return str(uuid.uuid5(uuid.NAMESPACE_OID, str(number)))


def _event(work: Work, number: int) -> bytes:
    start = (
        f"id: {_id(work.ids, number)}\n"
        'data: {"jsonrpc":"2.0","method":"notifications/message","params":{"data":"'
    )
    end = '"}}\n\n'
    return (start + "." * (work.event_bytes - len(start) - len(end)) + end).encode()


@dataclass
class Exchange:
    """A request and its answer, in the phases in which Envoy hands them over."""

    host: Host
    context: int

    def answer(self, content_type: str, *more: tuple[str, str]) -> None:
        """The response's headers."""
        fields = ((":status", "200"), ("content-type", content_type), ("date", "x"))
        self.host.headers[RESPONSE_HEADERS] = _pairs((*fields, *more))
        self.host.call("proxy_on_response_headers", self.context, len(fields) + len(more), 0)

    def body(self, chunk: bytes, end: bool = False) -> None:
        """Some of its body."""
        self.host.bodies[RESPONSE_BODY] = chunk
        self.host.call("proxy_on_response_body", self.context, len(chunk), int(end))

    def close(self) -> None:
        """The end."""
        for callback in ("proxy_on_log", "proxy_on_done", "proxy_on_delete"):
            self.host.call(callback, self.context)


@dataclass
class Host:
    """A host of proxy-wasm (ABI 0.2.1), as far as the module asks anything of it."""

    engine: wasmtime.Engine
    module: wasmtime.Module
    configuration: bytes
    calls: Counter[str] = field(default_factory=Counter)
    verdicts: set[str] = field(default_factory=set)
    """What was put into the filter state."""
    headers: dict[int, bytes] = field(default_factory=dict)
    bodies: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shared: dict[bytes, tuple[bytes, int]] = {}
        self._writes = self._clock_ns = 0
        self._contexts = PLUGIN
        self._store = wasmtime.Store(self.engine)
        self._store.set_fuel(2**62)
        linker = wasmtime.Linker(self.engine)
        for wanted in self.module.imports:
            function = self._function(str(wanted.name), len(wanted.type.results))
            linker.define_func(wanted.module, str(wanted.name), wanted.type, function)
        self._exports = linker.instantiate(self._store, self.module).exports(self._store)
        self._memory: Any = self._exports["memory"]
        self.bodies[PLUGIN_CONFIGURATION] = self.configuration
        self.call("_initialize")
        self.call("proxy_on_context_create", PLUGIN, 0)
        self.call("proxy_on_vm_start", PLUGIN, 0)
        if not self.call("proxy_on_configure", PLUGIN, len(self.configuration)):
            raise WrongAnswer("the module refuses its configuration")

    def call(self, name: str, *arguments: int) -> Any:
        """Calls the module."""
        function: Any = self._exports[name]
        return function(self._store, *arguments)

    def fuel(self) -> int:
        """What is left of it."""
        return self._store.get_fuel()

    def exchange(
        self, method: str, more: Sequence[tuple[str, str]], body: bytes | None = None
    ) -> Exchange:
        """A request."""
        self._contexts += 1
        context = self._contexts
        fields = (
            (":authority", "127.0.0.1:10000"),
            (":path", "/mcp"),
            (":method", method),
            (":scheme", "http"),
            ("accept", "application/json, text/event-stream"),
            ("content-type", "application/json"),
            ("mcp-protocol-version", "2025-11-25"),
            ("x-request-id", SESSION[1]),
            *more,
        )
        self.call("proxy_on_context_create", context, PLUGIN)
        self.headers[REQUEST_HEADERS] = _pairs(fields)
        self.call("proxy_on_request_headers", context, len(fields), int(body is None))
        if body is not None:
            self.bodies[REQUEST_BODY] = body
            self.call("proxy_on_request_body", context, len(body), 1)
        return Exchange(self, context)

    def _function(self, name: str, results: int) -> Callable[..., int | None]:
        """What stands behind an import, and counts."""
        does = getattr(self, name, None)

        def function(*arguments: int) -> int | None:
            self.calls[name.removeprefix("proxy_")] += 1
            done = OK if does is None else does(*arguments)
            return done if results else None

        return function

    def _read(self, at: int, size: int) -> bytes:
        return bytes(self._memory.read(self._store, at, at + size))

    def _write(self, at: int, value: bytes) -> None:
        self._memory.write(self._store, value, at)

    def _write_u32(self, at: int, value: int) -> None:
        self._write(at, struct.pack("<I", value))

    def _give(self, value: bytes, at: int, size_at: int) -> int:
        """In memory of the module's own."""
        block = self.call("proxy_on_memory_allocate", len(value)) if value else 0
        if value:
            self._write(block, value)
        self._write_u32(at, block)
        self._write_u32(size_at, len(value))
        return OK

    def proxy_get_buffer_bytes(
        self, kind: int, start: int, size: int, at: int, size_at: int
    ) -> int:
        """A body, or the configuration."""
        return self._give(self.bodies[kind][start : start + size % 2**32], at, size_at)

    def proxy_get_header_map_pairs(self, kind: int, at: int, size_at: int) -> int:
        """A header map."""
        return self._give(self.headers[kind], at, size_at)

    def proxy_get_shared_data(
        self, key: int, key_size: int, at: int, size_at: int, cas_at: int
    ) -> int:
        """A value and its number."""
        value, cas = self._shared.get(self._read(key, key_size), (None, 0))
        if value is None:
            return NOT_FOUND
        self._write_u32(cas_at, cas)
        return self._give(value, at, size_at)

    def proxy_set_shared_data(
        self, key: int, key_size: int, value: int, size: int, cas: int
    ) -> int:
        """Compares and swaps, or overwrites."""
        name = self._read(key, key_size)
        _, current = self._shared.get(name, (None, 0))
        if cas and current and cas != current:
            return CAS_MISMATCH
        self._writes += 1
        self._shared[name] = (self._read(value, size), self._writes)
        return OK

    def proxy_set_property(self, path: int, path_size: int, value: int, size: int) -> int:
        """The filter state."""
        self.verdicts.add(self._read(value, size).decode())
        return OK

    def proxy_get_property(self, path: int, path_size: int, at: int, size_at: int) -> int:
        """Where the answer comes from."""
        properties = {
            b"response\0code_details": b"via_upstream",
            b"upstream\0address": b"127.0.0.1:8000",
        }
        value = properties.get(self._read(path, path_size).rstrip(b"\0"))
        return NOT_FOUND if value is None else self._give(value, at, size_at)

    def proxy_define_metric(self, kind: int, name: int, size: int, id_at: int) -> int:
        """Its number."""
        self._write_u32(id_at, 1)
        return OK

    def clock_time_get(self, clock: int, precision: int, at: int) -> int:
        """Nanoseconds."""
        self._clock_ns += CLOCK_STEP_NS
        self._write(at, struct.pack("<Q", self._clock_ns))
        return OK

    def random_get(self, at: int, size: int) -> int:
        """The same bytes in every run."""
        self._write(at, bytes(range(1, size + 1)))
        return OK


def _pairs(fields: Sequence[tuple[str, str]]) -> bytes:
    """A header map: their number, the sizes of each, and the texts."""
    texts = [text.encode() for name_and_value in fields for text in name_and_value]
    numbers = (len(fields), *map(len, texts))
    return struct.pack(f"<{len(numbers)}I", *numbers) + b"".join(text + b"\0" for text in texts)
