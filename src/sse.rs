//! The event stream decoder: bytes in, dispatched events out.
//!
//! WHATWG HTML, sections 9.2.5 (parsing) and 9.2.6 (interpretation), for what
//! the guard needs of them: the `id` of each event and whether it has data.
//! It is incremental, works on bytes (an id is compared, never shown), and
//! keeps a bounded amount whatever comes: an id up to its limit, and up to
//! [`DATA_LIMIT`] of an event's data while somebody asks for it.

use memchr::memchr2;

use crate::bytes::begins;

/// Bytes of one event's data that are kept while data is captured.
pub const DATA_LIMIT: usize = 64 * 1024;

/// Bytes that are looked at together while no line end is near.
const STRIDE: usize = 64;

const BOM: &[u8; 3] = b"\xEF\xBB\xBF";

/// The `id` field of a dispatched event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdField<'a> {
    /// The event has none (or one with a NUL, which is ignored): the last
    /// event id stays what it was.
    Unchanged,
    /// It is empty: there is no last event id any more.
    Reset,
    /// The new last event id.
    Set(&'a [u8]),
    /// A new last event id, longer than the limit.
    TooLong,
}

/// The data of a dispatched event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data<'a> {
    /// None, or an empty one: a priming event.
    Empty,
    /// There is some, and it was not captured.
    Passed,
    /// There is some, and it begins as data does that is left out.
    LeftOut,
    /// There is some, longer than [`DATA_LIMIT`].
    TooLong,
    /// The data, its lines joined by LF.
    Captured(&'a [u8]),
}

/// An event at the blank line that dispatches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dispatched<'a> {
    /// Its id.
    pub id: IdField<'a>,
    /// Its data.
    pub data: Data<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    /// No colon yet: what came so far is in `name`.
    Name,
    Id,
    Data,
    Ignored,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Id {
    Unchanged,
    Reset,
    Set,
    TooLong,
}

/// An incremental decoder of one event stream.
#[derive(Debug)]
pub struct Decoder {
    id_limit: usize,
    capture: bool,
    /// Whether the data of this event is captured.
    capturing: bool,
    /// How data begins that isn't captured.
    beginnings_left_out: &'static [&'static [u8]],
    /// The data of this event began so.
    left_out: bool,

    /// How much of the byte order mark has matched; `BOM.len()` once that is
    /// decided.
    bom: usize,
    /// The last line ended in CR: an LF that follows belongs to it.
    after_cr: bool,

    field: Field,
    name: [u8; 4],
    name_len: usize,
    /// The field's value has begun: its first blank has been seen to.
    in_value: bool,
    line_id: Vec<u8>,
    line_id_has_nul: bool,

    id: Id,
    event_id: Vec<u8>,
    data_lines: usize,
    has_data: bool,
    data: Vec<u8>,
    data_too_long: bool,
}

impl Decoder {
    /// A decoder at the start of a stream. Ids longer than `id_limit` bytes
    /// are reported, not kept.
    pub fn new(id_limit: usize) -> Self {
        Decoder {
            id_limit,
            capture: false,
            capturing: false,
            beginnings_left_out: &[],
            left_out: false,
            bom: 0,
            after_cr: false,
            field: Field::Name,
            name: [0; 4],
            name_len: 0,
            in_value: false,
            line_id: Vec::new(),
            line_id_has_nul: false,
            id: Id::Unchanged,
            event_id: Vec::new(),
            data_lines: 0,
            has_data: false,
            data: Vec::new(),
            data_too_long: false,
        }
    }

    /// Data that begins so is left out, if its beginning comes in one piece:
    /// what is most of a stream needn't be copied.
    pub fn leaving_out(mut self, beginnings: &'static [&'static [u8]]) -> Self {
        self.beginnings_left_out = beginnings;
        self
    }

    /// Whether the data of events is captured whose data begins from now on.
    pub fn capture(&mut self, capture: bool) {
        self.capture = capture;
    }

    /// Takes the next bytes of the stream and gives each event that they
    /// dispatch to `sink`. Time is linear in the bytes.
    pub fn feed(&mut self, bytes: &[u8], mut sink: impl FnMut(Dispatched<'_>)) {
        let mut rest = self.skip_bom(bytes);
        while let Some(first) = rest.first() {
            if std::mem::take(&mut self.after_cr) && *first == b'\n' {
                rest = rest.get(1..).unwrap_or_default();
                continue;
            }
            let Some(end) = find_line_end(rest) else {
                self.line_bytes(rest);
                break;
            };
            let (line, tail) = rest.split_at_checked(end).unwrap_or((rest, &[]));
            self.line_bytes(line);
            self.line_end(&mut sink);
            self.after_cr = tail.first() == Some(&b'\r');
            rest = tail.get(1..).unwrap_or_default();
        }
    }

    /// The stream has ended cleanly. The standard drops an event without its
    /// blank line here, but there are clients that dispatch it (Go's), so its
    /// id counts as issued.
    pub fn finish(&mut self, mut sink: impl FnMut(Dispatched<'_>)) {
        if self.bom < BOM.len() {
            self.bom_was_none();
        }
        if !self.line_is_empty() {
            self.line_end(&mut sink);
        }
        self.dispatch(&mut sink);
    }

    fn skip_bom<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let mut rest = bytes;
        while let (Some(expected), Some(byte)) = (BOM.get(self.bom), rest.first()) {
            if byte != expected {
                self.bom_was_none();
                break;
            }
            self.bom = self.bom.saturating_add(1);
            rest = rest.get(1..).unwrap_or_default();
        }
        rest
    }

    fn bom_was_none(&mut self) {
        let matched = std::mem::replace(&mut self.bom, BOM.len());
        self.line_bytes(BOM.get(..matched).unwrap_or_default());
    }

    fn line_is_empty(&self) -> bool {
        self.field == Field::Name && self.name_len == 0
    }

    /// Some bytes of a line, without its end.
    fn line_bytes(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        if self.line_is_empty() {
            // Most names come in one piece.
            let named = match bytes {
                [b'i', b'd', b':', value @ ..] => Some((Field::Id, value)),
                [b'd', b'a', b't', b'a', b':', value @ ..] => Some((Field::Data, value)),
                _ => None,
            };
            if let Some((field, value)) = named {
                self.begin_value(field);
                rest = value;
            }
        }
        while self.field == Field::Name {
            let Some((byte, tail)) = rest.split_first() else { return };
            rest = tail;
            if *byte == b':' {
                let field = self.named_field();
                self.begin_value(field);
            } else if let Some(slot) = self.name.get_mut(self.name_len) {
                *slot = *byte;
                self.name_len = self.name_len.saturating_add(1);
            } else {
                // Longer than any name that counts here.
                self.field = Field::Ignored;
            }
        }
        if self.field == Field::Ignored || rest.is_empty() {
            return;
        }
        if !std::mem::replace(&mut self.in_value, true) {
            rest = rest.strip_prefix(b" ").unwrap_or(rest);
        }
        if self.field == Field::Id {
            self.line_id_has_nul |= memchr::memchr(0, rest).is_some();
            // One byte over the limit tells that it is over.
            append_up_to(&mut self.line_id, rest, self.id_limit.saturating_add(1));
        } else if !rest.is_empty() {
            self.has_data = true;
            self.capture_data(rest);
        }
    }

    fn named_field(&self) -> Field {
        match self.name.get(..self.name_len) {
            Some(b"id") => Field::Id,
            Some(b"data") => Field::Data,
            _ => Field::Ignored,
        }
    }

    fn begin_value(&mut self, field: Field) {
        self.field = field;
        if field == Field::Data {
            if self.data_lines == 0 {
                self.capturing = self.capture;
            } else {
                self.has_data = true;
                self.capture_data(b"\n");
            }
            self.data_lines = self.data_lines.saturating_add(1);
        }
    }

    fn capture_data(&mut self, bytes: &[u8]) {
        if self.capturing
            && self.data.is_empty()
            && self.beginnings_left_out.iter().any(|beginning| begins(bytes, beginning))
        {
            self.capturing = false;
            self.left_out = true;
        }
        if self.capturing && !self.data_too_long {
            self.data_too_long = self.data.len().saturating_add(bytes.len()) > DATA_LIMIT;
            append_up_to(&mut self.data, bytes, DATA_LIMIT);
        }
    }

    fn line_end(&mut self, sink: &mut impl FnMut(Dispatched<'_>)) {
        if self.line_is_empty() {
            self.dispatch(sink);
            return;
        }
        if self.field == Field::Name {
            // A line without a colon is a field with an empty value.
            let field = self.named_field();
            self.begin_value(field);
        }
        if self.field == Field::Id && !self.line_id_has_nul {
            self.id = match self.line_id.len() {
                0 => Id::Reset,
                len if len > self.id_limit => Id::TooLong,
                _ => Id::Set,
            };
            std::mem::swap(&mut self.event_id, &mut self.line_id);
        }
        self.line_id.clear();
        self.line_id_has_nul = false;
        self.field = Field::Name;
        self.name_len = 0;
        self.in_value = false;
    }

    fn dispatch(&mut self, sink: &mut impl FnMut(Dispatched<'_>)) {
        if self.id != Id::Unchanged || self.data_lines > 0 {
            sink(Dispatched {
                id: match self.id {
                    Id::Unchanged => IdField::Unchanged,
                    Id::Reset => IdField::Reset,
                    Id::Set => IdField::Set(&self.event_id),
                    Id::TooLong => IdField::TooLong,
                },
                data: match () {
                    () if !self.has_data => Data::Empty,
                    () if self.left_out => Data::LeftOut,
                    () if self.data_too_long => Data::TooLong,
                    () if self.data.is_empty() => Data::Passed,
                    () => Data::Captured(&self.data),
                },
            });
        }
        self.id = Id::Unchanged;
        self.event_id.clear();
        self.data_lines = 0;
        self.has_data = false;
        self.data.clear();
        self.data_too_long = false;
        self.left_out = false;
    }
}

/// Where the next CR or LF is. Text has hardly anything that is as low as these
/// two, so it is passed in strides that have nothing so low.
fn find_line_end(bytes: &[u8]) -> Option<usize> {
    let (strides, _) = bytes.as_chunks();
    let passed = strides.iter().take_while(|stride| is_text(stride)).count();
    let passed = passed.saturating_mul(STRIDE);
    let end = memchr2(b'\r', b'\n', bytes.get(passed..)?)?;
    Some(passed.saturating_add(end))
}

/// Whether each of these bytes is higher than CR.
#[cfg(target_feature = "simd128")]
fn is_text(stride: &[u8; STRIDE]) -> bool {
    use core::arch::wasm32::{u8x16_le, u8x16_min, u8x16_splat, u64x2, v128_any_true};
    // The compiler makes one load of the two halves, but no such comparison of
    // a loop over bytes.
    let (halves, _) = stride.as_chunks();
    let load =
        |[low, high]: &[[u8; 8]; 2]| u64x2(u64::from_le_bytes(*low), u64::from_le_bytes(*high));
    let ([a, b, c, d], _) = halves.as_chunks() else { return false };
    let lowest = u8x16_min(u8x16_min(load(a), load(b)), u8x16_min(load(c), load(d)));
    !v128_any_true(u8x16_le(lowest, u8x16_splat(b'\r')))
}

/// Without these instructions `memchr2` alone is faster, and a module that is built
/// so passes no stride. Native builds do, for the tests.
#[cfg(not(target_feature = "simd128"))]
fn is_text(stride: &[u8; STRIDE]) -> bool {
    !cfg!(target_arch = "wasm32") && stride.iter().all(|byte| *byte > b'\r')
}

fn append_up_to(buffer: &mut Vec<u8>, bytes: &[u8], limit: usize) {
    let room = limit.saturating_sub(buffer.len()).min(bytes.len());
    buffer.extend_from_slice(bytes.get(..room).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(id, data)` of each event; a reset is `""`, no id field `None`.
    fn decode_cut(chunks: &[&[u8]], finish: bool) -> Vec<(Option<String>, String)> {
        let mut decoder = Decoder::new(16);
        decoder.capture(true);
        let mut seen = Vec::new();
        let mut sink = |event: Dispatched<'_>| {
            let id = match event.id {
                IdField::Unchanged => None,
                IdField::Reset => Some(String::new()),
                IdField::Set(id) => Some(String::from_utf8_lossy(id).into_owned()),
                IdField::TooLong => Some("too long".to_owned()),
            };
            let data = match event.data {
                Data::Captured(data) => String::from_utf8_lossy(data).into_owned(),
                Data::Empty => String::new(),
                other => format!("{other:?}"),
            };
            seen.push((id, data));
        };
        for chunk in chunks {
            decoder.feed(chunk, &mut sink);
        }
        if finish {
            decoder.finish(&mut sink);
        }
        seen
    }

    fn decode(stream: &str) -> Vec<(Option<String>, String)> {
        decode_cut(&[stream.as_bytes()], false)
    }

    fn event(id: &str, data: &str) -> (Option<String>, String) {
        (Some(id.to_owned()), data.to_owned())
    }

    #[test]
    fn html_9_2_6_line_ends() {
        let expected = vec![event("1", "a"), event("2", "b")];
        assert_eq!(decode("id:1\ndata:a\n\nid:2\ndata:b\n\n"), expected);
        assert_eq!(decode("id:1\r\ndata:a\r\n\r\nid:2\r\ndata:b\r\n\r\n"), expected);
        assert_eq!(decode("id:1\rdata:a\r\rid:2\rdata:b\r\r"), expected);
        assert_eq!(decode("id:1\rdata:a\r\n\nid:2\ndata:b\n\r"), expected);
    }

    #[test]
    fn html_9_2_6_a_single_crlf_ends_a_line_not_an_event() {
        assert_eq!(decode("id:1\r\ndata:a\r\n"), vec![]);
    }

    #[test]
    fn html_9_2_6_lone_cr_at_the_end_of_a_chunk_dispatches_at_once() {
        assert_eq!(decode("id:1\r\r"), vec![event("1", "")]);
        assert_eq!(
            decode_cut(&[b"id:1\r", b"\n\r", b"\nid:2\r\n", b"\r\n"], false),
            vec![event("1", ""), event("2", "")]
        );
    }

    #[test]
    fn html_9_2_5_byte_order_mark() {
        assert_eq!(decode("\u{feff}id:1\n\n"), vec![event("1", "")]);
        assert_eq!(decode("\u{feff}\u{feff}id:1\n\n"), vec![]);
        assert_eq!(decode_cut(&[b"\xEF", b"\xBB", b"\xBFid:1\n\n"], false), vec![event("1", "")]);
        // Not a mark after all: the bytes belong to the field's name.
        assert_eq!(decode_cut(&[b"\xEF\xBBid:1\n\nid:2\n\n"], false), vec![event("2", "")]);
        assert_eq!(decode_cut(&[b"\xEF\xBB"], true), vec![]);
    }

    #[test]
    fn html_9_2_6_field_values() {
        assert_eq!(decode("id: 1\n\n"), vec![event("1", "")]);
        assert_eq!(decode("id:  1\n\n"), vec![event(" 1", "")]);
        assert_eq!(decode("id:1:2\n\n"), vec![event("1:2", "")]);
        assert_eq!(decode("id\n\n"), vec![event("", "")]);
        assert_eq!(decode("id:\n\n"), vec![event("", "")]);
        assert_eq!(decode("Id:1\n\n id:1\n\nidx:1\n\nident:1\n\n"), vec![]);
        assert_eq!(decode(":id:1\n\n"), vec![]);
        assert_eq!(decode("id:1\nid:2\n\n"), vec![event("2", "")]);
    }

    #[test]
    fn html_9_2_6_an_id_with_nul_is_ignored() {
        assert_eq!(decode("id:1\nid:2\u{0}3\n\n"), vec![event("1", "")]);
        // Beyond what is kept of it, too.
        assert_eq!(decode("id:1234567890123456789\u{0}\ndata:a\n\n"), vec![(None, "a".into())]);
    }

    #[test]
    fn html_9_2_6_data() {
        assert_eq!(decode("data\n\n"), vec![(None, String::new())]);
        assert_eq!(decode("data\ndata\n\n"), vec![(None, "\n".into())]);
        assert_eq!(decode("data:a\ndata: b\n\n"), vec![(None, "a\nb".into())]);
        assert_eq!(decode("event:x\nretry:5\n\n"), vec![]);
        assert_eq!(decode("\n\n\n"), vec![]);
    }

    #[test]
    fn an_event_without_an_id_leaves_the_last_one() {
        assert_eq!(decode("id:1\n\ndata:a\n\n"), vec![event("1", ""), (None, "a".into())]);
    }

    #[test]
    fn an_unfinished_event_counts_at_a_clean_end_only() {
        for (stream, expected) in [
            ("id:1", vec![event("1", "")]),
            ("id:1\n", vec![event("1", "")]),
            ("id:1\ndata:a", vec![event("1", "a")]),
            ("id:1\n\n", vec![event("1", "")]),
            ("event:x\n", vec![]),
            ("", vec![]),
        ] {
            assert_eq!(decode_cut(&[stream.as_bytes()], true), expected, "{stream:?}");
        }
        assert_eq!(decode("id:1\ndata:a\n"), vec![]);
    }

    #[test]
    fn memory_is_bounded() {
        let mut decoder = Decoder::new(16);
        decoder.capture(true);
        let mut events = 0;
        let endless = vec![b'x'; 1 << 20];
        for prefix in [&b"id:"[..], b"\ndata:", b"\nevent:", b"\n"] {
            decoder.feed(prefix, |_| events += 1);
            decoder.feed(&endless, |_| events += 1);
        }
        assert!(decoder.line_id.capacity() + decoder.event_id.capacity() < 256);
        assert!(decoder.data.capacity() <= 2 * DATA_LIMIT);
        assert_eq!(events, 0);
        decoder.feed(b"\n\n", |event| {
            assert_eq!(event.id, IdField::TooLong);
            assert_eq!(event.data, Data::TooLong);
        });
    }

    #[test]
    fn data_that_begins_so_is_left_out() {
        let mut decoder = Decoder::new(16).leaving_out(&[b"{\"method\":"]);
        decoder.capture(true);
        let mut seen = Vec::new();
        let mut sink = |event: Dispatched<'_>| {
            seen.push(match event.data {
                Data::Captured(data) => String::from_utf8_lossy(data).into_owned(),
                other => format!("{other:?}"),
            });
        };
        let whole = b"data:{\"method\":1}\ndata:2\n\ndata: {\"id\":{\"method\":1}}\n\n";
        decoder.feed(whole, &mut sink);
        for piece in [&b"data:{\"met"[..], b"hod\":1}\n\n", b"data\ndata:{\"method\":1}\n\n"] {
            decoder.feed(piece, &mut sink);
        }
        assert_eq!(
            seen,
            ["LeftOut", "{\"id\":{\"method\":1}}", "{\"method\":1}", "\n{\"method\":1}"]
        );
    }

    #[test]
    fn data_at_the_limit_is_captured() {
        for (len, captured) in [(DATA_LIMIT, true), (DATA_LIMIT + 1, false)] {
            let mut decoder = Decoder::new(16);
            decoder.capture(true);
            decoder.feed(b"data:", |_| ());
            decoder.feed(&vec![b'x'; len], |_| ());
            let mut seen = 0;
            decoder.feed(b"\n\n", |event| {
                seen += 1;
                assert_eq!(
                    matches!(event.data, Data::Captured(data) if data.len() == len),
                    captured
                );
            });
            assert_eq!(seen, 1);
        }
    }
}
