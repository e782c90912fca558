//! Who issued a stream, who answers its resumption, and where it is sent.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod support;

use support::{Answer, Gateway, Running};

const A: &str = "10.0.0.1:8000";
const B: &str = "10.0.0.2:8000";
const C: &str = "10.0.0.3:8000";

const MOVED: &str = "inconsistent;reason=owner_moved;action=rejected";
const MOVED_PASSED: &str = "inconsistent;reason=owner_moved;action=passed";
const UNVERIFIED: &str = "unverified;reason=owner_moved;action=passed";

fn config(more: &str) -> String {
    format!(r#"{{"history":"exclusive"{more}}}"#)
}

/// Session `a` at instance A, with a call that isn't answered.
fn gateway(more: &str) -> Gateway {
    let mut gateway = Gateway::new(&config(more));
    gateway.address = A.to_owned();
    gateway.initialize("a");
    let mut stream = gateway.call("a", 7);
    gateway.events(&mut stream, &["s_0", "s_1"]);
    gateway.abort(stream);
    gateway
}

/// What a resumption is told that is answered there: the ruling of the answer,
/// and the status of the reply in its place.
fn answered_by(gateway: &mut Gateway, address: &str, cursor: &str) -> (String, Option<u16>) {
    gateway.address = address.to_owned();
    let running = gateway.resume("a", cursor);
    let told = told(&running);
    gateway.abort(running);
    told
}

fn told(running: &Running) -> (String, Option<u16>) {
    let step = &running.step;
    assert_eq!(step.attest.is_none(), step.reply.is_some());
    let ruling = step.ruling.or(step.attest).unwrap();
    assert_eq!(step.count, Some(ruling));
    (ruling.to_string(), step.reply.as_ref().map(|reply| reply.status))
}

fn passed(ruling: &str) -> (String, Option<u16>) {
    (ruling.to_owned(), None)
}

#[test]
fn with_local_buffers_another_instance_is_refused() {
    let mut gateway = gateway(r#","replay_buffer":"local","reject":{"pending_calls":"status"}"#);
    assert_eq!(answered_by(&mut gateway, A, "s_0"), passed("continue"));
    assert_eq!(answered_by(&mut gateway, B, "s_0"), (MOVED.to_owned(), Some(400)));
    // It owns nothing by that.
    assert_eq!(answered_by(&mut gateway, A, "s_0"), passed("continue"));
}

#[test]
fn with_local_buffers_the_call_is_settled() {
    let mut gateway = gateway(r#","replay_buffer":"local""#);
    let settled = "inconsistent;reason=owner_moved;action=settled";
    assert_eq!(answered_by(&mut gateway, B, "s_0"), (settled.to_owned(), Some(200)));
    assert_eq!(answered_by(&mut gateway, B, "s_0"), (MOVED.to_owned(), Some(400)));
}

#[test]
fn the_policies_of_the_reason() {
    for (more, expected) in [
        (r#","reasons":{"owner_moved":"pass"}"#, passed(MOVED_PASSED)),
        (r#","mode":"observe""#, passed(MOVED_PASSED)),
        (
            r#","reasons":{"owner_moved":"session"},"reject":{"pending_calls":"status"}"#,
            (MOVED.to_owned(), Some(404)),
        ),
    ] {
        let mut gateway = gateway(&format!(r#","replay_buffer":"local"{more}"#));
        assert_eq!(answered_by(&mut gateway, B, "s_0"), expected, "{more}");
        let ended = gateway.verdict("a", "s_0").contains("session_terminated");
        assert_eq!(ended, expected.1 == Some(404), "{more}");
    }
}

#[test]
fn where_nobody_knows_it_passes_and_the_new_one_owns_it() {
    let mut gateway = gateway("");
    assert_eq!(answered_by(&mut gateway, B, "s_0"), passed(UNVERIFIED));
    assert_eq!(answered_by(&mut gateway, B, "s_0"), passed("continue"));
    assert_eq!(answered_by(&mut gateway, A, "s_0"), passed(UNVERIFIED));
}

#[test]
fn what_is_unverified_can_be_refused() {
    let mut gateway = gateway(r#","on_unverified":"reject""#);
    let rejected = "unverified;reason=owner_moved;action=rejected".to_owned();
    assert_eq!(answered_by(&mut gateway, B, "s_0"), (rejected, Some(400)));
}

#[test]
fn shared_buffers_are_everybodys() {
    let mut gateway = gateway(r#","replay_buffer":"shared""#);
    for address in [B, C, A] {
        assert_eq!(answered_by(&mut gateway, address, "s_0"), passed("continue"));
    }
}

#[test]
fn an_error_moves_nothing() {
    let mut gateway = gateway(r#","replay_buffer":"local""#);
    gateway.address = B.to_owned();
    for status in ["400", "401", "404", "405", "409", "500", "503"] {
        let Answer::Passed { exchange, .. } = gateway.try_resume("a", "s_0") else {
            panic!("refused");
        };
        let running = gateway
            .respond(exchange, &[(":status", status), ("content-type", "text/event-stream")]);
        assert!(running.step.reply.is_none() && running.step.attest.is_none());
        assert_eq!(running.step.count.unwrap().to_string(), "continue");
    }
    assert_eq!(answered_by(&mut gateway, A, "s_0"), passed("continue"));
}

#[test]
fn a_cursor_that_may_stand_elsewhere_moves_nothing() {
    // On a second stream, of another owner.
    let mut gateway = gateway(r#","replay_buffer":"local""#);
    gateway.address = B.to_owned();
    let mut second = gateway.post("a", r#"{"id":8,"method":"m"}"#);
    gateway.answer(&mut second, "s_0", 8);
    gateway.end(second);
    assert_eq!(answered_by(&mut gateway, A, "s_0"), passed("continue"));
    // In an incomplete session, on one that the guard doesn't know.
    let mut gateway = Gateway::new(r#"{"replay_buffer":"local"}"#);
    gateway.address = A.to_owned();
    let mut stream = gateway.listen("adopted");
    gateway.events(&mut stream, &["1", "2"]);
    gateway.address = B.to_owned();
    let running = gateway.resume("adopted", "1");
    assert_eq!(told(&running), passed("continue"));
}

#[test]
fn a_listening_stream_that_two_instances_carried_is_nobodys() {
    let mut gateway = Gateway::new(&config(r#","replay_buffer":"local""#));
    gateway.address = A.to_owned();
    gateway.initialize("a");
    for (address, id) in [(A, "1"), (B, "2")] {
        gateway.address = address.to_owned();
        let mut stream = gateway.listen("a");
        gateway.events(&mut stream, &[id]);
        gateway.abort(stream);
    }
    assert_eq!(answered_by(&mut gateway, A, "1"), passed("continue"));
}

fn identified(identity: Option<&str>) -> Vec<(&str, &str)> {
    let mut fields = vec![(":status", "200"), ("content-type", "text/event-stream")];
    fields.extend(identity.map(|identity| ("x-instance", identity)));
    fields
}

#[test]
fn an_instance_is_who_it_says() {
    let more = r#","replay_buffer":"local","owner":{"identity_header":"X-Instance"},
        "reject":{"pending_calls":"status"}"#;
    // At the same address after a restart; at another; without a name; with two.
    let same = passed("continue");
    let other = (MOVED.to_owned(), Some(400));
    for (before, after, address, expected) in [
        (Some("one"), Some("one"), A, &same),
        (Some("one"), Some("two"), A, &other),
        (Some("one"), Some("one"), B, &same),
        (Some("one"), None, B, &same),
        (None, Some("one"), B, &same),
        (Some("one"), Some(""), B, &same),
    ] {
        let mut gateway = Gateway::new(&config(more));
        gateway.address = A.to_owned();
        gateway.initialize("a");
        let exchange = gateway.post_unanswered("a", r#"{"id":1,"method":"m"}"#);
        let mut stream = gateway.respond(exchange, &identified(before));
        gateway.events(&mut stream, &["s_0"]);
        gateway.abort(stream);
        gateway.address = address.to_owned();
        let Answer::Passed { exchange, .. } = gateway.try_resume("a", "s_0") else {
            panic!("refused");
        };
        let running = gateway.respond(exchange, &identified(after));
        assert_eq!(&told(&running), expected, "{before:?} {after:?} {address}");
    }
}

const PIN: &str = r#","owner":{"pin_header":"X-Owner"}"#;

/// Where a request is pinned to, and whether a client's own pin is removed.
fn pin(gateway: &mut Gateway, list: &[(&str, &str)]) -> (Option<String>, bool) {
    let Answer::Passed { step, .. } = gateway.request(list) else { panic!("refused") };
    let removed = step.remove.iter().any(|name| name == "x-owner");
    let pin = step.pin.map(|(name, address)| {
        assert_eq!(name, "x-owner");
        address
    });
    (pin, removed)
}

#[test]
fn requests_are_pinned_to_who_issued() {
    let mut gateway = gateway(PIN);
    let to = |address: &str| (Some(address.to_owned()), false);
    for method in ["POST", "GET", "DELETE"] {
        let list = [(":method", method), (":path", "/mcp"), ("mcp-session-id", "a")];
        assert_eq!(pin(&mut gateway, &list), to(A), "{method}");
    }
    let resume = |cursor| {
        [(":method", "GET"), (":path", "/mcp"), ("mcp-session-id", "a"), ("last-event-id", cursor)]
    };
    assert_eq!(pin(&mut gateway, &resume("s_0")), to(A));
    // The stream moves, the session stays.
    answered_by(&mut gateway, B, "s_0");
    assert_eq!(pin(&mut gateway, &resume("s_0")), to(B));
    let list = [(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "a")];
    assert_eq!(pin(&mut gateway, &list), to(A));
    // Nobody's: a new session, and one that isn't known.
    for session in [vec![], vec![("mcp-session-id", "b")]] {
        let list = [vec![(":method", "POST"), (":path", "/mcp")], session].concat();
        assert_eq!(pin(&mut gateway, &list), (None, false));
    }
}

#[test]
fn an_adopted_session_is_pinned_to_who_served_it() {
    let mut gateway = Gateway::new(&config(PIN));
    gateway.address = B.to_owned();
    let mut stream = gateway.listen("adopted");
    gateway.events(&mut stream, &["1"]);
    let list = [(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "adopted")];
    assert_eq!(pin(&mut gateway, &list), (Some(B.to_owned()), false));
}

#[test]
fn a_client_cant_pin() {
    let more = format!(r#"{PIN},"paths":["/mcp"]"#);
    let mut gateway = gateway(&more);
    let forged = ("x-owner", "6.6.6.6:66");
    for (list, address) in [
        (vec![(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "a")], Some(A)),
        (vec![(":method", "POST"), (":path", "/mcp")], None),
        (vec![(":method", "PUT"), (":path", "/else")], None),
        (
            vec![(":method", "POST"), (":path", "/mcp"), ("mcp-protocol-version", "2026-07-28")],
            None,
        ),
    ] {
        let list = [list, vec![forged, forged]].concat();
        assert_eq!(pin(&mut gateway, &list), (address.map(str::to_owned), true), "{list:?}");
    }
    // And an upstream tells it no address.
    let mut gateway = Gateway::new(&config(PIN));
    let Answer::Passed { exchange, .. } = gateway.try_resume("x", "y") else { panic!("refused") };
    let running = gateway.respond(exchange, &[(":status", "200"), forged]);
    assert_eq!(running.step.remove, ["x-owner"]);
}

#[test]
fn only_an_ip_address_is_a_pin() {
    for (address, is_pin) in [
        ("[2001:db8::1]:443", true),
        ("/run/mcp.sock", false),
        ("envoy://internal", false),
        ("", false),
        (&*"1".repeat(48), false),
    ] {
        let mut gateway = Gateway::new(&config(PIN));
        gateway.address = address.to_owned();
        gateway.initialize("a");
        let list = [(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "a")];
        let expected = is_pin.then(|| address.to_owned());
        assert_eq!(pin(&mut gateway, &list).0, expected, "{address}");
    }
}

#[test]
fn room_for_addresses_is_bounded() {
    let mut gateway = gateway(PIN);
    for host in 1..200 {
        gateway.address = format!("10.1.0.{host}:8000");
        let mut stream = gateway.call("a", host);
        gateway.events(&mut stream, &[&format!("h{host}_0")]);
        gateway.abort(stream);
    }
    // The session's own is kept, and the newest.
    let list = [(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "a")];
    assert_eq!(pin(&mut gateway, &list).0.as_deref(), Some(A));
    let resume = [list[1], list[2], (":method", "GET"), ("last-event-id", "h199_0")];
    assert_eq!(pin(&mut gateway, &resume).0.as_deref(), Some("10.1.0.199:8000"));
    let bytes = u64::try_from(gateway.store.bytes()).unwrap();
    assert!(bytes < gateway.guard.ledger.max_memory_bytes());
}

#[test]
fn what_is_wrong_with_the_replay_doesnt_hide_it() {
    let mut gateway = gateway(r#","replay_buffer":"local","mode":"observe""#);
    gateway.address = B.to_owned();
    let stream = gateway.resume("a", "s_0");
    let ended = gateway.end(stream);
    assert_eq!(ended.found, ["inconsistent;reason=replay_empty;action=passed"]);
    assert_eq!(ended.ruling.as_deref(), Some(MOVED_PASSED));
    // What isn't known to be wrong gives way.
    let mut gateway = Gateway::new(&config(""));
    gateway.initialize("a");
    let mut stream = gateway.listen("a");
    gateway.events(&mut stream, &["1", "2"]);
    gateway.abort(stream);
    gateway.address = C.to_owned();
    let stream = gateway.resume("a", "1");
    assert_eq!(told(&stream), passed(UNVERIFIED));
    let empty = Some("inconsistent;reason=replay_empty;action=passed");
    assert_eq!(gateway.end(stream).ruling.as_deref(), empty);
}
