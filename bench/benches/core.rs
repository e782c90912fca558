//! The native core, part by part: what an exchange costs without Envoy and without wasm.
//!
//! `cargo bench -p mcp-resume-guard-bench`. The ratio of two builds in one sitting matters, not the
//! figures: a wasm VM is slower, and the calls to the host come on top.

use std::cell::Cell;

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use mcp_resume_guard::budget::Budget;
use mcp_resume_guard::config::Config;
use mcp_resume_guard::event_id::EventId;
use mcp_resume_guard::exchange::{Exchange, Guard, Origin};
use mcp_resume_guard::fingerprint::Secret;
use mcp_resume_guard::headers::Field;
use mcp_resume_guard::ledger::record::Record;
use mcp_resume_guard::ledger::{Access, Ledger};
use mcp_resume_guard::sse::{Decoder, Dispatched};
use mcp_resume_guard::store::memory::SharedData;
use mcp_resume_guard::telemetry::Tally;

fn main() {
    divan::main();
}

/// A gateway in memory.
struct Gateway {
    guard: Guard,
    store: SharedData,
    clock_us: Cell<u64>,
    random: Cell<u64>,
}

impl Origin for Gateway {
    fn is_upstream(&self) -> bool {
        true
    }

    fn address(&self) -> Option<Vec<u8>> {
        Some(b"127.0.0.1:8000".to_vec())
    }

    fn random(&self) -> u64 {
        self.random.set(self.random.get() + 1);
        self.random.get()
    }
}

fn fields<'a>(fields: &[(&'a str, &'a str)]) -> Vec<Field<'a>> {
    fields.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())).collect()
}

impl Gateway {
    /// With the defaults, but for one gateway and with room for so many sessions.
    fn new(sessions: u32) -> Self {
        let text = format!(r#"{{"history":"exclusive","state":{{"sessions":{sessions}}}}}"#);
        let config = Config::parse(text.as_bytes()).expect("the configuration is valid");
        let store = SharedData::default();
        let (ledger, _) = Ledger::join(&store, &config.state, [7; Secret::LEN]);
        let guard = Guard { config, ledger, body_budget: Budget::new(64 << 20) };
        Gateway { guard, store, clock_us: Cell::new(1_000_000), random: Cell::new(0) }
    }

    fn with<T>(&self, work: impl FnOnce(&Guard, &mut Access<'_, SharedData>) -> T) -> T {
        self.clock_us.set(self.clock_us.get() + 100);
        let now_us = self.clock_us.get();
        let mut tally = Tally::default();
        work(
            &self.guard,
            &mut Access { store: &self.store, now_ms: now_us / 1000, now_us, tally: &mut tally },
        )
    }

    fn begin(&self, request: &[Field<'_>], body: &[u8]) -> Exchange {
        let (mut exchange, step) = self.with(|guard, at| Exchange::begin(guard, at, request));
        assert!(step.reply.is_none(), "refused");
        if step.body {
            self.with(|guard, at| exchange.request_body(guard, at, body, true));
        }
        exchange
    }

    fn answer(&self, exchange: &mut Exchange, response: &[Field<'_>]) {
        let step = self.with(|guard, at| exchange.response(guard, at, response, false, self));
        assert!(step.reply.is_none(), "refused");
    }

    fn pass(&self, exchange: &mut Exchange, chunk: &[u8]) {
        self.with(|guard, at| exchange.response_body(guard, at, chunk));
    }

    fn end(&self, mut exchange: Exchange) {
        self.with(|guard, at| exchange.response_end(guard, at, false));
        self.with(|guard, at| exchange.close(guard, at, || false));
    }

    /// A session begins.
    fn initialize(&self, session: &str) {
        let mut exchange = self.begin(&post(None), INITIALIZE);
        self.answer(&mut exchange, &json(Some(session)));
        self.end(exchange);
    }

    /// A call whose answer is a stream, open.
    fn stream(&self, session: &str) -> Exchange {
        let mut exchange = self.begin(&post(Some(session)), CALL);
        self.answer(&mut exchange, &event_stream());
        exchange
    }
}

const INITIALIZE: &[u8] = br#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}"#;
const CALL: &[u8] = br#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"echo","arguments":{"text":"a text that makes the body of this request as long as those of the benchmark on a real Envoy"}}}"#;

fn post(session: Option<&str>) -> Vec<Field<'_>> {
    let mut all = vec![
        (":method", "POST"),
        (":path", "/mcp"),
        (":scheme", "http"),
        (":authority", "127.0.0.1:8080"),
        ("content-type", "application/json"),
        ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", "2025-11-25"),
    ];
    all.extend(session.map(|session| ("mcp-session-id", session)));
    fields(&all)
}

fn get<'a>(session: &'a str, cursor: &'a str) -> Vec<Field<'a>> {
    fields(&[
        (":method", "GET"),
        (":path", "/mcp"),
        (":scheme", "http"),
        (":authority", "127.0.0.1:8080"),
        ("accept", "text/event-stream"),
        ("mcp-protocol-version", "2025-11-25"),
        ("mcp-session-id", session),
        ("last-event-id", cursor),
    ])
}

fn json(session: Option<&str>) -> Vec<Field<'_>> {
    let mut all = vec![(":status", "200"), ("content-type", "application/json")];
    all.extend(session.map(|session| ("mcp-session-id", session)));
    fields(&all)
}

fn event_stream() -> Vec<Field<'static>> {
    fields(&[(":status", "200"), ("content-type", "text/event-stream")])
}

fn session(number: usize) -> String {
    format!("550e8400-e29b-41d4-a716-{number:012}")
}

/// The ids that servers give.
#[derive(Debug, Clone, Copy)]
enum Ids {
    Index,
    Uuid,
}

impl Ids {
    fn id(self, stream: usize, number: u64) -> String {
        match self {
            Ids::Index => format!("8c5d1f6e2b3a49c7a1d2e3f4a5b6c7{stream:02x}_{number}"),
            Ids::Uuid => {
                let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
                format!("{:08x}-e29b-4{stream:03x}-a716-{mixed:012x}", mixed >> 32)
            }
        }
    }

    fn event(self, stream: usize, number: u64) -> Vec<u8> {
        format!(
            "event: message\nid: {}\ndata: {{\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\
             \"params\":{{\"progressToken\":\"token\",\"progress\":{number},\"message\":\"some words \
             about what was done\"}}}}\n\n",
            self.id(stream, number)
        )
        .into_bytes()
    }
}

/// A POST with a JSON answer, of a session whose set has so many sessions.
#[divan::bench(args = [1, 8, 32])]
fn post_json(bencher: Bencher<'_, '_>, in_table: usize) {
    let gateway = Gateway::new(32);
    (0..in_table).for_each(|number| gateway.initialize(&session(number)));
    post_of_the_first_session(bencher, &gateway);
}

fn post_of_the_first_session(bencher: Bencher<'_, '_>, gateway: &Gateway) {
    let name = session(0);
    let (request, response) = (post(Some(&name)), json(None));
    bencher.bench_local(|| {
        let mut exchange = gateway.begin(black_box(&request), CALL);
        gateway.answer(&mut exchange, &response);
        gateway.end(exchange);
    });
}

/// The same, and each session has 16 finished streams.
#[divan::bench(args = [1, 8])]
fn post_json_after_streams(bencher: Bencher<'_, '_>, in_set: usize) {
    let gateway = Gateway::new(8);
    for number in 0..in_set {
        gateway.initialize(&session(number));
        for stream in 0..16 {
            let mut exchange = gateway.stream(&session(number));
            gateway.pass(&mut exchange, &Ids::Index.event(stream, 0));
            gateway.end(exchange);
        }
    }
    post_of_the_first_session(bencher, &gateway);
}

/// A chunk with one event, on a stream that has been running for a while.
#[divan::bench(args = [Ids::Index, Ids::Uuid])]
fn event(bencher: Bencher<'_, '_>, ids: Ids) {
    let gateway = Gateway::new(8192);
    gateway.initialize(&session(0));
    let mut exchange = gateway.stream(&session(0));
    let mut number = 0;
    for _ in 0..1000 {
        gateway.pass(&mut exchange, &ids.event(1, number));
        number += 1;
    }
    bencher
        .with_inputs(|| {
            number += 1;
            ids.event(1, number)
        })
        .bench_local_values(|chunk| gateway.pass(&mut exchange, &chunk));
}

/// A call whose answer is a stream of one event.
#[divan::bench(args = [1, 8])]
fn stream_of_one_event(bencher: Bencher<'_, '_>, in_set: usize) {
    let gateway = Gateway::new(8);
    (0..in_set).for_each(|number| gateway.initialize(&session(number)));
    let mut stream = 0;
    bencher
        .with_inputs(|| {
            stream += 1;
            Ids::Index.event(stream, 0)
        })
        .bench_local_values(|chunk| {
            let mut exchange = gateway.stream(&session(0));
            gateway.pass(&mut exchange, &chunk);
            gateway.end(exchange);
        });
}

/// 64 KiB of events in one chunk.
#[divan::bench(args = [Ids::Index, Ids::Uuid])]
fn bulk(bencher: Bencher<'_, '_>, ids: Ids) {
    let gateway = Gateway::new(8192);
    gateway.initialize(&session(0));
    let mut exchange = gateway.stream(&session(0));
    let mut number = 0;
    bencher
        .with_inputs(|| {
            let mut chunk = Vec::new();
            while chunk.len() < 64 * 1024 {
                number += 1;
                chunk.extend(ids.event(1, number));
            }
            chunk
        })
        .input_counter(BytesCount::of_slice)
        .bench_local_values(|chunk| gateway.pass(&mut exchange, &chunk));
}

/// An honest resumption whose answer brings the three events that are owed.
#[divan::bench(args = [Ids::Index, Ids::Uuid])]
fn resume_ok(bencher: Bencher<'_, '_>, ids: Ids) {
    let gateway = Gateway::new(8192);
    gateway.initialize(&session(0));
    let mut exchange = gateway.stream(&session(0));
    (0..10).for_each(|number| gateway.pass(&mut exchange, &ids.event(1, number)));
    gateway.with(|guard, at| exchange.close(guard, at, || false));
    let (name, cursor) = (session(0), ids.id(1, 6));
    let (request, response) = (get(&name, &cursor), event_stream());
    let replay: Vec<Vec<u8>> = (7..10).map(|number| ids.event(1, number)).collect();
    bencher.bench_local(|| {
        let mut exchange = gateway.begin(black_box(&request), b"");
        gateway.answer(&mut exchange, &response);
        replay.iter().for_each(|event| gateway.pass(&mut exchange, event));
        gateway.end(exchange);
    });
}

/// A resumption that is refused.
#[divan::bench]
fn resume_refused(bencher: Bencher<'_, '_>) {
    let gateway = Gateway::new(8192);
    gateway.initialize(&session(0));
    let mut exchange = gateway.stream(&session(0));
    gateway.pass(&mut exchange, &Ids::Uuid.event(1, 0));
    gateway.end(exchange);
    let (name, cursor) = (session(0), Ids::Uuid.id(2, 5));
    let request = get(&name, &cursor);
    bencher.bench_local(|| {
        let (_, step) = gateway.with(|guard, at| Exchange::begin(guard, at, black_box(&request)));
        assert!(step.reply.is_some());
    });
}

/// The decoder alone, on 64 KiB.
#[divan::bench]
fn decoder(bencher: Bencher<'_, '_>) {
    let chunk: Vec<u8> = (0..330).flat_map(|number| Ids::Index.event(1, number)).collect();
    let mut decoder = Decoder::new(4096);
    bencher.counter(BytesCount::new(chunk.len())).bench_local(|| {
        let mut events = 0;
        decoder.feed(black_box(&chunk), &mut |_: Dispatched<'_>| events += 1);
        events
    });
}

/// An id's fingerprints.
#[divan::bench(args = [Ids::Index, Ids::Uuid])]
fn event_id(bencher: Bencher<'_, '_>, ids: Ids) {
    let secret = Secret::new([7; Secret::LEN]);
    let text = ids.id(1, 12345);
    bencher.bench_local(|| EventId::new(&secret, black_box(text.as_bytes())));
}

/// The bytes of a record with a full window.
#[divan::bench(args = [Ids::Index, Ids::Uuid])]
fn encode_record(bencher: Bencher<'_, '_>, ids: Ids) {
    let record = full_record(ids);
    bencher.bench_local(|| black_box(&record).encode());
}

/// A record from them.
#[divan::bench(args = [Ids::Index, Ids::Uuid])]
fn decode_record(bencher: Bencher<'_, '_>, ids: Ids) {
    let bytes = full_record(ids).encode();
    bencher.bench_local(|| Record::decode(black_box(&bytes)));
}

fn full_record(ids: Ids) -> Record {
    let secret = Secret::new([7; Secret::LEN]);
    let mut record = Record::new(1, 0);
    for number in 0..100 {
        let id = EventId::new(&secret, ids.id(1, number).as_bytes()).expect("an id");
        record.push(&id, true, 64, 0);
    }
    record
}
