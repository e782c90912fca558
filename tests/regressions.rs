//! One sequence for each finding.
mod support;
use std::rc::Rc;
use std::cell::Cell;
use mcp_resume_guard::store::{memory::SharedData, Store, Cas, CasMismatch};
use support::*;

const A: &str = "550e8400-e29b-41d4-a716-446655440000";
const B: &str = "6fa459ea-ee8a-3ca4-894e-db77e160355e";
const C: &str = "7d444840-9dc0-11d1-b245-5ffdce74fad2";
const D: &str = "1b4e28ba-2fa1-11d2-883f-0016d3cca427";
const GO: &str = "7ZKQ3M5VXN2LB4YTRW6CJHDPAE";
fn go(n: u32) -> String { format!("{GO}_{n}") }
fn ok(v: &str) { assert!(!v.starts_with("inconsistent"), "{v}"); }

#[test]
fn a_replayed_then_evicted() {
    let mut g = Gateway::new(r#"{"state":{"ids_per_stream":2}}"#);
    let mut o = g.listen("o");
    g.events(&mut o, &[A]);
    let mut s = g.listen("s");
    g.events(&mut s, &[B]);
    g.abort(s);
    // The broadcast that `s` missed is replayed to it, then more comes.
    let mut s = g.resume("s", B);
    g.events(&mut s, &[A, C, D]);
    ok(&g.verdict("s", A));
}
#[test]
fn a2_unplaced_then_evicted() {
    let mut g = Gateway::new(r#"{"state":{"ids_per_stream":2}}"#);
    let mut o = g.listen("o");
    g.events(&mut o, &[A]);
    let mut s = g.resume("s", B);
    g.events(&mut s, &[A, C, D]);
    ok(&g.verdict("s", A));
}
#[test]
fn b1_unplaced_ids_are_not_foreign() {
    let mut g = Gateway::new("{}");
    let mut o = g.listen("o");
    g.events(&mut o, &[&go(0), &go(1), &go(2)]);
    let mut s = g.resume("o", &go(7));
    g.events(&mut s, &[&go(9)]);
    ok(&g.verdict("s", &go(9)));
}
#[test]
fn b2_resumed_from_an_unplaced_one() {
    let mut g = Gateway::new("{}");
    let mut o = g.resume("o", B);
    g.events(&mut o, &[A]);
    g.end(o);
    let mut o = g.resume("o", A);
    g.events(&mut o, &[C]);
    ok(&g.verdict("s", A));
    ok(&g.verdict("s", C));
}
#[test]
fn c_range_and_single() {
    let mut g = Gateway::new("{}");
    let mut o = g.listen("o");
    g.events(&mut o, &[&go(0), &go(1), &go(2), &go(3)]);
    let mut s = g.listen("s");
    g.events(&mut s, &[&go(3)]);
    ok(&g.verdict("s", &go(1)));
}
#[test]
fn e_answer_without_id_on_a_resumption() {
    let mut g = Gateway::new("{}");
    for call in [1, 2] {
        let mut s = g.call("s", call);
        g.priming(&mut s, &format!("x{call}"));
        g.events(&mut s, &["0"]);
        g.abort(s);
        let mut s = g.resume("s", &format!("x{call}"));
        g.send(&mut s, &format!("data: {{\"jsonrpc\":\"2.0\",\"id\":{call},\"result\":{{}}}}\n\n"));
        g.end(s);
    }
    ok(&g.verdict("s", "0"));
}
#[test]
fn f_activity_on_an_unplaced_stream() {
    let mut g = Gateway::new(r#"{"retention":{"seconds":10},"state":{"ids_per_stream":2}}"#);
    let mut s = g.listen("s");
    g.events(&mut s, &[A, B, C]);
    g.abort(s);
    let mut s = g.resume("s", A);
    g.now_ms += 11_000;
    g.events(&mut s, &[D]);
    ok(&g.verdict("s", B));
}
#[test]
fn f2_answer_on_an_unplaced_stream() {
    let mut g = Gateway::new(r#"{"state":{"ids_per_stream":2}}"#);
    let mut one = g.call("s", 1);
    g.events(&mut one, &["p-a", "p-b", "0"]);
    g.abort(one);
    // From an id that has left the window; the answer comes.
    let mut again = g.resume("s", "p-a");
    g.answer(&mut again, "p-z", 1);
    g.end(again);
    let mut two = g.call("s", 2);
    g.events(&mut two, &["0"]);
    ok(&g.verdict("s", "0"));
}
#[test]
fn h_stream_numbers_of_two_lives() {
    let mut g = Gateway::new(r#"{"state":{"sessions":1}}"#);
    let mut s = g.listen("s");
    g.events(&mut s, &["1", "2"]);
    g.abort(s);
    let mut live = g.resume("s", "2");
    g.initialize("other");
    let mut post = g.call("s", 1);
    g.events(&mut post, &["p"]);
    g.events(&mut live, &["3"]);
    let mut again = g.listen("s");
    g.events(&mut again, &["1", "2", "3"]);
    ok(&g.verdict("s", "3"));
}
#[test]
fn i_a_guess_at_the_stream() {
    let mut g = Gateway::new(r#"{"state":{"ids_per_stream":2}}"#);
    let mut post = g.call("s", 1);
    g.priming(&mut post, "0");
    g.events(&mut post, &["2", "4", "6"]);
    g.abort(post);
    let mut get = g.listen("s");
    g.events(&mut get, &["0"]);
    g.end(get);
    // `0` is the POST's, too, but has left its window there; the POST's
    // stream is replayed.
    let mut again = g.resume("s", "0");
    g.events(&mut again, &["2", "4", "6"]);
    ok(&g.verdict("s", "6"));
}
#[derive(Default)]
struct Flaky { data: SharedData, failing: Cell<bool> }
impl Store for Flaky {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<Cas>) { self.data.get(key) }
    fn set(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), CasMismatch> {
        if cas.is_some() && self.failing.get() { return Err(CasMismatch); }
        self.data.set(key, value, cas)
    }
}
fn flaky(config: &str) -> Gateway<Flaky> { Gateway::on(Rc::new(Flaky::default()), config) }
#[test]
fn d1_given_up_then_begun() {
    let mut g = flaky(r#"{"history":"exclusive"}"#);
    let mut s = g.listen("s");
    g.store.failing.set(true);
    g.events(&mut s, &["1"]);
    g.store.failing.set(false);
    g.now_ms += 1;
    g.initialize("s");
    ok(&g.verdict("s", "1"));
}
#[test]
fn d2_adoption_given_up() {
    let mut g = flaky("{}");
    let mut o = g.listen("o");
    g.events(&mut o, &[A]);
    g.store.failing.set(true);
    let mut s = g.listen("s");
    g.events(&mut s, &[A]);
    ok(&g.verdict("s", A));
}
#[test]
fn d3_answer_or_activity_given_up() {
    let mut g = flaky(r#"{"retention":{"seconds":10}}"#);
    let mut s = g.listen("s");
    g.events(&mut s, &["1", "2"]);
    g.abort(s);
    let mut s = g.resume("s", "2");
    g.now_ms += 11_000;
    g.store.failing.set(true);
    g.events(&mut s, &["3"]);
    ok(&g.verdict("s", "1"));
}
