//! What happens between a request and its answer, or its first event, counts:
//! what was read of the session when the request came may be old by then.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use support::{Answer, Gateway, Running, UUIDS};

const STREAM: [(&str, &str); 2] = [(":status", "200"), ("content-type", "text/event-stream")];

/// A resumption that has gone on to the upstream, which answers later.
fn asked(gw: &mut Gateway, session: &str, cursor: &str) -> mcp_resume_guard::exchange::Exchange {
    match gw.try_resume(session, cursor) {
        Answer::Passed { exchange, .. } => exchange,
        Answer::Refused(reply) => panic!("refused: {reply:?}"),
    }
}

fn answered(gw: &mut Gateway, exchange: mcp_resume_guard::exchange::Exchange) -> Running {
    gw.respond(exchange, &STREAM)
}

/// A server that replays all of a session's events after the cursor: what
/// another stream issued while the request was under way is no second issue.
#[test]
fn an_id_of_another_stream_issued_between_request_and_answer_is_not_ambiguous() {
    for between in [false, true] {
        let mut gw = Gateway::new(r#"{"history":"exclusive"}"#);
        gw.initialize("s");
        let mut a = gw.call("s", 1);
        gw.events(&mut a, &[UUIDS[0]]);
        gw.end(a);
        let mut x = gw.call("s", 2);
        gw.events(&mut x, &[UUIDS[1]]);
        if !between {
            gw.events(&mut x, &[UUIDS[2]]);
        }
        let exchange = asked(&mut gw, "s", UUIDS[0]);
        gw.now_ms += 50;
        if between {
            gw.events(&mut x, &[UUIDS[2]]);
        }
        let mut r = answered(&mut gw, exchange);
        gw.events(&mut r, &[UUIDS[1], UUIDS[2]]);
        gw.abort(x);
        gw.abort(r);
        assert_eq!(gw.verdict("s", UUIDS[2]), "continue", "between: {between}");
    }
}

/// A floor that was learned while the request was under way, and that its
/// answer shows to be none, is none.
#[test]
fn a_floor_learned_between_request_and_answer_is_forgotten() {
    for between in [false, true] {
        let mut gw = Gateway::new(r#"{"history":"exclusive"}"#);
        gw.initialize("s");
        let mut p = gw.call("s", 1);
        gw.events(&mut p, &["s_1", "s_2", "s_3", "s_4", "s_5", "s_6"]);
        gw.end(p);
        let mut exchange = None;
        if between {
            exchange = Some(asked(&mut gw, "s", "s_1"));
        }
        gw.now_ms += 50;
        let mut b = gw.resume("s", if between { "s_1" } else { "s_5" });
        if between {
            gw.events(&mut b, &["s_4"]);
            assert!(b.reset, "the gap is cut");
        }
        gw.abort(b);
        let exchange = exchange.unwrap_or_else(|| asked(&mut gw, "s", "s_1"));
        let mut a = answered(&mut gw, exchange);
        gw.events(&mut a, &["s_2", "s_3", "s_4", "s_5", "s_6"]);
        gw.abort(a);
        assert_eq!(gw.verdict("s", "s_1"), "continue", "between: {between}");
    }
}

/// A resumption whose cursor isn't known joins a stream by its first known id,
/// if only one has it.
#[test]
fn an_unknown_resumption_does_not_join_a_stream_by_an_id_that_another_got_meanwhile() {
    let mut gw = Gateway::new("{}");
    gw.initialize("s");
    let mut a = gw.call("s", 1);
    gw.events(&mut a, &["1", "2", "3"]);
    gw.end(a);
    let mut b = gw.call("s", 2);
    let exchange = asked(&mut gw, "s", "zz");
    gw.now_ms += 50;
    gw.events(&mut b, &["1", "2", "3"]);
    let mut r = answered(&mut gw, exchange);
    gw.events(&mut r, &["3", "4"]);
    gw.events(&mut b, &["4"]);
    gw.abort(b);
    gw.abort(r);
    assert_eq!(gw.verdict("s", "4"), "continue");
}

/// The same where the stream that it joins wrongly is the standalone one, which
/// is never finished: what the resumption brings then seems issued there, too.
#[test]
fn an_unknown_resumption_does_not_join_the_standalone_stream_by_stale_news() {
    for between in [false, true] {
        let mut gw = Gateway::new("{}");
        gw.initialize("s");
        let mut l = gw.listen("s");
        gw.events(&mut l, &["1", "2", "3"]);
        gw.end(l);
        let mut p = gw.call("s", 1);
        if !between {
            gw.events(&mut p, &["1", "2", "3"]);
        }
        let exchange = asked(&mut gw, "s", "zz");
        gw.now_ms += 50;
        if between {
            gw.events(&mut p, &["1", "2", "3"]);
        }
        let mut r = answered(&mut gw, exchange);
        gw.events(&mut r, &["3", "4"]);
        gw.events(&mut p, &["4"]);
        gw.abort(p);
        gw.abort(r);
        assert_eq!(gw.verdict("s", "4"), "continue", "between: {between}");
    }
}

/// The first connection still runs, and ends between request and answer.
#[test]
fn what_the_first_connection_brings_meanwhile_is_known() {
    for ends in [false, true] {
        for answers in [false, true] {
            let mut gw = Gateway::new(r#"{"history":"exclusive"}"#);
            gw.initialize("s");
            let mut p = gw.call("s", 1);
            gw.events(&mut p, &["s_1", "s_2"]);
            let exchange = asked(&mut gw, "s", "s_1");
            gw.now_ms += 50;
            gw.events(&mut p, &["s_3"]);
            if answers {
                gw.answer(&mut p, "s_4", 1);
            }
            let p = if ends {
                gw.end(p);
                None
            } else {
                Some(p)
            };
            let mut r = answered(&mut gw, exchange);
            gw.events(&mut r, &["s_2", "s_3"]);
            gw.answer(&mut r, "s_4", 1);
            p.map(|p| gw.abort(p));
            let ended = gw.end(r);
            assert_eq!(ended.replay, Some(("complete", "passed")), "{:?}", ended.found);
            for cursor in ["s_1", "s_2", "s_3", "s_4"] {
                assert_eq!(gw.verdict("s", cursor), "continue", "{cursor} {ends} {answers}");
            }
        }
    }
}

/// Two resumptions of one closed stream, the second of which asks before the
/// first is answered; each brings new ids.
#[test]
fn two_resumptions_of_one_closed_stream() {
    for order in 0..4 {
        let mut gw = Gateway::new(r#"{"history":"exclusive"}"#);
        gw.initialize("s");
        let mut p = gw.call("s", 1);
        gw.events(&mut p, &["w-a", "w-b"]);
        gw.end(p);
        let first = asked(&mut gw, "s", "w-a");
        let second = asked(&mut gw, "s", "w-b");
        gw.now_ms += 50;
        let mut first = answered(&mut gw, first);
        let mut second = answered(&mut gw, second);
        match order {
            0 => {
                gw.events(&mut first, &["w-b", "w-c"]);
                gw.events(&mut second, &["w-c", "w-d"]);
                gw.abort(first);
                gw.abort(second);
            }
            1 => {
                gw.events(&mut second, &["w-c", "w-d"]);
                gw.events(&mut first, &["w-b", "w-c"]);
                gw.abort(first);
                gw.abort(second);
            }
            2 => {
                gw.events(&mut first, &["w-b", "w-c"]);
                gw.end(first);
                gw.events(&mut second, &["w-c", "w-d"]);
                gw.end(second);
            }
            _ => {
                gw.events(&mut second, &["w-c", "w-d"]);
                gw.end(second);
                gw.events(&mut first, &["w-b", "w-c", "w-d"]);
                gw.end(first);
            }
        }
        for cursor in ["w-a", "w-b", "w-c", "w-d"] {
            assert_eq!(gw.verdict("s", cursor), "continue", "{cursor} {order}");
        }
        let mut last = gw.resume("s", "w-b");
        gw.events(&mut last, &["w-c", "w-d"]);
        let ended = gw.end(last);
        assert!(ended.found.is_empty(), "{order} {:?}", ended.found);
    }
}

/// Bodies of POSTs that wait for their answer hold none of the budget.
#[test]
fn calls_that_wait_do_not_take_others_bodies() {
    let mut gw = Gateway::new(r#"{"history":"exclusive","retention":{"events_per_stream":1}}"#);
    gw.initialize("s");
    let large = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":"{}"}}"#,
        "x".repeat(65_000)
    );
    let waiting: Vec<_> = (0..17).map(|_| gw.post_unanswered("s", &large)).collect();
    let mut p = gw.post("s", &large.replace("\"id\":1", "\"id\":77"));
    gw.events(&mut p, &["s_1", "s_2", "s_3"]);
    gw.end(p);
    let Answer::Refused(reply) = gw.try_resume("s", "s_1") else { panic!("passed") };
    assert!(String::from_utf8_lossy(&reply.body).contains("\"id\":77"), "{:?}", reply.status);
    drop(waiting);
}
