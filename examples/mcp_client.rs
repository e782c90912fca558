//! A real MCP client for `make interop`: `rmcp` with its ordinary Streamable
//! HTTP transport, whose reconnection it leaves as it is.
//!
//! ```text
//! echo '{"name": "count", "arguments": {"to": 20, "interval_ms": 300}}' |
//!     cargo run --example mcp_client -- http://127.0.0.1:8000/mcp
//! ```
//!
//! Each line that comes on stdin is a tool call (see the example `mcp_server`). It
//! makes one after the other, and ends when stdin does. What it gets goes to stdout,
//! a JSON object a line: a step of a call, `{"step": 1, "of": 20}`; a note, which is a
//! log message and comes on the listening stream, `{"note": …}`; and how a call ended,
//! `{"result": …}` or `{"error": …}`.

// Logging is deprecated from 2026-07-28 on, a revision this client doesn't speak.
#![expect(deprecated)]

use std::{error::Error, io::Write};

use rmcp::{
    ClientHandler, RoleClient, ServiceError, ServiceExt,
    model::{CallToolRequestParams, LoggingMessageNotificationParam, ProgressNotificationParam},
    service::{NotificationContext, RunningService},
    transport::StreamableHttpClientTransport,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::task::spawn_blocking;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [url] = args.as_slice() else {
        return Err("usage: mcp_client URL < CALLS".into());
    };
    let transport = StreamableHttpClientTransport::from_uri(url.as_str());
    let client = Printer.serve(transport).await?;
    while let Some(line) = spawn_blocking(|| std::io::stdin().lines().next()).await? {
        print(&made(&client, serde_json::from_str(&line?)?).await);
    }
    client.cancel().await?;
    Ok(())
}

#[derive(Deserialize)]
struct Call {
    name: String,
    arguments: Map<String, Value>,
}

/// How a call of a tool ended.
async fn made(client: &RunningService<RoleClient, Printer>, call: Call) -> Value {
    let mut params = CallToolRequestParams::new(call.name);
    params.arguments = Some(call.arguments);
    match client.call_tool(params).await {
        Ok(result) => {
            let text = result.content.first().and_then(|content| content.as_text());
            json!({ "result": text.map(|text| text.text.as_str()) })
        }
        Err(ServiceError::McpError(error)) => {
            let reason = error.data.as_ref().and_then(|data| data.get("reason"));
            json!({ "error": { "code": error.code.0, "message": error.message, "reason": reason } })
        }
        Err(error) => json!({ "error": { "code": null, "message": error.to_string() } }),
    }
}

/// Prints the steps of the calls, and the notes.
struct Printer;

impl ClientHandler for Printer {
    async fn on_progress(
        &self,
        params: ProgressNotificationParam,
        _: NotificationContext<RoleClient>,
    ) {
        print(&json!({ "step": params.progress, "of": params.total }));
    }

    async fn on_logging_message(
        &self,
        params: LoggingMessageNotificationParam,
        _: NotificationContext<RoleClient>,
    ) {
        print(&json!({ "note": params.data }));
    }
}

/// Errors are left aside: a reader that has gone has seen enough.
fn print(value: &Value) {
    let mut stdout = std::io::stdout().lock();
    drop(writeln!(stdout, "{value}").and_then(|()| stdout.flush()));
}
