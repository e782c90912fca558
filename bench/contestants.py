"""The contestants: envoy/envoy.yaml, each with another filter in the guard's place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from tests.harness import project, render
from tests.harness.render import Changes, Config

NOOP_MODULE = project.ROOT / "target/wasm32-wasip1/release/mcp_resume_guard_noop.wasm"

LUA = r"""
function envoy_on_request(request)
  local session = request:headers():get("mcp-session-id")
  local cursor = request:headers():get("last-event-id")
end

function envoy_on_response(response)
  if response:headers():get("content-type") ~= "text/event-stream" then
    return
  end
  local newest = nil
  for chunk in response:bodyChunks() do
    local text = chunk:getBytes(0, chunk:length())
    local from, to = text:find("id: ", 1, true)
    while from do
      local stop = text:find("\n", to, true) or #text + 1
      newest = text:sub(to + 1, stop - 1)
      from, to = text:find("id: ", stop, true)
    end
  end
end
"""
"""The least of what the guard does: reads the two headers, and the ids of events as they pass. (It
keeps nothing, judges nothing, misses ids that two chunks share, and takes data for ids.) `find`
without patterns is the fastest that LuaJIT has."""


@dataclass(frozen=True)
class Contestant:
    """Something that stands in Envoy where the guard does."""

    name: str
    label: str
    """Its name for people, in a few words."""
    title: str
    configure: Callable[[Config], None]
    """Changes the filter chain of a rendered configuration."""
    is_guard: bool = False
    module: Path | None = None

    def config(self, upstream: int, guard: dict[str, Any] | None = None) -> Config:
        """Envoy's configuration; `guard`: keys laid over those of the guard in envoy.yaml."""
        changes = Changes(upstreams=[("127.0.0.1", upstream)], guard=guard or {})
        config = render.render(changes)
        self.configure(config)
        return config

    def configuration(self) -> bytes:
        """What Envoy hands to its module."""
        text: str = _plugin(self.config(upstream=1)).get("configuration", {}).get("value", "")
        return text.encode()


def guard(name: str, module: Path) -> Contestant:
    """The guard, of this module."""

    def configure(config: Config) -> None:
        _plugin(config)["vm_config"]["code"]["local"]["filename"] = str(module)

    label = "mcp-resume-guard" if name == "ours" else name
    title = "the guard, as `make build` makes it"
    return Contestant(name, label, title, configure, is_guard=True, module=module)


def all_contestants() -> list[Contestant]:
    """All but further builds of the guard."""
    wasm = NOOP_MODULE
    return [
        Contestant("plain", "no filter", "nothing", _remove),
        Contestant(
            "noop", "wasm, does nothing", "a wasm filter that does nothing", _noop, module=wasm
        ),
        Contestant(
            "floor",
            "wasm, least calls",
            "the same, with the calls to the host that a guard of event streams can't do without:"
            " it reads headers, a value and each chunk, and writes a value for each; of a random id"
            " it reads and writes who was sent it, of a resumption it reads the stream and tells the"
            " verdict in header, filter state and counters; it uses nothing of what it reads",
            _floor,
            module=wasm,
        ),
        guard("ours", project.module()),
        Contestant(
            "lua", "Lua", "a Lua filter that reads the two headers, and ids in bodies", _lua
        ),
        Contestant(
            "mcp", "Envoy's mcp", "Envoy's `envoy.filters.http.mcp`, which parses JSON-RPC", _mcp
        ),
        Contestant(
            "envelope",
            "stateful_session",
            "Envoy's `stateful_session` with the envelope, which puts the host into the session id",
            _envelope,
        ),
    ]


def _remove(config: Config) -> None:
    filters = _filters(config)
    filters[:] = [http_filter for http_filter in filters if not _is_guard(http_filter)]


def _noop(config: Config) -> None:
    plugin = _plugin(config)
    plugin["name"] = plugin["root_id"] = plugin["vm_config"]["vm_id"] = "noop"
    plugin["vm_config"]["code"]["local"]["filename"] = str(NOOP_MODULE)
    del plugin["configuration"]


def _floor(config: Config) -> None:
    kind = "type.googleapis.com/google.protobuf.StringValue"
    _noop(config)
    _plugin(config)["configuration"] = {"@type": kind, "value": "reads and writes"}


def _lua(config: Config) -> None:
    _replace(config, "lua", "lua.v3.Lua", default_source_code={"inline_string": LUA})


def _mcp(config: Config) -> None:
    _replace(config, "mcp", "mcp.v3.Mcp")


def _envelope(config: Config) -> None:
    kind = "type.googleapis.com/envoy.extensions.http.stateful_session.envelope.v3.EnvelopeSessionState"
    state = {
        "name": "envoy.http.stateful_session.envelope",
        "typed_config": {"@type": kind, "header": {"name": "mcp-session-id"}},
    }
    _replace(config, "stateful_session", "stateful_session.v3.StatefulSession", session_state=state)


def _replace(config: Config, name: str, message: str, **settings: Any) -> None:
    filters = _filters(config)
    (place,) = [place for place, http_filter in enumerate(filters) if _is_guard(http_filter)]
    kind = f"type.googleapis.com/envoy.extensions.filters.http.{message}"
    typed = {"@type": kind, **settings}
    filters[place] = {"name": f"envoy.filters.http.{name}", "typed_config": typed}


def _plugin(config: Config) -> Config:
    (listener,) = config["static_resources"]["listeners"]
    return render.guard_of(listener)


def _filters(config: Config) -> list[Config]:
    (listener,) = config["static_resources"]["listeners"]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]


def _is_guard(http_filter: Config) -> bool:
    return http_filter["name"] == "mcp-resume-guard"
