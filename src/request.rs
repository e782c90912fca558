//! A request as the guard reads it, from the bytes of its header fields.

use crate::config::Config;
use crate::event_id::{IdReader, trim};
use crate::fingerprint::{Secret, SessionFingerprint};
use crate::headers::Field;
use crate::reply::RESUMPTION_HEADER;
use crate::verdict::{Cursor, Single};

const SESSION_HEADER: &[u8] = b"mcp-session-id";

/// The first revision of MCP without sessions, event ids and GET streams.
const FIRST_WITHOUT_SESSIONS: &[u8] = b"2026-07-28";

/// The methods that mean something in MCP's Streamable HTTP transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Opens or resumes a stream.
    Get,
    /// Sends a message.
    Post,
    /// Ends a session.
    Delete,
    /// Anything else.
    Other,
}

/// What a request says of session and cursor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Its method.
    pub method: Method,
    /// Whether its path is guarded.
    pub guarded: bool,
    /// `Mcp-Session-Id`.
    pub session: Single<SessionFingerprint>,
    /// All sessions that it names, where they differ.
    pub named: Vec<SessionFingerprint>,
    /// `Last-Event-ID`.
    pub cursor: Single<Cursor>,
    /// What has read the cursor: the ids that follow it mostly begin alike.
    pub ids: IdReader,
    /// It speaks a revision that has no sessions.
    pub without_sessions: bool,
    /// It accepts `text/event-stream`.
    pub accepts_event_stream: bool,
    /// It has an `accept-encoding`.
    pub has_accept_encoding: bool,
    /// It has an `mcp-resumption`, which only the guard may set.
    pub has_resumption: bool,
    /// It has the header that pins it to an instance, which only the guard may
    /// set, too.
    pub has_pin: bool,
}

impl Request {
    /// Reads the header fields of a request.
    pub fn new(config: &Config, secret: &Secret, fields: &[Field<'_>]) -> Self {
        let pin = config.owner.pin_header.as_ref().map(|pin| pin.as_str().as_bytes());
        let mut request = Request {
            method: Method::Other,
            guarded: false,
            session: session(secret, fields),
            named: Vec::new(),
            cursor: Single::Absent,
            ids: IdReader::default(),
            without_sessions: false,
            accepts_event_stream: false,
            has_accept_encoding: false,
            has_resumption: false,
            has_pin: false,
        };
        let mut path: &[u8] = b"";
        let mut has_cursor = false;
        let mut versions = 0usize;
        let mut versions_without_sessions = 0usize;
        for (name, value) in fields {
            match *name {
                b":method" => {
                    request.method = match *value {
                        b"GET" => Method::Get,
                        b"POST" => Method::Post,
                        b"DELETE" => Method::Delete,
                        _ => Method::Other,
                    }
                }
                b":path" => path = value,
                b"last-event-id" => has_cursor = true,
                b"mcp-protocol-version" => {
                    versions = versions.saturating_add(1);
                    let is_without = usize::from(is_without_sessions(trim(value)));
                    versions_without_sessions =
                        versions_without_sessions.saturating_add(is_without);
                }
                b"accept" => request.accepts_event_stream |= accepts_event_stream(value),
                b"accept-encoding" => request.has_accept_encoding = true,
                name if name == RESUMPTION_HEADER.as_bytes() => request.has_resumption = true,
                name if Some(name) == pin => request.has_pin = true,
                _ => {}
            }
        }
        request.guarded = config.guards(trim(path));
        request.without_sessions = versions > 0 && versions_without_sessions == versions;
        if has_cursor {
            request.cursor = cursor(config, secret, fields, &mut request.ids);
        }
        if request.session == Single::Malformed {
            request.named = sessions(secret, fields);
        }
        request
    }

    /// Whether it resumes a stream: a GET with a cursor.
    pub fn is_resumption(&self) -> bool {
        self.method == Method::Get && self.cursor != Single::Absent
    }
}

fn cursor(
    config: &Config,
    secret: &Secret,
    fields: &[Field<'_>],
    ids: &mut IdReader,
) -> Single<Cursor> {
    match single(values(fields, b"last-event-id")) {
        Single::One(text) if text.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t') => {
            Single::Malformed
        }
        Single::One(text) if text.len() > limit(config) => Single::One(Cursor::TooLong),
        Single::One(text) => {
            ids.read(secret, text).map_or(Single::Absent, |id| Single::One(Cursor::Id(id)))
        }
        Single::Absent => Single::Absent,
        Single::Malformed => Single::Malformed,
    }
}

/// The session that the fields of a request or a response name.
pub fn session(secret: &Secret, fields: &[Field<'_>]) -> Single<SessionFingerprint> {
    match single(values(fields, SESSION_HEADER)) {
        Single::One(id) => Single::One(secret.session(id)),
        Single::Absent => Single::Absent,
        Single::Malformed => Single::Malformed,
    }
}

/// All sessions that they name, where they name several.
pub fn sessions(secret: &Secret, fields: &[Field<'_>]) -> Vec<SessionFingerprint> {
    let named = values(fields, SESSION_HEADER).filter(|id| !id.is_empty());
    named.map(|id| secret.session(id)).collect()
}

/// The values of a field, without blanks and tabs at both ends.
fn values<'a>(fields: &[Field<'a>], name: &[u8]) -> impl Iterator<Item = &'a [u8]> {
    fields.iter().filter(move |(field, _)| *field == name).map(|(_, value)| trim(value))
}

/// The longest event id, in bytes.
pub fn limit(config: &Config) -> usize {
    usize::try_from(config.limits.event_id_bytes).unwrap_or(usize::MAX)
}

/// The one value of a field that may be repeated alike; an empty one is none.
fn single<'a>(mut values: impl Iterator<Item = &'a [u8]>) -> Single<&'a [u8]> {
    let Some(first) = values.next() else { return Single::Absent };
    if values.any(|other| other != first) {
        Single::Malformed
    } else if first.is_empty() {
        Single::Absent
    } else {
        Single::One(first)
    }
}

/// Whether a protocol version is a date from which on there are no sessions.
fn is_without_sessions(version: &[u8]) -> bool {
    let is_date = version.len() == FIRST_WITHOUT_SESSIONS.len()
        && version.iter().enumerate().all(|(at, byte)| match at {
            4 | 7 => *byte == b'-',
            _ => byte.is_ascii_digit(),
        });
    is_date && version >= FIRST_WITHOUT_SESSIONS
}

/// Whether an `accept` names the event stream (RFC 9110, section 12.5.1).
/// `*/*` doesn't count: that is every browser's, and its compression is none
/// of the guard's business.
fn accepts_event_stream(accept: &[u8]) -> bool {
    is_event_stream(accept)
}

/// Whether a media type is the event stream's, whatever its parameters; or one
/// of several, as Envoy joins repeated fields.
pub fn is_event_stream(media_types: &[u8]) -> bool {
    essences(media_types).any(|essence| essence.eq_ignore_ascii_case(b"text/event-stream"))
}

/// Whether a media type is JSON's.
pub fn is_json(media_types: &[u8]) -> bool {
    essences(media_types).any(|essence| essence.eq_ignore_ascii_case(b"application/json"))
}

fn essences(media_types: &[u8]) -> impl Iterator<Item = &[u8]> {
    media_types.split(|byte| *byte == b',').map(|media_type| {
        let media_type = trim(media_type);
        let ends = |byte: &u8| matches!(byte, b';' | b' ' | b'\t');
        media_type.split(ends).next().unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: Secret = Secret::new([9; 16]);

    fn request(fields: &[(&str, &[u8])]) -> Request {
        let fields: Vec<_> = fields.iter().map(|(name, value)| (name.as_bytes(), *value)).collect();
        Request::new(&Config::default(), &SECRET, &fields)
    }

    fn cursor(values: &[&[u8]]) -> Single<Cursor> {
        let fields: Vec<_> = values.iter().map(|value| ("last-event-id", *value)).collect();
        request(&fields).cursor
    }

    #[test]
    fn rule_2_cursors() {
        assert_eq!(cursor(&[]), Single::Absent);
        assert_eq!(cursor(&[b""]), Single::Absent);
        assert_eq!(cursor(&[b" \t"]), Single::Absent);
        assert_eq!(cursor(&[b"7", b" 7 "]), cursor(&[b"7"]));
        assert_eq!(cursor(&[b"7", b"8"]), Single::Malformed);
        assert_eq!(cursor(&[b"7", b""]), Single::Malformed);
        assert_eq!(cursor(&[b"7\x01"]), Single::Malformed);
        assert_eq!(cursor(&[b"7\x7f"]), Single::Malformed);
        assert!(matches!(cursor(&[b"7\t8"]), Single::One(_)));
        assert!(matches!(cursor(&[b"\xe9"]), Single::One(_)));
    }

    #[test]
    fn rule_3_the_limit() {
        assert!(matches!(cursor(&[&[b'x'; 4096]]), Single::One(Cursor::Id(_))));
        assert_eq!(cursor(&[&[b'x'; 4097]]), Single::One(Cursor::TooLong));
    }

    #[test]
    fn rule_1_versions() {
        for (version, without) in [
            ("2026-07-28", true),
            ("2026-08-01", true),
            ("2027-01-01", true),
            ("2026-07-27", false),
            ("2025-11-25", false),
            ("DRAFT-2026-v1", false),
            ("2026-7-28", false),
            ("9999", false),
            ("", false),
        ] {
            let request = request(&[("mcp-protocol-version", version.as_bytes())]);
            assert_eq!(request.without_sessions, without, "{version}");
        }
        assert!(!request(&[]).without_sessions);
    }

    #[test]
    fn what_clients_read_as_an_event_stream() {
        for (media_type, is) in [
            ("text/event-stream", true),
            ("Text/Event-Stream; charset=utf-8", true),
            ("text/event-stream charset=utf-8", true),
            ("text/event-stream,text/event-stream", true),
            ("application/json, text/event-stream", true),
            ("text/event-streams", false),
            ("application/json", false),
            ("", false),
        ] {
            assert_eq!(is_event_stream(media_type.as_bytes()), is, "{media_type}");
        }
    }

    #[test]
    fn who_accepts_the_event_stream() {
        for (accept, accepts) in [
            ("text/event-stream", true),
            ("application/json, text/event-stream", true),
            ("application/json,Text/Event-Stream;q=0.9", true),
            ("application/json", false),
            ("*/*", false),
            ("text/event-streams", false),
        ] {
            let request = request(&[("accept", accept.as_bytes())]);
            assert_eq!(request.accepts_event_stream, accepts, "{accept}");
        }
    }
}
