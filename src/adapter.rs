//! The adapter to proxy-wasm (ABI 0.2.1): callbacks in, host calls out, and
//! no decision of its own.
//!
//! Header maps are read in their own phase only, and always as bytes: the
//! SDK's other getters panic on what isn't UTF-8, and a panic would take down
//! the worker's VM with all its streams.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use log::{error, info, warn};
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, BufferType, Bytes, ContextType, MapType, MetricType};

use crate::budget::Budget;
use crate::config::Config;
use crate::exchange::{BodyStep, Exchange, Guard, Origin};
use crate::fingerprint::Secret;
use crate::headers;
use crate::ledger::{Access, Ledger};
use crate::reply::{RESUMPTION_HEADER, Reply};
use crate::store::{Cas, CasMismatch, Store};
use crate::telemetry::{
    LogLimit, LogLine, LogPermit, Tally, configured_line, message_line, replays_metric,
    resumptions_metric,
};
use crate::verdict::{Ruling, Verdict};

/// A body is read in pieces, so that a large chunk doesn't grow the VM.
const PIECE: usize = 64 * 1024;

/// What the bodies of a worker's POSTs, and events that aren't complete, hold
/// together at the most.
const BODY_BUDGET: usize = 64 * 1024 * 1024;

/// A stream that was cut is reset so much later, when its last word is on its
/// way: a reset in the same callback would be carried out before that.
const RESET_AFTER: Duration = Duration::from_millis(5);

/// The filter state's name behind Envoy's prefix `wasm.`.
const FILTER_STATE: &str = "mcp_resumption";

#[allow(unsafe_code, reason = "the SDK's entry point is an exported function")]
mod entry {
    proxy_wasm::main! {{
        proxy_wasm::set_log_level(proxy_wasm::types::LogLevel::Info);
        proxy_wasm::set_root_context(|_| Box::new(super::Root::default()));
    }}
}

/// Shared data, as the host has it.
struct SharedData;

impl Store for SharedData {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<Cas>) {
        hostcalls::get_shared_data(key).unwrap_or_default()
    }

    fn set(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), CasMismatch> {
        hostcalls::set_shared_data(key, Some(value), cas).map_err(|_| CasMismatch)
    }
}

/// Microseconds of the host's monotonic clock, the same for all workers.
fn now_us() -> u64 {
    #[allow(unsafe_code, reason = "a WASI call without pointers of ours")]
    // SAFETY: the call has no preconditions.
    let nanoseconds = unsafe { wasip1::clock_time_get(wasip1::CLOCKID_MONOTONIC, 1) };
    nanoseconds.unwrap_or(0) / 1_000
}

/// Bytes from the host's cryptographic source.
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    #[allow(unsafe_code, reason = "a WASI call that fills a buffer")]
    // SAFETY: the pointer and the length are those of `bytes`.
    if unsafe { wasip1::random_get(bytes.as_mut_ptr(), N) }.is_err() {
        error!("the host has no randomness");
    }
    bytes
}

thread_local! {
    /// Metrics belong to the VM: the host keeps one counter behind all.
    static METRICS: RefCell<HashMap<String, u32>> = RefCell::default();
}

fn metric(name: &str) -> Option<u32> {
    METRICS.with_borrow_mut(|metrics| match metrics.get(name) {
        Some(id) => Some(*id),
        None => match hostcalls::define_metric(MetricType::Counter, name) {
            Ok(id) => Some(*metrics.entry(name.to_owned()).or_insert(id)),
            Err(status) => {
                error!("metric {name}: {status:?}");
                None
            }
        },
    })
}

fn increment(metric: u32, amount: u64) {
    if let Ok(amount) = i64::try_from(amount)
        && let Err(status) = hostcalls::increment_metric(metric, amount)
    {
        error!("metric {metric}: {status:?}");
    }
}

fn count(name: &str) {
    metric(name).into_iter().for_each(|metric| increment(metric, 1));
}

/// A header map, as the host serializes it; see [`headers`].
fn header_map(map: MapType) -> Vec<u8> {
    #[allow(unsafe_code, reason = "the SDK gives it in pieces only")]
    mod host {
        unsafe extern "C" {
            pub fn proxy_get_header_map_pairs(map: u32, data: *mut *mut u8, len: *mut usize)
            -> u32;
        }
    }
    let (mut data, mut len) = (std::ptr::null_mut(), 0);
    #[allow(unsafe_code, reason = "the host hands over memory of ours")]
    // SAFETY: the pointers are those of two variables. What comes back in them
    // is a block of this length that the host has got from the SDK's
    // `proxy_on_memory_allocate`, and that is nobody's but ours.
    unsafe {
        if host::proxy_get_header_map_pairs(map as u32, &mut data, &mut len) != 0 || data.is_null()
        {
            return Vec::new();
        }
        Vec::from_raw_parts(data, len, len)
    }
}

/// What the exchanges of one configuration share within a worker.
struct Worker {
    guard: Guard,
    log_limit: RefCell<LogLimit>,
    /// The metrics of a tally, in its order.
    tallied: Vec<Option<u32>>,
    /// Where this VM's nonces start, and how many it has given out.
    nonce_base: u64,
    nonces: Cell<u64>,
    /// The contexts of streams that are to be reset.
    to_reset: RefCell<Vec<u32>>,
}

impl Worker {
    fn with<T>(&self, work: impl FnOnce(&Guard, &mut Access<'_, SharedData>) -> T) -> T {
        let mut tally = Tally::default();
        let now_us = now_us();
        let now_ms = now_us / 1_000;
        let mut access = Access { store: &SharedData, now_ms, now_us, tally: &mut tally };
        let result = work(&self.guard, &mut access);
        if tally != Tally::default() {
            self.count_all(&tally);
        }
        result
    }

    fn count_all(&self, tally: &Tally) {
        for (metric, (_, amount)) in self.tallied.iter().zip(tally.counts()) {
            // The host refuses an increment by nothing.
            if let Some(metric) = metric
                && amount > 0
            {
                increment(*metric, amount);
            }
        }
    }

    fn next_random(&self) -> u64 {
        self.nonces.set(self.nonces.get().wrapping_add(1));
        self.nonce_base.wrapping_add(self.nonces.get())
    }

    fn reset_later(&self, context: u32) {
        self.to_reset.borrow_mut().push(context);
        set_tick(RESET_AFTER);
    }

    /// A stream has ended by itself. Envoy crashes if one is reset that has
    /// ended and isn't deleted yet.
    fn reset_no_more(&self, context: u32) {
        self.to_reset.borrow_mut().retain(|other| *other != context);
    }
}

fn set_tick(period: Duration) {
    if let Err(status) = hostcalls::set_tick_period(period) {
        error!("tick period: {status:?}");
    }
}

impl Origin for Worker {
    /// Envoy's own replies, and the guard's, run through the same callbacks.
    fn is_upstream(&self) -> bool {
        code_details().as_deref() == Some(b"via_upstream")
    }

    fn address(&self) -> Option<Bytes> {
        hostcalls::get_property(vec!["upstream", "address"]).ok().flatten()
    }

    fn random(&self) -> u64 {
        self.next_random()
    }
}

fn code_details() -> Option<Bytes> {
    hostcalls::get_property(vec!["response", "code_details"]).ok().flatten()
}

/// Whether it was the upstream that broke off a response that had begun.
fn ended_by_upstream() -> bool {
    code_details().is_some_and(|details| details.starts_with(b"upstream_reset"))
}

#[derive(Default)]
struct Root {
    worker: Option<Rc<Worker>>,
}

impl Context for Root {}

impl RootContext for Root {
    fn on_configure(&mut self, _: usize) -> bool {
        let text = self.get_plugin_configuration().unwrap_or_default();
        let config = match Config::parse(&text) {
            Ok(config) => config,
            Err(error) => {
                let problem = format!("mcp-resume-guard {}: {error}", env!("CARGO_PKG_VERSION"));
                error!("{}", message_line("refused", &problem));
                return false;
            }
        };
        let (ledger, refused_shape) =
            Ledger::join(&SharedData, &config.state, random::<{ Secret::LEN }>());
        if ledger.announces(&SharedData, &text) {
            info!("{}", configured_line(&config, &ledger));
            if let Some(wanted) = refused_shape {
                let kept = format!(
                    "the state of this vm_id has room for {} and keeps it until Envoy restarts; \
                     this configuration asks for {wanted}",
                    ledger.shape()
                );
                warn!("{}", message_line("state_kept", &kept));
            }
        }
        self.worker = Some(Rc::new(Worker {
            guard: Guard { config, ledger, body_budget: Budget::new(BODY_BUDGET) },
            log_limit: RefCell::default(),
            // Each is there before it counts.
            tallied: Tally::default().counts().map(|(name, _)| metric(name)).to_vec(),
            nonce_base: u64::from_le_bytes(random()),
            nonces: Cell::new(0),
            to_reset: RefCell::default(),
        }));
        true
    }

    fn create_http_context(&self, context: u32) -> Option<Box<dyn HttpContext>> {
        let worker = Rc::clone(self.worker.as_ref()?);
        let (request_body, response_body) = (false, false);
        Some(Box::new(Stream { context, worker, exchange: None, request_body, response_body }))
    }

    fn on_tick(&mut self) {
        set_tick(Duration::ZERO);
        let Some(worker) = &self.worker else { return };
        for context in worker.to_reset.take() {
            if hostcalls::set_effective_context(context).is_ok()
                && let Err(status) = hostcalls::reset_http_response()
            {
                error!("reset: {status:?}");
            }
        }
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

struct Stream {
    context: u32,
    worker: Rc<Worker>,
    exchange: Option<Exchange>,
    request_body: bool,
    response_body: bool,
}

impl Stream {
    /// Tells of a ruling, and counts the resumption if it is time to.
    fn tell(&self, ruling: Option<&Ruling>, counted: Option<&Ruling>, line: Option<&LogLine>) {
        if let Some(ruling) = ruling {
            self.show(ruling);
        }
        if let Some(ruling) = counted {
            count(&resumptions_metric(ruling));
        }
        let Some(line) = line else { return };
        let permit = self.worker.log_limit.borrow_mut().ask(now_us() / 1_000);
        if let LogPermit::Granted { left_out } = permit {
            let request = hostcalls::get_property(vec!["request", "id"]).ok().flatten();
            let text = line.to_json(request.as_deref(), left_out);
            match line.ruling.verdict {
                Verdict::Inconsistent(_) => warn!("{text}"),
                _ => info!("{text}"),
            }
        }
    }

    /// Tells of faults of a replay.
    fn tell_found(&self, ruling: Option<Ruling>, found: &[LogLine]) {
        for line in found {
            self.tell(ruling.as_ref(), None, Some(line));
        }
    }

    /// Puts the ruling where the access log finds it.
    fn show(&self, ruling: &Ruling) {
        if let Err(status) =
            hostcalls::set_property(vec![FILTER_STATE], Some(ruling.to_string().as_bytes()))
        {
            error!("filter state: {status:?}");
        }
    }

    fn reply(&self, reply: &Reply) -> Action {
        let headers = reply.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.send_http_response(reply.status.into(), headers, Some(&reply.body));
        Action::Pause
    }

    fn see_request_body(&mut self, size: usize, end: bool) {
        let Some(exchange) = self.exchange.as_mut().filter(|_| self.request_body) else { return };
        self.request_body = self.worker.with(|guard, access| {
            let mut start = 0usize;
            while start < size {
                let piece = size.saturating_sub(start).min(PIECE);
                let bytes =
                    body_piece(BufferType::HttpRequestBody, start, piece).unwrap_or_default();
                if bytes.is_empty() || !exchange.request_body(guard, access, &bytes, false) {
                    return false;
                }
                start = start.saturating_add(bytes.len());
            }
            !end || exchange.request_body(guard, access, &[], true)
        });
    }
}

fn body_piece(buffer: BufferType, start: usize, size: usize) -> Option<Bytes> {
    hostcalls::get_buffer(buffer, start, size).ok().flatten()
}

impl Context for Stream {}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, _: usize, end_of_stream: bool) -> Action {
        let map = header_map(MapType::HttpRequestHeaders);
        let (exchange, step) = self
            .worker
            .with(|guard, access| Exchange::begin(guard, access, &headers::fields(&map)));
        self.exchange = Some(exchange);
        self.request_body = step.body && !end_of_stream;
        for name in &step.remove {
            self.set_http_request_header(name, None);
        }
        if let Some((name, address)) = &step.pin {
            self.set_http_request_header(name, Some(address));
        }
        self.tell(step.ruling.as_ref(), step.count.as_ref(), step.log.as_ref());
        step.reply.map_or(Action::Continue, |reply| self.reply(&reply))
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        self.see_request_body(size, end_of_stream);
        Action::Continue
    }

    fn on_http_request_trailers(&mut self, _: usize) -> Action {
        self.set_http_request_trailer(RESUMPTION_HEADER, None);
        self.see_request_body(0, true);
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _: usize, end_of_stream: bool) -> Action {
        let Some(exchange) = &mut self.exchange else { return Action::Continue };
        if !exchange.follows_response() {
            return Action::Continue;
        }
        let map = header_map(MapType::HttpResponseHeaders);
        let fields = headers::fields(&map);
        let worker = &self.worker;
        let step = worker.with(|guard, access| {
            exchange.response(guard, access, &fields, end_of_stream, &**worker)
        });
        self.response_body = step.body && !end_of_stream;
        self.tell(step.ruling.as_ref(), step.count.as_ref(), step.log.as_ref());
        if let Some(reply) = step.reply {
            return self.reply(&reply);
        }
        for name in &step.remove {
            self.set_http_response_header(name, None);
        }
        if let Some(ruling) = &step.attest {
            self.set_http_response_header(RESUMPTION_HEADER, Some(&ruling.to_string()));
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        let Some(exchange) = self.exchange.as_mut().filter(|_| self.response_body) else {
            return Action::Continue;
        };
        let mut body = Body::default();
        self.worker.with(|guard, access| {
            let mut start = 0usize;
            while start < size {
                let piece = size.saturating_sub(start).min(PIECE);
                let bytes =
                    body_piece(BufferType::HttpResponseBody, start, piece).unwrap_or_default();
                if bytes.is_empty() {
                    exchange.response_body_unread(guard, access);
                    break;
                }
                start = start.saturating_add(bytes.len());
                let step = exchange.response_body(guard, access, &bytes);
                body.add(step, Some(bytes).filter(|_| exchange.is_gated()));
            }
            if end_of_stream {
                body.add(exchange.response_end(guard, access, false), None);
            }
        });
        let ruling = exchange.ruling();
        self.tell_found(ruling, &body.found);
        if body.is_replaced
            && let Err(status) =
                hostcalls::set_buffer(BufferType::HttpResponseBody, 0, size, &body.bytes)
        {
            error!("response body: {status:?}");
        }
        if body.reset && !end_of_stream {
            self.worker.reset_later(self.context);
        }
        Action::Continue
    }

    fn on_http_response_trailers(&mut self, _: usize) -> Action {
        self.set_http_response_trailer(RESUMPTION_HEADER, None);
        if let Some(exchange) = self.exchange.as_mut().filter(|_| self.response_body) {
            let step = self.worker.with(|guard, access| exchange.response_end(guard, access, true));
            let ruling = exchange.ruling();
            self.tell_found(ruling, &step.found);
        }
        Action::Continue
    }

    fn on_log(&mut self) {
        self.worker.reset_no_more(self.context);
        let Some(exchange) = self.exchange.as_mut().filter(|exchange| exchange.is_open()) else {
            return;
        };
        let step =
            self.worker.with(|guard, access| exchange.close(guard, access, ended_by_upstream));
        let ruling = exchange.ruling();
        let found = step.found.as_ref();
        self.tell(found.and(ruling.as_ref()), step.count.as_ref(), found);
        if let Some(outcome) = &step.outcome {
            count(&replays_metric(outcome));
        }
    }
}

/// What becomes of a chunk that is read in pieces.
#[derive(Default)]
struct Body {
    bytes: Vec<u8>,
    is_replaced: bool,
    reset: bool,
    found: Vec<LogLine>,
}

impl Body {
    fn add(&mut self, step: BodyStep, unchanged: Option<Bytes>) {
        self.is_replaced |= step.replace.is_some();
        self.bytes.append(&mut step.replace.or(unchanged).unwrap_or_default());
        self.reset |= step.reset;
        self.found.extend(step.found);
    }
}
