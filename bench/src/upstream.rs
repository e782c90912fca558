//! The upstream: an MCP server without anything that would take time.
//!
//! It keeps the names of its streams and no event, for what stands at an index
//! follows from the index. `initialize` begins a session, the tool [`ECHO`]
//! answers with JSON, the tool [`EVENTS`] with a stream of events, and a GET
//! with a cursor of one of its streams brings the next [`REPLAYED`] events and
//! ends (a server may, since 2025-11-25). Any other cursor is a 400, as the
//! servers of TypeScript, C# and Go answer.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use uuid::Uuid;

use crate::http::{Connection, LAST_CHUNK, Request, SESSION};
use crate::protocol::{Call, ECHO, EVENTS, Events, REPLAYED, ToolCall};
use crate::sse::{self, Bulk, Ids, chunk};

const STREAM_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
    cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";

struct State {
    streams: RefCell<HashSet<Uuid>>,
    /// Where the signals for the events of a stream come from.
    tickets: RefCell<HashMap<u64, UnixStream>>,
    /// Taken out while it is sent.
    bulk: RefCell<Option<Bulk>>,
}

/// Serves until standard input ends; prints its two addresses as JSON.
pub async fn serve() -> Result<()> {
    let gateway_side = TcpListener::bind("127.0.0.1:0").await?;
    // An abstract name: no file is left behind.
    let signals_name = format!("mcp-resume-guard-bench-{}", std::process::id());
    let signals = UnixListener::bind(format!("\0{signals_name}"))?;
    println!(
        "{}",
        serde_json::json!({
            "port": gateway_side.local_addr()?.port(),
            "signals": signals_name,
        })
    );
    let state = Rc::new(State {
        streams: RefCell::default(),
        tickets: RefCell::default(),
        bulk: RefCell::default(),
    });
    let mut input = tokio::io::stdin();
    let mut nothing = [0];
    loop {
        tokio::select! {
            accepted = gateway_side.accept() => {
                let state = Rc::clone(&state);
                let connection = Connection::new(accepted?.0)?;
                tokio::task::spawn_local(async move {
                    if let Err(error) = answer_all(&state, connection).await {
                        eprintln!("upstream: {error:#}");
                    }
                });
            }
            accepted = signals.accept() => {
                let state = Rc::clone(&state);
                let stream = accepted?.0;
                tokio::task::spawn_local(async move {
                    if let Err(error) = take_ticket(&state, stream).await {
                        eprintln!("upstream: signals: {error:#}");
                    }
                });
            }
            read = input.read(&mut nothing) => if read? == 0 { return Ok(()) },
        }
    }
}

async fn take_ticket(state: &State, mut stream: UnixStream) -> Result<()> {
    let ticket = stream.read_u64().await?;
    stream.write_u8(0).await?;
    state.tickets.borrow_mut().insert(ticket, stream);
    Ok(())
}

async fn answer_all(state: &State, mut connection: Connection) -> Result<()> {
    while let Some(request) = connection.request().await? {
        let body = connection.body().await?;
        match request.method.as_str() {
            "POST" => post(state, &mut connection, &body).await?,
            "GET" => get(state, &mut connection, &request).await?,
            "DELETE" => connection.write(b"HTTP/1.1 204 No Content\r\n\r\n").await?,
            _ => answer(&mut connection, "405 Method Not Allowed", "", "").await?,
        }
    }
    Ok(())
}

async fn post(state: &State, connection: &mut Connection, body: &[u8]) -> Result<()> {
    let call: Call<'_> = serde_json::from_slice(body).context("not a JSON-RPC request")?;
    let Some(id) = call.id else {
        return connection.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n").await;
    };
    if call.method == "initialize" {
        let session = format!("{SESSION}: {}\r\n", Uuid::new_v4());
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":{id},"result":{{"protocolVersion":"2025-11-25","capabilities":{{"tools":{{}}}},"serverInfo":{{"name":"bench","version":"0"}}}}}}"#
        );
        return answer(connection, "200 OK", &session, &body).await;
    }
    let tool = call.params.map(|params| serde_json::from_str(params.get())).transpose()?;
    let Some(ToolCall { name, arguments }) = tool else { bail!("{}: no parameters", call.method) };
    match (name, arguments) {
        (ECHO, _) => {
            let body = format!(
                r#"{{"jsonrpc":"2.0","id":{id},"result":{{"content":[{{"type":"text","text":"an answer as short as the question"}}],"isError":false}}}}"#
            );
            answer(connection, "200 OK", "", &body).await
        }
        (EVENTS, Some(arguments)) => {
            let events: Events = serde_json::from_str(arguments.get())?;
            let stream = Uuid::new_v4();
            state.streams.borrow_mut().insert(stream);
            let (mut rest, index) = match (events.bulk, events.ticket) {
                (Some(event_bytes), _) => {
                    connection.write(STREAM_HEAD).await?;
                    let blocks = events.count;
                    (Vec::new(), send_bulk(state, connection, stream, event_bytes, blocks).await?)
                }
                (None, Some(ticket)) => {
                    connection.write(STREAM_HEAD).await?;
                    send_on_signals(state, connection, stream, &events, ticket).await?;
                    (Vec::new(), events.count)
                }
                (None, None) => {
                    let mut all = STREAM_HEAD.to_vec();
                    for index in 0..events.count {
                        all.extend(chunk(&sse::event(&events.ids.id(stream, index), index)));
                    }
                    (all, events.count)
                }
            };
            if events.answer {
                rest.extend(chunk(&sse::last_event(&events.ids.id(stream, index), id)));
            }
            rest.extend(LAST_CHUNK);
            connection.write(&rest).await
        }
        _ => bail!("no tool {name}"),
    }
}

/// Sends an event for each byte that comes: the client has seen the one before.
async fn send_on_signals(
    state: &State,
    connection: &mut Connection,
    stream: Uuid,
    events: &Events,
    ticket: u64,
) -> Result<()> {
    let signals = state.tickets.borrow_mut().remove(&ticket);
    let mut signals = signals.context("an unknown ticket")?;
    for index in 0..events.count {
        signals.read_u8().await.context("the load generator is gone")?;
        connection.write(&chunk(&sse::event(&events.ids.id(stream, index), index))).await?;
    }
    // The answer waits, too.
    signals.read_u8().await.context("the load generator is gone")?;
    // The next stream of this client takes it again.
    state.tickets.borrow_mut().insert(ticket, signals);
    Ok(())
}

/// Sends so many blocks, and tells the index after them.
async fn send_bulk(
    state: &State,
    connection: &mut Connection,
    stream: Uuid,
    event_bytes: usize,
    blocks: u64,
) -> Result<u64> {
    let bulk = state.bulk.take().filter(|bulk| bulk.event_bytes == event_bytes);
    let mut bulk = bulk.unwrap_or_else(|| Bulk::new(event_bytes));
    let mut index = Bulk::FIRST;
    for _ in 0..blocks {
        let events = bulk.events();
        let block = bulk.block(stream, index);
        connection.write(format!("{:x}\r\n", block.len()).as_bytes()).await?;
        connection.write(block).await?;
        connection.write(b"\r\n").await?;
        index += events;
    }
    state.bulk.replace(Some(bulk));
    Ok(index)
}

async fn get(state: &State, connection: &mut Connection, request: &Request) -> Result<()> {
    let Some(cursor) = &request.cursor else {
        return answer(connection, "405 Method Not Allowed", "", "").await;
    };
    let known =
        sse::parse_cursor(cursor).filter(|(stream, _)| state.streams.borrow().contains(stream));
    let Some((stream, index)) = known else {
        let body = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"Bad Request: Unknown event ID"}}"#;
        return answer(connection, "400 Bad Request", "", body).await;
    };
    // In one write, so that Envoy gets it in one piece each time.
    let mut replay = STREAM_HEAD.to_vec();
    for index in index + 1..=index + REPLAYED {
        replay.extend(chunk(&sse::event(&Ids::Index.id(stream, index), index)));
    }
    replay.extend(LAST_CHUNK);
    connection.write(&replay).await
}

async fn answer(
    connection: &mut Connection,
    status: &str,
    headers: &str,
    body: &str,
) -> Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    connection.write((head + body).as_bytes()).await
}
