//! The JSON-RPC ids of requests and of their answers: all that the guard reads
//! of a message, to know when a POST's stream is finished.
//!
//! A batch (MCP 2025-03-26) is an array of messages. Everything but `id`,
//! `method`, `result` and `error` is skipped without being kept.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, Visitor};

use crate::fingerprint::{Role, Secret};

/// Requests of one POST that are followed; a POST with more is not.
pub const MAX_CALLS: usize = 8;

/// The requests of a POST that await an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Calls {
    /// Not known, or not any more: the body or an event was too large, or not
    /// JSON-RPC, or had more than [`MAX_CALLS`] requests. Where it matters,
    /// the guard takes the side that refuses nothing.
    #[default]
    Unknown,
    /// The fingerprints of the ids that await their answer; none: the stream
    /// is finished.
    Pending(Vec<u64>),
}

impl Calls {
    /// The requests in the body of a POST.
    pub fn of_request(secret: &Secret, body: &[u8]) -> Self {
        let Some(messages) = messages(body) else { return Calls::Unknown };
        let mut pending = Vec::new();
        for message in messages.iter().filter(|message| message.method.0) {
            match &message.id {
                RpcId::Absent => {}
                RpcId::Unreadable => return Calls::Unknown,
                id => pending.push(id.fingerprint(secret)),
            }
        }
        if pending.len() > MAX_CALLS { Calls::Unknown } else { Calls::Pending(pending) }
    }

    /// Takes off what the data of an event answers.
    pub fn answer(&mut self, secret: &Secret, data: &[u8]) {
        let Calls::Pending(pending) = self else { return };
        let Some(messages) = messages(data) else {
            // A client that reads more than the guard may have its answer.
            *self = Calls::Unknown;
            return;
        };
        for message in messages {
            if message.method.0 || !(message.result.0 || message.error.0) {
                continue;
            }
            let answered = message.id.fingerprint(secret);
            pending.retain(|id| *id != answered);
        }
    }

    /// What is awaited still, where another connection has seen answers too.
    pub fn and(&self, other: &Calls) -> Calls {
        let (Calls::Pending(ours), Calls::Pending(theirs)) = (self, other) else {
            return Calls::Unknown;
        };
        Calls::Pending(ours.iter().filter(|id| theirs.contains(id)).copied().collect())
    }

    /// Whether it is known that every answer has come.
    pub fn all_answered(&self) -> bool {
        matches!(self, Calls::Pending(pending) if pending.is_empty())
    }

    /// Whether answers are awaited.
    pub fn awaited(&self) -> bool {
        matches!(self, Calls::Pending(pending) if !pending.is_empty())
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
struct Message {
    #[serde(default)]
    id: RpcId,
    #[serde(default)]
    method: Present,
    #[serde(default)]
    result: Present,
    #[serde(default)]
    error: Present,
}

/// One message, or a batch.
fn messages(text: &[u8]) -> Option<Vec<Message>> {
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
    Number(String),
    Text(String),
    /// Neither a number nor a string.
    Unreadable,
}

impl RpcId {
    fn fingerprint(&self, secret: &Secret) -> u64 {
        match self {
            RpcId::Number(number) => secret.text(Role::RpcNumber, number.as_bytes()),
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
                Ok(RpcId::Number(value.to_string()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<RpcId, E> {
                Ok(RpcId::Number(value.to_string()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<RpcId, E> {
                // `1.0` and `1` are the same number to most of those who
                // answer. Formatting a fraction would take 11 KiB of code.
                let whole = value as i64;
                Ok(RpcId::Number(if whole as f64 == value {
                    whole.to_string()
                } else {
                    format!("{:x}", value.to_bits())
                }))
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
        Calls::of_request(&SECRET, body.as_bytes())
    }

    fn pending_after(body: &str, events: &[&str]) -> usize {
        let mut calls = calls(body);
        for event in events {
            calls.answer(&SECRET, event.as_bytes());
        }
        match calls {
            Calls::Pending(pending) => pending.len(),
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
            ("not json", 99),
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
        assert_eq!(pending_after(r#"{"id":0,"method":"m"}"#, &[r#"{"id":null,"error":{}}"#]), 1);
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
