//! Settling: a refused resumption of a POST's stream ends the calls that wait
//! for it, each with its id exactly as the client sent it.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use support::{Answer, Gateway};

const EXCLUSIVE: &str = r#"{"history":"exclusive"}"#;
const FLOOR: &str = r#"{"history":"exclusive","retention":{"events_per_stream":1}}"#;

fn gateway(config: &str) -> Gateway {
    let mut gateway = Gateway::new(config);
    gateway.initialize("a");
    gateway
}

/// The ids that a resumption settles, as they stand in the text; none if it is
/// answered in another way.
fn settled(gateway: &mut Gateway, cursor: &str) -> Vec<String> {
    let Answer::Refused(reply) = gateway.try_resume("a", cursor) else { return Vec::new() };
    if reply.status != 200 {
        return Vec::new();
    }
    let body = String::from_utf8(reply.body).unwrap();
    body.split_terminator("\n\n")
        .map(|event| {
            let id = event.split_once(r#""id":"#).unwrap().1;
            id.split_once(r#","error":"#).unwrap().0.to_owned()
        })
        .collect()
}

fn status(gateway: &mut Gateway, cursor: &str) -> (u16, String) {
    gateway.try_resume("a", cursor).refusal().unwrap()
}

#[test]
fn a_call_that_waits_is_settled_once_for_each_cursor() {
    let mut gateway = gateway(EXCLUSIVE);
    let mut stream = gateway.call("a", 7);
    gateway.events(&mut stream, &["0/0", "1/0"]);
    assert_eq!(settled(&mut gateway, "9/0"), ["7"]);
    assert_eq!(
        status(&mut gateway, "9/0"),
        (400, "inconsistent;reason=ahead_of_head;action=rejected".to_owned())
    );
    assert_eq!(
        status(&mut gateway, "8/0"),
        (200, "inconsistent;reason=ahead_of_head;action=settled".to_owned())
    );
    assert_eq!(gateway.verdict("a", "1/0"), "continue");
}

#[test]
fn ids_are_sent_back_as_they_came() {
    let mut gateway = gateway(EXCLUSIVE);
    let body = r#"[{"id":"a\u00e9\"\\","method":"m"},{"id": 1.50 ,"method":"m"},
        {"method":"notifications/x"},{"id":"é ☃","method":"m"},{"id":-9007199254740993,"method":"m"}]"#;
    let mut stream = gateway.post("a", body);
    gateway.events(&mut stream, &["x_1"]);
    assert_eq!(
        settled(&mut gateway, "x_5"),
        [r#""a\u00e9\"\\""#, "1.50", r#""é ☃""#, "-9007199254740993"]
    );
}

#[test]
fn what_was_answered_before_the_cursor_is_not_pending() {
    let mut gateway = gateway(FLOOR);
    let body = r#"[{"id":1,"method":"m"},{"id":2,"method":"m"},{"id":3,"method":"m"}]"#;
    let mut stream = gateway.post("a", body);
    gateway.priming(&mut stream, "s_0");
    gateway.answer(&mut stream, "s_1", 2);
    gateway.events(&mut stream, &["s_2", "s_3"]);
    gateway.answer(&mut stream, "s_4", 3);
    // Before, at, and behind the first answer.
    assert_eq!(settled(&mut gateway, "s_0"), ["1", "2", "3"]);
    assert_eq!(settled(&mut gateway, "s_1"), ["1", "3"]);
    assert_eq!(settled(&mut gateway, "s_2"), ["1", "3"]);
    assert_eq!(gateway.verdict("a", "s_3"), "continue");
    assert_eq!(settled(&mut gateway, "s_9"), ["1"]);
}

#[test]
fn an_answer_without_an_id_stands_behind_the_id_before_it() {
    let mut gateway = gateway(FLOOR);
    let mut stream = gateway.post("a", r#"[{"id":1,"method":"m"},{"id":2,"method":"m"}]"#);
    gateway.send(
        &mut stream,
        "id:s_0\ndata:x\n\ndata:{\"id\":1,\"result\":1}\n\nid:s_1\ndata:[]\n\nid:s_2\ndata:[]\n\nid:s_3\ndata:[]\n\n",
    );
    // Not JSON: what it was can't be told, and nothing is settled.
    assert_eq!(settled(&mut gateway, "s_0"), Vec::<String>::new());

    let mut stream = gateway.post("a", r#"[{"id":1,"method":"m"},{"id":2,"method":"m"}]"#);
    gateway.send(
        &mut stream,
        "id:t_0\ndata:[]\n\ndata:{\"id\":1,\"result\":1}\n\nid:t_1\ndata:[]\n\nid:t_2\ndata:[]\n\nid:t_3\ndata:[]\n\n",
    );
    assert_eq!(settled(&mut gateway, "t_0"), ["1", "2"]);
    assert_eq!(settled(&mut gateway, "t_1"), ["2"]);
}

#[test]
fn requests_of_the_server_are_no_answers() {
    let mut gateway = gateway(EXCLUSIVE);
    let mut stream = gateway.call("a", 1);
    gateway
        .send(&mut stream, "id: s_0\ndata: {\"id\":1,\"method\":\"sampling/createMessage\"}\n\n");
    assert_eq!(settled(&mut gateway, "s_5"), ["1"]);
}

#[test]
fn where_nothing_is_settled() {
    let long = format!(r#"{{"id":"{}","method":"m"}}"#, "x".repeat(63));
    let many: Vec<String> = (0..9).map(|id| format!(r#"{{"id":{id},"method":"m"}}"#)).collect();
    for body in [
        "not json",
        "",
        r#"{"method":"notifications/x"}"#,
        r#"{"id":1,"result":{}}"#,
        &long,
        &format!("[{}]", many.join(",")),
        &format!(r#"{{"id":1,"method":"m","params":"{}"}}"#, "x".repeat(70_000)),
    ] {
        let mut gateway = gateway(EXCLUSIVE);
        let mut stream = gateway.post("a", body);
        gateway.events(&mut stream, &["s_0"]);
        assert_eq!(status(&mut gateway, "s_5").0, 400, "{body:.80}");
    }
    for (what, config, cursor) in [
        ("turned off", r#"{"history":"exclusive","reject":{"pending_calls":"status"}}"#, "s_5"),
        ("of no stream", EXCLUSIVE, "nobody"),
        ("standalone", EXCLUSIVE, "99"),
    ] {
        let mut gateway = gateway(config);
        let mut standalone = gateway.listen("a");
        gateway.events(&mut standalone, &["1"]);
        let mut stream = gateway.call("a", 1);
        gateway.events(&mut stream, &["s_0"]);
        assert_eq!(status(&mut gateway, cursor).0, 400, "{what}");
    }
}

#[test]
fn a_cursor_of_two_streams_settles_none() {
    let mut gateway = gateway(EXCLUSIVE);
    for call in [1, 2] {
        let mut stream = gateway.call("a", call);
        gateway.events(&mut stream, &["s_0"]);
    }
    assert_eq!(status(&mut gateway, "s_0").0, 400);
    assert_eq!(status(&mut gateway, "s_9").0, 400);
}

#[test]
fn an_escalated_fault_settles_first() {
    let mut gateway = gateway(r#"{"history":"exclusive","escalation":"session"}"#);
    let mut stream = gateway.call("a", 1);
    gateway.events(&mut stream, &["s_0"]);
    let Answer::Refused(reply) = gateway.try_resume("a", "s_5") else { panic!() };
    let body = String::from_utf8(reply.body).unwrap();
    assert_eq!(reply.status, 200);
    assert!(body.contains(r#""code":4404"#) && body.contains("reinitialize"), "{body}");
    assert_eq!(status(&mut gateway, "s_5").0, 404);
}

#[test]
fn the_body_of_the_request_may_come_late() {
    let mut gateway = gateway(EXCLUSIVE);
    let list = [(":method", "POST"), (":path", "/mcp"), ("mcp-session-id", "a")];
    let Answer::Passed { exchange, .. } = gateway.request(&list) else { panic!() };
    let sse = [(":status", "200"), ("content-type", "text/event-stream")];
    let mut running = gateway.respond(exchange, &sse);
    gateway.priming(&mut running, "s_0");
    gateway.late_body(&mut running, br#"{"id":1,"method":"m"}"#, true);
    assert_eq!(settled(&mut gateway, "s_5"), ["1"]);
}

#[test]
fn a_call_may_be_answered_where_it_is_resumed() {
    let mut gateway = gateway(EXCLUSIVE);
    let mut first = gateway.call("a", 1);
    gateway.events(&mut first, &["s_0"]);
    gateway.abort(first);
    let mut second = gateway.resume("a", "s_0");
    gateway.answer(&mut second, "s_1", 1);
    assert_eq!(status(&mut gateway, "s_5").0, 400);
}

#[test]
fn memory_for_ids_is_bounded() {
    let mut gateway = gateway(r#"{"history":"exclusive","state":{"streams_per_session":128}}"#);
    for call in 0..100 {
        let id = format!("{call}-{}", "x".repeat(50));
        let mut stream = gateway.post("a", &format!(r#"{{"id":"{id}","method":"m"}}"#));
        gateway.events(&mut stream, &[&format!("s{call}_0")]);
    }
    // The newest ones are kept.
    assert_eq!(settled(&mut gateway, "s99_5").len(), 1);
    assert_eq!(status(&mut gateway, "s0_5").0, 400);
    let bytes = u64::try_from(gateway.store.bytes()).unwrap();
    assert!(bytes < gateway.guard.ledger.max_memory_bytes());
}
