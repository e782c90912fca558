//! Event ids, and the cursors that come back: one type, as they are one thing.
//!
//! Ids are opaque (MCP 2025-11-25, "Resumability and Redelivery"). Two things
//! are read off their text all the same, and neither is ever taken for more
//! than it is: a place in a numbered sequence (`<prefix><n>` as Go, C# and
//! plain counters write it, `<n><suffix>` as rmcp does), and whether the text
//! is *distinctive*, so random that no two sessions share it by chance.

use crate::bytes::equal;
use crate::fingerprint::{Role, Secret};

/// A place in a numbered sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Fingerprint of the text around the index.
    pub sequence: u64,
    /// The index.
    pub index: u64,
}

/// The two readings of an id as a place: index at the end, index at the start.
pub const READINGS: usize = 2;

/// The fingerprints of one event id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventId {
    /// Fingerprint of the whole id.
    pub whole: u64,
    /// Its place in a sequence, by each reading that its text allows.
    pub places: [Option<Place>; READINGS],
    /// Whether the whole id is distinctive.
    pub distinctive: bool,
    /// Whether the text around the index is, by each reading.
    pub distinctive_sequence: [bool; READINGS],
}

impl EventId {
    /// Reads an id's text, blanks and tabs at both ends not counted. `None`
    /// if nothing is left: an empty id is no cursor.
    pub fn new(secret: &Secret, text: &[u8]) -> Option<Self> {
        let text = trim(text);
        if text.is_empty() {
            return None;
        }
        let whole = secret.text(Role::EventId, text);
        let (prefix, digits) = split_trailing_digits(text);
        let trailing = canonical_index(digits)
            .map(|index| Place { sequence: secret.text(Role::Prefix, prefix), index });
        let (leading, suffix) = leading_place(secret, text);
        Some(EventId {
            whole,
            places: [trailing, leading],
            distinctive: is_distinctive(text, prefix, suffix),
            distinctive_sequence: {
                // What isn't set off is a part of the random text, and a
                // sequence of its own.
                let set_off = set_off_index(text, prefix, suffix);
                [
                    trailing.is_some() && set_off[0] && has_bits(prefix, SEQUENCE_BITS),
                    leading.is_some() && set_off[1] && has_bits(suffix, SEQUENCE_BITS),
                ]
            },
        })
    }

    /// An id whose text isn't at hand, to be looked for.
    pub fn of_sequence(whole: u64, sequence: u64, index: u64) -> Self {
        EventId {
            whole,
            places: [Some(Place { sequence, index }), None],
            distinctive: false,
            distinctive_sequence: [false; READINGS],
        }
    }

    /// Its index in a sequence, if it is of that.
    pub fn index_in(&self, sequence: u64) -> Option<u64> {
        let place = self.places.iter().flatten().find(|place| place.sequence == sequence);
        place.map(|place| place.index)
    }

    /// The fingerprint under which the index keeps it: of its sequence, where
    /// that is distinctive, or else its own, if that is.
    pub fn index_key(&self) -> Option<u64> {
        let in_sequence = self.places.iter().zip(self.distinctive_sequence);
        let sequence = in_sequence.filter_map(|(place, distinctive)| place.filter(|_| distinctive));
        let sequence = sequence.map(|place| place.sequence).next();
        sequence.or(self.distinctive.then_some(self.whole))
    }

    /// The fingerprints under which another session may be known for this id.
    pub fn distinctive_keys(&self) -> impl Iterator<Item = u64> + '_ {
        let whole = self.distinctive.then_some(self.whole);
        let sequences = self
            .places
            .iter()
            .zip(self.distinctive_sequence)
            .filter_map(|(place, distinctive)| place.filter(|_| distinctive))
            .map(|place| place.sequence);
        whole.into_iter().chain(sequences)
    }
}

/// Reads the ids of one stream. What stands before an index is the same for
/// most of them, and is looked at once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdReader {
    prefix: Vec<u8>,
    /// The fingerprint of this prefix, and whether it is distinctive.
    known: Option<(u64, bool)>,
}

impl IdReader {
    /// The same as [`EventId::new`].
    pub fn read(&mut self, secret: &Secret, text: &[u8]) -> Option<EventId> {
        let text = trim(text);
        let (prefix, digits) = split_trailing_digits(text);
        let index = canonical_index(digits).filter(|_| is_plain(prefix));
        if let (Some(index), Some((sequence, distinctive))) = (index, self.known)
            && equal(prefix, &self.prefix)
        {
            return Some(EventId {
                whole: secret.text(Role::EventId, text),
                places: [Some(Place { sequence, index }), leading_place(secret, text).0],
                distinctive,
                distinctive_sequence: [distinctive, false],
            });
        }
        let id = EventId::new(secret, text)?;
        if let ([Some(place), _], Some(_)) = (id.places, index) {
            self.prefix.clear();
            self.prefix.extend_from_slice(prefix);
            self.known = Some((place.sequence, id.distinctive));
        }
        Some(id)
    }

    /// The id with this index, if that is of the sequence whose text is known,
    /// and every client sends such an id back as it got it.
    pub fn next(&self, sequence: u64, index: u64) -> Option<NextId> {
        let (known, _) = self.known?;
        if known != sequence || !is_visible(&self.prefix) {
            return None;
        }
        let text = [&self.prefix, index.to_string().as_bytes()].concat();
        Some(NextId { text, prefix_len: self.prefix.len(), index })
    }
}

/// The text of an id that is expected: the next of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NextId {
    text: Vec<u8>,
    prefix_len: usize,
    index: u64,
}

impl NextId {
    /// Whether this is the id. Then the one behind it is expected from now on.
    pub fn is(&mut self, text: &[u8]) -> bool {
        let is_next = equal(text, &self.text);
        if is_next {
            self.count_on();
        }
        is_next
    }

    fn count_on(&mut self) {
        let Some(index) = self.index.checked_add(1) else {
            // No index is higher; and no id is empty.
            self.text.clear();
            return;
        };
        self.index = index;
        for digit in self.text.iter_mut().skip(self.prefix_len).rev() {
            if *digit != b'9' {
                *digit = digit.wrapping_add(1);
                return;
            }
            *digit = b'0';
        }
        self.text.insert(self.prefix_len, b'1');
    }
}

/// Whether an index behind this is alone, or set off and the only one that is:
/// no other stands before it, and it is no part of a UUID.
fn is_plain(prefix: &[u8]) -> bool {
    if prefix.is_empty() {
        return true;
    }
    let is_set_off = |byte: &u8| !byte.is_ascii_alphanumeric();
    let first = prefix.iter().find(|byte| !byte.is_ascii_digit());
    prefix.last().is_some_and(|last| is_set_off(last) && *last != b'-')
        && (!prefix.first().is_some_and(u8::is_ascii_digit) || !first.is_some_and(is_set_off))
}

/// The reading of an id as an index and what stands behind it, and the latter.
/// A plain number is read once, as one that has nothing before it.
fn leading_place<'a>(secret: &Secret, text: &'a [u8]) -> (Option<Place>, &'a [u8]) {
    let (digits, suffix) = split_leading_digits(text);
    let index = canonical_index(digits).filter(|_| !suffix.is_empty());
    let place = |index| Place { sequence: secret.text(Role::Suffix, suffix), index };
    (index.map(place), suffix)
}

/// The text without blanks and tabs at both ends: HTTP/1 trims field values,
/// HTTP/2 does not, `fetch` does (RFC 9110, section 5.5).
pub fn trim(text: &[u8]) -> &[u8] {
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = text.iter().position(|b| !blank(b)).unwrap_or(text.len());
    let end = text.iter().rposition(|b| !blank(b)).map_or(start, |last| last.saturating_add(1));
    text.get(start..end).unwrap_or_default()
}

/// Whether every client sends this id back as it got it: visible ASCII, and
/// no longer than the limit.
pub fn comes_back_unchanged(text: &[u8], limit: usize) -> bool {
    text.len() <= limit && is_visible(text)
}

fn is_visible(text: &[u8]) -> bool {
    text.iter().all(|byte| matches!(byte, 0x21..=0x7e))
}

fn split_trailing_digits(text: &[u8]) -> (&[u8], &[u8]) {
    let at = text
        .iter()
        .rposition(|byte| !byte.is_ascii_digit())
        .map_or(0, |last| last.saturating_add(1));
    text.split_at_checked(at).unwrap_or((text, &[]))
}

fn split_leading_digits(text: &[u8]) -> (&[u8], &[u8]) {
    let at = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    text.split_at_checked(at).unwrap_or((text, &[]))
}

/// The number that is written exactly so: no leading zero, within `u64`.
fn canonical_index(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || (digits.len() > 1 && digits.first() == Some(&b'0')) {
        return None;
    }
    digits.iter().try_fold(0u64, |value, digit| {
        value.checked_mul(10)?.checked_add(u64::from(digit.wrapping_sub(b'0')))
    })
}

/// Bits of randomness that make a whole id distinctive.
const ID_BITS: f32 = 55.0;

/// The same for what stands around an index. More is asked here, for it may
/// name the server's instance (a pod, a build) and be the same in all sessions,
/// each of which counts on its own.
const SEQUENCE_BITS: f32 = 100.0;

/// What a character adds at the most.
const MAX_CHARACTER_BITS: f32 = 5.95;

/// What a timestamp adds.
const TIMESTAMP_BITS: f32 = 20.0;

/// Whether an id looks so random that two sessions don't share it by chance.
///
/// Words and numbers count for nothing (every session has `event-12`), and so
/// does a character that repeats the one before. A run of letters and digits
/// that are mixed counts for what its alphabet allows: 4 bits a character for
/// hexadecimal, 5.17 in one case, 5.95 in two. A timestamp adds 20. An id needs
/// 55 bits: a UUID has about 120, the TypeScript SDK's example store 61 for
/// `_GET_stream_<ms>_<8 random>`. Where a part of it may count, or an index is
/// set off at an end, the rest needs 100, as Go's stream id has. Hexadecimal
/// and base 64 are read as what they say, if that is text.
fn is_distinctive(text: &[u8], prefix: &[u8], suffix: &[u8]) -> bool {
    match set_off_index(text, prefix, suffix) {
        [false, false] => {
            may_have_bits(text, ID_BITS) && {
                let Randomness { bits, counted } = randomness(text);
                bits >= if counted { SEQUENCE_BITS } else { ID_BITS }
            }
        }
        [true, false] => has_bits(prefix, SEQUENCE_BITS),
        [false, true] => has_bits(suffix, SEQUENCE_BITS),
        [true, true] => has_bits(text, SEQUENCE_BITS),
    }
}

/// Whether a text has so many bits of randomness.
fn has_bits(text: &[u8], bits: f32) -> bool {
    may_have_bits(text, bits) && randomness(text).bits >= bits
}

/// Whether it is long enough for that. Most ids aren't, and needn't be read.
fn may_have_bits(text: &[u8], bits: f32) -> bool {
    text.len() as f32 * MAX_CHARACTER_BITS >= bits
}

/// Whether an index stands at the end, and at the start, that is set off from
/// the rest, and no part of a UUID.
fn set_off_index(text: &[u8], prefix: &[u8], suffix: &[u8]) -> [bool; READINGS] {
    let is_set_off = |byte: Option<&u8>| byte.is_some_and(|byte| !byte.is_ascii_alphanumeric());
    let index_behind = prefix.len() < text.len()
        && is_set_off(prefix.last())
        && !text.last_chunk::<UUID_LEN>().is_some_and(is_uuid);
    let index_before = suffix.len() < text.len()
        && is_set_off(suffix.first())
        && !text.first_chunk::<UUID_LEN>().is_some_and(is_uuid);
    [index_behind, index_before]
}

/// An estimate of the randomness of a text.
#[derive(Default)]
struct Randomness {
    bits: f32,
    /// A part of it may count: a number, or a word with one.
    counted: bool,
}

fn randomness(text: &[u8]) -> Randomness {
    let mut sum = Randomness::default();
    let mut rest = text;
    while let Some(first) = rest.first() {
        // A UUID's groups are too short by themselves to tell random from a
        // word.
        let len = if rest.first_chunk::<UUID_LEN>().is_some_and(is_uuid) {
            UUID_LEN
        } else {
            rest.iter().take_while(|byte| byte.is_ascii_alphanumeric()).count()
        };
        let (run, tail) = rest.split_at_checked(len).unwrap_or((rest, &[]));
        rest = if run.is_empty() && !first.is_ascii_alphanumeric() {
            rest.get(1..).unwrap_or_default()
        } else {
            tail
        };
        let of_run = match readable(run) {
            // Text that was encoded is as random as it was before.
            Some(decoded) => randomness(&decoded),
            None => Run::of(run).randomness(),
        };
        sum.bits += of_run.bits;
        sum.counted |= of_run.counted;
    }
    sum
}

/// What a run of letters and digits says if it is text in hexadecimal or in
/// base 64, long enough not to be so by chance.
fn readable(run: &[u8]) -> Option<Vec<u8>> {
    const MIN_LEN: usize = 12;
    if run.len() < MIN_LEN {
        return None;
    }
    let hex = |byte: u8| char::from(byte).to_digit(16);
    let base64 = |byte: u8| {
        let (first, before) = match byte {
            b'A'..=b'Z' => (b'A', 0),
            b'a'..=b'z' => (b'a', 26),
            b'0'..=b'9' => (b'0', 52),
            _ => return None,
        };
        Some(u32::from(byte.wrapping_sub(first)).saturating_add(before))
    };
    decode_text(run, 4, hex).or_else(|| decode_text(run, 6, base64))
}

/// The whole bytes in digits of so many bits, if they are visible ASCII.
fn decode_text(run: &[u8], bits: u32, digit: impl Fn(u8) -> Option<u32>) -> Option<Vec<u8>> {
    let mut decoded = Vec::new();
    let (mut buffer, mut held) = (0u32, 0u32);
    for byte in run {
        buffer = (buffer << bits) | digit(*byte)?;
        held = held.saturating_add(bits);
        if held >= 8 {
            held = held.saturating_sub(8);
            let byte = (buffer >> held) as u8;
            if !matches!(byte, b' '..=b'~') {
                return None;
            }
            decoded.push(byte);
            buffer &= (1u32 << held).saturating_sub(1);
        }
    }
    Some(decoded)
}

pub(crate) const UUID_LEN: usize = 36;
/// A bit for each place of a hyphen in a UUID.
const UUID_HYPHENS: u64 = 1 << 8 | 1 << 13 | 1 << 18 | 1 << 23;

/// Whether this is a UUID as it is mostly written: RFC 9562, section 4.
pub(crate) fn is_uuid(text: &[u8; UUID_LEN]) -> bool {
    let mut hyphens = UUID_HYPHENS;
    text.iter().all(|byte| {
        let is_hyphen = hyphens & 1 != 0;
        hyphens >>= 1;
        if is_hyphen { *byte == b'-' } else { class(*byte) & HEX != 0 }
    })
}

/// What a byte is, a count of one in the place of each: so a run is counted
/// with one addition for each of its bytes.
type Class = u64;
const DIGIT: Class = 1;
const UPPER: Class = DIGIT << COUNT_BITS;
const LOWER: Class = UPPER << COUNT_BITS;
const HEX: Class = LOWER << COUNT_BITS;
const VOWEL: Class = HEX << COUNT_BITS;
const COUNT_BITS: u32 = 12;
/// The most bytes that can be counted at once.
const COUNT_MAX: usize = (1 << COUNT_BITS) - 1;

const CLASSES: [Class; 256] = {
    let mut classes = [0; 256];
    let mut rest: &mut [Class] = &mut classes;
    let mut byte = 0u8;
    while let Some((class, next)) = rest.split_first_mut() {
        *class |= if byte.is_ascii_digit() { DIGIT } else { 0 };
        *class |= if byte.is_ascii_uppercase() { UPPER } else { 0 };
        *class |= if byte.is_ascii_lowercase() { LOWER } else { 0 };
        *class |= if byte.is_ascii_hexdigit() { HEX } else { 0 };
        *class |= match byte.to_ascii_lowercase() {
            b'a' | b'e' | b'i' | b'o' | b'u' => VOWEL,
            _ => 0,
        };
        rest = next;
        byte = byte.wrapping_add(1);
    }
    classes
};

fn class(byte: u8) -> Class {
    CLASSES.get(usize::from(byte)).copied().unwrap_or(0)
}

/// A run of ASCII letters and digits; what else stands between them doesn't
/// count.
#[derive(Default)]
struct Run {
    digits: u32,
    upper: u32,
    lower: u32,
    /// Those of hexadecimal digits.
    hex: u32,
    vowels: u32,
    /// How often a letter follows a digit, or a digit a letter.
    changes: u32,
    /// How often a character is the one before.
    repeats: u32,
}

impl Run {
    fn of(text: &[u8]) -> Self {
        let mut run = Run::default();
        let mut last = None;
        for part in text.chunks(COUNT_MAX) {
            let mut counts: Class = 0;
            for byte in part {
                let class = class(*byte);
                if class == 0 {
                    continue;
                }
                counts = counts.wrapping_add(class);
                if let Some((last_byte, last_class)) = last {
                    let is_change = (last_class ^ class) & DIGIT;
                    run.changes = run.changes.wrapping_add(is_change as u32);
                    run.repeats = run.repeats.wrapping_add(u32::from(last_byte == *byte));
                }
                last = Some((*byte, class));
            }
            let take = |sum: &mut u32, one: Class| {
                let count = counts.checked_div(one).unwrap_or(0) & COUNT_MAX as Class;
                *sum = sum.wrapping_add(count as u32);
            };
            take(&mut run.digits, DIGIT);
            take(&mut run.upper, UPPER);
            take(&mut run.lower, LOWER);
            take(&mut run.hex, HEX);
            take(&mut run.vowels, VOWEL);
        }
        run
    }

    fn randomness(&self) -> Randomness {
        let letters = self.upper.saturating_add(self.lower);
        let len = letters.saturating_add(self.digits).saturating_sub(self.repeats) as f32;
        let timestamp = Randomness { bits: TIMESTAMP_BITS, counted: false };
        if letters == 0 {
            return match self.digits {
                0 => Randomness::default(),
                13..=19 => timestamp,
                _ => Randomness { bits: 0.0, counted: true },
            };
        }
        // `sha256`, `event12`, `v2`: words with a number, not random. But a
        // long run in base 32 may have no digit in its midst; it is no word if
        // it has few vowels.
        if self.changes < 2 {
            let no_word = letters >= 20 && self.vowels.saturating_mul(4) <= letters;
            let counted = self.changes > 0 && !no_word;
            return Randomness { bits: if no_word { len * 4.7 } else { 0.0 }, counted };
        }
        // `20251125T101530Z`: random text has more letters.
        let short = letters.saturating_add(self.digits) <= 24;
        if short && letters.saturating_mul(6) < self.digits {
            return if self.digits >= 12 {
                timestamp
            } else {
                Randomness { bits: 0.0, counted: true }
            };
        }
        let beyond_hex = self.hex < letters.saturating_add(self.digits);
        let two_cases = self.upper > 0 && self.lower > 0;
        let bits_a_character = match (beyond_hex, two_cases) {
            (false, _) => 4.0,
            (true, false) => 5.17,
            (true, true) => MAX_CHARACTER_BITS,
        };
        Randomness { bits: len * bits_a_character, counted: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> EventId {
        EventId::new(&Secret::new([3; 16]), text.as_bytes()).unwrap()
    }

    #[test]
    fn the_next_of_a_sequence() {
        let secret = Secret::new([1; 16]);
        let mut reader = IdReader::default();
        let read = reader.read(&secret, b"s_8").unwrap();
        let sequence = read.places[0].unwrap().sequence;
        assert_eq!(reader.next(sequence ^ 1, 9), None);
        let mut next = reader.next(sequence, 9).unwrap();
        assert!(!next.is(b"s_10") && !next.is(b"s_09") && !next.is(b"s_9 "));
        for index in 9..=1_010 {
            assert!(next.is(format!("s_{index}").as_bytes()), "{index}");
        }
        let mut last = reader.next(sequence, u64::MAX).unwrap();
        assert!(last.is(b"s_18446744073709551615"));
        assert!(!last.is(b"s_18446744073709551616"));
        // Not every client sends this one back as it is.
        let read = reader.read(&secret, "\u{e9}_8".as_bytes()).unwrap();
        assert_eq!(reader.next(read.places[0].unwrap().sequence, 9), None);
    }

    #[test]
    fn blanks_and_tabs_at_the_ends_do_not_count() {
        assert_eq!(id(" \t7\t "), id("7"));
        assert_ne!(id("7 8"), id("78"));
        assert_eq!(EventId::new(&Secret::new([3; 16]), b" \t "), None);
    }

    #[test]
    fn a_reader_reads_the_same() {
        let secret = Secret::new([3; 16]);
        let mut reader = IdReader::default();
        let uuid = "550e8400-e29b-41d4-a716-446655440000";
        for prefix in [
            "",
            "_",
            "a",
            "a_",
            "a-",
            "1/",
            "8c5d_",
            "07a_",
            "1_2_",
            "8c5d1f6e2b3a49c7a1d2e3f4a5b6c7d8_",
            "9_",
            "_1_",
            "é_",
            " _",
            uuid,
            "0123456789abcdef/",
            "7b22736571223a337d:",
            "Xy7abcdefghijklmnopqrstuvw_",
            "550e8400-e29b-41d4-a716-",
            &format!("{uuid}_"),
            &format!("{uuid}-"),
            &format!("{uuid}{uuid}_"),
        ] {
            for index in ["0", "1", "2", "07", "446655440000", "12345678901234567890123", "x", ""] {
                let text = format!("{prefix}{index}");
                let read = reader.read(&secret, text.as_bytes());
                assert_eq!(read, EventId::new(&secret, text.as_bytes()), "{text}");
            }
        }
    }

    #[test]
    fn an_index_is_canonical_or_none() {
        let index = |text: &str| id(text).places.map(|place| place.map(|p| p.index));
        assert_eq!(index("7"), [Some(7), None]);
        assert_eq!(index("0"), [Some(0), None]);
        assert_eq!(index("07"), [None, None]);
        assert_eq!(index("_07"), [None, None]);
        assert_eq!(index("ABC_12"), [Some(12), None]);
        assert_eq!(index("12/3"), [Some(3), Some(12)]);
        assert_eq!(index("18446744073709551615"), [Some(u64::MAX), None]);
        assert_eq!(index("18446744073709551616"), [None, None]);
        assert_eq!(index("abc"), [None, None]);
    }

    #[test]
    fn a_sequence_is_the_text_around_the_index() {
        let places = |text: &str| id(text).places.map(|place| place.map(|p| p.sequence));
        assert_eq!(places("a_1")[0], places("a_22")[0]);
        assert_ne!(places("a_1")[0], places("b_1")[0]);
        assert_eq!(places("1/4")[1], places("2/4")[1]);
        assert_ne!(places("1/4")[1], places("1/5")[1]);
    }

    #[test]
    fn distinctive_ids() {
        for text in [
            "550e8400-e29b-41d4-a716-446655440000",
            "12345678-1a34-4234-9234-123456789012",
            "550e8400e29b41d4a716446655440000",
            "7ZKQ3M5VXN2LB4YTRW6CJHDPAE_3",
            "QZKQXMUVXNGLBHYTRWICJHDPAE_3",
            "MmY0YzNkN2E5YjFlOGY2Yw==:c3RyZWFtLTdmM2E5YzFlNWIyZA==:17",
            "7ZKQ3M5VXN2LB4YTRW6CJHDPAE",
            "01ARZ3NDEKTSV4RRFFQ69G5FAV",
            "_GET_stream_1764444444444_k3j5h2g1",
            "V1StGXR8_Z5jdHi6B-myT",
            "eyJhIjoxfQ3x9Zk2w:aGVsbG8gd29ybGQh1x:4",
        ] {
            assert!(id(text).distinctive, "{text}");
        }
        let go = id("7ZKQ3M5VXN2LB4YTRW6CJHDPAE_4");
        assert!(go.distinctive && go.distinctive_sequence[0]);
        // What looks like an index is a part of the random text.
        for text in [
            "12345678-1a34-4234-9234-123456789012",
            "101c04b5-1a34-4234-9234-12345678901f",
            "550e8400-e29b-41d4-a716-446655440000_1764444444444_k3j5h212",
        ] {
            let id = id(text);
            assert_eq!(id.index_key(), Some(id.whole), "{text}");
        }
    }

    #[test]
    fn ids_that_every_session_has() {
        for text in [
            "3",
            "_0",
            "1/0",
            "event-12",
            "priming",
            "0000000000000000000000000000000000",
            "18446744073709551615",
            "request-1764444444444-3",
            "stream1-event0001",
            "abc123-def456",
            "_GET_stream",
            "standalone-notifications-of-the-server",
            "STANDALONENOTIFICATIONSOFTHESERVER_1",
            "00000000000000a1",
            "0x0000000000000001",
            "20251125T101530Z-0",
            "mcp-server-7d9f8b6c5d-x7k2p/12",
            "v1.2.3-5f2a9c1d4e6b-g2k4j6:1",
            "i-0abc123def4567890:1",
            "17/mcp-server-7d9f8b6c5d-x7k2p",
            "mcp-server-7d9f8b6c5d-x7k2p-e12",
            "mcp-server-7d9f8b6c5d-x7k2p/12/get",
            // `standalone:3`, `stream=get&seq=3` and `{"seq":3}`, encoded.
            "c3RhbmRhbG9uZToz",
            "c3RyZWFtPWdldCZzZXE9Mw",
            "7b22736571223a337d",
            "7374616e64616c6f6e653a33",
        ] {
            assert!(!id(text).distinctive, "{text}");
        }
    }

    #[test]
    fn what_comes_back_unchanged() {
        assert!(comes_back_unchanged(b"a/b:c=", 6));
        assert!(!comes_back_unchanged(b"a/b:c=", 5));
        assert!(!comes_back_unchanged(b"a b", 10));
        assert!(!comes_back_unchanged("é".as_bytes(), 10));
    }
}
