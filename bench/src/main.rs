//! The load generator and the upstream of `make bench`.
//!
//! ```text
//! mcp-resume-guard-bench upstream              serves until standard input ends
//! mcp-resume-guard-bench load SIGNALS          does what standard input asks for
//! ```
//!
//! Both are processes of their own, each with one thread: the CPU time of the
//! Envoy between them is all that is measured, and they have to be cheap.

mod http;
mod load;
mod protocol;
mod sse;
mod upstream;

use anyhow::{Context, Result, bail};
use tokio::runtime::Builder;
use tokio::task::LocalSet;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let tasks = LocalSet::new();
    match arguments.next().as_deref() {
        Some("upstream") => runtime.block_on(tasks.run_until(upstream::serve()))?,
        Some("load") => {
            let signals = arguments.next().context("where do the signals go?")?;
            runtime.block_on(tasks.run_until(load::serve(signals)))?;
        }
        _ => bail!("mcp-resume-guard-bench upstream | load SIGNALS"),
    }
    // Reading standard input may block a thread that nobody waits for.
    runtime.shutdown_background();
    Ok(())
}
