//! A real MCP client for `make interop`: `rmcp` with its ordinary Streamable
//! HTTP transport, whose reconnection it leaves as it is.
//!
//! ```text
//! echo '{"name": "count", "arguments": {"to": 20, "interval_ms": 300}}' |
//!     cargo run --example mcp_client -- http://127.0.0.1:8000/mcp
//! ```
//!
//! It makes the calls that come on stdin (of tools of the example `mcp_server`), and
//! prints what it gets: see the module `calls`.

mod calls;

use std::error::Error;

use rmcp::{ServiceExt, transport::StreamableHttpClientTransport};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [url] = args.as_slice() else {
        return Err("usage: mcp_client URL < CALLS".into());
    };
    let transport = StreamableHttpClientTransport::from_uri(url.as_str());
    let client = calls::Printer.serve(transport).await?;
    calls::run(&client).await?;
    client.cancel().await?;
    Ok(())
}
