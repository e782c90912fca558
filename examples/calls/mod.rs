//! What the client examples have in common. Each line that comes on stdin is a tool
//! call, `{"name": …, "arguments": …}`; they make one after the other, and end when
//! stdin does. What they get goes to stdout, a JSON object a line: a step of a call,
//! `{"step": 1, "of": 20}`; a note, which is a log message and comes on the listening
//! stream, `{"note": …}`; and how a call ended, `{"result": …}` or `{"error": …}`.

// Logging is deprecated from 2026-07-28 on, and is there in what came before.
#![expect(deprecated)]

use std::{error::Error, io::Write};

use rmcp::{
    ClientHandler, RoleClient, ServiceError,
    model::{
        CallToolRequestParams, CallToolResult, LoggingMessageNotificationParam,
        ProgressNotificationParam,
    },
    service::{NotificationContext, RunningService},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::task::spawn_blocking;

pub type Client = RunningService<RoleClient, Printer>;

#[derive(Deserialize)]
struct Call {
    name: String,
    arguments: Map<String, Value>,
}

/// Makes the calls that come on stdin.
pub async fn run(client: &Client) -> Result<(), Box<dyn Error>> {
    while let Some(line) = spawn_blocking(|| std::io::stdin().lines().next()).await? {
        let Call { name, arguments } = serde_json::from_str(&line?)?;
        print(&ended(call(client, name, arguments).await));
    }
    Ok(())
}

/// Calls a tool.
pub async fn call(
    client: &Client,
    name: String,
    arguments: Map<String, Value>,
) -> Result<CallToolResult, ServiceError> {
    let mut params = CallToolRequestParams::new(name);
    params.arguments = Some(arguments);
    client.call_tool(params).await
}

fn ended(call: Result<CallToolResult, ServiceError>) -> Value {
    match call {
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
pub struct Printer;

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
pub fn print(value: &Value) {
    let mut stdout = std::io::stdout().lock();
    drop(writeln!(stdout, "{value}").and_then(|()| stdout.flush()));
}
