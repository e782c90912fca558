//! The guard against a naive twin that keeps everything (`support::oracle`).
//!
//! Random lives of a few sessions behind one or two workers of a gateway, with
//! the event ids of every SDK that is known, and upstreams, clients and
//! proxies that misbehave in every way that was seen. Whatever comes, an id
//! that was issued is never called inconsistent; and where nothing had to be
//! forgotten, the verdict is the twin's.

mod support {
    #[path = "mod.rs"]
    mod gateway;
    pub mod oracle;
    pub use gateway::*;
}

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use mcp_resume_guard::exchange::Exchange;
use mcp_resume_guard::ledger::table::Shape;
use mcp_resume_guard::store::memory::SharedData;
use mcp_resume_guard::store::{Cas, CasMismatch, Store};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use support::oracle::{Connection, Rules, Twin};
use support::{Answer, Gateway};

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

fn cases(default: u32) -> ProptestConfig {
    let mut config = ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = default;
    }
    config
}

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
    awaited: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq)]
struct Event {
    id: Option<String>,
    data: bool,
    answers: Option<u32>,
}

impl Event {
    fn text(&self) -> String {
        let id = self.id.as_ref().map_or_else(String::new, |id| format!("id: {id}\n"));
        match (self.data, self.answers) {
            (_, Some(call)) => {
                format!("{id}data: {{\"jsonrpc\":\"2.0\",\"id\":{call},\"result\":{{}}}}\n\n")
            }
            (true, None) => format!("{id}data: {{\"jsonrpc\":\"2.0\",\"method\":\"m\"}}\n\n"),
            (false, None) => format!("{id}data:\n\n"),
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
        late: bool,
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

/// Shared data whose compare-and-swaps can be made to fail, as they do while
/// others write all the time.
#[derive(Debug, Default)]
struct Flaky {
    data: SharedData,
    failing: Cell<bool>,
}

impl Store for Flaky {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<Cas>) {
        self.data.get(key)
    }

    fn set(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), CasMismatch> {
        if cas.is_some() && self.failing.get() {
            return Err(CasMismatch);
        }
        self.data.set(key, value, cas)
    }
}

#[derive(Debug, Clone)]
struct Setup {
    workers: usize,
    exclusive: bool,
    observe: bool,
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
            "ids_per_stream":{}}},"limits":{{"event_id_bytes":{EVENT_ID_BYTES}}}}}"#,
            if self.exclusive { "exclusive" } else { "shared" },
            if self.observe { "observe" } else { "enforce" },
            number(self.events_per_stream),
            number(self.seconds),
            number(self.finished_stream_seconds),
            self.sessions,
            self.streams,
            self.ids,
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
    let step = gateway.with(|guard, at| exchange.response(guard, at, &list, || true, || nonce));
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
        let stream =
            ServerStream { session, format, number, next, log: Vec::new(), awaited: Vec::new() };
        self.streams.push(stream);
        self.streams.len() - 1
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
            self.open.push(Open { running, worker, stream, twin });
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
            self.twin.event(&mut open.twin, event.id.as_deref(), event.data, event.answers);
        }
    }

    fn emit(&mut self, at: usize, count: u8, data: bool, together: bool) {
        let stream = self.open[at].stream;
        let events: Vec<Event> = (0..count)
            .map(|_| Event { id: Some(self.next_id(stream)), data, answers: None })
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
                open.running.exchange.response_end(guard, at);
            } else {
                open.running.exchange.close(guard, at);
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
                exchange.request_body(&gateway.guard, body(&[call]).as_bytes(), true);
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
                    self.streams[stream].awaited = vec![call];
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
                if !late {
                    exchange.request_body(&gateway.guard, text.as_bytes(), true);
                }
                let mut running = respond(gateway, &mut self.nonces, exchange, &response);
                if late {
                    running.exchange.request_body(&gateway.guard, text.as_bytes(), true);
                }
                let stream = self.new_stream(session, format);
                self.streams[stream].awaited.clone_from(&calls);
                let twin = self.twin.post(name(session), readable.then_some(calls));
                self.connect(worker, running, stream, twin);
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
            Op::Answer { connection, with_id } => {
                let Some(at) = usize::from(connection).checked_rem(self.open.len()) else {
                    return Ok(());
                };
                let stream = self.open[at].stream;
                let Some(call) = self.streams[stream].awaited.pop() else { return Ok(()) };
                let id = with_id.then(|| self.next_id(stream));
                let event = Event { id, data: true, answers: Some(call) };
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
        let twin = self.twin.listen(SESSIONS[answered]);
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
                exchange.request_body(&gateway.guard, body(&[0]).as_bytes(), true);
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
                    self.streams[stream].awaited = vec![0];
                    let twin = self.twin.post(SESSIONS[to], Some(vec![0]));
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
        let ruling = self.workers[worker].verdict(name, cursor);
        let verdict = verdict(&ruling);
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
        for issued_on in 0..SESSIONS.len() {
            for cursor in self.twin.issued(SESSIONS[issued_on]) {
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
    let rare = u32::from(rare);
    prop_oneof![
        5 => (session(), proptest::option::of(format()))
            .prop_map(|(session, stream)| Op::Initialize { session, stream }),
        8 => (session(), format(), 0u8..4, proptest::bool::weighted(0.9), any::<bool>()).prop_map(
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
        6 => (any::<u8>(), proptest::bool::weighted(0.8))
            .prop_map(|(connection, with_id)| Op::Answer { connection, with_id }),
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
        rare => any::<bool>().prop_map(Op::Failing),
    ]
}

fn setup(ample: bool) -> impl Strategy<Value = Setup> {
    let sizes = if ample {
        (Just(40u32).boxed(), Just(64u8).boxed(), Just(1024u16).boxed())
    } else {
        (prop_oneof![3 => 1u32..5, 1 => Just(40)].boxed(), (1u8..4).boxed(), (1u16..7).boxed())
    };
    let retention = proptest::option::of((
        proptest::option::of(0u64..6),
        proptest::option::of(0u64..30),
        proptest::option::of(0u64..30),
    ));
    (1usize..3, any::<bool>(), proptest::bool::weighted(0.3), retention, sizes).prop_map(
        |(workers, exclusive, observe, retention, (sessions, streams, ids))| {
            let (events_per_stream, seconds, finished_stream_seconds) =
                retention.unwrap_or_default();
            Setup {
                workers,
                exclusive,
                observe,
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
