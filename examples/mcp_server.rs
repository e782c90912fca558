//! A real MCP server to put behind Envoy: `rmcp`'s Streamable HTTP transport
//! with sessions, in the protocol revisions up to 2025-11-25, at `/mcp`.
//!
//! ```text
//! cargo run --example mcp_server -- --listen 127.0.0.1:8000
//! cargo run --example mcp_server -- --listen 127.0.0.1:0 --event-ids uuid
//! cargo run --example mcp_server -- --listen 127.0.0.1:8001 --listen 127.0.0.1:8002
//! ```
//!
//! It prints `listening on 127.0.0.1:PORT` once it accepts connections, and ends
//! on SIGINT or SIGTERM. Each further `--listen` is a further replica: they share
//! the table of sessions, through rmcp's session store, and nothing of rmcp's
//! replay buffers. `--event-ids` chooses what clients get as cursors:
//!
//! * `index`: rmcp's own, `INDEX/REQUEST` on the answer to a POST and `INDEX` on
//!   the standalone stream. Every session has the same ones. rmcp replays the 16
//!   newest events of a stream, and nothing of a request that it has answered.
//! * `uuid`: a UUID per event, from an event store of this example, which keeps
//!   1000 events of a stream, those of answered requests too. All replicas share
//!   it. rmcp doesn't tell the store which session asks, so a cursor works in any
//!   of them.
//!
//! With `--replay all` that store replays every later event, whatever its stream
//! and session, as several real servers did.
//!
//! It is a local demo: there is no authentication, and any `Host` is accepted.

// Logging is the one way to notify without a request. Its deprecation begins
// with 2026-07-28, a revision this server doesn't speak.
#![expect(deprecated)]

use std::{
    borrow::Cow,
    collections::{HashMap, VecDeque},
    error::Error,
    future::IntoFuture,
    io::Write,
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{Router, serve::ListenerExt};
use futures::{future::try_join_all, stream};
use rmcp::{
    ErrorData, RoleServer, ServerHandler, ServiceError,
    handler::server::wrapper::Parameters,
    model::{
        Implementation, JsonRpcMessage, LoggingLevel, LoggingMessageNotificationParam,
        ProgressNotificationParam, ProtocolVersion, ServerCapabilities, ServerConfig,
        SetLevelRequestParams,
    },
    schemars::{self, JsonSchema},
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService,
        session::{
            EventId, EventStore, EventStoreError, EventStream, ServerSseMessage, SessionState,
            SessionStore, SessionStoreError, StreamId, local::LocalSessionManager,
        },
    },
};
use serde::Deserialize;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::Notify,
    time::sleep,
};
use uuid::Uuid;

const USAGE: &str = "\
An MCP server (Streamable HTTP, at /mcp) for demos and tests.

Usage: mcp_server --listen ADDRESS:PORT... [--event-ids index|uuid] [--replay stream|all]

  --listen ADDRESS:PORT    where to listen; port 0 takes a free one; given again,
                           a replica with a replay buffer of its own listens there
  --event-ids index|uuid   what the SSE event ids look like (default: index)
  --replay stream|all      what the store of UUIDs replays after a cursor: what its
                           stream still has, or all that any has (default: stream)
  --help                   print this";

/// An idle session lives this long, an open standalone stream or not.
const SESSION_IDLE: Duration = Duration::from_secs(30 * 60);
/// How long connections may take to end after a signal.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// What the event store keeps at most: of each stream the newest events, and of
/// the streams those that were written last.
const EVENTS_PER_STREAM: usize = 1000;
const STREAMS: usize = 1000;

#[tokio::main]
async fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("mcp_server: {message}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = serve(options).await {
        eprintln!("mcp_server: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

struct Options {
    /// One replica each; never empty.
    listen: Vec<SocketAddr>,
    uuid_ids: bool,
    replay_all: bool,
}

impl Options {
    /// `None` is a call for help.
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let mut options = Self { listen: Vec::new(), uuid_ids: false, replay_all: false };
        while let Some(flag) = args.next() {
            match (flag.as_str(), args.next().as_deref()) {
                ("--help", _) => return Ok(None),
                ("--listen", Some(address)) => match address.parse() {
                    Ok(address) => options.listen.push(address),
                    Err(error) => return Err(format!("--listen {address}: {error}")),
                },
                ("--event-ids", Some("index")) => options.uuid_ids = false,
                ("--event-ids", Some("uuid")) => options.uuid_ids = true,
                ("--event-ids", Some(other)) => {
                    return Err(format!("--event-ids {other}: neither index nor uuid"));
                }
                ("--replay", Some("stream")) => options.replay_all = false,
                ("--replay", Some("all")) => options.replay_all = true,
                ("--replay", Some(other)) => {
                    return Err(format!("--replay {other}: neither stream nor all"));
                }
                ("--listen" | "--event-ids" | "--replay", None) => {
                    return Err(format!("{flag} needs a value"));
                }
                _ => return Err(format!("unknown argument {flag}")),
            }
        }
        if options.listen.is_empty() {
            return Err("--listen is missing".to_owned());
        }
        if options.replay_all && !options.uuid_ids {
            return Err("--replay all needs --event-ids uuid".to_owned());
        }
        Ok(Some(options))
    }
}

async fn serve(options: Options) -> Result<(), Box<dyn Error>> {
    // rmcp's default is to answer to loopback names only, against DNS rebinding.
    // A proxy hands on whatever `Host` its client sent, and this is a local demo.
    let mut config = StreamableHttpServerConfig::default().disable_allowed_hosts();
    if options.listen.len() > 1 {
        config.session_store = Some(Arc::new(SessionTable::default()));
    }
    let stop = config.cancellation_token.clone();
    let store = UuidEventStore { replay_all: options.replay_all, ..UuidEventStore::default() };
    let store = options.uuid_ids.then(|| Arc::new(store));

    let mut sigint = signal(SignalKind::interrupt())?;
    let mut sigterm = signal(SignalKind::terminate())?;
    let mut stdout = std::io::stdout();
    let mut replicas = Vec::new();
    for address in options.listen {
        let mut sessions = LocalSessionManager::default();
        sessions.session_config.keep_alive = Some(SESSION_IDLE);
        if let Some(store) = store.clone() {
            sessions = sessions.with_event_store(store);
        }
        let mcp = StreamableHttpService::new(|| Ok(DemoServer), Arc::new(sessions), config.clone());
        let app = Router::new().route_service("/mcp", mcp);

        let listener = TcpListener::bind(address)
            .await
            .map_err(|error| format!("listen on {address}: {error}"))?;
        writeln!(stdout, "listening on {}", listener.local_addr()?)?;
        // An event is to go out at once, not after the peer's delayed ACK. A
        // connection that doesn't take the option is only slower.
        let listener = listener.tap_io(|connection| drop(connection.set_nodelay(true)));
        let server = axum::serve(listener, app);
        let server = server.with_graceful_shutdown(stop.clone().cancelled_owned());
        replicas.push(server.into_future());
    }
    stdout.flush()?;

    let signalled = async {
        tokio::select! {
            _ = sigint.recv() => {}
            _ = sigterm.recv() => {}
        }
        // Ends the sessions and their event streams, and with them the servers.
        stop.cancel();
        sleep(SHUTDOWN_GRACE).await;
    };
    tokio::select! {
        served = try_join_all(replicas) => served.map(drop)?,
        () = signalled => {}
    }
    Ok(())
}

/// What one session talks to.
struct DemoServer;

#[derive(Deserialize, JsonSchema)]
struct Count {
    /// The last number.
    to: u32,
    /// The pause before each number.
    #[serde(default)]
    interval_ms: u64,
    /// The pause before the result.
    #[serde(default)]
    rest_ms: u64,
}

#[derive(Deserialize, JsonSchema)]
struct Announce {
    /// What to announce.
    text: String,
    /// How often.
    times: u32,
    /// The pause before each announcement.
    #[serde(default)]
    interval_ms: u64,
}

#[derive(Deserialize, JsonSchema)]
struct Echo {
    /// What to say back.
    text: String,
}

#[tool_router]
impl DemoServer {
    // Without a `progressToken` it counts silently: progress is all that rmcp
    // sends on the stream of a request before the result.
    /// Counts, and reports each number as progress.
    #[tool]
    async fn count(
        &self,
        Parameters(Count { to, interval_ms, rest_ms }): Parameters<Count>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        let token = context.meta.get_progress_token();
        for step in 1..=to {
            pause(interval_ms, &context).await?;
            if let Some(token) = token.clone() {
                let progress = ProgressNotificationParam::new(token, step.into())
                    .with_total(to.into())
                    .with_message(format!("{step} of {to}"));
                let sent = context.peer.notify_progress(progress).await;
                sent.map_err(session_over)?;
            }
        }
        pause(rest_ms, &context).await?;
        Ok(format!("counted to {to}"))
    }

    /// Sends log messages, which go out on the session's standalone stream.
    #[tool]
    async fn announce(
        &self,
        Parameters(announce): Parameters<Announce>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        let Announce { text, times, interval_ms } = announce;
        for time in 1..=times {
            pause(interval_ms, &context).await?;
            let message = format!("{text} ({time} of {times})");
            let message = LoggingMessageNotificationParam::new(LoggingLevel::Info, message.into());
            let sent = context.peer.notify_logging_message(message).await;
            sent.map_err(session_over)?;
        }
        Ok(format!("announced {times} times"))
    }

    /// Says the text back.
    #[tool]
    async fn echo(&self, Parameters(Echo { text }): Parameters<Echo>) -> String {
        text
    }
}

async fn pause(millis: u64, context: &RequestContext<RoleServer>) -> Result<(), ErrorData> {
    tokio::select! {
        () = sleep(Duration::from_millis(millis)) => Ok(()),
        () = context.ct.cancelled() => Err(ErrorData::internal_error("cancelled", None)),
    }
}

fn session_over(error: ServiceError) -> ErrorData {
    ErrorData::internal_error(error.to_string(), None)
}

#[tool_handler]
impl ServerHandler for DemoServer {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_logging().build();
        let name = Implementation::new("mcp-resume-guard-demo", env!("CARGO_PKG_VERSION"));
        ServerConfig::new(capabilities).with_server_info(name)
    }

    /// The revisions that have sessions and resumption.
    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        ProtocolVersion::known_up_to(&ProtocolVersion::V_2025_11_25).into()
    }

    /// Accepted, as the logging capability asks for, but announcements come at
    /// any level.
    async fn set_level(
        &self,
        _: SetLevelRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Ok(())
    }
}

/// The sessions that the replicas know of: what their clients initialized them
/// with. A replica that meets one of another takes it up with that. Only DELETE
/// takes a session out again.
#[derive(Default)]
struct SessionTable(Mutex<HashMap<String, SessionState>>);

#[async_trait::async_trait]
impl SessionStore for SessionTable {
    async fn load(&self, session_id: &str) -> Result<Option<SessionState>, SessionStoreError> {
        Ok(locked(&self.0).get(session_id).cloned())
    }

    async fn store(&self, session_id: &str, state: &SessionState) -> Result<(), SessionStoreError> {
        locked(&self.0).insert(session_id.to_owned(), state.clone());
        Ok(())
    }

    async fn delete(&self, session_id: &str) -> Result<(), SessionStoreError> {
        locked(&self.0).remove(session_id);
        Ok(())
    }
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Event ids that tell nothing, and the newest events of each stream in memory.
///
/// A resumption gets what followed its cursor, and then what still follows until
/// the stream's request is answered. rmcp doesn't tell its store that a request
/// was cancelled or a session deleted: then it stays open, silent.
#[derive(Clone, Default)]
struct UuidEventStore {
    streams: Arc<Mutex<Streams>>,
    stored: Arc<Notify>,
    /// Keeps the events of all streams as if they were of one, which no answer
    /// finishes.
    replay_all: bool,
}

/// The stream that was written last is the last one.
type Streams = VecDeque<(StreamId, VecDeque<ServerSseMessage>)>;

#[async_trait::async_trait]
impl EventStore for UuidEventStore {
    async fn store_event(
        &self,
        stream_id: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        let id = Uuid::new_v4().to_string();
        let mut event = event.clone();
        event.event_id = Some(id.clone());

        let stream_id = if self.replay_all { "" } else { stream_id };
        let mut streams = locked(&self.streams);
        let known = streams.iter().position(|(id, _)| id == stream_id);
        let (stream_id, mut events) = known
            .and_then(|position| streams.remove(position))
            .unwrap_or_else(|| (stream_id.to_owned(), VecDeque::new()));
        if events.len() >= EVENTS_PER_STREAM {
            events.pop_front();
        }
        events.push_back(event);
        if streams.len() >= STREAMS {
            streams.pop_front();
        }
        streams.push_back((stream_id, events));

        self.stored.notify_waiters();
        Ok(id)
    }

    async fn replay_events_after(&self, cursor: &str) -> Result<EventStream, EventStoreError> {
        if find(&locked(&self.streams), cursor).is_none() {
            return Err(format!("no event has the id {cursor}").into());
        }
        let position = (self.clone(), cursor.to_owned());
        let events = stream::unfold(position, async |(store, cursor)| {
            let event = store.next_after(&cursor).await?;
            let cursor = event.event_id.clone()?;
            Some((event, (store, cursor)))
        });
        Ok(Box::pin(events))
    }
}

impl UuidEventStore {
    /// The event after the cursor, as soon as there is one. `None` where the
    /// stream is finished, or has lost the cursor meanwhile.
    async fn next_after(&self, cursor: &str) -> Option<ServerSseMessage> {
        loop {
            // Made before the look, so that nothing stored after it is missed.
            let stored = self.stored.notified();
            let (event, next) = find(&locked(&self.streams), cursor)?;
            if next.is_some() || (is_answer(&event) && !self.replay_all) {
                return next;
            }
            stored.await;
        }
    }
}

/// The event with this id, and the one after it on its stream.
fn find(streams: &Streams, id: &str) -> Option<(ServerSseMessage, Option<ServerSseMessage>)> {
    streams.iter().find_map(|(_, events)| {
        let other = |event: &&ServerSseMessage| event.event_id.as_deref() != Some(id);
        let mut from_id = events.iter().skip_while(other).cloned();
        Some((from_id.next()?, from_id.next()))
    })
}

/// A response is the last event of its request's stream.
fn is_answer(event: &ServerSseMessage) -> bool {
    matches!(event.message.as_deref(), Some(JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_)))
}
