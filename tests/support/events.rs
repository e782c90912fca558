//! Event ids as the servers of some SDKs write them, and events in all the ways
//! in which they can be written.
#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::arithmetic_side_effects,
    reason = "a test may fail"
)]

/// A dice that falls the same way in every run (splitmix64).
#[derive(Debug, Clone, Default)]
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn roll(&mut self, sides: usize) -> usize {
        usize::try_from(self.next() % sides as u64).unwrap()
    }

    pub fn is_one_in(&mut self, sides: usize) -> bool {
        self.roll(sides) == 0
    }

    pub fn letters(mut self, count: usize, alphabet: &[u8]) -> String {
        (0..count).map(|_| char::from(alphabet[self.roll(alphabet.len())])).collect()
    }
}

pub fn uuid(seed: u64) -> String {
    let digits = Dice(seed).letters(32, b"0123456789abcdef");
    let [a, b, c, d, e] = [0..8, 8..12, 13..16, 17..20, 20..32].map(|range| &digits[range]);
    format!("{a}-{b}-4{c}-9{d}-{e}")
}

/// How a server writes event ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `<26 base32>_<index>`; `_<index>` on the standalone stream.
    Go,
    /// `<index>/<request>`; `<index>` on the standalone stream.
    Rmcp,
    /// One counter for all streams of the session.
    Counter,
    /// A UUID for each event.
    Uuid,
    /// `<stream>_<milliseconds>_<8 base36>`.
    TypeScript,
}

impl Format {
    pub fn has_indexes(self) -> bool {
        matches!(self, Format::Go | Format::Rmcp | Format::Counter)
    }

    /// The id with this index on the stream of a request, or on the standalone
    /// one; `minted`: how many there were before, anywhere.
    pub fn id(
        self,
        session: usize,
        request: Option<u64>,
        index: u64,
        minted: u64,
        ms: u64,
    ) -> String {
        let stream = Dice(session as u64 * 1_000 + request.unwrap_or(0));
        match (self, request) {
            (Format::Go, Some(_)) => {
                let stream = stream.letters(26, b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567");
                format!("{stream}_{index}")
            }
            (Format::Go, None) => format!("_{index}"),
            (Format::Rmcp, Some(request)) => format!("{index}/{request}"),
            (Format::Rmcp, None) | (Format::Counter, _) => index.to_string(),
            (Format::Uuid, _) => uuid(100_000 + minted),
            (Format::TypeScript, _) => {
                let stream = request.map_or("_GET_stream".into(), |_| uuid(50_000 + stream.0));
                let end = Dice(minted).letters(8, b"abcdefghijklmnopqrstuvwxyz0123456789");
                format!("{stream}_{}_{end}", 1_764_000_000_000 + ms)
            }
        }
    }
}

/// The index of an id: `a_7`, `7/a`, `7`.
pub fn index(id: &str) -> Option<u64> {
    let digits = match (id.rsplit_once('_'), id.split_once('/')) {
        (Some((_, digits)), _) | (None, Some((digits, _))) => digits,
        (None, None) => id,
    };
    digits.parse().ok()
}

/// An event on its way.
#[derive(Debug, Clone)]
pub struct Out {
    pub id: String,
    pub data: bool,
    pub bytes: String,
}

impl Out {
    /// As a server writes it, one way or another.
    pub fn new(dice: &mut Dice, id: &str, data: Option<&str>) -> Self {
        let end = ["\n", "\n", "\r\n", "\r"][dice.roll(4)];
        let blank = [" ", ""][dice.roll(2)];
        let mut lines: Vec<String> = match data {
            Some(data) if dice.is_one_in(4) => {
                data.split_inclusive(',').map(|part| format!("data:{blank}{part}")).collect()
            }
            Some(data) => vec![format!("data:{blank}{data}")],
            None if dice.is_one_in(3) => Vec::new(),
            None => vec!["data:".to_owned()],
        };
        let place = if dice.is_one_in(3) { lines.len() } else { 0 };
        lines.insert(place, format!("id:{blank}{id}"));
        for (line, one_in) in [("event: message", 2), (": c", 6), ("retry: 3000", 8)] {
            if dice.is_one_in(one_in) {
                lines.insert(dice.roll(lines.len() + 1), line.to_owned());
            }
        }
        if dice.is_one_in(200) {
            lines.insert(0, format!(":{}", "x".repeat(70_000)));
        }
        match dice.roll(8) {
            0 => lines.splice(0..0, [": ping".to_owned(), String::new()]).for_each(drop),
            1 => lines.insert(0, ":".to_owned()),
            _ => {}
        }
        lines.push(String::new());
        let bytes = lines.into_iter().map(|line| line + end).collect();
        Out { id: id.to_owned(), data: data.is_some(), bytes }
    }
}

pub fn joined(outs: &[Out]) -> String {
    outs.iter().map(|out| out.bytes.as_str()).collect()
}

/// The bytes in pieces: whole, in a few, or one by one.
pub fn split<'a>(dice: &mut Dice, bytes: &'a [u8]) -> Vec<&'a [u8]> {
    let most = [bytes.len(), 3, 20, 200][dice.roll(4)];
    // Each takes a moment.
    let most = most.max(bytes.len() / 100);
    let mut pieces = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let len = if most == bytes.len() { most } else { 1 + dice.roll(most) };
        let (piece, tail) = rest.split_at(len.min(rest.len()));
        pieces.push(piece);
        rest = tail;
    }
    pieces
}
