//! One HTTP request and its answer, as they pass the guard.
//!
//! The methods are called in the order in which a proxy gets to see the parts:
//! [`Exchange::begin`], [`Exchange::request_body`], [`Exchange::response`],
//! [`Exchange::response_body`], [`Exchange::response_end`], and at the end,
//! however it came, [`Exchange::close`]. Parts may be missing, and a response
//! may begin before the request's body ends. Nothing here waits, holds back a
//! byte or changes one.

use std::fmt;

use crate::budget::{Budget, Held};
use crate::config::{Config, Escalation, Mode, OnUnverified, PendingCalls, ReasonPolicy};
use crate::event_id::EventId;
use crate::fingerprint::SessionFingerprint;
use crate::jsonrpc::{Calls, SentIds};
use crate::ledger::{Access, Ledger};
use crate::recorder::{Carries, Recorder};
use crate::reply::{RESUMPTION_HEADER, Reply, Scope};
use crate::request::{self, Field, Method, Request, is_event_stream, is_json};
use crate::store::Store;
use crate::verdict::{self, Action, CarriedOn, Cursor, Fault, Judgement, Ruling, Single, Verdict};

/// What is the same for all exchanges of a configuration.
#[derive(Debug)]
pub struct Guard {
    /// What the operator decided.
    pub config: Config,
    /// Where it is kept.
    pub ledger: Ledger,
    /// What the bodies of all POSTs that are under way may hold together.
    pub body_budget: Budget,
}

/// What is to be done with a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RequestStep {
    /// Header fields to remove.
    pub remove: Vec<&'static str>,
    /// To be sent instead of passing the request on.
    pub reply: Option<Reply>,
    /// The ruling, for the filter state.
    pub ruling: Option<Ruling>,
    /// It is one on a resumption, and counts as such.
    pub is_resumption: bool,
    /// The line to log about it.
    pub log: Option<LogLine>,
    /// Whether the body is to be shown to [`Exchange::request_body`].
    pub body: bool,
}

/// What is to be done with the head of a response.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ResponseStep {
    /// Remove the upstream's `mcp-resumption`.
    pub remove_resumption: bool,
    /// Set it to this ruling.
    pub attest: Option<Ruling>,
    /// Whether the body is to be shown to [`Exchange::response_body`].
    pub body: bool,
}

/// A line about a resumption that was refused or isn't verified. The session
/// stands there as its fingerprint, good for this process only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLine {
    /// What was decided.
    pub ruling: Ruling,
    /// Whose resumption it was.
    pub session: Option<SessionFingerprint>,
}

impl fmt::Display for LogLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "resumption {}: {}", self.ruling.action.as_str(), self.ruling)?;
        match self.session {
            Some(session) => write!(f, ", session {session}"),
            None => Ok(()),
        }
    }
}

/// The JSON-RPC body of a POST, as far as it has come.
#[derive(Debug)]
enum Body {
    /// Not read, or too large.
    Unread,
    Coming(Vec<u8>, Held),
    /// All of it has come, and these are its requests.
    Whole(Calls, SentIds),
}

/// An exchange.
pub struct Exchange {
    method: Method,
    session: Single<SessionFingerprint>,
    /// All sessions that the request names, where they differ.
    named: Vec<SessionFingerprint>,
    /// The guard looks at nothing but its own header.
    inert: bool,
    /// The guard has answered itself.
    replied: bool,
    ruling: Option<Ruling>,
    carries: Carries,
    /// Where a resumption carries on, if that is known.
    resumed: Option<(EventId, CarriedOn)>,
    body: Body,
    recorder: Option<Recorder>,
}

impl Exchange {
    /// A request's header fields have come.
    pub fn begin<S: Store>(
        guard: &Guard,
        at: &mut Access<'_, S>,
        fields: &[Field],
    ) -> (Self, RequestStep) {
        let request = Request::new(&guard.config, guard.ledger.secret(), fields);
        let mut step = RequestStep::default();
        if request.has_resumption {
            step.remove.push(RESUMPTION_HEADER);
        }
        let mut exchange = Exchange {
            method: request.method,
            session: request.session.clone(),
            named: request.named.clone(),
            inert: true,
            replied: false,
            ruling: None,
            carries: Carries::NewStream,
            resumed: None,
            body: Body::Unread,
            recorder: None,
        };
        if !request.guarded {
            return (exchange, step);
        }
        let known = match &request.session {
            Single::One(session) => guard.ledger.used_session(at, *session),
            _ => None,
        };
        // Rule 1.
        if request.without_sessions && known.is_none() {
            return (exchange, step);
        }
        exchange.inert = false;
        if request.is_resumption() {
            exchange.resume(guard, at, &request, &mut step);
        } else if known.is_some_and(|session| session.ended) && request.method != Method::Delete {
            refuse_ended(guard, &mut step);
        }
        exchange.replied = step.reply.is_some();
        if exchange.replied {
            return (exchange, step);
        }
        if request.accepts_event_stream && request.has_accept_encoding {
            // What is compressed can't be read.
            step.remove.push("accept-encoding");
        }
        if request.method == Method::Get && !request.is_resumption() {
            exchange.carries = Carries::Standalone;
        }
        if request.method == Method::Post {
            exchange.body = Body::Coming(Vec::new(), guard.body_budget.hold());
            step.body = true;
        }
        (exchange, step)
    }

    fn resume<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        request: &Request,
        step: &mut RequestStep,
    ) {
        let Judgement { verdict, stream, pending } =
            verdict::judge(&guard.config, &guard.ledger, at, &request.session, &request.cursor);
        self.carries =
            stream.map_or(Carries::Unknown, |stream| Carries::Known(stream.number, stream.kind));
        if let (Some(stream), Single::One(Cursor::Id(cursor))) = (stream, &request.cursor) {
            self.resumed = Some((*cursor, stream));
        }
        let refused = self.scope_of_refusal(guard, at, verdict);
        let action = match refused {
            None => Action::Passed,
            Some(_) if self.settles(guard, at, &request.cursor, &pending) => Action::Settled,
            Some(_) => Action::Rejected,
        };
        let ruling = Ruling { verdict, action };
        self.ruling = Some(ruling);
        step.ruling = self.ruling;
        step.is_resumption = true;
        step.reply = refused.map(|scope| match action {
            Action::Settled => Reply::settlement(verdict, scope, &pending),
            Action::Passed | Action::Rejected => Reply::refusal(verdict, scope),
        });
        step.log = (verdict != Verdict::Continue)
            .then_some(LogLine { ruling, session: self.known_session() });
    }

    /// Whether the calls that are pending for the cursor are settled instead
    /// of an HTTP error: once for each cursor.
    fn settles<S: Store>(
        &self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        cursor: &Single<Cursor>,
        pending: &SentIds,
    ) -> bool {
        let (Some(session), Single::One(Cursor::Id(cursor))) = (self.known_session(), cursor)
        else {
            return false;
        };
        guard.config.reject.pending_calls == PendingCalls::Settle
            && !pending.is_empty()
            && guard.ledger.settle(at, session, cursor)
    }

    fn known_session(&self) -> Option<SessionFingerprint> {
        match self.session {
            Single::One(session) => Some(session),
            Single::Absent | Single::Malformed => None,
        }
    }

    /// What a refusal of this verdict ends; `None` if it passes.
    fn scope_of_refusal<S: Store>(
        &self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        verdict: Verdict,
    ) -> Option<Scope> {
        let config = &guard.config;
        match verdict {
            _ if config.mode == Mode::Observe => None,
            Verdict::Continue => None,
            Verdict::Unverified(_) => match config.on_unverified {
                OnUnverified::Pass => None,
                OnUnverified::Reject => Some(Scope::Cursor),
            },
            Verdict::Inconsistent(fault) => match policy(config, fault) {
                ReasonPolicy::Pass => None,
                ReasonPolicy::Cursor => Some(Scope::Cursor),
                // 404 only where the session is known, and so known to be
                // ended from now on: else the client would begin anew, and
                // the old session live on.
                ReasonPolicy::Session => match self.known_session() {
                    Some(session) if guard.ledger.end(at, session) => Some(Scope::Session),
                    _ => Some(Scope::Cursor),
                },
            },
        }
    }

    /// Some of the request's body has passed by, `end` with its last part.
    /// Whether the next part is wanted, too.
    pub fn request_body<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        bytes: &[u8],
        end: bool,
    ) -> bool {
        let limit = usize::try_from(guard.config.limits.request_body_bytes).unwrap_or(usize::MAX);
        let Body::Coming(body, held) = &mut self.body else { return false };
        let len = body.len().saturating_add(bytes.len());
        if len > limit || !held.grow_to(len) {
            self.body = Body::Unread;
            return false;
        }
        body.extend_from_slice(bytes);
        if !end {
            return true;
        }
        let (calls, sent) = Calls::of_request(guard.ledger.secret(), body);
        match &mut self.recorder {
            Some(recorder) => {
                recorder.set_calls(&guard.ledger, at, (calls, sent));
                self.body = Body::Unread;
            }
            None => self.body = Body::Whole(calls, sent),
        }
        false
    }

    /// The requests that the answer to this POST has to answer, as far as they
    /// are known by now.
    fn take_calls(&mut self) -> (Calls, SentIds) {
        match std::mem::replace(&mut self.body, Body::Unread) {
            Body::Whole(calls, sent) => (calls, sent),
            coming => {
                self.body = coming;
                Default::default()
            }
        }
    }

    /// Whether the response is of interest: the guard's own answer is not.
    pub fn follows_response(&self) -> bool {
        !self.replied
    }

    /// The header fields of a response have come. `from_upstream` tells whether
    /// it is the upstream's own; it is asked only where that matters. `random`
    /// gives a number that no other exchange gets. `end`: no body follows.
    pub fn response<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        fields: &[Field],
        end: bool,
        from_upstream: impl FnOnce() -> bool,
        random: impl FnOnce() -> u64,
    ) -> ResponseStep {
        let mut step = ResponseStep {
            remove_resumption: fields.iter().any(|(name, _)| name == RESUMPTION_HEADER),
            ..ResponseStep::default()
        };
        if self.inert {
            return step;
        }
        let value = |name: &str| fields.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_slice());
        let success = value(":status").is_some_and(|status| status.starts_with(b"2"));
        if !success || self.method == Method::Other || !from_upstream() {
            return step;
        }
        let secret = guard.ledger.secret();
        let issued = request::session(secret, fields);
        self.follow_session(guard, at, &issued);
        if self.method == Method::Delete {
            return step;
        }
        let content_type = value("content-type").unwrap_or_default();
        if !is_event_stream(content_type) {
            // There are clients that read any answer to a GET as a stream.
            if self.method == Method::Get
                && !end
                && !is_json(content_type)
                && let Some(session) = self.known_session()
            {
                guard.ledger.make_incomplete(at, session);
            }
            return step;
        }
        step.attest = self.ruling;
        // Where sessions are named that differ, whose events these are can't
        // be told: anybody's.
        let mut doubtful = std::mem::take(&mut self.named);
        if issued == Single::Malformed {
            doubtful.extend(request::sessions(secret, fields));
            doubtful.extend(self.known_session());
        }
        for session in doubtful {
            guard.ledger.make_incomplete(at, session);
        }
        let session = match (issued, &self.session) {
            (Single::One(issued), _) => issued,
            (Single::Absent, Single::One(requested)) => *requested,
            _ => return step,
        };
        if self.known_session().is_some_and(|requested| requested != session)
            && self.carries != Carries::NewStream
        {
            // The cursor stands on a stream of another session.
            self.carries = Carries::Unknown;
        }
        if value("content-encoding").is_some_and(|coding| !coding.eq_ignore_ascii_case(b"identity"))
        {
            guard.ledger.make_incomplete(at, session);
            return step;
        }
        let calls = self.take_calls();
        let mut recorder = Recorder::new(
            session,
            self.carries,
            guard.ledger.nonce(random()),
            request::limit(&guard.config),
            calls,
        );
        if let (Carries::Known(..), Some((cursor, stream))) = (self.carries, &self.resumed) {
            recorder = recorder.resumes(cursor, stream.owed, stream.ambiguous);
        }
        self.recorder = Some(recorder);
        step.body = true;
        step
    }

    /// A session that begins, gets another name, or ends.
    fn follow_session<S: Store>(
        &self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        issued: &Single<SessionFingerprint>,
    ) {
        match (self.method, &self.session, issued) {
            (Method::Delete, Single::One(session), _) => {
                guard.ledger.end(at, *session);
            }
            (Method::Delete, _, _) => {}
            (Method::Post, Single::Absent, Single::One(session)) => {
                guard.ledger.begin(at, *session);
            }
            (_, Single::One(old), Single::One(new)) if old != new => {
                guard.ledger.rename(at, *old, *new);
            }
            _ => {}
        }
    }

    /// Some of the response's body is about to go on to the client: what it
    /// dispatches is recorded when this returns.
    pub fn response_body<S: Store>(&mut self, guard: &Guard, at: &mut Access<'_, S>, bytes: &[u8]) {
        if let Some(recorder) = &mut self.recorder {
            recorder.record(&guard.ledger, at, bytes);
        }
    }

    /// The body could not be read: it may have had any id.
    pub fn response_body_unread<S: Store>(&mut self, guard: &Guard, at: &mut Access<'_, S>) {
        if let Some(recorder) = &self.recorder {
            guard.ledger.make_incomplete(at, recorder.session());
        }
    }

    /// The response has ended cleanly, with its body or with trailers.
    pub fn response_end<S: Store>(&mut self, guard: &Guard, at: &mut Access<'_, S>) {
        if let Some(recorder) = &mut self.recorder {
            recorder.finish(&guard.ledger, at);
        }
        self.close(guard, at);
    }

    /// The exchange is over, however it ended.
    pub fn close<S: Store>(&mut self, guard: &Guard, at: &mut Access<'_, S>) {
        if let Some(mut recorder) = self.recorder.take() {
            recorder.close(&guard.ledger, at);
        }
    }
}

/// What a fault leads to.
fn policy(config: &Config, fault: Fault) -> ReasonPolicy {
    match (config.reason_policy(fault), fault, config.escalation) {
        (Some(policy), _, _) => policy,
        (None, Fault::SessionTerminated, _) | (None, _, Escalation::Session) => {
            ReasonPolicy::Session
        }
        (None, _, Escalation::Cursor) => ReasonPolicy::Cursor,
    }
}

/// The answer to a request of a session that has been ended.
fn refuse_ended(guard: &Guard, step: &mut RequestStep) {
    let scope = match policy(&guard.config, Fault::SessionTerminated) {
        _ if guard.config.mode == Mode::Observe => return,
        ReasonPolicy::Pass => return,
        ReasonPolicy::Cursor => Scope::Cursor,
        ReasonPolicy::Session => Scope::Session,
    };
    let verdict = Verdict::Inconsistent(Fault::SessionTerminated);
    step.ruling = Some(Ruling { verdict, action: Action::Rejected });
    step.reply = Some(Reply::refusal(verdict, scope));
}
