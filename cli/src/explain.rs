//! Why a resumption got its verdict, from whatever tells of it. The words are
//! those of `docs/verdicts.md`.

use anyhow::{Result, anyhow, bail};
use mcp_resume_guard::verdict::{Action, Doubt, Fault};
use serde_json::Value;

const VERDICTS: &str = include_str!("../../docs/verdicts.md");

/// JSON is looked for at this many `{` of a line: garbage must end soon.
const MOST_STARTS: usize = 64;

/// What a text tells of a resumption.
#[derive(Debug, Default, PartialEq)]
struct Told {
    outcome: String,
    reason: String,
    action: Option<String>,
    /// What the guard knew, or who asked: as much as the text says.
    more: Vec<String>,
}

impl Told {
    fn verdict(&self) -> (&str, &str) {
        (&self.outcome, &self.reason)
    }
}

/// Explains every verdict that the text tells of, each once.
pub fn explain(text: &str) -> Result<Vec<String>> {
    // With the number of lines that have it.
    let mut all: Vec<(Told, usize)> = Vec::new();
    let mut last = None;
    let mut unknown = None;
    for told in told(text) {
        if let Err(error) = told.known() {
            // Another program's line, where the guard's are there too.
            unknown.get_or_insert(error);
            continue;
        }
        // An answer has its verdict in the header and, without the action, in the body.
        let header = last.filter(|&at: &usize| {
            let (header, _) = &all[at];
            told.action.is_none() && header.action.is_some() && header.verdict() == told.verdict()
        });
        let same =
            |(a, _): &(Told, usize)| a.verdict() == told.verdict() && a.action == told.action;
        if let Some(at) = header {
            all[at].0.more.extend(told.more);
        } else if let Some(at) = all.iter().position(same) {
            all[at].1 += 1;
            last = Some(at);
        } else {
            last = Some(all.len());
            all.push((told, 1));
        }
    }
    if all.is_empty() {
        return Err(unknown.unwrap_or_else(|| {
            anyhow!(
                "no verdict in it: give a line of the access log with `resumption`, a line of the \
                 guard's log, the JSON of the answer, or its header `mcp-resumption`"
            )
        }));
    }
    all.iter().map(|(told, lines)| told.explain(*lines)).collect()
}

/// What each line tells, or JSON that begins in one and ends in a later one.
fn told(text: &str) -> Vec<Told> {
    let mut all = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let line = rest.lines().next().unwrap_or_default();
        let starts = line.match_indices('{').map(|(at, _)| at).take(MOST_STARTS);
        let json = starts.filter_map(|at| Told::of_json_at(rest, at)).next();
        if let Some((begin, told, end)) = json {
            all.extend(Told::of_ruling(&rest[..begin]));
            all.push(told);
            rest = &rest[end..];
        } else {
            all.extend(Told::of_ruling(line));
            rest = rest.split_once('\n').map_or("", |(_, rest)| rest);
        }
    }
    all
}

impl Told {
    /// What the JSON that begins there tells; with its begin and its end.
    fn of_json_at(text: &str, begin: usize) -> Option<(usize, Self, usize)> {
        let mut values = serde_json::Deserializer::from_str(&text[begin..]).into_iter::<Value>();
        let told = Told::of_json(&values.next()?.ok()?)?;
        Some((begin, told, begin + values.byte_offset()))
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
        let has_name = text.to_ascii_lowercase().contains("mcp-resumption");
        let words = |c: char| !(c.is_ascii_alphanumeric() || "_;=-".contains(c));
        text.split(words).find_map(|word| {
            let (outcome, rest) = word.split_once(';').unwrap_or((word, ""));
            let value = |key: &str| {
                rest.split(';').find_map(|part| Some(part.split_once('=')?).filter(|p| p.0 == key))
            };
            let reason = match outcome {
                "continue" if text.trim() == "continue" || has_name => "none",
                "unverified" | "inconsistent" => value("reason")?.1,
                _ => return None,
            };
            let action = value("action").map(|(_, action)| action.to_owned());
            let (outcome, reason) = (outcome.to_owned(), reason.to_owned());
            Some(Told { outcome, reason, action, more: Vec::new() })
        })
    }

    /// The heading of the outcome's table, if the guard has such a verdict.
    fn known(&self) -> Result<&'static str> {
        let Told { outcome, reason, .. } = self;
        let (section, known): (_, Vec<&str>) = match outcome.as_str() {
            "continue" => return Ok(""),
            "unverified" => ("### Unverified", Doubt::ALL.map(Doubt::as_str).to_vec()),
            "inconsistent" => ("### Inconsistent", Fault::ALL.map(Fault::as_str).to_vec()),
            _ => bail!("`{outcome}` is no outcome of the guard's"),
        };
        if !known.contains(&reason.as_str()) {
            bail!("`{reason}` is no reason for `{outcome}`; there are {}", known.join(", "));
        }
        Ok(section)
    }

    fn explain(&self, count: usize) -> Result<String> {
        let Told { outcome, reason, .. } = self;
        let count_line = (count > 1).then(|| format!("Lines that have it: {count}"));
        let section = self.known()?;
        if outcome == "continue" {
            let mut lines = vec![
                "continue: the guard issued this cursor on this session, and nothing speaks \
                 against it. The resumption passed."
                    .to_owned(),
            ];
            lines.extend(count_line);
            return Ok(lines.join("\n"));
        }
        let Some([_, why, what_to_do]) = row(section, &format!("`{reason}`")) else {
            bail!("`{reason}` isn't in docs/verdicts.md");
        };
        let mut lines = vec![format!("{outcome}: {reason}")];
        lines.extend(count_line);
        lines.push(self.found());
        lines.push(format!("Why: {why}"));
        // Where several lines have it, it would be unclear whose.
        if count == 1 && !self.more.is_empty() {
            lines.push(format!("What is known: {}", self.more.join("; ")));
        }
        if let Some(action) = self.action.as_deref().and_then(done) {
            lines.push(format!("What was done: {action}"));
        }
        lines.push(format!("What to do: {what_to_do}"));
        lines.push(format!("More: docs/runbook.md#{reason}"));
        Ok(lines.join("\n"))
    }

    /// Which rule it was, or that it was none.
    fn found(&self) -> String {
        let answer = "Found in the upstream's answer, which no rule can see before";
        let rule = |verdict: &str| {
            let [number, condition, _] = row("## The rules", verdict)?;
            Some(format!("Rule {number}: {condition}"))
        };
        if let Some(rule) = rule(&format!("`{};{}`", self.outcome, self.reason)) {
            return rule;
        }
        // A replay's fault comes at the request too, from the rule that remembers it. An answer
        // that has begun can only be cut.
        let remembered = rule("`inconsistent;`").filter(|_| self.reason.starts_with("replay_"));
        match (remembered, self.action.as_deref()) {
            (Some(rule), Some("rejected" | "settled")) => rule,
            (Some(rule), None) => format!("{answer}; or at the request. {rule}"),
            _ => answer.to_owned(),
        }
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
            ("MCP-Resumption: continue", &["continue: "]),
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
        let [twice, once] = explain(lines).unwrap().try_into().unwrap();
        assert!(twice.contains("never_issued\nLines that have it: 2\n"), "{twice}");
        assert!(!once.contains("Lines"), "{once}");
    }

    #[test]
    fn another_action_is_another_verdict() {
        let line = |action: &str, client: &str| {
            format!(
                "{{\"resumption\":\"inconsistent;reason=below_floor;action={action}\",\"client\":\"{client}\"}}\n"
            )
        };
        let text = line("rejected", "a") + &line("settled", "b") + &line("rejected", "c");
        let [rejected, settled] = explain(&text).unwrap().try_into().unwrap();
        assert!(rejected.contains("have it: 2") && rejected.contains("HTTP error"), "{rejected}");
        // Neither a's nor c's.
        assert!(!rejected.contains("client:"), "{rejected}");
        assert!(settled.contains("the client: b") && settled.contains("may have run"), "{settled}");
    }

    #[test]
    fn a_replays_fault_at_the_request_is_rule_11() {
        for fault in Fault::ALL.map(Fault::as_str) {
            let Some(_) = fault.strip_prefix("replay_") else { continue };
            for (action, found) in [
                (";action=rejected", "\nRule 11: "),
                (";action=settled", "\nRule 11: "),
                (";action=cut", "\nFound in the upstream's answer, which no rule can see before\n"),
                (
                    ";action=passed",
                    "\nFound in the upstream's answer, which no rule can see before\n",
                ),
                ("", "or at the request. Rule 11: "),
            ] {
                let explained = explain(&format!("inconsistent;reason={fault}{action}")).unwrap();
                assert!(explained[0].contains(found), "{action}: {}", explained[0]);
            }
        }
        let moved = explain("inconsistent;reason=owner_moved;action=rejected").unwrap();
        assert!(moved[0].contains("\nFound in"), "{}", moved[0]);
    }

    #[test]
    fn lines_of_others_are_passed_over() {
        let other = "{\"outcome\":\"success\",\"reason\":\"ok\"}";
        let unknown = "inconsistent;reason=stale;action=cut";
        let text = format!("{other}\n{unknown}\nunverified;reason=owner_moved;action=passed\n");
        let [explained] = explain(&text).unwrap().try_into().unwrap();
        assert!(explained.starts_with("unverified: owner_moved"), "{explained}");
        assert!(explain(other).unwrap_err().to_string().contains("`success`"));
    }

    #[test]
    fn nested_garbage_ends_soon() {
        let begun = std::time::Instant::now();
        let ruling = "inconsistent;reason=never_issued;action=rejected";
        for (garbage, times) in [
            ("{\"a\":", 100_000),
            ("{", 100_000),
            ("{\"a\":[", 100_000),
            ("{\"a\":{},", 100_000),
            // Over lines the time grows with their number, no faster.
            ("{\"a\":\n", 2000),
            ("{}\n{\"a\":[0,\n", 2000),
        ] {
            let text = format!("{}\n{ruling}", garbage.repeat(times));
            assert_eq!(explain(&text).unwrap().len(), 1, "{garbage}");
        }
        // What tries every `{` of such a line takes minutes.
        assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
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
