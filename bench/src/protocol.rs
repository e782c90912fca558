//! What load generator and upstream say to each other through Envoy.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::sse::Ids;

/// A JSON-RPC request.
#[derive(Debug, Deserialize)]
pub struct Call<'a> {
    /// Its id.
    #[serde(borrow)]
    pub id: Option<&'a RawValue>,
    /// Its method.
    pub method: &'a str,
    /// The rest.
    #[serde(borrow)]
    pub params: Option<&'a RawValue>,
}

/// The parameters of `tools/call`.
#[derive(Debug, Deserialize)]
pub struct ToolCall<'a> {
    /// The tool's name.
    pub name: &'a str,
    /// Its arguments.
    #[serde(borrow)]
    pub arguments: Option<&'a RawValue>,
}

/// The tool that answers with JSON.
pub const ECHO: &str = "echo";

/// The tool that answers with events.
pub const EVENTS: &str = "events";

/// The arguments of [`EVENTS`].
#[derive(Debug, Clone, Deserialize, Serialize)]
pub struct Events {
    /// Events before the answer.
    pub count: u64,
    /// How their ids are made.
    pub ids: Ids,
    /// Where the signal for each event comes from; without, they come at once,
    /// each in a chunk of its own.
    pub ticket: Option<u64>,
    /// Whether the answer comes at the end. Without it the connection ends
    /// cleanly before: the client is to come back (MCP 2025-11-25).
    pub answer: bool,
    /// In blocks of `Bulk` with events of so many bytes; there are `count`
    /// blocks.
    pub bulk: Option<usize>,
}

/// Events that follow a cursor.
pub const REPLAYED: u64 = 2;
