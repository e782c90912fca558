//! The incremental decoder against a whole-input one, written straight from
//! WHATWG HTML, 9.2.5 (parsing) and 9.2.6 (interpretation): however a stream
//! is cut, the same events come out.
#![allow(clippy::indexing_slicing, clippy::arithmetic_side_effects, reason = "a test may fail")]

#[path = "support/cases.rs"]
mod cases;

use cases::cases;
use mcp_resume_guard::sse::{DATA_LIMIT, Data, Decoder, Dispatched, IdField};
use proptest::prelude::*;

/// Short, so that ids at and over it are common.
const ID_LIMIT: usize = 6;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Id {
    Unchanged,
    Reset,
    Set(Vec<u8>),
    TooLong,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Payload {
    Empty,
    Whole(Vec<u8>),
    TooLong,
    /// There is some; it wasn't asked for.
    Passed,
}

type Event = (Id, Payload);

/// The lines of a stream, and what follows the last line end. A byte order
/// mark at the start is not part of them; an end is CRLF, LF or CR.
fn lines(stream: &[u8]) -> (Vec<&[u8]>, &[u8]) {
    let stream = stream.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(stream);
    let mut lines = Vec::new();
    let mut start = 0;
    let mut at = 0;
    while at < stream.len() {
        let end = match &stream[at..] {
            [b'\r', b'\n', ..] => 2,
            [b'\r' | b'\n', ..] => 1,
            _ => 0,
        };
        if end == 0 {
            at += 1;
        } else {
            lines.push(&stream[start..at]);
            at += end;
            start = at;
        }
    }
    (lines, &stream[start..])
}

/// An event that is being put together.
#[derive(Default)]
struct Pending {
    id: Option<Vec<u8>>,
    data: Vec<Vec<u8>>,
}

impl Pending {
    fn field(&mut self, line: &[u8]) {
        let (name, value) = match line.iter().position(|byte| *byte == b':') {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line, &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match name {
            b"id" if !value.contains(&0) => self.id = Some(value.to_vec()),
            b"data" => self.data.push(value.to_vec()),
            _ => {}
        }
    }

    fn dispatch(&mut self, events: &mut Vec<Event>) {
        let Pending { id, data } = std::mem::take(self);
        if id.is_none() && data.is_empty() {
            return;
        }
        let id = match id {
            None => Id::Unchanged,
            Some(id) if id.is_empty() => Id::Reset,
            Some(id) if id.len() > ID_LIMIT => Id::TooLong,
            Some(id) => Id::Set(id),
        };
        let data = data.join(&b'\n');
        let data = match data.len() {
            0 => Payload::Empty,
            len if len > DATA_LIMIT => Payload::TooLong,
            _ => Payload::Whole(data),
        };
        events.push((id, data));
    }
}

/// The events of a whole stream. At a clean end an event that lacks its blank
/// line counts, too.
fn whole(stream: &[u8], clean_end: bool) -> Vec<Event> {
    let (lines, rest) = lines(stream);
    let mut events = Vec::new();
    let mut pending = Pending::default();
    for line in lines {
        if line.is_empty() {
            pending.dispatch(&mut events);
        } else {
            pending.field(line);
        }
    }
    if clean_end {
        if !rest.is_empty() {
            pending.field(rest);
        }
        pending.dispatch(&mut events);
    }
    events
}

fn seen(event: &Dispatched<'_>) -> Event {
    let id = match event.id {
        IdField::Unchanged => Id::Unchanged,
        IdField::Reset => Id::Reset,
        IdField::Set(id) => Id::Set(id.to_vec()),
        IdField::TooLong => Id::TooLong,
    };
    let data = match event.data {
        Data::Empty => Payload::Empty,
        Data::Passed | Data::LeftOut => Payload::Passed,
        Data::TooLong => Payload::TooLong,
        Data::Captured(data) => Payload::Whole(data.to_vec()),
    };
    (id, data)
}

/// What the decoder makes of the stream, cut at these places. `capture` says
/// for each piece whether data is asked for (the last value is for the rest).
fn decode(stream: &[u8], cuts: &[usize], capture: &[bool], clean_end: bool) -> Vec<Event> {
    let mut decoder = Decoder::new(ID_LIMIT);
    let mut events = Vec::new();
    let mut start = 0;
    let ends = cuts.iter().copied().chain([stream.len()]);
    for (piece, end) in ends.enumerate() {
        decoder.capture(*capture.get(piece).or(capture.last()).unwrap_or(&true));
        decoder.feed(&stream[start..end], |event| events.push(seen(&event)));
        start = end;
    }
    if clean_end {
        decoder.finish(|event| events.push(seen(&event)));
    }
    events
}

/// Pieces of a stream: whole fields and the bytes that are special in one.
fn token() -> impl Strategy<Value = Vec<u8>> {
    let fixed: Vec<&'static [u8]> = vec![
        b"id",
        b"id:",
        b"id: ",
        b"id:  ",
        b"id:7\n",
        b"id: a-1\r\n",
        b"id\n",
        b"id:\r",
        b"data",
        b"data:",
        b"data: ",
        b"data:{}\n",
        b"data\r\n",
        b"data:\n",
        b"event: prime\n",
        b"retry: 3000\r\n",
        b": ping\n",
        b":\r\n",
        b"idx:1\n",
        b"dat",
        b"datas:1\n",
        b":",
        b" ",
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b"\r\r",
        b"\r\n\r\n",
        b"\xEF\xBB\xBF",
        b"\xEF\xBB",
        b"\0",
        b"123456",
        b"1234567",
        b"\xFF",
        b"\xC3",
        "é".as_bytes(),
        "😀".as_bytes(),
    ];
    prop_oneof![
        20 => proptest::sample::select(fixed).prop_map(<[u8]>::to_vec),
        2 => proptest::collection::vec(any::<u8>(), 1..4),
        1 => (1usize..40).prop_map(|len| vec![b'x'; len]),
    ]
}

fn stream(tokens: std::ops::Range<usize>) -> impl Strategy<Value = Vec<u8>> {
    let start = prop_oneof![
        4 => Just(&b""[..]),
        1 => Just(&b"\xEF\xBB\xBF"[..]),
        1 => Just(&b"\xEF\xBB\xBF\xEF\xBB\xBF"[..]),
        1 => Just(&b"\xEF\xBB"[..]),
    ];
    (start, proptest::collection::vec(token(), tokens)).prop_map(|(start, tokens)| {
        let mut stream = start.to_vec();
        stream.extend(tokens.concat());
        stream
    })
}

/// A stream with a sorted list of places to cut it, empty pieces included.
fn cut_stream(tokens: std::ops::Range<usize>) -> impl Strategy<Value = (Vec<u8>, Vec<usize>)> {
    stream(tokens).prop_flat_map(|stream| {
        let cuts = proptest::collection::vec(0..=stream.len(), 0..24).prop_map(|mut cuts| {
            cuts.sort_unstable();
            cuts
        });
        (Just(stream), cuts)
    })
}

/// A long line in the middle of a stream, as bytes are piled up only there.
fn long_line() -> impl Strategy<Value = Vec<u8>> {
    let lengths = prop_oneof![
        Just(DATA_LIMIT - 1),
        Just(DATA_LIMIT),
        Just(DATA_LIMIT + 1),
        Just(2 * DATA_LIMIT),
    ];
    let before = proptest::sample::select(vec![
        &b"data:"[..],
        b"id:",
        b"id: 1\ndata: ",
        b"data\ndata:",
        b":",
        b"",
    ]);
    let after = proptest::sample::select(vec![
        &b"\n\n"[..],
        b"\ndata\n\n",
        b"\nid:2\n\ndata:a\n\n",
        b"\0\ndata:b\n\n",
        b"",
    ]);
    (before, lengths, after).prop_map(|(before, length, after)| {
        [before, &vec![b'x'; length], after, b"id:9\ndata:z\n\n"].concat()
    })
}

proptest! {
    #![proptest_config(cases(2_000))]

    /// Random places to cut, pieces down to nothing.
    #[test]
    fn however_it_is_cut_the_events_are_the_same(
        (stream, cuts) in cut_stream(0..40),
        clean_end: bool,
    ) {
        prop_assert_eq!(decode(&stream, &cuts, &[true], clean_end), whole(&stream, clean_end));
    }

    /// Every byte a piece of its own.
    #[test]
    fn byte_by_byte_the_events_are_the_same(stream in stream(0..40), clean_end: bool) {
        let cuts: Vec<usize> = (0..stream.len()).collect();
        prop_assert_eq!(decode(&stream, &cuts, &[true], clean_end), whole(&stream, clean_end));
    }

    /// Without capture the same ids come, and the same answer to whether there
    /// is data: ids are recorded however little is known of the calls.
    #[test]
    fn what_is_not_captured_has_data_all_the_same(
        (stream, cuts) in cut_stream(0..40),
        clean_end: bool,
    ) {
        let expected: Vec<Event> = whole(&stream, clean_end)
            .into_iter()
            .map(|(id, data)| match data {
                Payload::Empty => (id, Payload::Empty),
                _ => (id, Payload::Passed),
            })
            .collect();
        prop_assert_eq!(decode(&stream, &cuts, &[false], clean_end), expected);
    }

    /// Data is asked for and not any more in the midst of events: what is
    /// shown of an event is all of it or nothing, never a part that could be
    /// read as another message.
    #[test]
    fn captured_data_is_never_a_part(
        (stream, cuts) in cut_stream(0..40),
        capture in proptest::collection::vec(any::<bool>(), 1..25),
        clean_end: bool,
    ) {
        let events = decode(&stream, &cuts, &capture, clean_end);
        let expected = whole(&stream, clean_end);
        prop_assert_eq!(events.len(), expected.len());
        for ((id, data), (expected_id, expected_data)) in events.into_iter().zip(expected) {
            prop_assert_eq!(id, expected_id);
            match data {
                Payload::Passed => prop_assert_ne!(expected_data, Payload::Empty),
                shown => prop_assert_eq!(shown, expected_data),
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(150))]

    /// All single cuts and all pairs of cuts of short streams.
    #[test]
    fn every_cut_and_every_pair_of_cuts(stream in stream(0..9), clean_end: bool) {
        let stream = &stream[..stream.len().min(32)];
        let expected = whole(stream, clean_end);
        for first in 0..=stream.len() {
            prop_assert_eq!(&decode(stream, &[first], &[true], clean_end), &expected);
            for second in first..=stream.len() {
                let cuts = [first, second];
                let events = decode(stream, &cuts, &[true], clean_end);
                prop_assert_eq!(&events, &expected, "cut at {:?}", cuts);
            }
        }
    }

    /// Around the most that is kept of an event.
    #[test]
    fn long_lines(
        stream in long_line(),
        cuts in proptest::collection::vec(0usize..=2 * DATA_LIMIT, 0..6),
        clean_end: bool,
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(stream.len())).collect();
        cuts.sort_unstable();
        prop_assert_eq!(decode(&stream, &cuts, &[true], clean_end), whole(&stream, clean_end));
    }
}
