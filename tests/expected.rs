//! An id that carries on a range is kept without being read as any other: what
//! is recorded is the same as if it had been.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "tests"
)]

#[path = "support/cases.rs"]
mod cases;

use cases::cases;
use mcp_resume_guard::config::State;
use mcp_resume_guard::event_id::EventId;
use mcp_resume_guard::fingerprint::SessionFingerprint;
use mcp_resume_guard::jsonrpc::Calls;
use mcp_resume_guard::ledger::{Access, Ledger};
use mcp_resume_guard::recorder::{Carries, Recorder};
use mcp_resume_guard::store::memory::SharedData;
use mcp_resume_guard::telemetry::Tally;
use proptest::prelude::*;

/// What stands before the index: the last is distinctive, and noted in the index.
const PREFIXES: [&str; 4] = ["s_", "t-x_", "", "8c5d1f6e2b3a49c7a1d2e3f4a5b6c7d8_"];

const DATA: [&str; 5] = [
    "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\"}\n",
    "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n",
    "data: {\"jsonrpc\":\"2.0\",\"id\":2,\"result\":{}}\n",
    "data: x\n",
    "data:\n",
];

#[derive(Debug, Clone)]
enum Step {
    /// Events of a stream that follow each other; the first is so far from the
    /// one before.
    Events { stream: usize, step: i64, run: usize, prefix: Option<usize>, data: usize },
    /// An event without an id.
    Nameless { stream: usize, data: usize },
    /// So much time passes, and the chunks of all streams end.
    Pause { ms: u64 },
    /// The stream ends, and another begins.
    End { stream: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let data = prop_oneof![20 => Just(0usize), 1 => 1..DATA.len()];
    let steps = prop_oneof![5 => Just(1i64), 1 => -12..4i64];
    let prefix = prop_oneof![9 => Just(None), 1 => (0..PREFIXES.len()).prop_map(Some)];
    prop_oneof![
        20 => (0..3usize, steps, 1..7usize, prefix, data.clone())
            .prop_map(|(stream, step, run, prefix, data)| Step::Events { stream, step, run, prefix, data }),
        2 => (0..3usize, data).prop_map(|(stream, data)| Step::Nameless { stream, data }),
        10 => prop_oneof![Just(0u64), Just(400), Just(1_500)].prop_map(|ms| Step::Pause { ms }),
        1 => (0..3usize).prop_map(|stream| Step::End { stream }),
    ]
}

/// One of two workers that see the same, but for a blank behind each id, which
/// doesn't count (RFC 9110, section 5.5) and keeps it from being the text that
/// is expected.
struct Worker {
    blank: &'static str,
    store: SharedData,
    ledger: Ledger,
    tally: Tally,
    now_ms: u64,
    nonces: u64,
    streams: Vec<Stream>,
}

struct Stream {
    recorder: Recorder,
    prefix: &'static str,
    index: i64,
    chunk: String,
}

impl Worker {
    fn new(blank: &'static str) -> Self {
        let store = SharedData::default();
        // Streams lose their lanes to others.
        let state =
            State { sessions: 1, streams_per_session: 2, ids_per_stream: 64, ..State::default() };
        let (ledger, _) = Ledger::join(&store, &state, [7; 16]);
        let (tally, streams) = (Tally::default(), Vec::new());
        let mut worker = Worker { blank, store, ledger, tally, now_ms: 1_000, nonces: 0, streams };
        worker.streams = (0..3).map(|number| worker.stream(number)).collect();
        worker
    }

    fn session(&self) -> SessionFingerprint {
        self.ledger.secret().session(b"session")
    }

    fn stream(&mut self, number: usize) -> Stream {
        self.nonces += 1;
        let body =
            br#"[{"jsonrpc":"2.0","id":1,"method":"a"},{"jsonrpc":"2.0","id":2,"method":"b"}]"#;
        let calls = Calls::of_request(self.ledger.secret(), body);
        let nonce = self.ledger.nonce(self.nonces);
        let recorder = Recorder::new(self.session(), Carries::NewStream, nonce, 64, calls);
        Stream { recorder, prefix: PREFIXES[number], index: 95, chunk: String::new() }
    }

    fn flush(&mut self) {
        let now_us = self.now_ms * 1_000;
        let at =
            &mut Access { store: &self.store, now_ms: self.now_ms, now_us, tally: &mut self.tally };
        for stream in &mut self.streams {
            stream.recorder.record(&self.ledger, at, std::mem::take(&mut stream.chunk).as_bytes());
        }
    }

    fn go(&mut self, step: &Step) {
        let blank = self.blank;
        match *step {
            Step::Events { stream, step, run, prefix, data } => {
                let stream = &mut self.streams[stream];
                stream.prefix = prefix.map_or(stream.prefix, |prefix| PREFIXES[prefix]);
                stream.index = (stream.index + step - 1).max(0);
                let (prefix, data) = (stream.prefix, DATA[data]);
                for _ in 0..run {
                    stream.index += 1;
                    stream.chunk += &format!("id: {prefix}{}{blank}\n{data}\n", stream.index);
                }
            }
            Step::Nameless { stream, data } => {
                self.streams[stream].chunk += &format!("{}\n", DATA[data]);
            }
            Step::Pause { ms } => {
                self.flush();
                self.now_ms += ms;
            }
            Step::End { stream } => {
                self.flush();
                let now_us = self.now_ms * 1_000;
                let next = self.stream(stream);
                let mut ended = std::mem::replace(&mut self.streams[stream], next);
                let at = &mut Access {
                    store: &self.store,
                    now_ms: self.now_ms,
                    now_us,
                    tally: &mut self.tally,
                };
                ended.recorder.finish(&self.ledger, at);
                ended.recorder.close(&self.ledger, at);
            }
        }
    }

    fn state(&self) -> Vec<Vec<u8>> {
        let mut values = self.store.values();
        values.sort();
        values
    }
}

proptest! {
    #![proptest_config(cases(500))]

    #[test]
    fn what_is_recorded_is_the_same(steps in proptest::collection::vec(step(), 1..80)) {
        let (mut expected, mut read) = (Worker::new(""), Worker::new(" "));
        for step in steps.iter().chain([&Step::Pause { ms: 0 }]) {
            expected.go(step);
            read.go(step);
            prop_assert_eq!(expected.state(), read.state(), "after {:?}", step);
            prop_assert_eq!(&expected.tally, &read.tally);
        }
    }
}

/// No index is higher than this, and what looks like the next is no index.
#[test]
fn the_highest_index() {
    let mut workers = [Worker::new(""), Worker::new(" ")];
    for worker in &mut workers {
        let ids = (u64::MAX - 5..=u64::MAX).map(|index| index.to_string());
        let behind = ["18446744073709551615", "18446744073709551616", "18446744073709551617"];
        let ids = ids.chain(behind.map(str::to_owned));
        for id in ids {
            worker.streams[0].chunk = format!("id: s_{id}{}\n{}\n", worker.blank, DATA[0]);
            worker.flush();
        }
    }
    assert_eq!(workers[0].state(), workers[1].state());
    let past = EventId::new(workers[0].ledger.secret(), b"s_18446744073709551616").unwrap();
    let at = &Access {
        store: &workers[0].store,
        now_ms: 2_000,
        now_us: 2_000_000,
        tally: &mut Tally::default(),
    };
    let history = workers[0].ledger.history(at, workers[0].session()).unwrap();
    assert!(history.streams[0].has(&past));
}

/// A range may grow up to an id that came before it.
#[test]
fn an_id_that_is_known_is_not_expected() {
    let mut workers = [Worker::new(""), Worker::new(" ")];
    for worker in &mut workers {
        for id in ["s_5", "t_1", "s_2", "s_3", "s_4", "s_5", "s_6"] {
            worker.streams[0].chunk = format!("id: {id}{}\n{}\n", worker.blank, DATA[0]);
            worker.flush();
        }
    }
    assert_eq!(workers[0].state(), workers[1].state());
    assert_eq!(workers[0].tally, workers[1].tally);
}
