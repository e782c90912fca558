//! The guard against a naive twin that keeps everything (`support::oracle`).
//!
//! Random lives of a few sessions behind one or two workers of a gateway, with
//! the event ids of every SDK that is known, and upstreams, clients and
//! proxies that misbehave in every way that was seen. Whatever comes, an id
//! that was issued is never called inconsistent; and where nothing had to be
//! forgotten, the verdict is the twin's.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::arithmetic_side_effects,
    reason = "a test may fail"
)]

mod support {
    mod cases;
    #[path = "mod.rs"]
    mod gateway;
    pub mod oracle;
    pub use cases::cases;
    pub use gateway::*;
}

use std::collections::BTreeMap;
use std::rc::Rc;

use mcp_resume_guard::exchange::Exchange;
use mcp_resume_guard::headers::Field;
use mcp_resume_guard::ledger::table::Shape;
use mcp_resume_guard::sse::DATA_LIMIT;
use mcp_resume_guard::store::memory::SharedData;
use mcp_resume_guard::store::{Cas, CasMismatch, Store};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use support::oracle::{Answers, Connection, Rules, Twin};
use support::{Answer, Flaky, Gateway, Sender, cases};

/// Session ids: Java's servers use them as event ids, so they are UUIDs.
const SESSIONS: [&str; 6] = [
    "0b6e5f0a-7d53-4c1e-9a41-6f2d8c3b1a00",
    "1f0e8a7b-2c64-4d5f-8b32-705e9d4c2b11",
    "2a1d9b8c-3f75-4e60-9c23-816fae5d3c22",
    "3b2cac9d-4a86-4f71-ad14-927abf6e4d33",
    "4c3bbdae-5b97-4082-be05-a38bc07f5e44",
    "5d4acebf-6ca8-4193-8ff6-b49cd1806f55",
];

const EVENT_ID_BYTES: usize = 120;

/// How a server writes event ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// `<26 base32>_<index>`.
    Go,
    /// The standalone stream of Go's servers: `_<index>`.
    GoStandalone,
    /// `<index>/<request>`.
    Rmcp,
    /// A plain index for each stream.
    Index,
    /// `<session>:<stream>:<index>`, in base64.
    CSharp,
    /// One counter for all sessions.
    McpGo,
    /// A UUID for each event.
    Uuid,
    /// `<stream>_<milliseconds>_<8 base36>`.
    TypeScript,
    /// Always the session's id.
    Java,
    /// Always the same.
    Constant,
    /// The same UUIDs for all sessions.
    Broadcast,
    /// The same `<26 base32>_<index>` for all sessions.
    BroadcastIndex,
    /// What can't come back unchanged, or not at all.
    Odd,
}

fn random(seed: u64) -> u64 {
    // splitmix64
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn uuid(seed: u64) -> String {
    let (a, b) = (random(seed), random(seed ^ u64::MAX));
    format!(
        "{:08x}-{:04x}-4{:03x}-9{:03x}-{:012x}",
        a >> 32,
        (a >> 16) & 0xffff,
        a & 0xfff,
        b >> 52,
        b & 0xffff_ffff_ffff
    )
}

fn digits(seed: u64, count: u64, alphabet: &[u8]) -> String {
    (0..count)
        .map(|at| {
            let pick = random(seed.wrapping_mul(131).wrapping_add(at)) % alphabet.len() as u64;
            char::from(alphabet[usize::try_from(pick).unwrap()])
        })
        .collect()
}

fn base32(seed: u64) -> String {
    digits(seed, 26, b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")
}

/// A stream as the server has it.
#[derive(Debug, Clone)]
struct ServerStream {
    session: usize,
    format: Format,
    number: u64,
    next: u64,
    log: Vec<Event>,
    calls: Vec<u32>,
    awaited: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq)]
struct Event {
    id: Option<String>,
    data: bool,
    answers: Answers,
    rank: usize,
}

impl Event {
    fn text(&self) -> String {
        let id = self.id.as_ref().map_or_else(String::new, |id| format!("id: {id}\n"));
        match (self.data, self.answers) {
            (_, Answers::Call(call)) => {
                format!("{id}data: {{\"jsonrpc\":\"2.0\",\"id\":{call},\"result\":{{}}}}\n\n")
            }
            (_, Answers::Unreadably(call)) => {
                let long = "x".repeat(DATA_LIMIT);
                format!("{id}data: {{\"result\":\"{long}\",\"id\":{call}}}\n\n")
            }
            (true, _) => format!("{id}data: {{\"jsonrpc\":\"2.0\",\"method\":\"m\"}}\n\n"),
            (false, _) => format!("{id}data:\n\n"),
        }
    }
}

/// A cursor that a client sends.
#[derive(Debug, Clone, Copy)]
enum Cursor {
    /// Issued on the same session.
    Own(u16),
    /// Issued on another one.
    Other(u16),
    /// Own, with its number moved on.
    Moved(u16, i8),
    /// Own, with a character changed.
    Changed(u16, u8),
    /// Own, longer than the limit.
    TooLong(u16),
    Random(Format, u8),
}

/// When a POST's body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Late {
    BeforeTheAnswer,
    BeforeTheEvents,
    AfterSome,
}

#[derive(Debug, Clone, Copy)]
enum Replay {
    /// With the cursor's own event (rmcp).
    Inclusive,
    Exclusive,
    /// Nothing: only what is new comes.
    LiveOnly,
    /// As a server does that clamps.
    FromStart,
}

#[derive(Debug, Clone, Copy)]
enum Op {
    /// The server answers a POST without a session with this session's id,
    /// and an event stream or JSON.
    Initialize {
        session: u8,
        stream: Option<Format>,
    },
    Post {
        session: u8,
        format: Format,
        calls: u8,
        readable: bool,
        late: Late,
    },
    Listen {
        session: u8,
        format: Format,
        replay: bool,
    },
    Resume {
        session: u8,
        cursor: Cursor,
        replay: Replay,
        which: u8,
    },
    Emit {
        connection: u8,
        count: u8,
        data: bool,
        together: bool,
    },
    Answer {
        connection: u8,
        with_id: bool,
        readable: bool,
    },
    End {
        connection: u8,
    },
    Abort {
        connection: u8,
    },
    Delete {
        session: u8,
        accepted: bool,
    },
    /// A response to the one session's request names the other.
    Rename {
        from: u8,
        to: u8,
        via: Via,
    },
    Advance {
        ms: u32,
    },
    Restart,
    Ask {
        session: u8,
        cursor: Cursor,
    },
    AskWithoutSession {
        session: u8,
        cursor: Cursor,
    },
    /// Compare-and-swap fails from now on, or doesn't any more.
    Failing(bool),
}

#[derive(Debug, Clone, Copy)]
enum Via {
    Json,
    Post(Format),
    Listen(Format),
    Resume(Cursor),
}

#[derive(Debug, Clone)]
struct Setup {
    workers: usize,
    exclusive: bool,
    observe: bool,
    settle: bool,
    events_per_stream: Option<u64>,
    seconds: Option<u64>,
    finished_stream_seconds: Option<u64>,
    sessions: u32,
    streams: u8,
    ids: u16,
}

impl Setup {
    fn config(&self) -> String {
        let number = |n: Option<u64>| n.map_or_else(|| "null".to_owned(), |n| n.to_string());
        format!(
            r#"{{"history":"{}","mode":"{}","retention":{{"events_per_stream":{},"seconds":{},
            "finished_stream_seconds":{}}},"state":{{"sessions":{},"streams_per_session":{},
            "ids_per_stream":{}}},"reject":{{"pending_calls":"{}"}},
            "replay":{{"gap":"report","foreign_session":"report"}},"limits":{{"event_id_bytes":{EVENT_ID_BYTES}}}}}"#,
            if self.exclusive { "exclusive" } else { "shared" },
            if self.observe { "observe" } else { "enforce" },
            number(self.events_per_stream),
            number(self.seconds),
            number(self.finished_stream_seconds),
            self.sessions,
            self.streams,
            self.ids,
            if self.settle { "settle" } else { "status" },
        )
    }

    fn rules(&self) -> Rules {
        Rules {
            exclusive: self.exclusive,
            event_id_bytes: EVENT_ID_BYTES,
            events_per_stream: self.events_per_stream,
            seconds: self.seconds,
            finished_stream_seconds: self.finished_stream_seconds,
        }
    }
}

struct Running {
    exchange: Exchange,
    /// Its body is of interest to the guard.
    body: bool,
}

fn respond(
    gateway: &mut Gateway<Flaky>,
    nonces: &mut u64,
    mut exchange: Exchange,
    list: &[(&str, &str)],
) -> Running {
    *nonces += 1;
    let (nonce, list) = (*nonces, support::fields(list));
    let step = gateway
        .with(|guard, at| exchange.response(guard, at, &list, false, &Sender::upstream(nonce)));
    Running { exchange, body: step.body }
}

fn send(gateway: &mut Gateway<Flaky>, running: &mut Running, text: &str) {
    gateway.with(|guard, at| running.exchange.response_body(guard, at, text.as_bytes()));
}

struct Open {
    running: Running,
    worker: usize,
    stream: usize,
    twin: Connection,
    /// The rest of the request, which ends after some events.
    late_body: Option<String>,
}

/// Workers, servers, clients, and the twin that watches them.
struct World {
    setup: Setup,
    store: Rc<Flaky>,
    workers: Vec<Gateway<Flaky>>,
    twin: Twin,
    streams: Vec<ServerStream>,
    standalone: BTreeMap<usize, usize>,
    open: Vec<Open>,
    /// Connections that a session ever had.
    connected: BTreeMap<usize, usize>,
    next_call: u32,
    /// The counter of mcp-go's store.
    counter: u64,
    turn: usize,
    /// Compare-and-swaps were made to fail.
    failed: bool,
    nonces: u64,
    now_ms: u64,
}

const START_MS: u64 = 1_000_000;

impl World {
    fn new(setup: &Setup) -> Self {
        let store = Rc::new(Flaky::default());
        World {
            workers: World::start(setup, &store),
            twin: Twin::new(setup.rules(), START_MS),
            setup: setup.clone(),
            store,
            streams: Vec::new(),
            standalone: BTreeMap::new(),
            open: Vec::new(),
            connected: BTreeMap::new(),
            next_call: 1,
            counter: 0,
            turn: 0,
            failed: false,
            nonces: 0,
            now_ms: START_MS,
        }
    }

    fn start(setup: &Setup, store: &Rc<Flaky>) -> Vec<Gateway<Flaky>> {
        (0..setup.workers).map(|_| Gateway::on(Rc::clone(store), &setup.config())).collect()
    }

    /// The workers take turns.
    fn worker(&mut self) -> usize {
        self.turn += 1;
        self.turn % self.workers.len()
    }

    fn new_stream(&mut self, session: usize, format: Format) -> usize {
        let number = self.streams.len() as u64;
        let next = match format {
            // It joins in what the others get already.
            Format::BroadcastIndex => session as u64 * 2,
            Format::CSharp => 1,
            _ => 0,
        };
        let stream = ServerStream {
            session,
            format,
            number,
            next,
            log: Vec::new(),
            calls: Vec::new(),
            awaited: Vec::new(),
        };
        self.streams.push(stream);
        self.streams.len() - 1
    }

    fn expect_answers(&mut self, stream: usize, calls: &[u32]) {
        self.streams[stream].calls = calls.to_vec();
        self.streams[stream].awaited = calls.to_vec();
    }

    fn standalone(&mut self, session: usize, format: Format) -> usize {
        if let Some(stream) = self.standalone.get(&session) {
            return *stream;
        }
        let stream = self.new_stream(session, format);
        self.standalone.insert(session, stream);
        stream
    }

    fn next_id(&mut self, stream: usize) -> String {
        let counter = self.counter;
        let ServerStream { session, format, number, next, .. } = &mut self.streams[stream];
        let n = *next;
        *next += 1;
        let unique = *number * 1000 + n;
        match format {
            Format::Go => format!("{}_{n}", base32(*number)),
            Format::GoStandalone => format!("_{n}"),
            Format::Rmcp => format!("{n}/{number}"),
            Format::Index => n.to_string(),
            Format::CSharp => format!(
                "{}:{}:{n}",
                digits(77 + *session as u64, 22, b"ABCDEFGHIJabcdefghij0123456789+/"),
                digits(99 + *number, 8, b"ABCDEFGHIJabcdefghij0123456789+/"),
            ),
            Format::McpGo => {
                self.counter = counter + 1;
                counter.to_string()
            }
            Format::Uuid => uuid(unique),
            Format::TypeScript => format!(
                "{}_{}_{}",
                uuid(1_000_000 + *number),
                1_764_444_444_000 + n / 3,
                digits(unique, 8, b"abcdefghijklmnopqrstuvwxyz0123456789")
            ),
            Format::Java => SESSIONS[*session].to_owned(),
            Format::Constant => "priming".to_owned(),
            Format::Broadcast => uuid(2_000_000 + n),
            Format::BroadcastIndex => format!("{}_{n}", base32(3_000_000)),
            Format::Odd => match n % 4 {
                0 => format!("a b-{unique}"),
                1 => format!("é-{unique}"),
                2 => format!("{unique}{}", "x".repeat(EVENT_ID_BYTES)),
                _ => format!("  padded-{unique}\t"),
            },
        }
    }

    fn connect(&mut self, worker: usize, running: Running, stream: usize, twin: Connection) {
        let session = self.streams[stream].session;
        *self.connected.entry(session).or_default() += 1;
        if running.body {
            self.open.push(Open { running, worker, stream, twin, late_body: None });
        }
    }

    /// Sends events of a server's stream, old or new ones.
    fn send(&mut self, at: usize, events: &[Event], together: bool) {
        let open = &mut self.open[at];
        let gateway = &mut self.workers[open.worker];
        let texts: Vec<String> = events.iter().map(Event::text).collect();
        if together {
            send(gateway, &mut open.running, &texts.concat());
        } else {
            for text in &texts {
                let (head, tail) = text.split_at(3);
                send(gateway, &mut open.running, head);
                send(gateway, &mut open.running, tail);
            }
        }
        for event in events {
            self.twin.event(
                &mut open.twin,
                event.id.as_deref(),
                event.data,
                event.answers,
                (open.stream, event.rank),
            );
        }
        if let Some(body) = open.late_body.take() {
            gateway.with(|guard, at| {
                open.running.exchange.request_body(guard, at, body.as_bytes(), true)
            });
            self.twin.late_body(&mut open.twin);
        }
    }

    fn emit(&mut self, at: usize, count: u8, data: bool, together: bool) {
        let stream = self.open[at].stream;
        let events: Vec<Event> = (0..count)
            .map(|at| {
                let rank = self.streams[stream].log.len() + usize::from(at);
                Event { id: Some(self.next_id(stream)), data, answers: Answers::Nothing, rank }
            })
            .collect();
        self.streams[stream].log.extend(events.iter().cloned());
        self.send(at, &events, together);
    }

    fn close(&mut self, at: usize, clean: bool) {
        let mut open = self.open.swap_remove(at);
        self.twin.close(&open.twin);
        let gateway = &mut self.workers[open.worker];
        gateway.with(|guard, at| {
            if clean {
                open.running.exchange.response_end(guard, at, false);
            } else {
                open.running.exchange.close(guard, at, || false);
            }
        });
    }

    fn cursor(&self, session: usize, cursor: Cursor) -> Option<String> {
        let pick = |session: usize, n: u16| {
            let issued = self.twin.issued(SESSIONS[session]);
            let at = usize::from(n).checked_rem(issued.len())?;
            issued.into_iter().nth(at)
        };
        match cursor {
            Cursor::Own(n) => pick(session, n),
            Cursor::Other(n) => {
                pick((session + 1 + usize::from(n) % (SESSIONS.len() - 1)) % SESSIONS.len(), n / 5)
            }
            Cursor::Moved(n, by) => {
                let own = pick(session, n)?;
                let number = own.trim_end_matches(|c: char| c.is_ascii_digit());
                let (prefix, digits) = own.split_at(number.len());
                match digits.parse::<u64>() {
                    Ok(index) => {
                        Some(format!("{prefix}{}", index.saturating_add_signed(by.into())))
                    }
                    Err(_) => {
                        let rest = own.trim_start_matches(|c: char| c.is_ascii_digit());
                        let index: u64 = own[..own.len() - rest.len()].parse().ok()?;
                        Some(format!("{}{rest}", index.saturating_add_signed(by.into())))
                    }
                }
            }
            Cursor::Changed(n, by) => {
                let own = pick(session, n)?;
                let at = usize::from(by) % own.len();
                let byte = own.as_bytes()[at];
                own.is_ascii().then(|| {
                    let changed = char::from(if byte == b'z' { b'y' } else { b'z' });
                    format!("{}{changed}{}", &own[..at], &own[at + 1..])
                })
            }
            Cursor::TooLong(n) => pick(session, n).map(|own| own + &"x".repeat(EVENT_ID_BYTES)),
            Cursor::Random(format, seed) => {
                let seed = u64::from(seed);
                Some(match format {
                    Format::Go | Format::BroadcastIndex => format!("{}_0", base32(500 + seed)),
                    Format::Uuid | Format::Broadcast => uuid(500_000_000 + seed),
                    Format::Rmcp => format!("{seed}/{}", seed % 7),
                    Format::GoStandalone => format!("_{seed}"),
                    Format::Java => SESSIONS[usize::from(seed as u8) % SESSIONS.len()].to_owned(),
                    _ => seed.to_string(),
                })
            }
        }
    }

    fn run(&mut self, op: Op) -> TestCaseResult {
        let name = |session: usize| SESSIONS[session];
        let index = |session: u8| usize::from(session) % SESSIONS.len();
        match op {
            Op::Initialize { session, stream } => {
                let (session, worker) = (index(session), self.worker());
                let gateway = &mut self.workers[worker];
                let Answer::Passed { mut exchange, .. } =
                    gateway.request(&[(":method", "POST"), (":path", "/mcp")])
                else {
                    return Err(TestCaseError::fail("a POST without a session was refused"));
                };
                let call = self.next_call;
                self.next_call += 1;
                gateway.with(|guard, at| {
                    exchange.request_body(guard, at, body(&[call]).as_bytes(), true)
                });
                let content_type =
                    if stream.is_some() { "text/event-stream" } else { "application/json" };
                let running = respond(
                    gateway,
                    &mut self.nonces,
                    exchange,
                    &[
                        (":status", "200"),
                        ("content-type", content_type),
                        ("mcp-session-id", name(session)),
                    ],
                );
                if !self.store.failing.get() {
                    self.twin.begin(name(session));
                }
                if let Some(format) = stream {
                    let stream = self.new_stream(session, format);
                    self.expect_answers(stream, &[call]);
                    let twin = self.twin.post(name(session), Some(vec![call]));
                    self.connect(worker, running, stream, twin);
                }
            }
            Op::Post { session, format, calls, readable, late } => {
                let (session, worker) = (index(session), self.worker());
                let gateway = &mut self.workers[worker];
                let request =
                    [(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", name(session))];
                let Answer::Passed { mut exchange, .. } = gateway.request(&request) else {
                    return self.refused_as_ended(session);
                };
                let calls: Vec<u32> = (self.next_call..).take(usize::from(calls)).collect();
                self.next_call += calls.len() as u32;
                let text = if readable { body(&calls) } else { "{".to_owned() };
                let response = [(":status", "200"), ("content-type", "text/event-stream")];
                if late == Late::BeforeTheAnswer {
                    gateway
                        .with(|guard, at| exchange.request_body(guard, at, text.as_bytes(), true));
                }
                let mut running = respond(gateway, &mut self.nonces, exchange, &response);
                if late == Late::BeforeTheEvents {
                    gateway.with(|guard, at| {
                        running.exchange.request_body(guard, at, text.as_bytes(), true)
                    });
                }
                let stream = self.new_stream(session, format);
                self.expect_answers(stream, &calls);
                let twin = self.twin.post(name(session), readable.then_some(calls));
                self.connect(worker, running, stream, twin);
                if late == Late::AfterSome
                    && let Some(open) = self.open.last_mut()
                {
                    open.late_body = Some(text);
                }
            }
            Op::Listen { session, format, replay } => {
                let session = index(session);
                self.listen(session, session, format, replay)?;
            }
            Op::Resume { session, cursor, replay, which } => {
                let session = index(session);
                self.resume(session, session, cursor, replay, which)?;
            }
            Op::Emit { connection, count, data, together } => {
                let Some(at) = usize::from(connection).checked_rem(self.open.len()) else {
                    return Ok(());
                };
                self.emit(at, count, data, together);
            }
            Op::Answer { connection, with_id, readable } => {
                let Some(at) = usize::from(connection).checked_rem(self.open.len()) else {
                    return Ok(());
                };
                let stream = self.open[at].stream;
                let Some(call) = self.streams[stream].awaited.pop() else { return Ok(()) };
                let id = with_id.then(|| self.next_id(stream));
                let rank = self.streams[stream].log.len();
                let answers =
                    if readable { Answers::Call(call) } else { Answers::Unreadably(call) };
                let event = Event { id, data: true, answers, rank };
                self.streams[stream].log.push(event.clone());
                self.send(at, &[event], true);
            }
            Op::End { connection } | Op::Abort { connection } => {
                let Some(at) = usize::from(connection).checked_rem(self.open.len()) else {
                    return Ok(());
                };
                self.close(at, matches!(op, Op::End { .. }));
            }
            Op::Delete { session, accepted } => {
                let (session, worker) = (index(session), self.worker());
                let status = if accepted { "204" } else { "405" };
                self.workers[worker].delete(name(session), status);
                if accepted && !self.store.failing.get() {
                    self.twin.end(name(session));
                }
            }
            Op::Rename { from, to, via } => {
                let (from, to) = (index(from), index(to));
                if from != to {
                    self.rename(from, to, via)?;
                }
            }
            Op::Advance { ms } => {
                self.now_ms += u64::from(ms);
                self.twin.now_ms = self.now_ms;
                for worker in &mut self.workers {
                    worker.now_ms = self.now_ms;
                }
            }
            Op::Restart => {
                // All connections break with the process.
                self.open.clear();
                self.connected.clear();
                self.store = Rc::new(Flaky::default());
                self.workers = World::start(&self.setup, &self.store);
                for worker in &mut self.workers {
                    worker.now_ms = self.now_ms;
                }
                self.twin.restart();
                self.failed = false;
            }
            Op::Ask { session, cursor } => {
                let session = index(session);
                if let Some(cursor) = self.cursor(session, cursor) {
                    let worker = self.worker();
                    self.ask(worker, session, &cursor)?;
                }
            }
            Op::AskWithoutSession { session, cursor } => {
                if let Some(cursor) = self.cursor(index(session), cursor) {
                    self.ask_without_session(&cursor)?;
                }
            }
            Op::Failing(failing) => {
                self.store.failing.set(failing);
                self.failed |= failing;
            }
        }
        self.check_bounds()
    }

    fn refused_as_ended(&self, session: usize) -> TestCaseResult {
        prop_assert!(!self.setup.observe, "refused in observe mode");
        prop_assert!(self.twin.is_ended(SESSIONS[session]), "refused, and not ended");
        Ok(())
    }

    fn listen(
        &mut self,
        asked: usize,
        answered: usize,
        format: Format,
        replay: bool,
    ) -> TestCaseResult {
        let worker = self.worker();
        let gateway = &mut self.workers[worker];
        let request = [(":method", "GET"), (":path", "/mcp"), ("mcp-session-id", SESSIONS[asked])];
        let Answer::Passed { exchange, .. } = gateway.request(&request) else {
            return self.refused_as_ended(asked);
        };
        let response = [
            (":status", "200"),
            ("content-type", "text/event-stream"),
            ("mcp-session-id", SESSIONS[answered]),
        ];
        let running = respond(gateway, &mut self.nonces, exchange, &response);
        if asked != answered {
            self.twin.rename(SESSIONS[asked], SESSIONS[answered]);
        }
        let stream = self.standalone(answered, format);
        let twin = self.twin.listen(SESSIONS[asked], SESSIONS[answered]);
        self.connect(worker, running, stream, twin);
        if replay {
            let log = self.streams[stream].log.clone();
            self.send(self.open.len() - 1, &log, false);
        }
        Ok(())
    }

    fn resume(
        &mut self,
        asked: usize,
        answered: usize,
        cursor: Cursor,
        replay: Replay,
        which: u8,
    ) -> TestCaseResult {
        let Some(cursor) = self.cursor(asked, cursor) else { return Ok(()) };
        let worker = self.worker();
        self.ask(worker, asked, &cursor)?;
        let gateway = &mut self.workers[worker];
        let Answer::Passed { exchange, .. } = gateway.try_resume(SESSIONS[asked], &cursor) else {
            return Ok(());
        };
        let response = [
            (":status", "200"),
            ("content-type", "text/event-stream"),
            ("mcp-session-id", SESSIONS[answered]),
        ];
        let running = respond(gateway, &mut self.nonces, exchange, &response);
        if asked != answered {
            self.twin.rename(SESSIONS[asked], SESSIONS[answered]);
        }
        let pick =
            |streams: &[usize]| usize::from(which).checked_rem(streams.len()).map(|at| streams[at]);
        let has_cursor = |stream: &ServerStream| {
            stream.log.iter().any(|e| e.id.as_deref().map(str::trim) == Some(cursor.trim()))
        };
        let own: Vec<usize> =
            (0..self.streams.len()).filter(|s| self.streams[*s].session == asked).collect();
        let with_cursor: Vec<usize> =
            own.iter().copied().filter(|s| has_cursor(&self.streams[*s])).collect();
        let stream = match pick(&with_cursor).or_else(|| pick(&own)) {
            Some(stream) => stream,
            None => self.new_stream(asked, Format::Uuid),
        };
        let twin = self.twin.resume(SESSIONS[asked], SESSIONS[answered], &cursor);
        self.connect(worker, running, stream, twin);
        let log = self.streams[stream].log.clone();
        let at = log.iter().position(|e| e.id.as_deref().map(str::trim) == Some(cursor.trim()));
        let replayed = match (replay, at) {
            (Replay::LiveOnly, _) | (Replay::Inclusive | Replay::Exclusive, None) => &[][..],
            (Replay::FromStart, _) => &log,
            (Replay::Inclusive, Some(at)) => &log[at..],
            (Replay::Exclusive, Some(at)) => &log[at + 1..],
        };
        self.send(self.open.len() - 1, replayed, false);
        Ok(())
    }

    fn rename(&mut self, from: usize, to: usize, via: Via) -> TestCaseResult {
        match via {
            Via::Listen(format) => self.listen(from, to, format, true),
            Via::Resume(cursor) => self.resume(from, to, cursor, Replay::Exclusive, 0),
            Via::Json | Via::Post(_) => {
                let worker = self.worker();
                let gateway = &mut self.workers[worker];
                let request =
                    [(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", SESSIONS[from])];
                let Answer::Passed { mut exchange, .. } = gateway.request(&request) else {
                    return self.refused_as_ended(from);
                };
                let call = self.next_call;
                self.next_call += 1;
                gateway.with(|guard, at| {
                    exchange.request_body(guard, at, body(&[call]).as_bytes(), true)
                });
                let content_type = match via {
                    Via::Json => "application/json",
                    _ => "text/event-stream",
                };
                let response = [
                    (":status", "200"),
                    ("content-type", content_type),
                    ("mcp-session-id", SESSIONS[to]),
                ];
                let running = respond(gateway, &mut self.nonces, exchange, &response);
                self.twin.rename(SESSIONS[from], SESSIONS[to]);
                if let Via::Post(format) = via {
                    let stream = self.new_stream(to, format);
                    self.expect_answers(stream, &[call]);
                    let twin = self.twin.post(SESSIONS[to], Some(vec![call]));
                    self.connect(worker, running, stream, twin);
                }
                Ok(())
            }
        }
    }

    /// Whether the guard had to forget nothing, so that the twin's verdict is
    /// its own.
    fn nothing_was_forgotten(&self) -> bool {
        let evicted = self
            .workers
            .iter()
            .any(|worker| worker.tally.sessions_evicted > 0 || worker.tally.streams_evicted > 0);
        let most_connections = self.connected.values().copied().max().unwrap_or(0);
        !evicted
            && !self.failed
            && self.setup.sessions as usize >= SESSIONS.len()
            && most_connections <= usize::from(self.setup.streams)
            && self.twin.longest_stream() <= usize::from(self.setup.ids)
    }

    fn ask(&mut self, worker: usize, session: usize, cursor: &str) -> TestCaseResult {
        let name = SESSIONS[session];
        let list = support::fields(&[
            (":method", "GET"),
            (":path", "/mcp"),
            ("mcp-session-id", name),
            ("last-event-id", cursor),
        ]);
        let (_, step) = self.workers[worker].with(|guard, at| Exchange::begin(guard, at, &list));
        if let Some(reply) = step.reply.filter(|reply| reply.status == 200) {
            self.check_settlement(session, cursor, &reply.body)?;
        }
        let verdict = verdict(&step.ruling.unwrap().to_string());
        if verdict.starts_with("inconsistent") && self.twin.is_issued(name, cursor) {
            let faults = self.twin.faults_of_issued(name, cursor);
            prop_assert!(
                faults.contains(&verdict.as_str()),
                "{cursor:?} was issued on session {session}, and is {verdict}"
            );
        }
        if self.nothing_was_forgotten() {
            let right = self.twin.judge(Some(name), cursor);
            prop_assert!(
                right.contains(&verdict.as_str()),
                "{cursor:?} of session {session} is {right:?}, not {verdict}"
            );
        }
        Ok(())
    }

    /// What is settled are calls of the session whose answers, if they have
    /// come, stand behind the cursor.
    fn check_settlement(&self, session: usize, cursor: &str, body: &[u8]) -> TestCaseResult {
        let body = std::str::from_utf8(body).unwrap();
        prop_assert!(self.setup.settle && !self.setup.observe, "settled: {body}");
        for event in body.split_terminator("\n\n") {
            let id = event.split_once("\"id\":").unwrap().1.split_once(',').unwrap().0;
            let call: u32 = id.parse().unwrap();
            let stream = self.streams.iter().find(|stream| stream.calls.contains(&call));
            let own = stream.filter(|stream| stream.session == session);
            prop_assert!(own.is_some(), "{call} was settled on session {session}");
            let log = &own.unwrap().log;
            let is_answer = |event: &&Event| match event.answers {
                Answers::Call(answered) | Answers::Unreadably(answered) => answered == call,
                Answers::Nothing => false,
            };
            let is_cursor =
                |event: &&Event| event.id.as_deref().map(str::trim) == Some(cursor.trim());
            if self.twin.answers_may_be_unseen(SESSIONS[session]) || !self.twin.is_answered(call) {
                continue;
            }
            let answered = log.iter().find(is_answer).map(|event| event.rank);
            let stands = log.iter().find(is_cursor).map(|event| event.rank);
            prop_assert!(
                !matches!((answered, stands), (Some(answered), Some(stands)) if answered <= stands),
                "{call} was settled for {cursor:?}, which stands behind its answer"
            );
        }
        Ok(())
    }

    fn ask_without_session(&mut self, cursor: &str) -> TestCaseResult {
        let worker = self.worker();
        let request = [(":method", "GET"), (":path", "/mcp"), ("last-event-id", cursor)];
        let list = support::fields(&request);
        let (_, step) = self.workers[worker].with(|guard, at| Exchange::begin(guard, at, &list));
        let verdict = verdict(&step.ruling.unwrap().to_string());
        if self.nothing_was_forgotten() {
            let right = self.twin.judge(None, cursor);
            prop_assert!(
                right.contains(&verdict.as_str()),
                "{cursor:?} is {right:?}, not {verdict}"
            );
        }
        Ok(())
    }

    /// All that was issued, on its own session and on the others.
    fn ask_all(&mut self) -> TestCaseResult {
        for issued_on in SESSIONS {
            for cursor in self.twin.issued(issued_on) {
                for session in 0..SESSIONS.len() {
                    let worker = self.worker();
                    self.ask(worker, session, &cursor)?;
                }
                self.ask_without_session(&cursor)?;
            }
        }
        Ok(())
    }

    fn check_bounds(&self) -> TestCaseResult {
        let ledger = &self.workers[0].guard.ledger;
        let (bytes, keys) = (self.store.data.bytes() as u64, self.store.data.len() as u64);
        prop_assert!(bytes <= ledger.max_memory_bytes(), "{bytes} bytes");
        prop_assert!(keys <= max_keys(ledger.shape()), "{keys} keys");
        Ok(())
    }
}

/// Of each kind of key as many as the ledger's table of keys allows: records,
/// sets and doubts, buckets of the index, and the two that stand alone.
fn max_keys(shape: &Shape) -> u64 {
    shape.sessions() * u64::from(shape.lanes())
        + 2 * u64::from(shape.sets)
        + shape.sessions().max(64)
        + 2
}

fn body(calls: &[u32]) -> String {
    let calls: Vec<String> = calls
        .iter()
        .map(|id| format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call"}}"#))
        .collect();
    match &calls[..] {
        [] => r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#.to_owned(),
        [call] => call.clone(),
        _ => format!("[{}]", calls.join(",")),
    }
}

/// Outcome and reason of a ruling.
fn verdict(ruling: &str) -> String {
    let (outcome, rest) = ruling.split_once(";reason=").unwrap_or((ruling, ""));
    match rest.split_once(';') {
        Some((reason, _)) => format!("{outcome};{reason}"),
        None => outcome.to_owned(),
    }
}

fn format() -> impl Strategy<Value = Format> {
    prop_oneof![
        4 => Just(Format::Go),
        2 => Just(Format::GoStandalone),
        3 => Just(Format::Rmcp),
        4 => Just(Format::Index),
        3 => Just(Format::CSharp),
        4 => Just(Format::McpGo),
        4 => Just(Format::Uuid),
        2 => Just(Format::TypeScript),
        2 => Just(Format::Java),
        2 => Just(Format::Constant),
        3 => Just(Format::Broadcast),
        3 => Just(Format::BroadcastIndex),
        1 => Just(Format::Odd),
    ]
}

fn cursor() -> impl Strategy<Value = Cursor> {
    prop_oneof![
        8 => any::<u16>().prop_map(Cursor::Own),
        2 => any::<u16>().prop_map(Cursor::Other),
        2 => (any::<u16>(), -4i8..9).prop_map(|(n, by)| Cursor::Moved(n, by)),
        1 => (any::<u16>(), any::<u8>()).prop_map(|(n, by)| Cursor::Changed(n, by)),
        1 => any::<u16>().prop_map(Cursor::TooLong),
        1 => (format(), any::<u8>()).prop_map(|(format, seed)| Cursor::Random(format, seed)),
    ]
}

/// Mostly the first two sessions, so that much happens on one.
fn session() -> impl Strategy<Value = u8> {
    prop_oneof![4 => 0u8..2, 2 => 0u8..6]
}

fn late() -> impl Strategy<Value = Late> {
    prop_oneof![
        4 => Just(Late::BeforeTheAnswer),
        3 => Just(Late::BeforeTheEvents),
        1 => Just(Late::AfterSome),
    ]
}

/// Calls of one session whose streams have the same ids, and answers that come
/// wherever they may.
fn call_op() -> impl Strategy<Value = Op> {
    let format = || {
        prop_oneof![
            4 => Just(Format::Index),
            2 => Just(Format::Constant),
            1 => Just(Format::Rmcp),
            1 => Just(Format::Uuid),
        ]
    };
    let replay = prop_oneof![
        Just(Replay::Inclusive),
        Just(Replay::Exclusive),
        Just(Replay::LiveOnly),
        Just(Replay::FromStart),
    ];
    let cursor = || {
        prop_oneof![
            3 => any::<u16>().prop_map(Cursor::Own),
            1 => (Just(Format::Uuid), any::<u8>()).prop_map(|(f, seed)| Cursor::Random(f, seed)),
        ]
    };
    let advance = prop_oneof![0u32..20, 900u32..1_100, 0u32..30_000];
    prop_oneof![
        6 => (format(), 0u8..3, late()).prop_map(|(format, calls, late)| {
            Op::Post { session: 0, format, calls, readable: true, late }
        }),
        1 => (format(), any::<bool>())
            .prop_map(|(format, replay)| Op::Listen { session: 0, format, replay }),
        8 => (cursor(), replay, any::<u8>()).prop_map(|(cursor, replay, which)| {
            Op::Resume { session: 0, cursor, replay, which }
        }),
        8 => (any::<u8>(), 1u8..3, proptest::bool::weighted(0.85), any::<bool>()).prop_map(
            |(connection, count, data, together)| Op::Emit { connection, count, data, together }
        ),
        8 => (any::<u8>(), proptest::bool::weighted(0.7), proptest::bool::weighted(0.9)).prop_map(
            |(connection, with_id, readable)| Op::Answer { connection, with_id, readable }
        ),
        4 => any::<u8>().prop_map(|connection| Op::End { connection }),
        3 => any::<u8>().prop_map(|connection| Op::Abort { connection }),
        2 => advance.prop_map(|ms| Op::Advance { ms }),
        6 => cursor().prop_map(|cursor| Op::Ask { session: 0, cursor }),
    ]
}

fn op(rare: bool) -> impl Strategy<Value = Op> {
    let replay = prop_oneof![
        Just(Replay::Inclusive),
        Just(Replay::Exclusive),
        Just(Replay::LiveOnly),
        Just(Replay::FromStart),
    ];
    let via = prop_oneof![
        Just(Via::Json),
        format().prop_map(Via::Post),
        format().prop_map(Via::Listen),
        cursor().prop_map(Via::Resume),
    ];
    let advance = prop_oneof![0u32..20, 900u32..1_100, 0u32..10_000, 0u32..600_000];
    prop_oneof![
        5 => (session(), proptest::option::of(format()))
            .prop_map(|(session, stream)| Op::Initialize { session, stream }),
        8 => (session(), format(), 0u8..4, proptest::bool::weighted(0.9), late()).prop_map(
            |(session, format, calls, readable, late)| Op::Post {
                session, format, calls, readable, late
            }
        ),
        6 => (session(), format(), any::<bool>())
            .prop_map(|(session, format, replay)| Op::Listen { session, format, replay }),
        8 => (session(), cursor(), replay, any::<u8>()).prop_map(
            |(session, cursor, replay, which)| Op::Resume { session, cursor, replay, which }
        ),
        24 => (any::<u8>(), 1u8..5, proptest::bool::weighted(0.85), any::<bool>()).prop_map(
            |(connection, count, data, together)| Op::Emit { connection, count, data, together }
        ),
        6 => (any::<u8>(), proptest::bool::weighted(0.8), proptest::bool::weighted(0.95))
            .prop_map(|(connection, with_id, readable)| Op::Answer { connection, with_id, readable }),
        4 => any::<u8>().prop_map(|connection| Op::End { connection }),
        3 => any::<u8>().prop_map(|connection| Op::Abort { connection }),
        2 => (session(), any::<bool>())
            .prop_map(|(session, accepted)| Op::Delete { session, accepted }),
        2 => (session(), session(), via).prop_map(|(from, to, via)| Op::Rename { from, to, via }),
        5 => advance.prop_map(|ms| Op::Advance { ms }),
        1 => Just(Op::Restart),
        8 => (session(), cursor()).prop_map(|(session, cursor)| Op::Ask { session, cursor }),
        2 => (session(), cursor())
            .prop_map(|(session, cursor)| Op::AskWithoutSession { session, cursor }),
        1 => any::<bool>().prop_map(move |failing| Op::Failing(failing && rare)),
    ]
}

fn setup(ample: bool) -> impl Strategy<Value = Setup> {
    let sizes = if ample {
        (Just(40u32).boxed(), Just(64u8).boxed(), Just(1024u16).boxed())
    } else {
        (prop_oneof![3 => 1u32..5, 1 => Just(40)].boxed(), (1u8..4).boxed(), (1u16..7).boxed())
    };
    let retention = proptest::option::of((
        proptest::option::of(1u64..6),
        proptest::option::of(1u64..30),
        proptest::option::of(1u64..30),
    ));
    (1usize..3, any::<(bool, bool)>(), proptest::bool::weighted(0.3), retention, sizes).prop_map(
        |(workers, (exclusive, settle), observe, retention, (sessions, streams, ids))| {
            let (events_per_stream, seconds, finished_stream_seconds) =
                retention.unwrap_or_default();
            Setup {
                workers,
                exclusive,
                observe,
                settle,
                events_per_stream,
                seconds,
                finished_stream_seconds,
                sessions,
                streams,
                ids,
            }
        },
    )
}

fn live(setup: &Setup, ops: &[Op]) -> TestCaseResult {
    let mut world = World::new(setup);
    for op in ops {
        world.run(*op)?;
    }
    world.ask_all()
}

proptest! {
    #![proptest_config(cases(300))]

    /// With room for everything the verdict is the twin's, outcome and reason.
    #[test]
    fn with_room_for_everything_the_verdict_is_the_twins(
        setup in setup(true),
        ops in proptest::collection::vec(op(false), 1..50),
    ) {
        live(&setup, &ops)?;
    }

    /// The same where many calls are pending and answered on one session.
    #[test]

    fn an_answer_counts_wherever_it_comes(
        setup in setup(true),
        ops in proptest::collection::vec(call_op(), 1..40),
    ) {
        live(&setup, &ops)?;
    }

    /// With room for next to nothing an id that was issued is never called
    /// inconsistent, and nothing grows.
    #[test]
    fn with_room_for_next_to_nothing_no_issued_id_is_inconsistent(
        setup in setup(false),
        ops in proptest::collection::vec(op(false), 1..80),
    ) {
        live(&setup, &ops)?;
    }

    /// The same while writes are given up now and then.
    #[test]
    fn while_writes_are_given_up_no_issued_id_is_inconsistent(
        setup in prop_oneof![setup(false), setup(true)],
        ops in proptest::collection::vec(op(true), 1..60),
    ) {
        live(&setup, &ops)?;
    }
}

/// A broadcast comes to one session twice, and to another one first: the second
/// connection didn't know that the first had brought it. The guard takes the
/// session for everybody's then, and may claim nothing as foreign to it.
#[test]
fn a_broadcast_that_two_connections_of_one_stream_bring() {
    let setup = Setup {
        workers: 1,
        exclusive: false,
        observe: false,
        settle: false,
        events_per_stream: None,
        seconds: None,
        finished_stream_seconds: None,
        sessions: 40,
        streams: 64,
        ids: 1024,
    };
    let post = |session, format| Op::Post {
        session,
        format,
        calls: 0,
        readable: true,
        late: Late::BeforeTheAnswer,
    };
    let emit = |connection, count| Op::Emit { connection, count, data: false, together: false };
    let ops = [
        post(5, Format::Go),
        emit(0, 1),
        post(1, Format::Broadcast),
        emit(1, 1),
        post(0, Format::Broadcast),
        // Its first id shows that it carries on the stream of the POST.
        Op::Rename { from: 0, to: 1, via: Via::Listen(Format::Broadcast) },
        emit(3, 1),
        emit(2, 2),
        emit(1, 1),
        emit(3, 1),
    ];
    live(&setup, &ops).unwrap();
}

/// Header values and bodies of any bytes, with what is understood among them.
fn bytes(understood: &[&'static [u8]]) -> impl Strategy<Value = Vec<u8>> {
    let understood: Vec<&'static [u8]> = understood.to_vec();
    let pieces = prop_oneof![
        3 => proptest::sample::select(understood).prop_map(<[u8]>::to_vec),
        1 => proptest::collection::vec(any::<u8>(), 0..12),
    ];
    proptest::collection::vec(pieces, 1..4).prop_map(|pieces| pieces.concat())
}

/// These fields, behind the usual ones where it is `proper`.
fn and_usual<'a>(
    usual: &[(&'a str, &'a str)],
    proper: bool,
    fields: &'a [(String, Vec<u8>)],
) -> Vec<Field<'a>> {
    let usual = if proper { support::fields(usual) } else { Vec::new() };
    let fields = fields.iter().map(|(name, value)| (name.as_bytes(), value.as_slice()));
    usual.into_iter().chain(fields).collect()
}

fn header() -> impl Strategy<Value = (String, Vec<u8>)> {
    let names: Vec<&'static str> = vec![
        ":method",
        ":path",
        ":status",
        "mcp-session-id",
        "last-event-id",
        "mcp-protocol-version",
        "mcp-resumption",
        "accept",
        "accept-encoding",
        "content-type",
        "content-encoding",
    ];
    let value = bytes(&[
        b"GET",
        b"POST",
        b"DELETE",
        b"/mcp",
        b"200",
        b"a",
        b"7",
        b" \t",
        b"18446744073709551616",
        b"2026-07-28",
        b"text/event-stream",
        b",",
        b"identity",
        b"",
    ]);
    (proptest::sample::select(names).prop_map(str::to_owned), value)
}

fn part() -> impl Strategy<Value = Vec<u8>> {
    bytes(&[
        b"id: 7\n",
        b"id: a_1\ndata: {}\n\n",
        b"data: {\"id\":1,\"result\":{}}\n\n",
        b"{\"id\":1,\"method\":\"m\"}",
        b"[{\"id\":-1.5e300,\"method\":\"m\"}]",
        b"[[[[",
        b"id: 18446744073709551615\n\n",
        b"id: 18446744073709551614\n\n",
        b"\xEF\xBB\xBF",
        b"\0",
        b"\r",
        b"\n\n",
    ])
}

proptest! {
    #![proptest_config(cases(400))]

    /// Nothing that comes over the wire makes the guard panic: that would take
    /// down all streams of the worker.
    #[test]
    fn no_bytes_make_it_panic(
        exchanges in proptest::collection::vec(
            (
                proptest::collection::vec(header(), 0..8),
                proptest::collection::vec(part(), 0..3),
                proptest::collection::vec(header(), 0..6),
                proptest::collection::vec(part(), 0..4),
                any::<(bool, bool)>(),
            ),
            1..12,
        ),
        setup in setup(false),
    ) {
        let mut gateway = Gateway::on(Rc::new(Flaky::default()), &setup.config());
        for (number, (request, sent, response, received, (proper, clean))) in
            exchanges.into_iter().enumerate()
        {
            let request = and_usual(&[(":method", "POST"), (":path", "/mcp")], proper, &request);
            let response = and_usual(
                &[
                    (":status", "200"),
                    ("content-type", "text/event-stream"),
                    ("mcp-session-id", "a"),
                ],
                proper,
                &response,
            );
            let (mut exchange, step) =
                gateway.with(|guard, at| Exchange::begin(guard, at, &request));
            if let Some(line) = step.log {
                prop_assert!(!line.to_json(None, 0).is_empty());
            }
            gateway.with(|guard, at| {
                for part in &sent {
                    exchange.request_body(guard, at, part, false);
                }
                exchange.request_body(guard, at, b"", true);
                exchange.response(guard, at, &response, false, &Sender::upstream(number as u64));
                for part in &received {
                    exchange.response_body(guard, at, part);
                }
                if clean {
                    exchange.response_end(guard, at, false);
                }
                exchange.close(guard, at, || false);
            });
        }
    }
}

/// Two workers that really run at once, on a store where a schedule says at
/// each access which of them goes on.
mod interleaved {
    use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
    use std::thread;

    use super::*;

    /// Whose turn it is. One who isn't running is skipped.
    struct Baton {
        schedule: Vec<u8>,
        at: usize,
        turn: usize,
        running: [bool; 2],
        failing: bool,
    }

    impl Baton {
        /// The next access is by whom the schedule says.
        fn pass(&mut self) {
            let next = self.schedule.get(self.at).map_or(1 - self.turn, |next| usize::from(*next));
            self.at += 1;
            self.turn = if self.running[next] { next } else { 1 - next };
        }
    }

    struct Shared {
        data: Mutex<SharedData>,
        baton: Mutex<Baton>,
        passed: Condvar,
        /// What was issued by calls that have returned: session and id.
        issued: Mutex<Vec<(usize, String)>>,
        now_ms: Mutex<u64>,
        /// Sessions whose end was asked for.
        ended: Mutex<[bool; SESSIONS.len()]>,
    }

    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store as one worker sees it.
    struct Turns {
        shared: Arc<Shared>,
        me: usize,
    }

    impl Turns {
        /// An access in its turn.
        fn access<T>(&self, access: impl FnOnce(&SharedData, &Baton) -> T) -> T {
            let mut baton = lock(&self.shared.baton);
            while baton.turn != self.me {
                baton = self.shared.passed.wait(baton).unwrap_or_else(PoisonError::into_inner);
            }
            let result = access(&lock(&self.shared.data), &baton);
            baton.pass();
            self.shared.passed.notify_all();
            result
        }
    }

    impl Store for Turns {
        fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<Cas>) {
            self.access(|data, _| data.get(key))
        }

        fn set(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), CasMismatch> {
            self.access(|data, baton| {
                if cas.is_some() && baton.failing {
                    return Err(CasMismatch);
                }
                data.set(key, value, cas)
            })
        }
    }

    /// Gives the turn away for good, however the worker ends.
    struct Leave(Arc<Shared>, usize);

    impl Drop for Leave {
        fn drop(&mut self) {
            let mut baton = lock(&self.0.baton);
            baton.running[self.1] = false;
            baton.turn = 1 - self.1;
            self.0.passed.notify_all();
        }
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Initialize(u8),
        Post(u8),
        Listen(u8),
        /// Resumes from an id that has been issued, by whomever.
        Resume(u16),
        Emit {
            connection: u8,
            format: u8,
            count: u8,
        },
        End(u8),
        Delete(u8),
        /// Asks for an id that has been issued, by whomever.
        Ask(u16),
        Advance(u16),
    }

    fn step(ends: bool) -> impl Strategy<Value = Step> {
        let session = || 0u8..4;
        prop_oneof![
            2 => session().prop_map(Step::Initialize),
            3 => session().prop_map(Step::Post),
            3 => session().prop_map(Step::Listen),
            4 => any::<u16>().prop_map(Step::Resume),
            10 => (any::<u8>(), 0u8..3, 1u8..4).prop_map(|(connection, format, count)| {
                Step::Emit { connection, format, count }
            }),
            3 => any::<u8>().prop_map(Step::End),
            1 => session().prop_map(move |s| if ends { Step::Delete(s) } else { Step::Post(s) }),
            3 => any::<u16>().prop_map(Step::Ask),
            1 => prop_oneof![0u16..3, 900u16..1_200].prop_map(Step::Advance),
        ]
    }

    /// A worker and its connections.
    struct Worker {
        shared: Arc<Shared>,
        gateway: Gateway<Turns>,
        /// With session and number; numbers make ids.
        open: Vec<(Exchange, usize, u64)>,
        numbers: u64,
        emitted: u64,
        complaints: Vec<String>,
    }

    impl Worker {
        fn new(me: usize, shared: Arc<Shared>, config: &str) -> Self {
            let store = Rc::new(Turns { shared: Arc::clone(&shared), me });
            Worker {
                shared,
                gateway: Gateway::on(store, config),
                open: Vec::new(),
                numbers: me as u64 * 1_000,
                emitted: 0,
                complaints: Vec::new(),
            }
        }

        fn respond(&mut self, mut exchange: Exchange, session: usize, event_stream: bool) {
            self.numbers += 1;
            let number = self.numbers;
            let content_type = if event_stream { "text/event-stream" } else { "application/json" };
            let list = support::fields(&[
                (":status", "200"),
                ("content-type", content_type),
                ("mcp-session-id", SESSIONS[session]),
            ]);
            let step = self.gateway.with(|guard, at| {
                exchange.response(guard, at, &list, false, &Sender::upstream(number))
            });
            if step.body {
                self.open.push((exchange, session, number));
            }
        }

        fn request(&mut self, method: &str, session: Option<usize>) -> Option<Exchange> {
            let mut list = vec![(":method", method), (":path", "/mcp")];
            list.extend(session.map(|session| ("mcp-session-id", SESSIONS[session])));
            match self.gateway.request(&list) {
                Answer::Passed { exchange, .. } => Some(exchange),
                Answer::Refused(reply) => {
                    if !session.is_some_and(|session| lock(&self.shared.ended)[session]) {
                        self.complaints.push(format!("{method} refused: {reply:?}"));
                    }
                    None
                }
            }
        }

        fn pick(&self, n: u16) -> Option<(usize, String)> {
            let issued = lock(&self.shared.issued);
            let at = usize::from(n).checked_rem(issued.len())?;
            issued.get(at).cloned()
        }

        /// Asks for an id whose recording had returned before.
        fn ask(&mut self, session: usize, cursor: &str) -> String {
            let verdict = verdict(&self.gateway.verdict(SESSIONS[session], cursor));
            let ended = lock(&self.shared.ended)[session];
            if verdict.starts_with("inconsistent")
                && !(ended && verdict == "inconsistent;session_terminated")
            {
                self.complaints.push(format!("{cursor} of session {session}: {verdict}"));
            }
            verdict
        }

        fn run(&mut self, step: Step) {
            self.gateway.now_ms = *lock(&self.shared.now_ms);
            match step {
                Step::Initialize(session) => {
                    if let Some(exchange) = self.request("POST", None) {
                        self.respond(exchange, session.into(), false);
                    }
                }
                Step::Post(session) => {
                    if let Some(mut exchange) = self.request("POST", Some(session.into())) {
                        self.gateway.with(|guard, at| {
                            exchange.request_body(guard, at, body(&[1]).as_bytes(), true)
                        });
                        self.respond(exchange, session.into(), true);
                    }
                }
                Step::Listen(session) => {
                    if let Some(exchange) = self.request("GET", Some(session.into())) {
                        self.respond(exchange, session.into(), true);
                    }
                }
                Step::Resume(n) => {
                    let Some((session, cursor)) = self.pick(n) else { return };
                    if let Answer::Passed { exchange, .. } =
                        self.gateway.try_resume(SESSIONS[session], &cursor)
                    {
                        self.respond(exchange, session, true);
                    }
                }
                Step::Emit { connection, format, count } => {
                    let Some(at) = usize::from(connection).checked_rem(self.open.len()) else {
                        return;
                    };
                    let (exchange, session, number) = &mut self.open[at];
                    // Unique to the connection: no cursor is on two streams.
                    let ids: Vec<String> = (0..u64::from(count))
                        .map(|n| match format {
                            0 => format!("c{number}_{}", self.emitted + n),
                            1 => format!("{}_{}", base32(*number), self.emitted + n),
                            _ => uuid(*number * 1_000 + self.emitted + n),
                        })
                        .collect();
                    self.emitted += u64::from(count);
                    let text: String =
                        ids.iter().map(|id| format!("id: {id}\ndata: {{}}\n\n")).collect();
                    self.gateway
                        .with(|guard, at| exchange.response_body(guard, at, text.as_bytes()));
                    let session = *session;
                    lock(&self.shared.issued).extend(ids.into_iter().map(|id| (session, id)));
                }
                Step::End(connection) => {
                    let Some(at) = usize::from(connection).checked_rem(self.open.len()) else {
                        return;
                    };
                    let (mut exchange, ..) = self.open.swap_remove(at);
                    self.gateway.with(|guard, at| exchange.response_end(guard, at, false));
                }
                Step::Delete(session) => {
                    lock(&self.shared.ended)[usize::from(session)] = true;
                    self.gateway.delete(SESSIONS[usize::from(session)], "204");
                }
                Step::Ask(n) => {
                    if let Some((session, cursor)) = self.pick(n) {
                        self.ask(session, &cursor);
                    }
                }
                Step::Advance(ms) => *lock(&self.shared.now_ms) += u64::from(ms),
            }
        }
    }

    /// Runs both, then asks for everything that was issued. Gives the
    /// complaints, and the verdicts that aren't `continue`.
    fn run(
        config: &str,
        steps: [Vec<Step>; 2],
        schedule: Vec<u8>,
        failing: bool,
    ) -> (Vec<String>, Vec<String>) {
        let baton = Baton { schedule, at: 0, turn: 0, running: [true; 2], failing: false };
        let shared = Arc::new(Shared {
            data: Mutex::new(SharedData::default()),
            baton: Mutex::new(baton),
            passed: Condvar::new(),
            issued: Mutex::new(Vec::new()),
            now_ms: Mutex::new(START_MS),
            ended: Mutex::new([false; SESSIONS.len()]),
        });
        // The sessions are there before, and complete.
        {
            let store = Turns { shared: Arc::clone(&shared), me: 0 };
            lock(&shared.baton).running[1] = false;
            let mut first = Gateway::on(Rc::new(store), config);
            for session in &SESSIONS[..4] {
                first.initialize(session);
            }
            let mut baton = lock(&shared.baton);
            (baton.running, baton.at, baton.turn, baton.failing) = ([true; 2], 0, 0, failing);
        }
        let workers: Vec<_> = steps
            .into_iter()
            .enumerate()
            .map(|(me, steps)| {
                let (shared, config) = (Arc::clone(&shared), config.to_owned());
                thread::spawn(move || {
                    let _leave = Leave(Arc::clone(&shared), me);
                    let mut worker = Worker::new(me, shared, &config);
                    steps.into_iter().for_each(|step| worker.run(step));
                    worker.complaints
                })
            })
            .collect();
        let mut complaints = Vec::new();
        for worker in workers {
            match worker.join() {
                Ok(said) => complaints.extend(said),
                Err(_) => complaints.push("panicked".to_owned()),
            }
        }
        {
            let mut baton = lock(&shared.baton);
            (baton.running, baton.turn) = ([true, false], 0);
        }
        let mut last = Worker::new(0, Arc::clone(&shared), config);
        last.gateway.now_ms = *lock(&shared.now_ms);
        let mut others = Vec::new();
        let issued = lock(&shared.issued).clone();
        for (session, cursor) in issued {
            let verdict = last.ask(session, &cursor);
            if verdict != "continue" {
                others.push(format!("{cursor} of session {session}: {verdict}"));
            }
        }
        complaints.extend(last.complaints);
        (complaints, others)
    }

    fn steps(ends: bool) -> impl Strategy<Value = [Vec<Step>; 2]> {
        let steps = move || proptest::collection::vec(step(ends), 1..16);
        [steps(), steps()]
    }

    fn schedule() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(0u8..2, 0..300)
    }

    proptest! {
        #![proptest_config(cases(150))]

        /// With room for everything no update is lost.
        #[test]
        fn two_workers_lose_no_update(steps in steps(false), schedule in schedule()) {
            let config = r#"{"history":"exclusive","state":{"sessions":40,
                "streams_per_session":64,"ids_per_stream":256}}"#;
            let (complaints, others) = run(config, steps, schedule, false);
            prop_assert_eq!(complaints, Vec::<String>::new());
            prop_assert_eq!(others, Vec::<String>::new());
        }

        /// While sessions and streams are evicted, adopted and ended, nothing
        /// that was issued is inconsistent.
        #[test]
        fn two_workers_with_room_for_next_to_nothing(
            steps in steps(true),
            schedule in schedule(),
            sessions in 1u32..4,
            streams in 1u8..3,
            ids in 1u16..5,
        ) {
            let config = format!(
                r#"{{"history":"exclusive","state":{{"sessions":{sessions},
                "streams_per_session":{streams},"ids_per_stream":{ids}}}}}"#
            );
            let (complaints, _) = run(&config, steps, schedule, false);
            prop_assert_eq!(complaints, Vec::<String>::new());
        }

        /// Where every compare-and-swap fails, nothing is known, and nothing
        /// is inconsistent.
        #[test]
        fn two_workers_that_always_give_up(steps in steps(false), schedule in schedule()) {
            let config = r#"{"history":"exclusive"}"#;
            let (complaints, others) = run(config, steps, schedule, true);
            prop_assert_eq!(complaints, Vec::<String>::new());
            for verdict in others {
                prop_assert!(verdict.contains(": unverified"), "{}", verdict);
            }
        }
    }
}
