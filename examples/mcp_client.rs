//! A real MCP client for `make interop`: `rmcp` with its ordinary Streamable
//! HTTP transport, whose reconnection it leaves as it is.
//!
//! ```text
//! cargo run --example mcp_client -- http://127.0.0.1:8000/mcp '{"to": 20, "interval_ms": 300}'
//! ```
//!
//! It calls the tool `count` (see the example `mcp_server`) with these arguments, and
//! then once more, shortly, to see whether the session still works. What it gets goes to stdout, a JSON object a
//! line: `{"step": 1, "of": 20}`, how the call ended, `{"result": …}` or `{"error": …}`, and
//! how the next one did, `{"next": {"result": …}}`. It ends when stdin does.

use std::{error::Error, io::Write};

use rmcp::{
    ClientHandler, RoleClient, ServiceError, ServiceExt,
    model::{CallToolRequestParams, ProgressNotificationParam},
    service::{NotificationContext, RunningService},
    transport::StreamableHttpClientTransport,
};
use serde_json::{Value, json};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [url, given] = args.as_slice() else {
        return Err("usage: mcp_client URL ARGUMENTS".into());
    };
    let transport = StreamableHttpClientTransport::from_uri(url.as_str());
    let client = Printer.serve(transport).await?;
    print(&count(&client, serde_json::from_str(given)?).await);
    print(&json!({ "next": count(&client, json!({ "to": 1 })).await }));
    tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()))
        .await??;
    client.cancel().await?;
    Ok(())
}

/// How a call of the tool ended.
async fn count(client: &RunningService<RoleClient, Printer>, given: Value) -> Value {
    let mut params = CallToolRequestParams::new("count");
    params.arguments = given.as_object().cloned();
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

/// Prints the progress of the calls.
struct Printer;

impl ClientHandler for Printer {
    async fn on_progress(
        &self,
        params: ProgressNotificationParam,
        _: NotificationContext<RoleClient>,
    ) {
        print(&json!({ "step": params.progress, "of": params.total }));
    }
}

/// Errors are left aside: a reader that has gone has seen enough.
fn print(value: &Value) {
    let mut stdout = std::io::stdout().lock();
    drop(writeln!(stdout, "{value}").and_then(|()| stdout.flush()));
}
