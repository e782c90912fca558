//! A client: one connection, and the sessions that take turns on it.
//!
//! It behaves as an honest client does, and checks each answer: a run in which
//! one is wrong fails.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use uuid::Uuid;

use super::{Done, Work};
use crate::http::{CURSOR, Connection, Response, SESSION};
use crate::protocol::{ECHO, EVENTS, Events, REPLAYED};
use crate::sse::{self, Bulk, EVENT_BYTES, Ids};

/// Bytes of a POST's body.
const POST_BYTES: usize = 200;

pub struct Client {
    connection: Connection,
    /// Past Envoy: a byte makes the upstream send the next event.
    signals: UnixStream,
    ticket: u64,
    sessions: Vec<Session>,
    /// Whose turn it is.
    turn: usize,
    /// The last JSON-RPC id.
    call: u64,
    running: Option<Running>,
}

#[derive(Clone)]
struct Session {
    id: String,
    /// The stream that can be resumed, and the index of its newest event.
    resumable: Option<(Uuid, u64)>,
}

/// A stream of events that is under way.
struct Running {
    ids: Ids,
    next: u64,
    /// The name of the stream, with the first id.
    prefix: String,
    /// What came of the next event.
    event: Vec<u8>,
}

impl Client {
    pub async fn open(gateway: SocketAddr, signals: &str, ticket: u64) -> Result<Self> {
        let signals = UnixStream::connect(format!("\0{signals}")).await;
        let mut signals = signals.context("nobody takes the signals")?;
        signals.write_u64(ticket).await?;
        signals.read_u8().await?;
        Ok(Client {
            connection: Connection::open(gateway).await?,
            signals,
            ticket,
            sessions: Vec::new(),
            turn: 0,
            call: 0,
            running: None,
        })
    }

    /// Begins so many sessions; `resumable`: each with a stream whose call the
    /// server hasn't answered yet.
    pub async fn begin_sessions(&mut self, count: usize, resumable: bool) -> Result<Done> {
        let mut done = Done::default();
        for _ in 0..count {
            let began = Instant::now();
            let params = r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"0"}}"#;
            let response = self.post("initialize", params, None).await?;
            ensure!(response.status == 200, "initialize was answered with {}", response.status);
            self.connection.body().await?;
            done.slowest_us = done.slowest_us.max(began.elapsed().as_micros() as u64);
            let id = response.session.context("initialize brought no session")?;
            self.sessions.push(Session { id, resumable: None });
            done.sessions += 1;
            if resumable {
                let began = Instant::now();
                self.turn = self.sessions.len() - 1;
                let count = REPLAYED;
                let events =
                    Events { count, ids: Ids::Index, ticket: None, answer: false, bulk: None };
                self.call_events(&events).await?;
                let body = self.connection.body().await?;
                ensure!(body.len() == EVENT_BYTES * count as usize, "not the events of a call");
                let (stream, _) =
                    sse::id_of(&body).and_then(sse::parse_cursor).context("an event without id")?;
                self.session().resumable = Some((stream, count - 1));
                done.events += count;
                done.slowest_us = done.slowest_us.max(began.elapsed().as_micros() as u64);
            }
        }
        Ok(done)
    }

    pub fn share_session_of(&mut self, other: &Client) {
        self.sessions = other.sessions.clone();
    }

    pub async fn work(&mut self, work: Work, units: u64) -> Result<Done> {
        let mut done = Done::default();
        match work {
            Work::Post => {
                for _ in 0..units {
                    self.echo(&mut done).await?;
                }
            }
            Work::Resume => {
                for _ in 0..units {
                    self.resume(&mut done).await?;
                }
            }
            Work::Refuse => {
                for _ in 0..units {
                    self.be_refused(&mut done).await?;
                }
            }
            Work::Stream { ids, events } => {
                while done.units < units {
                    let events = events.min(units - done.units);
                    self.begin_stream(ids, events).await?;
                    for _ in 0..events {
                        self.next_event().await?;
                    }
                    done.units += events;
                    done.add(self.end_stream().await?);
                }
            }
            Work::Bulk { blocks, event_bytes } => {
                while done.units < units {
                    let blocks = blocks.min(units - done.units);
                    self.download(blocks, event_bytes, &mut done).await?;
                    done.units += blocks;
                }
            }
        }
        Ok(done)
    }

    /// Opens a stream of events that come one by one.
    pub async fn begin_stream(&mut self, ids: Ids, events: u64) -> Result<()> {
        self.next_session();
        let ticket = Some(self.ticket);
        self.call_events(&Events { count: events, ids, ticket, answer: true, bulk: None }).await?;
        self.running = Some(Running { ids, next: 0, prefix: String::new(), event: Vec::new() });
        Ok(())
    }

    /// Asks for the next event, waits until it's there, and tells the
    /// nanoseconds since it was made.
    pub async fn next_event(&mut self) -> Result<u64> {
        self.signals.write_u8(0).await?;
        let running = self.running.as_mut().context("no stream")?;
        running.event.clear();
        while !running.event.ends_with(b"\n\n") {
            let data = self.connection.data().await?.context("the stream ended early")?;
            running.event.extend_from_slice(&data);
        }
        let now = sse::now_ns();
        ensure!(running.event.len() == EVENT_BYTES, "not one event at a time");
        let id = sse::id_of(&running.event).context("an event without id")?;
        match running.ids {
            Ids::Index if running.next == 0 => {
                running.prefix = id.strip_suffix('0').context("not the first event")?.to_owned();
            }
            Ids::Index => {
                let index = id.strip_prefix(&running.prefix).and_then(|text| text.parse().ok());
                ensure!(index == Some(running.next), "not the next event");
            }
            Ids::Uuid => ensure!(id.len() == 36, "not a UUID"),
        }
        running.next += 1;
        let made = sse::time_of(&running.event).context("an event without time")?;
        Ok(now.saturating_sub(made))
    }

    /// Asks for the answer that ends the stream.
    pub async fn end_stream(&mut self) -> Result<Done> {
        let running = self.running.take().context("no stream")?;
        self.signals.write_u8(0).await?;
        let rest = self.connection.body().await?;
        self.check_answer(&rest)?;
        self.session().resumable = sse::id_of(&rest).and_then(sse::parse_cursor);
        Ok(Done { events: running.next + 1, ..Done::default() })
    }

    async fn echo(&mut self, done: &mut Done) -> Result<()> {
        self.next_session();
        let start = format!(
            r#"{{"jsonrpc":"2.0","id":{},"method":"tools/call","params":{{"name":"{ECHO}","arguments":{{"text":""#,
            self.call + 1
        );
        const END: &str = r#""}}}"#;
        let text = ".".repeat(POST_BYTES - start.len() - END.len());
        let began = Instant::now();
        let response = self.send(&format!("{start}{text}{END}"), true).await?;
        ensure!(response.status == 200, "a POST was answered with {}", response.status);
        let body = self.connection.body().await?;
        done.slowest_us = done.slowest_us.max(began.elapsed().as_micros() as u64);
        let expected = format!(r#"{{"jsonrpc":"2.0","id":{},"result":"#, self.call);
        ensure!(body.starts_with(expected.as_bytes()), "not the answer to this call");
        done.units += 1;
        Ok(())
    }

    /// Resumes as if the newest event hadn't come.
    async fn resume(&mut self, done: &mut Done) -> Result<()> {
        self.next_session();
        let (stream, newest) = self.session().resumable.context("nothing to resume")?;
        let response = self.get(&sse::cursor(stream, newest - 1), done).await?;
        ensure!(response.status == 200, "a resumption was answered with {}", response.status);
        let body = self.connection.body().await?;
        ensure!(body.len() == EVENT_BYTES * REPLAYED as usize, "not a whole replay");
        for (event, index) in body.chunks(EVENT_BYTES).zip(newest..) {
            let id = sse::id_of(event).and_then(sse::parse_cursor);
            ensure!(id == Some((stream, index)), "not the event {index}");
        }
        self.session().resumable = Some((stream, newest + 1));
        done.events += 1;
        done.units += 1;
        Ok(())
    }

    async fn be_refused(&mut self, done: &mut Done) -> Result<()> {
        self.next_session();
        let nowhere = Uuid::from_u128(fastrand::u128(..));
        let response = self.get(&sse::cursor(nowhere, 1), done).await?;
        ensure!(response.status == 400, "a wrong cursor was answered with {}", response.status);
        let body = self.connection.body().await?;
        ensure!(memchr::memmem::find(&body, b"\"error\"").is_some(), "not an error");
        done.units += 1;
        Ok(())
    }

    async fn download(&mut self, blocks: u64, event_bytes: usize, done: &mut Done) -> Result<()> {
        self.next_session();
        let events = Events {
            count: blocks,
            ids: Ids::Index,
            ticket: None,
            answer: true,
            bulk: Some(event_bytes),
        };
        self.call_events(&events).await?;
        let per_block = (Bulk::BLOCK / event_bytes) as u64;
        let mut left = blocks as usize * per_block as usize * event_bytes;
        let mut rest = Vec::new();
        while let Some(data) = self.connection.data().await? {
            let of_blocks = left.min(data.len());
            left -= of_blocks;
            rest.extend_from_slice(&data[of_blocks..]);
        }
        ensure!(left == 0, "{left} bytes are missing");
        self.check_answer(&rest)?;
        let newest = sse::id_of(&rest).and_then(sse::parse_cursor).map(|(_, index)| index);
        ensure!(newest == Some(Bulk::FIRST + blocks * per_block), "not the last event");
        done.events += blocks * per_block + 1;
        Ok(())
    }

    fn check_answer(&self, event: &[u8]) -> Result<()> {
        let expected = format!(r#"data: {{"jsonrpc":"2.0","id":{},"result":"#, self.call);
        let found = memchr::memmem::find(event, expected.as_bytes());
        ensure!(found.is_some(), "the stream ended without the answer");
        Ok(())
    }

    async fn call_events(&mut self, events: &Events) -> Result<()> {
        let params =
            format!(r#"{{"name":"{EVENTS}","arguments":{}}}"#, serde_json::to_string(events)?);
        let response = self.post("tools/call", &params, Some(self.turn)).await?;
        if response.status != 200 || !response.is_stream {
            bail!("a call was answered with {}, not with a stream", response.status);
        }
        Ok(())
    }

    async fn post(&mut self, method: &str, params: &str, turn: Option<usize>) -> Result<Response> {
        let id = self.call + 1;
        let body =
            format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#);
        self.send(&body, turn.is_some()).await
    }

    async fn send(&mut self, body: &str, in_session: bool) -> Result<Response> {
        self.call += 1;
        let session = match in_session {
            true => {
                format!("mcp-protocol-version: 2025-11-25\r\n{SESSION}: {}\r\n", self.session().id)
            }
            false => String::new(),
        };
        let request = format!(
            "POST /mcp HTTP/1.1\r\nhost: bench\r\nuser-agent: bench\r\n\
             accept: application/json, text/event-stream\r\ncontent-type: application/json\r\n\
             {session}content-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.connection.write(request.as_bytes()).await?;
        self.connection.response().await
    }

    async fn get(&mut self, cursor: &str, done: &mut Done) -> Result<Response> {
        let request = format!(
            "GET /mcp HTTP/1.1\r\nhost: bench\r\nuser-agent: bench\r\naccept: text/event-stream\r\n\
             mcp-protocol-version: 2025-11-25\r\n{SESSION}: {}\r\n{CURSOR}: {cursor}\r\n\r\n",
            self.session().id
        );
        self.connection.write(request.as_bytes()).await?;
        let response = self.connection.response().await?;
        if let Some(verdict) = &response.verdict {
            match done.verdicts.get_mut(verdict) {
                Some(count) => *count += 1,
                None => _ = done.verdicts.insert(verdict.clone(), 1),
            }
        }
        Ok(response)
    }

    fn next_session(&mut self) {
        self.turn = (self.turn + 1) % self.sessions.len().max(1);
    }

    fn session(&mut self) -> &mut Session {
        &mut self.sessions[self.turn]
    }
}
