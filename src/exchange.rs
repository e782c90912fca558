//! One HTTP request and its answer, as they pass the guard.
//!
//! The methods are called in the order in which a proxy gets to see the parts:
//! [`Exchange::begin`], [`Exchange::request_body`], [`Exchange::response`],
//! [`Exchange::response_body`], [`Exchange::response_end`], and at the end,
//! however it came, [`Exchange::close`]. Parts may be missing, and a response
//! may begin before the request's body ends. Nothing here waits; and a byte is
//! held back or changed only where the answer to a resumption is checked.

use crate::answer::{Answer, Resumed};
use crate::budget::{Budget, Held};
use crate::config::{
    Config, Escalation, HeaderName, Mode, OnUnverified, PendingCalls, ReasonPolicy, ReplayBuffer,
};
use crate::event_id::{EventId, IdReader};
use crate::fingerprint::SessionFingerprint;
use crate::headers::Field;
use crate::jsonrpc::{Calls, SentIds};
use crate::ledger::table::Session;
use crate::ledger::{Access, Ledger};
use crate::owner::Instance;
use crate::recorder::{Carries, Recorder};
use crate::replay::{Outcome, Replay};
use crate::reply::{RESUMPTION_HEADER, Reply, Scope};
use crate::request::{self, Method, Request, is_event_stream, is_json};
use crate::store::Store;
use crate::telemetry::{Known, LogLine};
use crate::verdict::{
    self, Action, CarriedOn, Cursor, Doubt, Fault, Judgement, Ruling, Single, Verdict,
};

/// What is the same for all exchanges of a configuration.
#[derive(Debug)]
pub struct Guard {
    /// What the operator decided.
    pub config: Config,
    /// Where it is kept.
    pub ledger: Ledger,
    /// What the bodies of all POSTs that are under way, and the events that
    /// aren't complete, may hold together.
    pub body_budget: Budget,
}

/// What is to be done with a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RequestStep {
    /// Header fields to remove.
    pub remove: Vec<String>,
    /// The field to set that pins the request to an instance.
    pub pin: Option<(String, String)>,
    /// To be sent instead of passing the request on.
    pub reply: Option<Reply>,
    /// The ruling, for the filter state.
    pub ruling: Option<Ruling>,
    /// A resumption that is refused, and counts as such.
    pub count: Option<Ruling>,
    /// The line to log about it.
    pub log: Option<LogLine>,
    /// Whether the body is to be shown to [`Exchange::request_body`].
    pub body: bool,
}

/// What is to be done with the head of a response.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ResponseStep {
    /// Header fields to remove.
    pub remove: Vec<String>,
    /// Set `mcp-resumption` to this ruling.
    pub attest: Option<Ruling>,
    /// To be sent instead of all that the upstream has sent and will send.
    pub reply: Option<Reply>,
    /// The ruling, for the filter state, where it has changed.
    pub ruling: Option<Ruling>,
    /// A resumption that counts now.
    pub count: Option<Ruling>,
    /// The line to log about it.
    pub log: Option<LogLine>,
    /// Whether the body is to be shown to [`Exchange::response_body`].
    pub body: bool,
}

/// What is to be done with some of a response's body.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BodyStep {
    /// What goes on in its place; `None`: it goes on as it is.
    pub replace: Option<Vec<u8>>,
    /// The stream is to be reset once that is on its way.
    pub reset: bool,
    /// Faults of the replay, for the log; the ruling may have changed.
    pub found: Vec<LogLine>,
}

/// What is to be done when an exchange is over.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CloseStep {
    /// A resumption that counts now: no answer has come.
    pub count: Option<Ruling>,
    /// What the replay came to.
    pub outcome: Option<Outcome>,
    /// A fault of it that was found only now.
    pub found: Option<LogLine>,
}

/// What a proxy knows of a response beside its header fields. It is asked only
/// where that matters.
pub trait Origin {
    /// Whether it is the upstream's own, and nobody else's on its behalf.
    fn is_upstream(&self) -> bool;
    /// The address of the instance that sent it.
    fn address(&self) -> Option<Vec<u8>>;
    /// A number that no other exchange gets.
    fn random(&self) -> u64;
}

/// The JSON-RPC body of a POST, as far as it has come.
#[derive(Debug)]
enum Body {
    /// Not read, or too large.
    Unread,
    Coming(Vec<u8>, Held),
    /// All of a short one has come. It is read when its answer is a stream:
    /// most aren't.
    Whole(Vec<u8>),
    /// All of a long one has come, and these are its requests: while its answer
    /// is awaited it is not to take memory that others need.
    Read(Calls, SentIds),
}

/// The most bytes of a short body.
const SHORT_BODY: usize = 4096;

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
    /// The ruling is one on a resumption that passed, and hasn't been counted.
    uncounted: bool,
    /// The cursor of a resumption.
    cursor: Option<EventId>,
    /// What was known of the session when it was judged.
    known: Option<Known>,
    /// What has read it.
    ids: IdReader,
    /// Where it carries on, if that is known.
    resumed: Option<CarriedOn>,
    body: Body,
    recorder: Option<Box<Recorder>>,
    /// Who answers.
    instance: Option<Instance>,
    /// The answer, if this is a resumption.
    answer: Option<Box<Answer>>,
}

impl Exchange {
    /// A request's header fields have come.
    pub fn begin<S: Store>(
        guard: &Guard,
        at: &mut Access<'_, S>,
        fields: &[Field<'_>],
    ) -> (Self, RequestStep) {
        let mut request = Request::new(&guard.config, guard.ledger.secret(), fields);
        let mut step = RequestStep::default();
        if request.has_resumption {
            step.remove.push(RESUMPTION_HEADER.to_owned());
        }
        let pin = guard.config.owner.pin_header.as_ref();
        if let Some(pin) = pin.filter(|_| request.has_pin) {
            step.remove.push(pin.as_str().to_owned());
        }
        let mut exchange = Exchange {
            method: request.method,
            session: request.session.clone(),
            named: request.named.clone(),
            inert: true,
            replied: false,
            ruling: None,
            carries: Carries::NewStream,
            uncounted: false,
            cursor: match &request.cursor {
                Single::One(Cursor::Id(id)) => Some(*id),
                _ => None,
            },
            known: None,
            ids: std::mem::take(&mut request.ids),
            resumed: None,
            body: Body::Unread,
            recorder: None,
            instance: None,
            answer: None,
        };
        if !request.guarded {
            return (exchange, step);
        }
        let reads_all = request.is_resumption() || pin.is_some();
        let known = match &request.session {
            Single::One(session) => guard.ledger.used_session(at, *session, |slot| {
                (slot.is_ended(), reads_all.then(|| slot.session()).flatten())
            }),
            _ => None,
        };
        // Rule 1.
        if request.without_sessions && known.is_none() {
            return (exchange, step);
        }
        let (is_ended, known) = known.unwrap_or_default();
        exchange.inert = false;
        if request.is_resumption() {
            exchange.resume(guard, at, &request, known.as_ref(), &mut step);
        } else if is_ended && request.method != Method::Delete {
            refuse_ended(guard, &mut step);
        }
        exchange.replied = step.reply.is_some();
        if exchange.replied {
            return (exchange, step);
        }
        if request.accepts_event_stream && request.has_accept_encoding {
            // What is compressed can't be read.
            step.remove.push("accept-encoding".to_owned());
        }
        if let (Some(pin), Some(session)) = (pin, &known) {
            let address = exchange.owner_address(session);
            step.pin = address.map(|address| (pin.as_str().to_owned(), address.to_owned()));
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
        known: Option<&Session>,
        step: &mut RequestStep,
    ) {
        let Judgement { verdict, stream, pending, known } = verdict::judge(
            &guard.config,
            &guard.ledger,
            at,
            (&request.session, known),
            &request.cursor,
        );
        self.carries = stream.as_ref().map_or(Carries::Unknown, |carried| {
            Carries::Known(carried.stream.number, carried.stream.kind)
        });
        self.resumed = stream;
        self.known = known;
        let (ruling, reply) = self.rule(guard, at, verdict, &pending);
        step.ruling = Some(ruling);
        step.count = reply.is_some().then_some(ruling);
        self.uncounted = reply.is_none();
        step.reply = reply;
        step.log = (verdict != Verdict::Continue).then_some(self.log_line(ruling));
    }

    /// What a verdict leads to: the ruling, and the reply if it is a refusal.
    fn rule<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        verdict: Verdict,
        pending: &SentIds,
    ) -> (Ruling, Option<Reply>) {
        let refused = self.scope_of_refusal(guard, at, verdict);
        let (action, reply) = match refused {
            None => (Action::Passed, None),
            Some(scope) if self.settles(guard, at, pending) => {
                (Action::Settled, Some(Reply::settlement(verdict, scope, pending)))
            }
            Some(scope) => (Action::Rejected, Some(Reply::refusal(verdict, scope))),
        };
        let ruling = Ruling { verdict, action };
        self.ruling = Some(ruling);
        (ruling, reply)
    }

    fn log_line(&self, ruling: Ruling) -> LogLine {
        LogLine { ruling, session: self.known_session(), known: self.known }
    }

    /// Where the instance is that has to answer: the owner of the stream that
    /// is resumed, or else the session's.
    fn owner_address<'a>(&self, session: &'a Session) -> Option<&'a str> {
        let stream = self.resumed.as_ref().map(|carried| carried.stream.number);
        let of_stream = stream.and_then(|stream| session.stream_owner(stream));
        session.address(of_stream.or(session.owner))
    }

    /// Whether the calls that are pending for the cursor are settled instead
    /// of an HTTP error: once for each cursor.
    fn settles<S: Store>(&self, guard: &Guard, at: &mut Access<'_, S>, pending: &SentIds) -> bool {
        let (Some(session), Some(cursor)) = (self.known_session(), &self.cursor) else {
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
        let body = std::mem::take(body);
        self.body = if body.len() <= SHORT_BODY {
            Body::Whole(body)
        } else {
            let (calls, sent) = Calls::of_request(guard.ledger.secret(), &body);
            Body::Read(calls, sent)
        };
        if let Some(mut recorder) = self.recorder.take() {
            recorder.set_calls(&guard.ledger, at, self.take_calls(guard));
            self.recorder = Some(recorder);
        }
        false
    }

    /// The requests that the answer to this POST has to answer, as far as they
    /// are known by now.
    fn take_calls(&mut self, guard: &Guard) -> (Calls, SentIds) {
        match std::mem::replace(&mut self.body, Body::Unread) {
            Body::Whole(body) => Calls::of_request(guard.ledger.secret(), &body),
            Body::Read(calls, sent) => (calls, sent),
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

    /// The header fields of a response have come. `end`: no body follows.
    pub fn response<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        fields: &[Field<'_>],
        end: bool,
        origin: &impl Origin,
    ) -> ResponseStep {
        let mut step = ResponseStep::default();
        let pin = guard.config.owner.pin_header.as_ref().map(HeaderName::as_str);
        for name in [Some(RESUMPTION_HEADER), pin].into_iter().flatten() {
            if fields.iter().any(|(field, _)| *field == name.as_bytes()) {
                step.remove.push(name.to_owned());
            }
        }
        if !self.inert {
            self.read_response(guard, at, fields, end, origin, &mut step);
        }
        if self.recorder.is_none() {
            // Nobody will ask for the calls.
            self.body = Body::Unread;
        }
        step.count = self.take_uncounted();
        step
    }

    fn take_uncounted(&mut self) -> Option<Ruling> {
        self.ruling.filter(|_| std::mem::take(&mut self.uncounted))
    }

    fn read_response<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        fields: &[Field<'_>],
        end: bool,
        origin: &impl Origin,
        step: &mut ResponseStep,
    ) {
        let value = |name: &str| {
            let field = fields.iter().find(|(field, _)| *field == name.as_bytes());
            field.map(|(_, value)| *value)
        };
        let success = value(":status").is_some_and(|status| status.starts_with(b"2"));
        if !success || self.method == Method::Other {
            return;
        }
        let secret = guard.ledger.secret();
        let issued = request::session(secret, fields);
        let names_session = issued != Single::Absent && issued != self.session;
        let content_type = value("content-type").unwrap_or_default();
        let is_stream = self.method != Method::Delete && is_event_stream(content_type);
        // Most answers to a POST say nothing of a session or a stream.
        let is_of_interest = is_stream || names_session || self.method != Method::Post;
        if !is_of_interest || !origin.is_upstream() {
            return;
        }
        if is_stream || names_session {
            self.instance = Instance::of_answer(&guard.config, secret, fields, || origin.address());
        }
        if is_stream && self.is_fenced_off(guard, at, step) {
            return;
        }
        self.follow_session(guard, at, &issued);
        if self.method == Method::Delete {
            return;
        }
        if !is_stream {
            // There are clients that read any answer to a GET as a stream.
            if self.method == Method::Get
                && !end
                && !is_json(content_type)
                && let Some(session) = self.known_session()
            {
                guard.ledger.make_incomplete(at, session);
            }
            return;
        }
        step.attest = self.ruling;
        let resumed = self.ruling.map(|ruling| Resumed {
            session: self.known_session(),
            cursor: self.cursor,
            ruling,
            known: self.known,
            instance: self.instance.clone(),
        });
        if let Some(resumed) = &resumed {
            if value("content-length").is_some() {
                step.remove.push("content-length".to_owned());
            }
            self.answer = Some(Box::new(Answer::unread(resumed.clone(), end)));
        }
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
            _ => return,
        };
        if self.known_session().is_some_and(|requested| requested != session)
            && self.carries != Carries::NewStream
        {
            // The cursor stands on a stream of another session.
            self.carries = Carries::Unknown;
            self.resumed = None;
        }
        if value("content-encoding").is_some_and(|coding| !coding.eq_ignore_ascii_case(b"identity"))
        {
            guard.ledger.make_incomplete(at, session);
            return;
        }
        let calls = self.take_calls(guard);
        let mut recorder = Recorder::new(
            session,
            self.carries,
            guard.ledger.nonce(origin.random()),
            request::limit(&guard.config),
            calls,
        )
        .sent_by(
            self.instance.clone(),
            at.now_us,
            guard.config.replay_buffer != ReplayBuffer::Shared,
        );
        step.body = true;
        let Some(resumed) = resumed else {
            self.recorder = Some(Box::new(recorder));
            return;
        };
        let carried = self.resumed.take();
        if let Some(carried) = &carried {
            recorder = recorder.resumes(carried, std::mem::take(&mut self.ids));
        }
        let replay = Replay::new(session, at.now_us, carried);
        if replay.is_ordered() {
            recorder.leave_order();
        }
        self.answer = Some(Box::new(Answer::new(guard, resumed, end, recorder, replay)));
    }

    /// Whether the answer to a resumption comes from an instance that can't
    /// replay the stream. If not, or if that passes, the instance is its owner
    /// from now on.
    fn is_fenced_off<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        step: &mut ResponseStep,
    ) -> bool {
        let (Some(ruling), Some(session), Some(cursor)) =
            (self.ruling, self.known_session(), self.cursor)
        else {
            return false;
        };
        if let Some(verdict) = self.owner_verdict(guard, ruling.verdict) {
            let history = guard.ledger.history(at, session);
            let pending = history.map(|history| history.pending_calls(&cursor, &[]));
            let pending = pending.filter(|_| matches!(verdict, Verdict::Inconsistent(_)));
            let (ruling, reply) = self.rule(guard, at, verdict, &pending.unwrap_or_default());
            step.ruling = Some(ruling);
            step.log = Some(self.log_line(ruling));
            if reply.is_some() {
                step.reply = reply;
                self.replied = true;
                return true;
            }
        }
        let instance = self.instance.as_ref();
        let carried = self.resumed.as_ref();
        let moved_to = instance.filter(|_| self.is_moved());
        if moved_to.is_some() || carried.is_none_or(|carried| carried.was_cut) {
            let stream = carried.map(|carried| carried.stream.number);
            guard.ledger.carry_on(at, session, stream, &cursor, moved_to);
        }
        false
    }

    /// Whether another instance answers than any that issued the cursor.
    fn is_moved(&self) -> bool {
        let (Some(instance), Some(carried)) = (&self.instance, &self.resumed) else { return false };
        let differs = |owners: &Vec<_>| owners.iter().all(|owner| instance.id.differs_from(*owner));
        !carried.uncertain && carried.owners.as_ref().is_some_and(differs)
    }

    /// The verdict where another instance answers than the stream's owner.
    fn owner_verdict(&self, guard: &Guard, verdict: Verdict) -> Option<Verdict> {
        let passed_by_policy = |fault| policy(&guard.config, fault) == ReasonPolicy::Pass;
        let is_open = match verdict {
            Verdict::Continue => true,
            Verdict::Unverified(_) => false,
            Verdict::Inconsistent(fault) => passed_by_policy(fault),
        };
        if !is_open || !self.is_moved() {
            return None;
        }
        match guard.config.replay_buffer {
            ReplayBuffer::Local => Some(Verdict::Inconsistent(Fault::OwnerMoved)),
            ReplayBuffer::Unknown if verdict == Verdict::Continue => {
                Some(Verdict::Unverified(Doubt::OwnerMoved))
            }
            ReplayBuffer::Unknown | ReplayBuffer::Shared => None,
        }
    }

    /// A session that begins, gets another name, or ends.
    fn follow_session<S: Store>(
        &self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        issued: &Single<SessionFingerprint>,
    ) {
        let instance = self.instance.as_ref();
        match (self.method, &self.session, issued) {
            (Method::Delete, Single::One(session), _) => {
                guard.ledger.end(at, *session);
            }
            (Method::Delete, _, _) => {}
            (Method::Post, Single::Absent, Single::One(session)) => {
                guard.ledger.begin(at, *session, instance);
            }
            (_, Single::One(old), Single::One(new)) if old != new => {
                guard.ledger.rename(at, *old, *new, instance);
            }
            _ => {}
        }
    }

    /// Some of the response's body is about to go on to the client: what it
    /// dispatches is recorded when this returns.
    pub fn response_body<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        bytes: &[u8],
    ) -> BodyStep {
        if let Some(answer) = &mut self.answer {
            return answer.body(guard, at, bytes);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.record(&guard.ledger, at, bytes);
        }
        BodyStep::default()
    }

    /// The body could not be read: it may have had any id.
    pub fn response_body_unread<S: Store>(&mut self, guard: &Guard, at: &mut Access<'_, S>) {
        let of_answer = self.answer.as_ref().and_then(|answer| answer.session());
        let of_recorder = self.recorder.as_ref().map(|recorder| recorder.session());
        if let Some(session) = of_recorder.or(of_answer) {
            guard.ledger.make_incomplete(at, session);
        }
    }

    /// Whether a part of the response's body may have to be replaced.
    pub fn is_gated(&self) -> bool {
        self.answer.as_ref().is_some_and(|answer| answer.is_gated())
    }

    /// The ruling on a resumption as it stands now, for the filter state.
    pub fn ruling(&self) -> Option<Ruling> {
        self.answer.as_ref().map(|answer| answer.ruling()).or(self.ruling)
    }

    /// The response has ended cleanly, with its body or, `with_trailers`, where
    /// nothing can be sent any more.
    pub fn response_end<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        with_trailers: bool,
    ) -> BodyStep {
        if let Some(answer) = &mut self.answer {
            return answer.end(guard, at, with_trailers);
        }
        if let Some(mut recorder) = self.recorder.take() {
            recorder.finish(&guard.ledger, at);
            recorder.close(&guard.ledger, at);
        }
        BodyStep::default()
    }

    /// Whether [`Exchange::close`] has anything to do.
    pub fn is_open(&self) -> bool {
        self.uncounted || self.recorder.is_some() || self.answer.is_some()
    }

    /// The exchange is over, however it ended. `ended_by_upstream` tells
    /// whether it was the upstream that broke it off.
    pub fn close<S: Store>(
        &mut self,
        guard: &Guard,
        at: &mut Access<'_, S>,
        ended_by_upstream: impl FnOnce() -> bool,
    ) -> CloseStep {
        if let Some(mut recorder) = self.recorder.take() {
            recorder.close(&guard.ledger, at);
        }
        let mut step = CloseStep { count: self.take_uncounted(), ..CloseStep::default() };
        if let Some(mut answer) = self.answer.take() {
            let (outcome, found) = answer.close(guard, at, ended_by_upstream);
            self.ruling = Some(answer.ruling());
            step.outcome = Some(outcome);
            step.found = found;
        }
        step
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
