//! What the client gets instead of the upstream's answer: a JSON-RPC error
//! under an HTTP status, in words that tell what to do.
//!
//! The codes are outside the ranges that JSON-RPC 2.0 (section 5.1) and MCP
//! reserve. Nothing of another session is ever told, and no address.

use serde::Serialize;

use crate::jsonrpc::SentIds;
use crate::verdict::{Action, Doubt, Fault, ReplayFault, Ruling, Verdict};

/// The header that tells a ruling.
pub const RESUMPTION_HEADER: &str = "mcp-resumption";

/// What a refusal ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The resumption: the session lives on.
    Cursor,
    /// The session: the client has to initialize again.
    Session,
}

impl Scope {
    const fn status(self) -> u16 {
        match self {
            // 404 would say that the session is gone (MCP, "Session
            // Management"), so a cursor's fault is a 400.
            Scope::Cursor => 400,
            Scope::Session => 404,
        }
    }

    const fn code(self) -> u16 {
        match self {
            Scope::Cursor => 4400,
            Scope::Session => 4404,
        }
    }

    const fn recovery(self) -> &'static str {
        match self {
            Scope::Cursor => "open_new_stream",
            Scope::Session => "reinitialize",
        }
    }
}

/// An answer of the guard's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The HTTP status.
    pub status: u16,
    /// The headers.
    pub headers: Vec<(&'static str, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Reply {
    /// The refusal of a resumption, or of any request of an ended session.
    pub fn refusal(verdict: Verdict, scope: Scope) -> Self {
        let body = Message { jsonrpc: "2.0", id: (), error: Error::new(verdict, scope, "") };
        // Strings and integers: there is nothing that can't be written.
        let body = serde_json::to_vec(&body).unwrap_or_default();
        Reply::new(
            scope.status(),
            "application/json",
            Ruling { verdict, action: Action::Rejected },
            body,
        )
    }

    /// The settlement of a resumption: in its stream an error for each call
    /// that waits for it, by its id as the client sent it.
    pub fn settlement(verdict: Verdict, scope: Scope, calls: &SentIds) -> Self {
        let body = error_events(verdict, scope, calls);
        Reply::new(200, "text/event-stream", Ruling { verdict, action: Action::Settled }, body)
    }

    fn new(status: u16, content_type: &str, ruling: Ruling, body: Vec<u8>) -> Self {
        Reply {
            status,
            headers: vec![
                ("content-type", content_type.to_owned()),
                ("cache-control", "no-store".to_owned()),
                (RESUMPTION_HEADER, ruling.to_string()),
            ],
            body,
        }
    }
}

/// The last word of a stream that is cut: an error for each call that waits
/// for it, or else a comment that names the reason.
pub fn last_word(verdict: Verdict, calls: &SentIds) -> Vec<u8> {
    if calls.is_empty() {
        let ruling = Ruling { verdict, action: Action::Cut };
        return format!(": mcp-resume-guard: {ruling}\n\n").into_bytes();
    }
    error_events(verdict, Scope::Cursor, calls)
}

fn error_events(verdict: Verdict, scope: Scope, calls: &SentIds) -> Vec<u8> {
    let error = Error::new(verdict, scope, " The call may have run.");
    let error = serde_json::to_string(&error).unwrap_or_default();
    let mut events = Vec::new();
    for id in calls {
        events.extend_from_slice(b"event: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":");
        events.extend_from_slice(id);
        events.extend_from_slice(format!(",\"error\":{error}}}\n\n").as_bytes());
    }
    events
}

#[derive(Serialize)]
struct Message {
    jsonrpc: &'static str,
    id: (),
    error: Error,
}

#[derive(Serialize)]
struct Error {
    code: u16,
    message: String,
    data: Data,
}

impl Error {
    fn new(verdict: Verdict, scope: Scope, more: &str) -> Self {
        Error {
            code: scope.code(),
            message: format!("{}{more}", message(verdict)),
            data: Data {
                outcome: verdict.outcome(),
                reason: verdict.reason(),
                recovery: scope.recovery(),
            },
        }
    }
}

#[derive(Serialize)]
struct Data {
    outcome: &'static str,
    reason: &'static str,
    recovery: &'static str,
}

/// One sentence for people.
const fn message(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Continue => "The stream can be resumed.",
        Verdict::Unverified(doubt) => match doubt {
            Doubt::SessionMissing => {
                "The request has a Last-Event-ID and no Mcp-Session-Id, so the gateway can't tell whether the stream can be resumed."
            }
            Doubt::CursorTooLong => {
                "The Last-Event-ID is longer than the gateway keeps event ids, so it can't tell whether the stream can be resumed."
            }
            Doubt::UnknownSession => {
                "The gateway doesn't know this session, so it can't tell whether the stream can be resumed."
            }
            Doubt::HistoryIncomplete => {
                "The gateway didn't issue this Last-Event-ID, and hasn't seen all of this session's events, so it can't tell whether the stream can be resumed."
            }
            Doubt::HistoryEvicted => {
                "The gateway no longer knows all of this session's events, so it can't tell whether the stream can be resumed."
            }
            Doubt::OwnerMoved => {
                "Another instance of the server answers than the one that issued this stream, and the gateway can't tell whether it has the stream's events."
            }
        },
        Verdict::Inconsistent(fault) => match fault {
            Fault::MalformedCursor => {
                "The request has Last-Event-ID headers that differ, or a control character in one."
            }
            Fault::MalformedSession => "The request has Mcp-Session-Id headers that differ.",
            Fault::SessionTerminated => "This session has been ended.",
            Fault::SessionMissing => {
                "The Last-Event-ID belongs to a session, and the request has no Mcp-Session-Id."
            }
            Fault::ForeignSession => "The Last-Event-ID was not issued on this session.",
            Fault::AmbiguousCursor => {
                "The Last-Event-ID was issued on several open streams of this session, so nobody can say which one to resume."
            }
            Fault::BelowFloor => {
                "Events after this Last-Event-ID are no longer kept, so resuming here would lose them."
            }
            Fault::AheadOfHead => {
                "The Last-Event-ID is past the newest event of its stream: it has not been issued yet."
            }
            Fault::NeverIssued => "The Last-Event-ID was never issued on this session.",
            Fault::OwnerMoved => {
                "Another instance of the server answers than the one that issued this stream, and it doesn't have the stream's events."
            }
            Fault::Replay(fault) => match fault {
                ReplayFault::Empty => {
                    "The server sent nothing, although events follow this Last-Event-ID."
                }
                ReplayFault::Repeated => {
                    "The server sent events again that the client has already."
                }
                ReplayFault::ForeignStream => "The server sent events of another stream.",
                ReplayFault::Gap => {
                    "The server passed over events that follow this Last-Event-ID: they are lost."
                }
                ReplayFault::ForeignSession => {
                    "The server sent events that don't belong to this session."
                }
            },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_fault() {
        let reply = Reply::refusal(Verdict::Inconsistent(Fault::BelowFloor), Scope::Cursor);
        assert_eq!(reply.status, 400);
        assert_eq!(
            reply.headers,
            [
                ("content-type", "application/json".to_owned()),
                ("cache-control", "no-store".to_owned()),
                ("mcp-resumption", "inconsistent;reason=below_floor;action=rejected".to_owned()),
            ]
        );
        assert_eq!(
            String::from_utf8(reply.body).unwrap(),
            concat!(
                r#"{"jsonrpc":"2.0","id":null,"error":{"code":4400,"message":"#,
                r#""Events after this Last-Event-ID are no longer kept, so resuming here would lose them.","#,
                r#""data":{"outcome":"inconsistent","reason":"below_floor","recovery":"open_new_stream"}}}"#
            )
        );
    }

    #[test]
    fn a_settlement() {
        let verdict = Verdict::Inconsistent(Fault::AheadOfHead);
        let ids = vec![b"7".to_vec(), br#""a\u00e9""#.to_vec()];
        let reply = Reply::settlement(verdict, Scope::Cursor, &ids);
        assert_eq!(reply.status, 200);
        assert_eq!(reply.headers[0].1, "text/event-stream");
        assert_eq!(reply.headers[2].1, "inconsistent;reason=ahead_of_head;action=settled");
        let body = String::from_utf8(reply.body).unwrap();
        let events: Vec<&str> = body.split_terminator("\n\n").collect();
        for (event, id) in events.iter().zip(["7", r#""a\u00e9""#]) {
            let data = event.strip_prefix("event: message\ndata: ").unwrap();
            assert!(
                data.starts_with(&format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":4400,"#))
            );
            assert!(data.contains("The call may have run."));
            serde_json::from_str::<serde_json::Value>(data).unwrap();
        }
        assert_eq!(events.len(), 2);
    }

    #[test]
    fn a_session_fault() {
        let reply = Reply::refusal(Verdict::Inconsistent(Fault::SessionTerminated), Scope::Session);
        assert_eq!(reply.status, 404);
        let body = String::from_utf8(reply.body).unwrap();
        assert!(body.contains(r#""code":4404"#) && body.contains(r#""recovery":"reinitialize""#));
    }

    #[test]
    fn an_unverified_resumption_that_is_refused() {
        let reply = Reply::refusal(Verdict::Unverified(Doubt::UnknownSession), Scope::Cursor);
        assert_eq!(reply.status, 400);
        assert_eq!(reply.headers[2].1, "unverified;reason=unknown_session;action=rejected");
    }
}
