//! Both ends of the protocol 2026-07-28 with `rmcp`, for `make interop`: a server
//! and a client that speak no older one. It has no sessions and no resumption.
//!
//! ```text
//! cargo run --example mcp_modern -- serve
//! echo '{"name": "count", "arguments": {"to": 5, "interval_ms": 100}}' |
//!     cargo run --example mcp_modern -- http://127.0.0.1:8000/mcp
//! cargo run --example mcp_modern -- http://127.0.0.1:8000/mcp listen
//! ```
//!
//! `serve` listens on a free port of 127.0.0.1, at `/mcp`, and prints `listening on
//! 127.0.0.1:PORT`. Its tools: `count` reports progress, `change` says that the
//! resource `count://NUMBER` has changed, and `end_listening` ends the open
//! `subscriptions/listen` streams; both reach all clients that listen.
//!
//! The client makes the calls that come on stdin, and prints what it gets (see the
//! module `calls`), or, with `listen`, does and prints what
//! `tests/interop/clients/modern.mjs` does.

mod calls;

use std::{borrow::Cow, error::Error, time::Duration};

use axum::{Router, serve::ListenerExt};
use calls::{Client, Printer, call, print};
use rmcp::{
    ClientLifecycleMode, ClientServiceExt, ErrorData, RoleServer, ServerHandler,
    handler::server::wrapper::Parameters,
    model::{
        ProgressNotificationParam, ProtocolVersion, ServerCapabilities, ServerConfig,
        ServerNotification, SubscriptionFilter,
    },
    schemars::{self, JsonSchema},
    service::{RequestContext, Subscription, SubscriptionContext, SubscriptionEnd},
    tool, tool_handler, tool_router,
    transport::{
        StreamableHttpClientTransport,
        streamable_http_server::{
            StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
        },
    },
};
use serde::Deserialize;
use serde_json::{Map, json};
use tokio::{
    net::TcpListener,
    sync::watch,
    time::{sleep, timeout},
};

/// How long a client waits for a change, or for the end, of which it knows that
/// the server has sent it.
const PATIENCE: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["serve"] => serve().await,
        [url] => {
            let client = connect(url).await?;
            calls::run(&client).await?;
            Ok(client.cancel().await.map(drop)?)
        }
        [url, "listen"] => {
            let client = connect(url).await?;
            for ends in ["server", "client"] {
                listen(&client, ends).await?;
            }
            Ok(client.cancel().await.map(drop)?)
        }
        _ => Err("usage: mcp_modern serve | URL < CALLS | URL listen".into()),
    }
}

// The server

async fn serve() -> Result<(), Box<dyn Error>> {
    let (changes, _) = watch::channel(None);
    // A proxy hands on whatever `Host` its client sent.
    let config = StreamableHttpServerConfig::default().disable_allowed_hosts();
    let server = move || Ok(Server { seen: changes.subscribe(), changes: changes.clone() });
    let mcp =
        StreamableHttpService::<_, LocalSessionManager>::new(server, Default::default(), config);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("listening on {}", listener.local_addr()?);
    // An event is to go out at once, not after the peer's delayed ACK.
    let listener = listener.tap_io(|connection| drop(connection.set_nodelay(true)));
    Ok(axum::serve(listener, Router::new().route_service("/mcp", mcp)).await?)
}

/// What answers one request.
struct Server {
    /// The number of the resource that has changed, or none: listening is over.
    changes: watch::Sender<Option<u32>>,
    /// What had changed before the request came.
    seen: watch::Receiver<Option<u32>>,
}

#[derive(Deserialize, JsonSchema)]
struct Count {
    to: u32,
    #[serde(default)]
    interval_ms: u64,
}

#[derive(Deserialize, JsonSchema)]
struct Change {
    number: u32,
}

#[tool_router]
impl Server {
    /// Counts, and reports each number as progress.
    #[tool]
    async fn count(
        &self,
        Parameters(Count { to, interval_ms }): Parameters<Count>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        let token = context.meta.get_progress_token();
        for step in 1..=to {
            sleep(Duration::from_millis(interval_ms)).await;
            if let Some(token) = token.clone() {
                let progress = ProgressNotificationParam::new(token, step.into());
                let progress = progress.with_total(to.into());
                context.peer.notify_progress(progress).await.map_err(internal)?;
            }
        }
        Ok(format!("counted to {to}"))
    }

    /// Tells those who listen that a resource has changed.
    #[tool]
    async fn change(&self, Parameters(Change { number }): Parameters<Change>) -> String {
        self.changes.send_replace(Some(number));
        format!("changed {number}")
    }

    /// Ends the streams of those who listen.
    #[tool]
    async fn end_listening(&self) -> String {
        self.changes.send_replace(None);
        "ended".to_owned()
    }
}

#[tool_handler]
impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_resources();
        ServerConfig::new(capabilities.enable_resources_subscribe().build())
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        Cow::Borrowed(&[ProtocolVersion::V_2026_07_28])
    }

    fn accepted_subscription_filter(
        &self,
        asked: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        Some(asked.clone())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let mut changes = self.seen.clone();
        loop {
            tokio::select! {
                changed = changes.changed() => changed.map_err(internal)?,
                () = context.cancelled() => return Ok(()),
            }
            let Some(number) = *changes.borrow_and_update() else { return Ok(()) };
            context.sink().notify_resource_updated(resource(number)).await.map_err(internal)?;
        }
    }
}

fn internal(error: impl Error) -> ErrorData {
    ErrorData::internal_error(error.to_string(), None)
}

fn resource(number: u32) -> String {
    format!("count://{number}")
}

// The client

async fn connect(url: &str) -> Result<Client, Box<dyn Error>> {
    let transport = StreamableHttpClientTransport::from_uri(url);
    let preferred_versions = vec![ProtocolVersion::V_2026_07_28];
    let lifecycle = ClientLifecycleMode::Discover { preferred_versions };
    Ok(Printer.serve_with_lifecycle(transport, lifecycle).await?)
}

/// Has the server tell a change, and tell the second one when it has heard of the
/// first.
async fn listen(client: &Client, ends: &str) -> Result<(), Box<dyn Error>> {
    let filter = SubscriptionFilter::builder().resource_subscriptions([1, 2].map(resource));
    let mut subscription = client.listen(filter.build()).await?;
    for number in [1, 2] {
        let arguments = Map::from_iter([("number".to_owned(), number.into())]);
        call(client, "change".to_owned(), arguments).await?;
        match timeout(PATIENCE, subscription.next()).await?? {
            Some(ServerNotification::ResourceUpdatedNotification(update)) => {
                print(&json!({ "heard": update.params.uri }));
            }
            other => return Err(format!("not an update: {other:?}").into()),
        }
    }
    print(&json!({ "ended": end(client, subscription, ends).await? }));
    Ok(())
}

async fn end(
    client: &Client,
    mut subscription: Subscription,
    ends: &str,
) -> Result<&'static str, Box<dyn Error>> {
    if ends == "client" {
        subscription.cancel().await?;
    } else {
        call(client, "end_listening".to_owned(), Map::new()).await?;
        timeout(PATIENCE, subscription.next()).await??;
    }
    match subscription.end() {
        Some(SubscriptionEnd::Graceful(_)) => Ok("by the server"),
        Some(SubscriptionEnd::Cancelled) => Ok("by the client"),
        other => Err(format!("ended otherwise: {other:?}").into()),
    }
}
