//! Why a resumption got its verdict, from whatever tells of it. The words are
//! those of `docs/verdicts.md`.

use anyhow::{Result, bail};
use mcp_resume_guard::verdict::{Action, Doubt, Fault};
use serde_json::Value;

const VERDICTS: &str = include_str!("../../docs/verdicts.md");

/// What a text tells of a resumption.
#[derive(Debug, Default, PartialEq)]
struct Told {
    outcome: String,
    reason: String,
    action: Option<String>,
    /// What the guard knew, or who asked: as much as the text says.
    more: Vec<String>,
}

/// Explains every verdict that the text tells of, each once.
pub fn explain(text: &str) -> Result<Vec<String>> {
    let mut all: Vec<Told> = Vec::new();
    for told in told(text) {
        match all.iter_mut().find(|a| (&a.outcome, &a.reason) == (&told.outcome, &told.reason)) {
            // An answer has it in its header and in its body.
            Some(same) => {
                same.action = same.action.take().or(told.action);
                same.more.extend(told.more);
            }
            None => all.push(told),
        }
    }
    if all.is_empty() {
        bail!(
            "no verdict in it: give a line of the access log with `resumption`, a line of the \
             guard's log, the JSON of the answer, or its header `mcp-resumption`"
        );
    }
    all.iter().map(Told::explain).collect()
}

fn told(text: &str) -> Vec<Told> {
    // JSON over several lines, or else whatever a line has.
    let whole = first_json(text).and_then(|value| Told::of_json(&value));
    if let Some(told) = whole.filter(|_| text.trim_start().starts_with('{')) {
        let rest: Vec<Told> = text.lines().skip(1).filter_map(Told::of_line).collect();
        return std::iter::once(told).chain(rest).collect();
    }
    let mut all: Vec<Told> = text.lines().filter_map(Told::of_line).collect();
    all.extend(first_json(text).and_then(|value| Told::of_json(&value)));
    all
}

/// The first JSON object that begins somewhere in the text.
fn first_json(text: &str) -> Option<Value> {
    let starts = text.match_indices('{').map(|(at, _)| text.get(at..).unwrap_or_default());
    let values = starts.filter_map(|rest| {
        serde_json::Deserializer::from_str(rest).into_iter::<Value>().next()?.ok()
    });
    values.into_iter().next()
}

impl Told {
    fn of_line(line: &str) -> Option<Self> {
        let of_json = first_json(line).and_then(|value| Told::of_json(&value));
        of_json.or_else(|| Told::of_ruling(line))
    }

    fn of_json(value: &Value) -> Option<Self> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let data = &value["error"]["data"];
        let mut told = if let Some(ruling) = value["resumption"].as_str() {
            Told::of_ruling(ruling)?
        } else if let (Some(outcome), Some(reason)) =
            (text(&data["outcome"]), text(&data["reason"]))
        {
            Told { outcome, reason, ..Told::default() }
        } else {
            Told {
                outcome: text(&value["outcome"])?,
                reason: text(&value["reason"])?,
                action: text(&value["action"]),
                more: Vec::new(),
            }
        };
        for (key, sentence) in [
            ("history", "its history of the session was {}"),
            ("streams", "streams of the session that it knew: {}"),
            ("owed", "events that follow the cursor on its stream: {}"),
            (
                "session",
                "the session's fingerprint, the same in all its lines until Envoy restarts: {}",
            ),
            ("client", "the client: {}"),
            ("user_agent", "its user agent: {}"),
            ("upstream", "the instance that answered: {}"),
            ("request_id", "the request's id in the access log: {}"),
        ] {
            match &value[key] {
                Value::Null => {}
                Value::String(text) => told.more.push(sentence.replace("{}", text)),
                other => told.more.push(sentence.replace("{}", &other.to_string())),
            }
        }
        Some(told)
    }

    /// As it stands in the header: `inconsistent;reason=below_floor;action=cut`.
    fn of_ruling(text: &str) -> Option<Self> {
        let words = |c: char| !(c.is_ascii_alphanumeric() || "_;=-".contains(c));
        text.split(words).find_map(|word| {
            let (outcome, rest) = word.split_once(';').unwrap_or((word, ""));
            let value = |key: &str| {
                rest.split(';').find_map(|part| Some(part.split_once('=')?).filter(|p| p.0 == key))
            };
            let reason = match outcome {
                "continue" if text.trim() == "continue" || text.contains("mcp-resumption") => {
                    "none"
                }
                "unverified" | "inconsistent" => value("reason")?.1,
                _ => return None,
            };
            let action = value("action").map(|(_, action)| action.to_owned());
            let (outcome, reason) = (outcome.to_owned(), reason.to_owned());
            Some(Told { outcome, reason, action, more: Vec::new() })
        })
    }

    fn explain(&self) -> Result<String> {
        let Told { outcome, reason, .. } = self;
        if outcome == "continue" {
            return Ok("continue: the guard issued this cursor on this session, and nothing \
                       speaks against it. The resumption passed."
                .to_owned());
        }
        let (section, known): (_, Vec<&str>) = match outcome.as_str() {
            "unverified" => ("### Unverified", Doubt::ALL.map(Doubt::as_str).to_vec()),
            "inconsistent" => ("### Inconsistent", Fault::ALL.map(Fault::as_str).to_vec()),
            _ => bail!("`{outcome}` is no outcome of the guard's"),
        };
        let Some([_, why, what_to_do]) = row(section, &format!("`{reason}`")) else {
            bail!("`{reason}` is no reason for `{outcome}`; there are {}", known.join(", "));
        };
        let mut lines = vec![format!("{outcome}: {reason}")];
        match row("## The rules", &format!("`{outcome};{reason}`")) {
            Some([number, condition, _]) => lines.push(format!("Rule {number}: {condition}")),
            None => lines
                .push("Found in the upstream's answer, which no rule can see before".to_owned()),
        }
        lines.push(format!("Why: {why}"));
        if !self.more.is_empty() {
            lines.push(format!("What is known: {}", self.more.join("; ")));
        }
        if let Some(action) = self.action.as_deref().and_then(done) {
            lines.push(format!("What was done: {action}"));
        }
        lines.push(format!("What to do: {what_to_do}"));
        lines.push(format!("More: docs/runbook.md#{reason}"));
        Ok(lines.join("\n"))
    }
}

fn done(action: &str) -> Option<&'static str> {
    let actions = [Action::Passed, Action::Rejected, Action::Settled, Action::Cut];
    Some(match actions.into_iter().find(|known| known.as_str() == action)? {
        Action::Passed => "nothing was refused: it went on as it came",
        Action::Rejected => {
            "the client got an HTTP error: 400 for a cursor, 404 where the session has ended"
        }
        Action::Settled => {
            "the client got 200 and a JSON-RPC error for each call that waited for this stream; \
             the calls may have run"
        }
        Action::Cut => {
            "the stream was ended before what is wrong, with an error for each call that waits"
        }
    })
}

/// The row of a table of the page, below this heading, that has a cell with
/// this text.
fn row(heading: &str, cell: &str) -> Option<[String; 3]> {
    let (_, section) = VERDICTS.split_once(&format!("\n{heading}\n"))?;
    let rows = section.lines().take_while(|line| !line.starts_with('#'));
    rows.filter(|line| line.starts_with('|')).find_map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let is_row = cells.first()?.contains(cell) || cells.last()?.contains(cell);
        let cells: [&str; 3] = cells.try_into().ok()?;
        is_row.then(|| cells.map(plain))
    })
}

/// Markdown as plain text.
fn plain(markdown: &str) -> String {
    let mut text = markdown.replace(['`', '*'], "");
    while let Some((before, rest)) = text.split_once('[') {
        let Some((words, rest)) = rest.split_once("](") else { break };
        let Some((_, after)) = rest.split_once(')') else { break };
        text = format!("{before}{words}{after}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_explained() {
        let faults = Fault::ALL.map(|fault| ("inconsistent", fault.as_str()));
        let doubts = Doubt::ALL.map(|doubt| ("unverified", doubt.as_str()));
        for (outcome, reason) in faults.into_iter().chain(doubts) {
            let header = format!("{outcome};reason={reason};action=passed");
            let [explained] = explain(&header).unwrap().try_into().unwrap();
            for part in [reason, "Why: ", "What to do: ", "nothing was refused"] {
                assert!(explained.contains(part), "{explained}");
            }
            assert!(!explained.contains("]("), "{explained}");
        }
    }

    #[test]
    fn whatever_tells_of_it() {
        for (text, parts) in [
            ("mcp-resumption: inconsistent;reason=below_floor;action=rejected", &["Rule 10"][..]),
            ("< mcp-resumption: continue\r", &["continue: "]),
            ("continue", &["continue: "]),
            (
                r#"{"resumption":"inconsistent;reason=replay_gap;action=cut","client":"10.0.0.7:5"}"#,
                &["Found in", "ended before", "10.0.0.7:5"],
            ),
            (
                r#"[2026-01-01][warning][wasm] wasm log mcp-resume-guard: {"event":"resumption","message":"{x}","outcome":"inconsistent","reason":"below_floor","action":"settled","history":"complete","streams":2,"owed":17}"#,
                &["below_floor", "was complete", "cursor on its stream: 17", "may have run"],
            ),
            (
                "HTTP/1.1 400 Bad Request\r\nmcp-resumption: inconsistent;reason=never_issued;action=rejected\r\n\r\n{\"jsonrpc\":\"2.0\",\"id\":null,\"error\":{\"code\":4400,\"message\":\"m\",\n \"data\":{\"outcome\":\"inconsistent\",\"reason\":\"never_issued\",\"recovery\":\"open_new_stream\"}}}",
                &["Rule 16", "HTTP error"],
            ),
            (
                "event: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":7,\"error\":{\"code\":4400,\"message\":\"m\",\"data\":{\"outcome\":\"inconsistent\",\"reason\":\"owner_moved\",\"recovery\":\"open_new_stream\"}}}",
                &["owner_moved", "Found in"],
            ),
            (": mcp-resume-guard: inconsistent;reason=replay_gap;action=cut", &["replay_gap"]),
        ] {
            let explained = explain(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(explained.len(), 1, "{text}: {explained:#?}");
            for part in parts {
                assert!(explained[0].contains(part), "{text}: {part}: {}", explained[0]);
            }
        }
    }

    #[test]
    fn several_at_once() {
        let lines = "{\"resumption\":\"inconsistent;reason=never_issued;action=rejected\"}\n\
                     {\"resumption\":null}\n\
                     {\"resumption\":\"unverified;reason=unknown_session;action=passed\"}\n\
                     {\"resumption\":\"inconsistent;reason=never_issued;action=rejected\"}";
        assert_eq!(explain(lines).unwrap().len(), 2);
    }

    #[test]
    fn what_tells_of_none() {
        for text in ["", "hello", "{}", "{\"resumption\":null}", "inconsistent", "please continue"]
        {
            assert!(explain(text).is_err(), "{text}");
        }
        let error = explain("inconsistent;reason=stale;action=rejected").unwrap_err().to_string();
        assert!(error.contains("stale") && error.contains("below_floor"), "{error}");
    }
}
