//! The guard of MCP resumptions, as a proxy-wasm filter.
//!
//! A client of MCP's Streamable HTTP transport that reconnects sends two
//! opaque strings: `Mcp-Session-Id`, who the session is, and `Last-Event-ID`,
//! where in a stream it stood. A valid session does not make a cursor
//! resumable. This crate keeps what each session's streams issued, and gives
//! every reconnect a verdict of its own.
//!
//! # The way of a reconnect
//!
//! [`request`] (session and cursor) → [`exchange`] → [`ledger`] (what was
//! issued) → [`verdict`] (the rules) → [`reply`].
//!
//! # The way of an event
//!
//! [`exchange`] → [`recorder`] → [`sse`] (bytes to dispatched ids) →
//! [`event_id`] → [`ledger`] → [`store`].
//!
//! # The way of the answer to a resumption
//!
//! [`exchange`] → [`owner`] (who sends it) → `answer` → [`blocks`] (up to the
//! last complete event) → [`recorder`] → [`replay`] (is it what is owed?) → the
//! chunk, or a cut.
//!
//! The core takes bytes, the time, randomness and a [`store::Store`] as
//! arguments and knows nothing of proxy-wasm; `adapter` is all that does.

#[cfg(target_arch = "wasm32")]
mod adapter;
mod answer;
pub mod blocks;
pub mod budget;
mod bytes;
mod codec;
pub mod config;
pub mod event_id;
pub mod exchange;
pub mod fingerprint;
pub mod headers;
pub mod jsonrpc;
pub mod ledger;
pub mod owner;
pub mod recorder;
pub mod replay;
pub mod reply;
pub mod request;
pub mod sse;
pub mod store;
pub mod telemetry;
pub mod verdict;
