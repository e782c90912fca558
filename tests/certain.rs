//! What is certain of a replay is found: a stream of which all is known, one
//! connection at a time, and an event that must not come. And whatever comes,
//! nothing panics.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "a test may fail"
)]

mod support {
    mod cases;
    mod events;
    #[path = "mod.rs"]
    mod gateway;
    pub use cases::cases;
    pub use events::*;
    pub use gateway::*;
}

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;
use support::{Answer, Dice, Format, Gateway, Out, Running, cases, joined, split};

const STREAM: [(&str, &str); 2] = [(":status", "200"), ("content-type", "text/event-stream")];

const CUT: &str = r#"{"history":"exclusive","reject":{"pending_calls":"status"},
    "replay":{"gap":"cut","foreign_session":"cut","foreign_stream":"cut","repeated":"cut"}}"#;

/// A session with one stream, of which all is known: how it went until the
/// replay that is wrong.
#[derive(Debug, Clone)]
struct Certain {
    format: Format,
    is_standalone: bool,
    has_priming: bool,
    inclusive: bool,
    /// What the first connection brings, as the counters rise by.
    first: Vec<u64>,
    /// Honest resumptions: from where, and what each brings that is new.
    resumed: Vec<(u8, Vec<u64>)>,
    seed: u32,
}

/// That world, as it is.
struct Known {
    gateway: Gateway,
    certain: Certain,
    dice: Dice,
    /// The ids that were issued, and whether with data.
    issued: Vec<(String, bool)>,
    index: u64,
}

impl Known {
    fn new(certain: &Certain) -> Self {
        let mut known = Known {
            gateway: Gateway::new(CUT),
            certain: certain.clone(),
            dice: Dice(certain.seed.into()),
            issued: Vec::new(),
            index: 0,
        };
        known.gateway.initialize("a");
        let mut stream = match certain.is_standalone {
            true => known.gateway.listen("a"),
            false => known.gateway.call("a", 1),
        };
        if certain.has_priming {
            let id = known.next_id(1);
            known.gateway.priming(&mut stream, &id);
            known.issued.push((id, false));
        }
        let outs = known.issue(&certain.first);
        known.send(&mut stream, &joined(&outs));
        known.gateway.abort(stream);
        for (cursor, steps) in &certain.resumed {
            let cursor = usize::from(*cursor) % known.issued.len();
            let (mut stream, mut outs) = known.resume(cursor);
            outs.extend(known.issue(steps));
            known.send(&mut stream, &joined(&outs));
            known.gateway.abort(stream);
        }
        known
    }

    fn next_id(&mut self, step: u64) -> String {
        self.index += if self.certain.format == Format::Counter { step } else { 1 };
        let request = (!self.certain.is_standalone).then_some(1);
        self.certain.format.id(0, request, self.index, self.index, 0)
    }

    /// New events, with data.
    fn issue(&mut self, steps: &[u64]) -> Vec<Out> {
        let first = self.issued.len();
        for step in steps {
            let id = self.next_id(*step);
            self.issued.push((id, true));
        }
        self.write(first)
    }

    /// The events with data from there on.
    fn write(&mut self, first: usize) -> Vec<Out> {
        let ids = self.issued[first..].iter().filter(|(_, data)| *data);
        ids.map(|(id, _)| Out::new(&mut self.dice, id, Some("{}"))).collect()
    }

    fn send(&mut self, stream: &mut Running, text: &str) {
        for piece in split(&mut self.dice, text.as_bytes()) {
            self.gateway.send_bytes(stream, piece);
        }
    }

    /// A resumption from there, and what it has to bring.
    fn resume(&mut self, cursor: usize) -> (Running, Vec<Out>) {
        let stream = self.gateway.resume("a", &self.issued[cursor].0);
        let outs = self.write(cursor + usize::from(!self.certain.inclusive));
        (stream, outs)
    }

    /// Sends what is right and then an event that is wrong: that is cut.
    fn is_cut(
        &mut self,
        mut stream: Running,
        right: &[Out],
        (wrong, data): (&str, bool),
        fault: &str,
    ) -> TestCaseResult {
        let end = ["\n", "\r", "\r\n"][self.dice.roll(3)];
        let data = if data { format!("data: SECRET{end}") } else { String::new() };
        let lines = match self.dice.roll(2) {
            0 => format!("event: message{end}id: {wrong}{end}{data}{end}"),
            _ => format!("{data}id: {wrong}{end}{end}"),
        };
        let later = "id: later\ndata: SECRET\n\n";
        let right = joined(right);
        self.send(&mut stream, &format!("{right}{lines}{later}"));
        let ended = match self.dice.roll(2) {
            0 => self.gateway.end(stream),
            _ => self.gateway.abort(stream),
        };
        let ruling = format!("inconsistent;reason=replay_{fault};action=cut");
        prop_assert_eq!(ended.text, format!("{right}: mcp-resume-guard: {ruling}\n\n"));
        prop_assert!(ended.reset);
        prop_assert_eq!(ended.found, [ruling]);
        prop_assert_eq!(ended.replay, Some((fault, "cut")));
        Ok(())
    }

    fn verdict(&mut self, at: usize) -> String {
        self.gateway.verdict("a", &self.issued[at].0)
    }
}

fn certain(formats: &[Format]) -> impl Strategy<Value = Certain> {
    let steps = |len| vec(1u64..4, len);
    (
        select(formats.to_vec()),
        any::<(bool, bool, bool)>(),
        steps(2..10),
        vec((any::<u8>(), steps(0..4)), 0..4),
        any::<u32>(),
    )
        .prop_map(|(format, (is_standalone, has_priming, inclusive), first, resumed, seed)| {
            Certain { format, is_standalone, has_priming, inclusive, first, resumed, seed }
        })
}

const ALL: [Format; 4] = [Format::Go, Format::Rmcp, Format::Counter, Format::Uuid];

proptest! {
    #![proptest_config(cases(300))]

    /// Another session's event, another stream's, or one that the client has
    /// had is cut, and the cursor is refused from then on.
    #[test]
    fn what_belongs_elsewhere_is_cut(
        certain in certain(&ALL),
        fault in select(vec!["foreign_session", "foreign_stream", "repeated"]),
        (is_uuid, has_data) in any::<(bool, bool)>(),
        (cursor, right, which) in any::<(u8, u8, u8)>(),
    ) {
        let mut known = Known::new(&certain);
        let format = if is_uuid { Format::Uuid } else { Format::Go };
        let others: Vec<String> =
            (0..4).map(|index| format.id(7, Some(2), index, 5_000 + index, 0)).collect();
        let owner = if fault == "foreign_session" { "b" } else { "a" };
        if owner == "b" {
            known.gateway.initialize("b");
        }
        let mut stream = known.gateway.call(owner, 2);
        for other in &others {
            known.gateway.events(&mut stream, &[other]);
        }
        known.gateway.abort(stream);
        let cursor = usize::from(cursor) % known.issued.len();
        let (stream, mut outs) = known.resume(cursor);
        outs.truncate(usize::from(right) % (outs.len() + 1));
        let (wrong, data) = match fault {
            "repeated" => {
                // At first the cursor's own may come.
                let end = cursor + usize::from(!outs.is_empty());
                let mut old = known.issued[..end].to_vec();
                old.retain(|(_, data)| *data);
                prop_assume!(!old.is_empty());
                (old[usize::from(which) % old.len()].0.clone(), true)
            }
            _ => (others[usize::from(which) % 4].clone(), has_data || owner == "a"),
        };
        known.is_cut(stream, &outs, (&wrong, data), fault)?;
        let told = format!("inconsistent;reason=replay_{fault};action=rejected");
        for at in 0..known.issued.len() {
            let told = if at == cursor { &told } else { "continue" };
            prop_assert_eq!(known.verdict(at), told);
        }
    }

    /// A gap in a sequence is cut at the first event behind it. Whoever lacks
    /// what is gone is refused from then on, and nobody else.
    #[test]
    fn a_gap_is_cut(
        certain in certain(&ALL[..3]),
        (cursor, right, gap, skips) in any::<(u8, u8, u8, u8)>(),
    ) {
        let mut known = Known::new(&certain);
        let cursor = usize::from(cursor) % (known.issued.len() - 1);
        let (stream, mut outs) = known.resume(cursor);
        let behind = known.issued.len() - 1 - cursor;
        // So many of those behind the cursor come, and so many don't.
        let right = usize::from(right) % behind;
        let gap = 1 + usize::from(gap) % (behind - right);
        outs.truncate(outs.len() - (behind - right));
        let next = cursor + 1 + right + gap;
        let wrong = match known.issued.get(next) {
            Some((id, _)) => id.clone(),
            None => {
                for _ in 0..skips % 3 {
                    known.next_id(2);
                }
                known.next_id(1)
            }
        };
        known.is_cut(stream, &outs, (&wrong, true), "gap")?;
        for at in 0..known.issued.len() {
            let lacks = at + 1 < next && known.issued[at + 1..next].iter().any(|(_, data)| *data);
            let below = "inconsistent;reason=below_floor;action=rejected";
            prop_assert_eq!(known.verdict(at), if lacks { below } else { "continue" });
        }
    }
}

/// Pieces of streams.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let texts = "id: s_1\n|id:s_2\r\n|id: s_3\r|id: s_18446744073709551615\n|id: 7/0\n|\
        id: s_00\n|id\n|id: \0\n|id: 550e8400-e29b-41d4-a716-446655440000\n|data\n|data:\n|\
        data: {\"id\":|data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n|\n|\n\n|\r|\
        \r\n\r\n|: ping\n\n|\u{feff}|event: x\n|retry: 1\n";
    let text = select(texts.split('|').map(|text| text.as_bytes().to_vec()).collect::<Vec<_>>());
    let long = (any::<u8>(), 0usize..70_000).prop_map(|(byte, len)| vec![byte; len]);
    let piece = prop_oneof![60 => text, 10 => vec(any::<u8>(), 0..20), 1 => long];
    vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(cases(200))]

    /// Whatever follows a cursor, nothing panics, and the state stays small.
    #[test]
    fn any_bytes_do_no_harm(
        (sessions, streams, ids) in (1u32..4, 1u8..4, 1u16..8),
        resumptions in vec((any::<[u8; 4]>(), bytes()), 1..12),
        seed in any::<u32>(),
    ) {
        let state = format!(
            r#"{{"state":{{"sessions":{sessions},"streams_per_session":{streams},
            "ids_per_stream":{ids}}},"#
        );
        let mut gateway = Gateway::new(&CUT.replacen('{', &state, 1));
        let mut dice = Dice(seed.into());
        let cursors = ["s_0", "s_1", "s_2", "7/0", "550e8400-e29b-41d4-a716-446655440000"];
        let mut open = Vec::new();
        for ([session, cursor, how, ms], bytes) in resumptions {
            let session = ["a", "b", "c", "d"][usize::from(session % 4)];
            let mut running = match (how % 4, usize::from(cursor) % cursors.len()) {
                (0, _) => {
                    gateway.initialize(session);
                    let mut call = gateway.call(session, 1);
                    gateway.events(&mut call, &cursors);
                    call
                }
                (_, cursor) => match gateway.try_resume(session, cursors[cursor]) {
                    Answer::Passed { exchange, .. } => gateway.respond(exchange, &STREAM),
                    Answer::Refused(_) => continue,
                },
            };
            gateway.now_ms += u64::from(ms) * 30;
            for piece in split(&mut dice, &bytes) {
                gateway.send_bytes(&mut running, piece);
            }
            match dice.roll(4) {
                0 => drop(gateway.end(running)),
                1 => drop(gateway.abort(running)),
                2 => drop(gateway.break_off(running)),
                _ => open.push(running),
            }
            let most = gateway.guard.ledger.max_memory_bytes();
            let held = gateway.store.bytes() as u64;
            prop_assert!(held <= most, "{held} of {most} bytes");
        }
    }
}
