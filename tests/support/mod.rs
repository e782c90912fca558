//! A gateway in memory: the core of the guard, with shared data that follows
//! the host's rules, a clock that is set by hand, and requests and streams in
//! the words of the tests.
#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    clippy::large_enum_variant,
    reason = "a test may fail"
)]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mcp_resume_guard::budget::Budget;
use mcp_resume_guard::config::Config;
use mcp_resume_guard::exchange::{CloseStep, Exchange, Guard, Origin, RequestStep, ResponseStep};
use mcp_resume_guard::headers::Field;
use mcp_resume_guard::ledger::{Access, Ledger};
use mcp_resume_guard::reply::Reply;
use mcp_resume_guard::store::memory::SharedData;
use mcp_resume_guard::store::{Cas, CasMismatch, Store};
use mcp_resume_guard::telemetry::{LogLine, Tally};

/// Ids that no two sessions share by chance.
pub const UUIDS: [&str; 6] = [
    "550e8400-e29b-41d4-a716-446655440000",
    "6fa459ea-ee8a-3ca4-894e-db77e160355e",
    "7d444840-9dc0-11d1-b245-5ffdce74fad2",
    "1b4e28ba-2fa1-11d2-883f-0016d3cca427",
    "f47ac10b-58cc-4372-a567-0e02b2c3d479",
    "9a8f5a5e-3c1b-4b0e-9f0a-1d2c3b4a5f60",
];

/// No two things happen at once, on whatever worker.
static TICKS: AtomicU64 = AtomicU64::new(0);

/// A worker of an Envoy process.
pub struct Gateway<S = SharedData> {
    pub guard: Guard,
    pub store: Rc<S>,
    pub now_ms: u64,
    pub tally: Tally,
    nonces: u64,
    /// The instance that answers from now on.
    pub address: String,
}

/// Shared data whose compare-and-swaps can be made to fail, as they do while
/// others write all the time.
#[derive(Debug, Default)]
pub struct Flaky {
    pub data: SharedData,
    pub failing: Cell<bool>,
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

/// Where a response comes from.
pub struct Sender {
    /// It is the upstream's own.
    pub upstream: bool,
    /// The instance.
    pub address: String,
    pub random: u64,
}

impl Sender {
    /// The only instance that most tests have.
    pub fn upstream(random: u64) -> Self {
        Sender { upstream: true, address: "127.0.0.1:8000".to_owned(), random }
    }
}

impl Origin for Sender {
    fn is_upstream(&self) -> bool {
        self.upstream
    }

    fn address(&self) -> Option<Vec<u8>> {
        Some(self.address.clone().into_bytes())
    }

    fn random(&self) -> u64 {
        self.random
    }
}

/// An exchange that is under way.
pub struct Running {
    exchange: Exchange,
    pub step: ResponseStep,
    /// What went on to the client of the body.
    pub delivered: Vec<u8>,
    /// The stream was cut, and is to be reset.
    pub reset: bool,
    /// Faults of the replay, as they were told.
    pub found: Vec<LogLine>,
}

impl Running {
    /// What went on to the client, as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.delivered).into_owned()
    }
}

/// How an exchange ended: the client's view of the whole body, what was found
/// (rulings as text), and the result and the action of the replay.
pub struct Ended {
    pub text: String,
    pub reset: bool,
    pub found: Vec<String>,
    pub replay: Option<(&'static str, &'static str)>,
    /// The filter state at the end.
    pub ruling: Option<String>,
}

/// What a request led to.
pub enum Answer {
    /// The guard's own reply.
    Refused(Reply),
    /// It went on to the upstream, with these fields removed.
    Passed { exchange: Exchange, step: RequestStep },
}

impl Answer {
    /// `passed`, or the value of `mcp-resumption` of the refusal.
    pub fn refusal(&self) -> Option<(u16, String)> {
        match self {
            Answer::Passed { .. } => None,
            Answer::Refused(reply) => {
                let header = reply.headers.iter().find(|(name, _)| *name == "mcp-resumption");
                Some((reply.status, header.unwrap().1.clone()))
            }
        }
    }
}

pub fn fields<'a>(list: &[(&'a str, &'a str)]) -> Vec<Field<'a>> {
    list.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())).collect()
}

impl Gateway<SharedData> {
    pub fn new(config: &str) -> Self {
        Gateway::on(Rc::new(SharedData::default()), config)
    }

    /// All of the process's state is lost.
    pub fn restart(&mut self) {
        let config = self.guard.config.clone();
        let store = Rc::new(SharedData::default());
        let (ledger, _) = Ledger::join(&*store, &config.state, [8; 16]);
        self.guard = Guard { config, ledger, body_budget: Budget::new(1 << 20) };
        self.store = store;
    }
}

impl<S: Store> Gateway<S> {
    /// A worker on shared data that others may use, too.
    pub fn on(store: Rc<S>, config: &str) -> Self {
        let config = Config::parse(config.as_bytes()).unwrap();
        let (ledger, _) = Ledger::join(&*store, &config.state, [7; 16]);
        Gateway {
            guard: Guard { config, ledger, body_budget: Budget::new(1 << 20) },
            store,
            now_ms: 1_000_000,
            tally: Tally::default(),
            nonces: 0,
            address: "127.0.0.1:8000".to_owned(),
        }
    }

    /// Nonces of this worker start here, apart from those of others.
    pub fn with_nonces_from(mut self, nonces: u64) -> Self {
        self.nonces = nonces;
        self
    }

    pub fn with<T>(&mut self, work: impl FnOnce(&Guard, &mut Access<'_, S>) -> T) -> T {
        let mut access = Access {
            store: &*self.store,
            now_ms: self.now_ms,
            now_us: self.now_ms * 1000 + TICKS.fetch_add(100, Relaxed),
            tally: &mut self.tally,
        };
        work(&self.guard, &mut access)
    }

    pub fn request(&mut self, list: &[(&str, &str)]) -> Answer {
        let list = fields(list);
        let (exchange, mut step) = self.with(|guard, at| Exchange::begin(guard, at, &list));
        match step.reply.take() {
            Some(reply) => Answer::Refused(reply),
            None => Answer::Passed { exchange, step },
        }
    }

    pub fn respond(&mut self, mut exchange: Exchange, list: &[(&str, &str)]) -> Running {
        self.nonces += 1;
        let origin = Sender { upstream: true, address: self.address.clone(), random: self.nonces };
        let list = fields(list);
        let step = self.with(|guard, at| exchange.response(guard, at, &list, false, &origin));
        Running { exchange, step, delivered: Vec::new(), reset: false, found: Vec::new() }
    }

    fn pass(&mut self, list: &[(&str, &str)]) -> Exchange {
        match self.request(list) {
            Answer::Passed { exchange, .. } => exchange,
            Answer::Refused(reply) => panic!("refused: {reply:?}"),
        }
    }

    /// `initialize`, answered with JSON: the session begins.
    pub fn initialize(&mut self, session: &str) {
        let exchange = self.pass(&[(":method", "POST"), (":path", "/mcp")]);
        self.respond(
            exchange,
            &[
                (":status", "200"),
                ("content-type", "application/json"),
                ("mcp-session-id", session),
            ],
        );
    }

    /// A POST with this body, answered with an event stream.
    pub fn post(&mut self, session: &str, body: &str) -> Running {
        let exchange = self.post_unanswered(session, body);
        self.respond(exchange, &[(":status", "200"), ("content-type", "text/event-stream")])
    }

    /// A POST that has passed, body and all, and isn't answered yet.
    pub fn post_unanswered(&mut self, session: &str, body: &str) -> Exchange {
        let mut exchange =
            self.pass(&[(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", session)]);
        self.with(|guard, at| exchange.request_body(guard, at, body.as_bytes(), true));
        exchange
    }

    /// A POST of the request with this JSON-RPC id.
    pub fn call(&mut self, session: &str, id: u32) -> Running {
        self.post(session, &format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call"}}"#))
    }

    /// A GET without a cursor, answered with an event stream.
    pub fn listen(&mut self, session: &str) -> Running {
        let exchange =
            self.pass(&[(":method", "GET"), (":path", "/mcp"), ("mcp-session-id", session)]);
        self.respond(exchange, &[(":status", "200"), ("content-type", "text/event-stream")])
    }

    pub fn try_resume(&mut self, session: &str, cursor: &str) -> Answer {
        self.request(&[
            (":method", "GET"),
            (":path", "/mcp"),
            ("mcp-session-id", session),
            ("last-event-id", cursor),
        ])
    }

    /// A resumption that passes, answered with an event stream.
    pub fn resume(&mut self, session: &str, cursor: &str) -> Running {
        match self.try_resume(session, cursor) {
            Answer::Passed { exchange, .. } => {
                self.respond(exchange, &[(":status", "200"), ("content-type", "text/event-stream")])
            }
            Answer::Refused(reply) => panic!("refused: {reply:?}"),
        }
    }

    /// What a resumption is told: the value of the filter state.
    pub fn verdict(&mut self, session: &str, cursor: &str) -> String {
        let list = fields(&[
            (":method", "GET"),
            (":path", "/mcp"),
            ("mcp-session-id", session),
            ("last-event-id", cursor),
        ]);
        let (_, step) = self.with(|guard, at| Exchange::begin(guard, at, &list));
        step.ruling.unwrap().to_string()
    }

    pub fn delete(&mut self, session: &str, status: &str) {
        let exchange =
            self.pass(&[(":method", "DELETE"), (":path", "/mcp"), ("mcp-session-id", session)]);
        self.respond(exchange, &[(":status", status)]);
    }

    /// Some of a POST's body comes after its answer has begun.
    pub fn late_body(&mut self, running: &mut Running, bytes: &[u8], end: bool) {
        self.with(|guard, at| running.exchange.request_body(guard, at, bytes, end));
    }

    pub fn send(&mut self, running: &mut Running, text: &str) {
        self.send_bytes(running, text.as_bytes());
    }

    pub fn send_bytes(&mut self, running: &mut Running, bytes: &[u8]) {
        let step = self.with(|guard, at| running.exchange.response_body(guard, at, bytes));
        running.delivered.extend(step.replace.unwrap_or_else(|| bytes.to_vec()));
        running.reset |= step.reset;
        running.found.extend(step.found);
    }

    /// Events with data and these ids.
    pub fn events(&mut self, running: &mut Running, ids: &[&str]) {
        for id in ids {
            self.send(running, &format!("id: {id}\ndata: {{}}\n\n"));
        }
    }

    /// An event with an id and without data.
    pub fn priming(&mut self, running: &mut Running, id: &str) {
        self.send(running, &format!("id: {id}\ndata:\n\n"));
    }

    /// An event with the answer to the request with this JSON-RPC id.
    pub fn answer(&mut self, running: &mut Running, event_id: &str, id: u32) {
        self.send(
            running,
            &format!(
                "id: {event_id}\ndata: {{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{}}}}\n\n"
            ),
        );
    }

    /// The response ends cleanly.
    pub fn end(&mut self, running: Running) -> Ended {
        self.end_with(running, false)
    }

    /// The same, with trailers or without.
    pub fn end_with(&mut self, mut running: Running, trailers: bool) -> Ended {
        let step = self.with(|guard, at| running.exchange.response_end(guard, at, trailers));
        running.delivered.extend(step.replace.unwrap_or_default());
        running.found.extend(step.found);
        self.close(running, false)
    }

    /// The client goes away.
    pub fn abort(&mut self, running: Running) -> Ended {
        self.close(running, false)
    }

    /// The upstream breaks the stream off.
    pub fn break_off(&mut self, running: Running) -> Ended {
        self.close(running, true)
    }

    fn close(&mut self, mut running: Running, by_upstream: bool) -> Ended {
        let CloseStep { outcome, found, .. } =
            self.with(|guard, at| running.exchange.close(guard, at, || by_upstream));
        let text = running.text();
        running.found.extend(found);
        Ended {
            text,
            reset: running.reset,
            found: running.found.iter().map(|line| line.ruling.to_string()).collect(),
            replay: outcome.map(|outcome| (outcome.result(), outcome.action.as_str())),
            ruling: running.exchange.ruling().map(|ruling| ruling.to_string()),
        }
    }

    pub fn log_line(&mut self, session: &str, cursor: &str) -> Option<LogLine> {
        let list = fields(&[
            (":method", "GET"),
            (":path", "/mcp"),
            ("mcp-session-id", session),
            ("last-event-id", cursor),
        ]);
        self.with(|guard, at| Exchange::begin(guard, at, &list)).1.log
    }
}
