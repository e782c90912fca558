//! What is counted and what is logged: closed sets of names, never an id.
//!
//! A line of the log is a JSON object. `docs/observability.md` has its fields.

use serde::Serialize;

use crate::config::Config;
use crate::event_id::{UUID_LEN, is_uuid};
use crate::fingerprint::SessionFingerprint;
use crate::ledger::Ledger;
use crate::replay::Outcome;
use crate::verdict::Ruling;

/// The metric of a ruling. Labels are written as Istio's `extraStatTags` read
/// them; `envoy/envoy.yaml` has the same patterns.
pub fn resumptions_metric(ruling: &Ruling) -> String {
    format!(
        "mcp_resume_guard_resumptions.outcome=.={};.;reason=.={};.;action=.={};.;",
        ruling.verdict.outcome(),
        ruling.verdict.reason(),
        ruling.action.as_str()
    )
}

/// The metric of a replay's outcome.
pub fn replays_metric(outcome: &Outcome) -> String {
    format!(
        "mcp_resume_guard_replays.result=.={};.;action=.={};.;",
        outcome.result(),
        outcome.action.as_str()
    )
}

/// Counts since they were last flushed to the host's metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Event ids recorded.
    pub events_recorded: u64,
    /// Sessions that began at this gateway.
    pub sessions_started: u64,
    /// Sessions that lost their slot while they lived.
    pub sessions_evicted: u64,
    /// Streams that lost their records while their session lived.
    pub streams_evicted: u64,
    /// Writes that were tried again.
    pub cas_conflicts: u64,
    /// An id with data was issued on two streams of a session.
    pub event_ids_reused: u64,
    /// A session id was issued while it was in use, or had been ended.
    pub session_ids_reissued: u64,
    /// A stream ended that had events and not one id.
    pub streams_without_ids: u64,
}

impl Tally {
    /// Adds another tally to this one.
    pub fn add(&mut self, other: &Tally) {
        for (sum, (_, count)) in self.counts_mut().into_iter().zip(other.counts()) {
            *sum = sum.saturating_add(count);
        }
    }

    /// Every count with the name of its metric.
    pub fn counts(&self) -> [(&'static str, u64); 8] {
        [
            ("mcp_resume_guard_events_recorded", self.events_recorded),
            ("mcp_resume_guard_sessions_started", self.sessions_started),
            ("mcp_resume_guard_sessions_evicted", self.sessions_evicted),
            ("mcp_resume_guard_streams_evicted", self.streams_evicted),
            ("mcp_resume_guard_cas_conflicts", self.cas_conflicts),
            (
                "mcp_resume_guard_contract_violations.kind=.=event_id_reused;.;",
                self.event_ids_reused,
            ),
            (
                "mcp_resume_guard_contract_violations.kind=.=session_id_reissued;.;",
                self.session_ids_reissued,
            ),
            (
                "mcp_resume_guard_contract_violations.kind=.=no_event_ids;.;",
                self.streams_without_ids,
            ),
        ]
    }

    fn counts_mut(&mut self) -> [&mut u64; 8] {
        [
            &mut self.events_recorded,
            &mut self.sessions_started,
            &mut self.sessions_evicted,
            &mut self.streams_evicted,
            &mut self.cas_conflicts,
            &mut self.event_ids_reused,
            &mut self.session_ids_reissued,
            &mut self.streams_without_ids,
        ]
    }
}

/// What the ledger had of a session when a resumption of it was judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// All that it was issued was seen here.
    pub complete: bool,
    /// Its streams.
    pub streams: usize,
    /// The events that follow the cursor on its stream, if it stands on one.
    pub owed: Option<u64>,
}

/// A line about a resumption that was refused or isn't verified. The session
/// stands there as its fingerprint, good for this process only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLine {
    /// What was decided.
    pub ruling: Ruling,
    /// Whose resumption it was.
    pub session: Option<SessionFingerprint>,
    /// What was known of that; `None` if nothing was.
    pub known: Option<Known>,
}

impl LogLine {
    /// The line. `request` is the request's id, the same as in the access log,
    /// told if it is a UUID, as Envoy makes them; `left_out` tells how many lines
    /// before this one were too many.
    pub fn to_json(&self, request: Option<&[u8]>, left_out: u64) -> String {
        #[derive(Serialize)]
        struct Line<'a> {
            event: &'static str,
            message: String,
            outcome: &'static str,
            reason: &'static str,
            action: &'static str,
            #[serde(skip_serializing_if = "Option::is_none")]
            session: Option<String>,
            #[serde(skip_serializing_if = "Option::is_none")]
            history: Option<&'static str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            streams: Option<usize>,
            #[serde(skip_serializing_if = "Option::is_none")]
            owed: Option<u64>,
            #[serde(skip_serializing_if = "Option::is_none")]
            request_id: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            left_out: Option<u64>,
        }
        let session = self.session.map(|session| session.to_string());
        let action = self.ruling.action.as_str();
        let mut message = format!("resumption {action}: {}", self.ruling);
        if let Some(session) = &session {
            message = format!("{message}, session {session}");
        }
        if left_out > 0 {
            message = format!("{message} ({left_out} more lines were left out)");
        }
        // A client may have sent another, and anything in it.
        let request = request
            .filter(|id| <&[u8; UUID_LEN]>::try_from(*id).is_ok_and(is_uuid))
            .and_then(|id| str::from_utf8(id).ok());
        let complete = self.known.map(|known| known.complete);
        written(&Line {
            event: "resumption",
            message,
            outcome: self.ruling.verdict.outcome(),
            reason: self.ruling.verdict.reason(),
            action,
            session,
            history: complete.map(|complete| if complete { "complete" } else { "incomplete" }),
            streams: self.known.map(|known| known.streams),
            owed: self.known.and_then(|known| known.owed),
            request_id: request,
            left_out: (left_out > 0).then_some(left_out),
        })
    }
}

/// What a configuration means, in a sentence.
pub fn meaning(config: &Config, ledger: &Ledger) -> String {
    format!(
        "mode {}; history {}: {}; room for {}, at most {} MiB",
        config.mode.as_str(),
        config.history.as_str(),
        config.history.meaning(),
        ledger.shape(),
        max_memory_mib(ledger)
    )
}

fn max_memory_mib(ledger: &Ledger) -> u64 {
    ledger.max_memory_bytes().div_ceil(1024 * 1024)
}

/// The line about a configuration that is new here.
pub fn configured_line(config: &Config, ledger: &Ledger) -> String {
    #[derive(Serialize)]
    struct Line {
        event: &'static str,
        message: String,
        version: &'static str,
        mode: &'static str,
        history: &'static str,
        sessions: u64,
        streams_per_session: u8,
        ids_per_stream: u16,
        max_memory_mib: u64,
    }
    let shape = ledger.shape();
    written(&Line {
        event: "configured",
        message: format!("mcp-resume-guard {VERSION}: {}", meaning(config, ledger)),
        version: VERSION,
        mode: config.mode.as_str(),
        history: config.history.as_str(),
        sessions: shape.sessions(),
        streams_per_session: shape.streams,
        ids_per_stream: shape.ids,
        max_memory_mib: max_memory_mib(ledger),
    })
}

/// A line that only says something.
pub fn message_line(event: &'static str, message: &str) -> String {
    #[derive(Serialize)]
    struct Line<'a> {
        event: &'static str,
        message: &'a str,
        version: &'static str,
    }
    written(&Line { event, message, version: VERSION })
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn written(line: &impl Serialize) -> String {
    // Strings and integers: there is nothing that can't be written.
    serde_json::to_string(line).unwrap_or_default()
}

/// Lets at most [`LogLimit::PER_SECOND`] lines a second through, and counts the
/// rest.
#[derive(Debug, Default)]
pub struct LogLimit {
    second: u64,
    lines: u32,
    left_out: u64,
}

/// Whether a line may be logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogPermit {
    /// It is one too many.
    Suppressed,
    /// It is logged, and so many were left out since the last.
    Granted {
        /// Lines left out.
        left_out: u64,
    },
}

impl LogLimit {
    /// Lines a second.
    pub const PER_SECOND: u32 = 10;

    /// Asks for a line.
    pub fn ask(&mut self, now_ms: u64) -> LogPermit {
        let second = now_ms / 1000;
        if second != self.second {
            self.second = second;
            self.lines = 0;
        }
        if self.lines >= Self::PER_SECOND {
            self.left_out = self.left_out.saturating_add(1);
            return LogPermit::Suppressed;
        }
        self.lines = self.lines.saturating_add(1);
        LogPermit::Granted { left_out: std::mem::take(&mut self.left_out) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::{Action, Doubt, Verdict};

    #[test]
    fn whatever_a_request_is_called_a_line_is_json() {
        let verdict = Verdict::Unverified(Doubt::UnknownSession);
        let ruling = Ruling { verdict, action: Action::Passed };
        let line = LogLine { ruling, session: None, known: None };
        const UUID: Option<&str> = Some("8df04497-00ea-4acb-a546-46ffb1888074");
        for (request, told) in [
            (&b"8df04497-00ea-4acb-a546-46ffb1888074"[..], UUID),
            (b"8df04497-00ea-4acb-a546-46ffb188807", None),
            (b"8df04497-00ea-4acb-a546-46ffb188807\"", None),
            (b"a session's id", None),
            (b"\xff", None),
            (b"", None),
        ] {
            let text = line.to_json(Some(request), 2);
            let fields: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(fields["request_id"].as_str(), told, "{text}");
            assert_eq!(fields["reason"], "unknown_session");
            assert_eq!(fields["left_out"], 2);
            assert_eq!(text.lines().count(), 1);
        }
    }

    #[test]
    fn ten_lines_a_second_then_a_count() {
        let mut limit = LogLimit::default();
        for _ in 0..10 {
            assert_eq!(limit.ask(5_000), LogPermit::Granted { left_out: 0 });
        }
        for _ in 0..3 {
            assert_eq!(limit.ask(5_999), LogPermit::Suppressed);
        }
        assert_eq!(limit.ask(6_000), LogPermit::Granted { left_out: 3 });
        assert_eq!(limit.ask(6_000), LogPermit::Granted { left_out: 0 });
    }

    #[test]
    fn tallies_add_up() {
        let mut sum = Tally { cas_conflicts: 1, ..Tally::default() };
        sum.add(&Tally { cas_conflicts: 2, streams_without_ids: 1, ..Tally::default() });
        assert_eq!(sum, Tally { cas_conflicts: 3, streams_without_ids: 1, ..Tally::default() });
    }
}
