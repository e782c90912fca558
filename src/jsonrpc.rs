//! The JSON-RPC ids of requests and of their answers: all that the guard reads
//! of a message, to know when a POST's stream is finished.
//!
//! A batch (MCP 2025-03-26) is an array of messages. Everything but `id`,
//! `method`, `result` and `error` is skipped without being kept.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, Visitor};
use serde_json::value::RawValue;

use crate::fingerprint::{Role, Secret};

/// Requests of one POST that are followed; a POST with more is not.
pub const MAX_CALLS: usize = 8;

/// Bytes of a request's id, as it was sent, up to which a call can be settled.
pub const MAX_ID_BYTES: usize = 64;

/// A request that a stream has to answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// The fingerprint of its id.
    pub id: u64,
    /// Where in the stream its answer stands, counted in event ids; 0: nowhere
    /// yet.
    pub answered_at: u32,
}

/// The requests of a POST.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Calls {
    /// Not known, or not any more: the body or an event was too large, or not
    /// JSON-RPC, or had more than [`MAX_CALLS`] requests. Where it matters,
    /// the guard takes the side that refuses nothing.
    #[default]
    Unknown,
    /// These; if every one has its answer, the stream is finished.
    Known(Vec<Call>),
}

/// The ids of a POST's requests, exactly as the client sent them.
pub type SentIds = Vec<Vec<u8>>;

impl Calls {
    /// The requests in the body of a POST, and their ids as they were sent
    /// (none if one of them is longer than [`MAX_ID_BYTES`]).
    pub fn of_request(secret: &Secret, body: &[u8]) -> (Self, SentIds) {
        let Some(messages) = messages(body) else { return Default::default() };
        let mut calls = Vec::new();
        let mut sent = Vec::new();
        for message in messages.iter().filter(|message| message.method.0) {
            match message.rpc_id() {
                RpcId::Absent => {}
                RpcId::Unreadable => return Default::default(),
                id => {
                    calls.push(Call { id: id.fingerprint(secret), answered_at: 0 });
                    sent.push(message.id.map_or("", RawValue::get).as_bytes().to_vec());
                }
            }
        }
        if calls.len() > MAX_CALLS {
            return Default::default();
        }
        if sent.iter().any(|id| id.len() > MAX_ID_BYTES) {
            sent.clear();
        }
        (Calls::Known(calls), sent)
    }

    /// The fingerprints of the ids that the data of an event answers; `None`
    /// if that can't be told.
    pub fn answered_by(secret: &Secret, data: &[u8]) -> Option<Vec<u64>> {
        let answers = messages(data)?;
        let answers = answers.iter().filter(|m| !m.method.0 && (m.result.0 || m.error.0));
        Some(answers.map(|message| message.rpc_id().fingerprint(secret)).collect())
    }

    /// Notes an answer that stands there. Whether it was awaited.
    pub fn answer(&mut self, answered: u64, at: u32) -> bool {
        let Calls::Known(calls) = self else { return false };
        let awaited = calls.iter_mut().find(|call| call.id == answered && call.answered_at == 0);
        awaited.is_some_and(|call| {
            call.answered_at = at.max(1);
            true
        })
    }

    /// What is awaited still, where another connection has seen answers too.
    pub fn and(&self, other: &Calls) -> Calls {
        let (Calls::Known(ours), Calls::Known(theirs)) = (self, other) else {
            return Calls::Unknown;
        };
        if !ours.iter().map(|call| call.id).eq(theirs.iter().map(|call| call.id)) {
            return Calls::Unknown;
        }
        let first_answer = |(ours, theirs): (&Call, &Call)| {
            let answers = [ours.answered_at, theirs.answered_at];
            let first = answers.into_iter().filter(|at| *at > 0).min();
            Call { id: ours.id, answered_at: first.unwrap_or(0) }
        };
        Calls::Known(ours.iter().zip(theirs).map(first_answer).collect())
    }

    /// Whether one of these fingerprints is a call's.
    pub fn has_any(&self, ids: &[u64]) -> bool {
        matches!(self, Calls::Known(calls) if calls.iter().any(|call| ids.contains(&call.id)))
    }

    /// Whether it is known that every answer has come.
    pub fn all_answered(&self) -> bool {
        matches!(self, Calls::Known(calls) if calls.iter().all(|call| call.answered_at > 0))
    }

    /// Whether answers are awaited.
    pub fn awaited(&self) -> bool {
        matches!(self, Calls::Known(calls) if calls.iter().any(|call| call.answered_at == 0))
    }
}

/// Whether a key is there, whatever its value, `null` included.
#[derive(Default)]
struct Present(bool);

impl<'de> Deserialize<'de> for Present {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Present(true))
    }
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(default, borrow)]
    id: Option<&'a RawValue>,
    #[serde(default)]
    method: Present,
    #[serde(default)]
    result: Present,
    #[serde(default)]
    error: Present,
}

impl Message<'_> {
    fn rpc_id(&self) -> RpcId {
        let id = self.id.map(|id| serde_json::from_str(id.get()).unwrap_or(RpcId::Unreadable));
        id.unwrap_or_default()
    }
}

/// How SDKs begin a notification or a request. What has a method is no answer,
/// and needn't be read.
pub const METHOD_FIRST: &[&[u8]] = &[br#"{"jsonrpc":"2.0","method":""#, br#"{"method":""#];

/// One message, or a batch.
fn messages(text: &[u8]) -> Option<Vec<Message<'_>>> {
    let first = text.iter().find(|byte| !byte.is_ascii_whitespace())?;
    if *first == b'[' {
        serde_json::from_slice(text).ok()
    } else {
        serde_json::from_slice(text).ok().map(|message| vec![message])
    }
}

/// The id of a message (JSON-RPC 2.0, sections 4 and 5).
#[derive(Default)]
enum RpcId {
    #[default]
    Absent,
    /// The bits of the number.
    Number(u64),
    Text(String),
    /// Neither a number nor a string.
    Unreadable,
}

/// A number as JavaScript knows it: `1.0` is `1`, and what is beyond 2^53 may
/// come back rounded.
fn number(value: f64) -> RpcId {
    // `-0` is `0`, too.
    RpcId::Number((value + 0.0).to_bits())
}

impl RpcId {
    fn fingerprint(&self, secret: &Secret) -> u64 {
        match self {
            RpcId::Number(bits) => secret.text(Role::RpcNumber, &bits.to_le_bytes()),
            RpcId::Text(text) => secret.text(Role::RpcString, text.as_bytes()),
            RpcId::Absent | RpcId::Unreadable => 0,
        }
    }
}

impl<'de> Deserialize<'de> for RpcId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IdVisitor;

        impl<'de> Visitor<'de> for IdVisitor {
            type Value = RpcId;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON-RPC id")
            }

            fn visit_unit<E>(self) -> Result<RpcId, E> {
                Ok(RpcId::Absent)
            }

            fn visit_u64<E>(self, value: u64) -> Result<RpcId, E> {
                Ok(number(value as f64))
            }

            fn visit_i64<E>(self, value: i64) -> Result<RpcId, E> {
                Ok(number(value as f64))
            }

            fn visit_f64<E>(self, value: f64) -> Result<RpcId, E> {
                Ok(number(value))
            }

            fn visit_str<E>(self, value: &str) -> Result<RpcId, E> {
                Ok(RpcId::Text(value.to_owned()))
            }

            fn visit_string<E>(self, value: String) -> Result<RpcId, E> {
                Ok(RpcId::Text(value))
            }

            fn visit_bool<E>(self, _: bool) -> Result<RpcId, E> {
                Ok(RpcId::Unreadable)
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> Result<RpcId, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(RpcId::Unreadable)
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<RpcId, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(RpcId::Unreadable)
            }
        }

        deserializer.deserialize_any(IdVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: Secret = Secret::new([5; 16]);

    fn calls(body: &str) -> Calls {
        Calls::of_request(&SECRET, body.as_bytes()).0
    }

    fn pending_after(body: &str, events: &[&str]) -> usize {
        let mut calls = calls(body);
        for event in events {
            match Calls::answered_by(&SECRET, event.as_bytes()) {
                None => calls = Calls::Unknown,
                Some(ids) => ids.into_iter().for_each(|id| {
                    calls.answer(id, 1);
                }),
            }
        }
        match calls {
            Calls::Known(calls) => calls.iter().filter(|call| call.answered_at == 0).count(),
            Calls::Unknown => 99,
        }
    }

    #[test]
    fn requests_are_what_has_a_method_and_an_id() {
        for (body, pending) in [
            (r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#, 1),
            (r#"{"id":"a","params":{"id":7},"method":"tools/call"}"#, 1),
            (r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#, 0),
            (r#"{"jsonrpc":"2.0","id":null,"method":"x"}"#, 0),
            (r#"{"jsonrpc":"2.0","id":1,"result":{}}"#, 0),
            (r#" [{"id":1,"method":"a"},{"method":"b"},{"id":2,"method":"c"}]"#, 2),
            ("[]", 0),
        ] {
            assert_eq!(pending_after(body, &[]), pending, "{body}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_unknown() {
        let many: Vec<String> = (0..9).map(|id| format!(r#"{{"id":{id},"method":"m"}}"#)).collect();
        for body in [
            "",
            "not json",
            r#"{"id":1,"method":"m""#,
            r#"{"id":[1],"method":"m"}"#,
            r#"{"id":{"a":[]},"method":"m"}"#,
            r#"{"id":true,"method":"m"}"#,
            "3",
            &format!("[{}]", many.join(",")),
        ] {
            assert_eq!(calls(body), Calls::Unknown, "{body}");
        }
        assert_eq!(pending_after(&format!("[{}]", many[..8].join(",")), &[]), 8);
    }

    #[test]
    fn an_answer_has_the_id_and_a_result_or_an_error() {
        let body = r#"{"id":1,"method":"m"}"#;
        for (event, pending) in [
            (r#"{"jsonrpc":"2.0","id":1,"result":{}}"#, 0),
            (r#"{"result":{"id":2},"id":1}"#, 0),
            (r#"{"error":{"code":-1,"message":"x"},"id":1}"#, 0),
            (r#"{"result":null,"id":1}"#, 0),
            (r#"[{"id":3,"result":1},{"id":1,"result":1}]"#, 0),
            (r#"{"id":1.0,"result":{}}"#, 0),
            (r#"{"id":1.5,"result":{}}"#, 1),
            (r#"{"id":"1","result":{}}"#, 1),
            (r#"{"id":2,"result":{}}"#, 1),
            (r#"{"id":1,"method":"sampling/createMessage","params":{}}"#, 1),
            (r#"{"method":"notifications/progress","params":{"id":1}}"#, 1),
            (r#"{"id":1}"#, 1),
            (r#"{"result":{},"\u0069d":1}"#, 0),
            (r#"{"result":{},"i\u0064":1}"#, 0),
            (r#"{"id":1,"result""#, 99),
            ("not json", 99),
            (r#"{"jsonrpc":"2.0","method":"m","id":1,"result":{}}"#, 1),
        ] {
            assert_eq!(pending_after(body, &[event]), pending, "{event}");
        }
    }

    #[test]
    fn ids_are_compared_by_value() {
        assert_eq!(
            pending_after(r#"{"id":"é","method":"m"}"#, &[r#"{"id":"\u00e9","result":1}"#]),
            0
        );
        assert_eq!(pending_after(r#"{"id":-3,"method":"m"}"#, &[r#"{"id":-3,"result":1}"#]), 0);
        let (sent, rounded) = (r#"{"id":9007199254740993,"method":"m"}"#, "9007199254740992");
        assert_eq!(pending_after(sent, &[&format!(r#"{{"id":{rounded},"result":1}}"#)]), 0);
        assert_eq!(pending_after(r#"{"id":0,"method":"m"}"#, &[r#"{"id":null,"error":{}}"#]), 1);
    }

    #[test]
    fn ids_are_kept_exactly_as_they_were_sent() {
        let body = r#"[{"id":"a\u00e9\"é","method":"m"},{"id" : 1.0 ,"method":"m"},
            {"id":-0,"method":"m"},{"id":12345678901234567890123,"method":"m"}]"#;
        let sent = Calls::of_request(&SECRET, body.as_bytes()).1;
        let sent: Vec<_> = sent.iter().map(|id| std::str::from_utf8(id).unwrap()).collect();
        assert_eq!(sent, [r#""a\u00e9\"é""#, "1.0", "-0", "12345678901234567890123"]);
        for (len, kept) in [(MAX_ID_BYTES, 1), (MAX_ID_BYTES + 1, 0)] {
            let body = format!(r#"{{"id":"{}","method":"m"}}"#, "x".repeat(len - 2));
            let (calls, sent) = Calls::of_request(&SECRET, body.as_bytes());
            assert!(calls.awaited());
            assert_eq!(sent.len(), kept);
        }
    }

    #[test]
    fn depth_is_no_danger() {
        let deep = format!(
            r#"{{"id":1,"method":"m","params":{}1{}}}"#,
            "[".repeat(100_000),
            "]".repeat(100_000)
        );
        calls(&deep);
    }
}
