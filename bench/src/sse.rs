//! The events that the upstream sends: each of the same size, so that a unit of
//! work is always the same.

use rustix::time::{ClockId, clock_gettime};
use uuid::Uuid;

/// Bytes of an event, blank line included.
pub const EVENT_BYTES: usize = 200;

/// What stands before the time of writing in an event's data.
const AT: &str = "at ";

/// How an event's id is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ids {
    /// `STREAM_INDEX`, the stream a random name: what Go's and C#'s servers do.
    Index,
    /// A UUID for each event: what Python's and TypeScript's event stores do.
    Uuid,
}

impl Ids {
    /// The id of an event.
    pub fn id(self, stream: Uuid, index: u64) -> String {
        match self {
            Ids::Index => cursor(stream, index),
            Ids::Uuid => Uuid::new_v4().to_string(),
        }
    }
}

/// The id of the event with this index.
pub fn cursor(stream: Uuid, index: u64) -> String {
    format!("{}_{index}", stream.simple())
}

/// Reads such an id.
pub fn parse_cursor(cursor: &str) -> Option<(Uuid, u64)> {
    let (stream, index) = cursor.split_once('_')?;
    Some((stream.parse().ok()?, index.parse().ok()?))
}

/// A notification, with the time at which it was made.
pub fn event(id: &str, index: u64) -> String {
    event_of(EVENT_BYTES, id, index)
}

/// The same with so many bytes.
fn event_of(bytes: usize, id: &str, index: u64) -> String {
    let mut event = format!(
        "id: {id}\ndata: {{\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\
         \"params\":{{\"level\":\"info\",\"data\":\"{AT}{:020} n {index} ",
        now_ns()
    );
    const END: &str = "\"}}\n\n";
    debug_assert!(event.len() + END.len() <= bytes);
    while event.len() < bytes - END.len() {
        event.push('.');
    }
    event + END
}

/// The event that answers a call, and ends its stream.
pub fn last_event(id: &str, call: &serde_json::value::RawValue) -> String {
    format!(
        "id: {id}\ndata: {{\"jsonrpc\":\"2.0\",\"id\":{call},\
         \"result\":{{\"content\":[{{\"type\":\"text\",\"text\":\"done\"}}]}}}}\n\n"
    )
}

/// The same as a chunk of HTTP/1.1.
pub fn chunk(event: &str) -> Vec<u8> {
    format!("{:x}\r\n{event}\r\n", event.len()).into_bytes()
}

/// The id of an event's text.
pub fn id_of(event: &[u8]) -> Option<&str> {
    let start = memchr::memmem::find(event, b"id: ")? + "id: ".len();
    let size = memchr::memchr(b'\n', &event[start..])?;
    std::str::from_utf8(&event[start..start + size]).ok()
}

/// When an event was made.
pub fn time_of(event: &[u8]) -> Option<u64> {
    let start = memchr::memmem::find(event, AT.as_bytes())? + AT.len();
    std::str::from_utf8(event.get(start..start + 20)?).ok()?.parse().ok()
}

/// Nanoseconds of the monotonic clock, which is the same in all processes.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A great body of events, made once: of each copy that is sent only the
/// stream's name and the indices differ.
pub struct Bulk {
    /// Bytes of an event.
    pub event_bytes: usize,
    block: Vec<u8>,
    places: Vec<usize>,
}

impl Bulk {
    /// Bytes of a block: as large as the largest chunk that Envoy passes on.
    pub const BLOCK: usize = 1024 * 1024;

    /// Indices all have 7 digits.
    pub const FIRST: u64 = 1_000_000;

    /// Makes the block.
    pub fn new(event_bytes: usize) -> Self {
        let event = event_of(event_bytes, &cursor(Uuid::nil(), Self::FIRST), Self::FIRST);
        let events = Self::BLOCK / event.len();
        let place = event.find("id: ").map_or(0, |place| place + "id: ".len());
        Bulk {
            event_bytes,
            block: event.repeat(events).into_bytes(),
            places: (0..events).map(|n| n * event.len() + place).collect(),
        }
    }

    /// Events of a block.
    pub fn events(&self) -> u64 {
        self.places.len() as u64
    }

    /// The block with these ids.
    pub fn block(&mut self, stream: Uuid, mut index: u64) -> &[u8] {
        let name = stream.simple().to_string();
        let mut digits = itoa::Buffer::new();
        for place in &self.places {
            let digits = digits.format(index).as_bytes();
            self.block[*place..place + name.len()].copy_from_slice(name.as_bytes());
            let place = place + name.len() + 1;
            self.block[place..place + digits.len()].copy_from_slice(digits);
            index += 1;
        }
        &self.block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_has_the_same_size_and_is_read_back() {
        for (ids, index) in [(Ids::Index, 0), (Ids::Index, 9_999_999), (Ids::Uuid, 123_456)] {
            let id = ids.id(Uuid::new_v4(), index);
            let event = event(&id, index);
            assert_eq!(event.len(), EVENT_BYTES, "{event}");
            assert_eq!(id_of(event.as_bytes()), Some(id.as_str()));
            assert!(time_of(event.as_bytes()).is_some_and(|time| time <= now_ns()));
        }
    }

    #[test]
    fn a_bulk_is_events_with_consecutive_ids() {
        let stream = Uuid::new_v4();
        let mut bulk = Bulk::new(1000);
        let count = bulk.events();
        let block = bulk.block(stream, Bulk::FIRST + 5);
        let ids = block.chunks(1000).map(|event| id_of(event).and_then(parse_cursor));
        let expected = (0..count).map(|n| Some((stream, Bulk::FIRST + 5 + n)));
        assert!(ids.eq(expected));
    }
}
