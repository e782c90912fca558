//! The configuration: JSON text, every key optional, nothing unknown let by.
//!
//! `docs/configuration.md` is the reference for users.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::verdict::Fault;

/// What the operator decides.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(title = "Configuration of mcp-resume-guard"))]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Whether the guard acts, or only tells.
    pub mode: Mode,
    /// The guarded paths, without query and trailing slash; none: all.
    pub paths: Vec<GuardedPath>,
    /// Who else may have issued events of a session.
    pub history: History,
    /// What becomes of a resumption that can't be verified.
    pub on_unverified: OnUnverified,
    /// How a cursor fault is answered.
    pub escalation: Escalation,
    /// The same for single reasons.
    #[cfg_attr(feature = "schema", schemars(schema_with = "schema::reasons"))]
    pub reasons: BTreeMap<String, ReasonPolicy>,
    /// How a refusal is sent.
    pub reject: Reject,
    /// What the upstream's replay buffer keeps, where that is known.
    pub retention: Retention,
    /// Who can replay.
    pub replay_buffer: ReplayBuffer,
    /// How upstream instances are told apart, and sessions pinned to them.
    pub owner: Owner,
    /// What a wrong replay leads to.
    pub replay: Replay,
    /// The bounds of the state.
    pub state: State,
    /// The bounds of what is read.
    pub limits: Limits,
}

/// Whether the guard acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Refuse what is inconsistent.
    #[default]
    Enforce,
    /// Pass everything, and tell the same verdicts.
    Observe,
}

impl Mode {
    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Mode::Enforce => "enforce",
            Mode::Observe => "observe",
        }
    }
}

/// Who else may have issued events of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum History {
    /// Other gateways too: an id not seen here may well have been issued.
    #[default]
    Shared,
    /// Nobody: this Envoy process sees all the traffic of its sessions.
    Exclusive,
}

impl History {
    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            History::Shared => "shared",
            History::Exclusive => "exclusive",
        }
    }

    /// What it means for a verdict.
    pub const fn meaning(self) -> &'static str {
        match self {
            History::Exclusive => {
                "this process sees all traffic of its sessions, so a cursor can be proven never issued"
            }
            History::Shared => {
                "other gateways may issue events too, so a cursor not seen here is unverified, never refused for that"
            }
        }
    }
}

/// What becomes of a resumption that can't be verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnUnverified {
    /// It passes, and says so.
    #[default]
    Pass,
    /// It is refused.
    Reject,
}

/// What a cursor fault ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Escalation {
    /// The resumption: 400.
    #[default]
    Cursor,
    /// The session: 404, so that the client initializes again.
    Session,
}

/// What one reason leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ReasonPolicy {
    /// The resumption passes, and says what was found.
    Pass,
    /// As [`Escalation::Cursor`].
    Cursor,
    /// As [`Escalation::Session`].
    Session,
}

/// How a refusal is sent.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Reject {
    /// What the calls that wait for the stream's answer get.
    pub pending_calls: PendingCalls,
}

/// What the calls that wait for the stream's answer get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PendingCalls {
    /// A JSON-RPC error each, in the stream.
    #[default]
    Settle,
    /// The HTTP status alone.
    Status,
}

/// What the upstream's replay buffer keeps: the declared floor.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Retention {
    /// Events of a stream.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1_000_000_000)))]
    pub events_per_stream: Option<u64>,
    /// Seconds since a stream's last event.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 31_536_000)))]
    pub seconds: Option<u64>,
    /// The same for a finished stream.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 31_536_000)))]
    pub finished_stream_seconds: Option<u64>,
}

/// Who can replay a stream's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ReplayBuffer {
    /// The instance that issued them.
    Local,
    /// Every instance.
    Shared,
    /// Nobody has said.
    #[default]
    Unknown,
}

/// How upstream instances are told apart.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Owner {
    /// The response header that names the instance.
    pub identity_header: Option<HeaderName>,
    /// The request header that pins a session to an address.
    #[cfg_attr(feature = "schema", schemars(schema_with = "schema::pin_header"))]
    pub pin_header: Option<HeaderName>,
}

/// What a wrong replay leads to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Replay {
    /// Events that are owed are passed over.
    pub gap: ReplayAction,
    /// Another session's event.
    pub foreign_session: ReplayAction,
    /// Another stream's event.
    pub foreign_stream: ReplayAction,
    /// An event from before the cursor.
    pub repeated: ReplayAction,
}

impl Default for Replay {
    fn default() -> Self {
        Replay {
            gap: ReplayAction::Cut,
            foreign_session: ReplayAction::Cut,
            foreign_stream: ReplayAction::Report,
            repeated: ReplayAction::Report,
        }
    }
}

/// What a wrong replay leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ReplayAction {
    /// It is told.
    Report,
    /// The stream is ended before it.
    Cut,
}

/// The bounds of the state.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct State {
    /// Sessions that are kept: 1 to 1,000,000.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1_000_000)))]
    pub sessions: u32,
    /// Streams of a session: 1 to 128.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 128)))]
    pub streams_per_session: u8,
    /// Ids of a stream that are no range: 1 to 1,024.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 1_024)))]
    pub ids_per_stream: u16,
    /// A session without traffic for this long is the first to be evicted.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 2_592_000)))]
    pub idle_seconds: u32,
}

impl Default for State {
    fn default() -> Self {
        State { sessions: 8192, streams_per_session: 16, ids_per_stream: 64, idle_seconds: 1800 }
    }
}

/// The bounds of what is read.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(serde::Serialize, schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Bytes of an event id: 1 to 65,536.
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = 65_536)))]
    pub event_id_bytes: u32,
    /// Bytes of a POST's body: 0 to 1,048,576.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1_048_576)))]
    pub request_body_bytes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { event_id_bytes: 4096, request_body_bytes: 65536 }
    }
}

/// An exact path, in the form in which requests are compared with it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "schema", derive(serde::Serialize))]
pub struct GuardedPath(String);

impl GuardedPath {
    /// Whether the path of a request, with its query, is this one.
    pub fn matches(&self, path: &[u8]) -> bool {
        let path = path.split(|byte| matches!(byte, b'?' | b'#')).next().unwrap_or_default();
        path.strip_suffix(b"/").unwrap_or(path) == self.0.as_bytes()
    }
}

impl<'de> Deserialize<'de> for GuardedPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let path = String::deserialize(deserializer)?;
        if !path.starts_with('/') || path.contains(['?', '#', ' ', '*']) {
            return Err(de::Error::custom(format_args!(
                "`{path}` is no exact path: it has to begin with `/`, without query, fragment, blank or `*`"
            )));
        }
        Ok(GuardedPath(path.strip_suffix('/').unwrap_or(&path).to_owned()))
    }
}

/// A header's name, in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "schema", derive(serde::Serialize))]
pub struct HeaderName(String);

impl HeaderName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for HeaderName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        // RFC 9110, section 5.6.2: a token.
        let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        if name.is_empty() || !name.bytes().all(token) {
            return Err(de::Error::custom(format_args!("`{name}` is no header name")));
        }
        Ok(HeaderName(name.to_ascii_lowercase()))
    }
}

/// Headers that can't carry a pin: what the guard, MCP or HTTP itself reads.
const UNPINNABLE: [&str; 14] = [
    "accept",
    "accept-encoding",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "cookie",
    "host",
    "last-event-id",
    "mcp-protocol-version",
    "mcp-resumption",
    "mcp-session-id",
    "te",
    "transfer-encoding",
];

/// The numbers, with the least and the most that is allowed.
const RANGES: [(&str, u64, u64); 9] = [
    ("state.sessions", 1, 1_000_000),
    ("state.streams_per_session", 1, 128),
    ("state.ids_per_stream", 1, 1_024),
    ("state.idle_seconds", 1, 2_592_000),
    ("limits.event_id_bytes", 1, 65_536),
    ("limits.request_body_bytes", 0, 1_048_576),
    ("retention.events_per_stream", 1, 1_000_000_000),
    ("retention.seconds", 1, 31_536_000),
    ("retention.finished_stream_seconds", 1, 31_536_000),
];

/// Why a configuration is refused: where, and what is allowed there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    path: String,
    problem: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() {
            write!(f, "configuration: {}", self.problem)
        } else {
            write!(f, "configuration: `{}`: {}", self.path, self.problem)
        }
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Reads the plugin configuration as Envoy hands it over.
    ///
    /// # Errors
    ///
    /// Text that is no JSON object, an unknown key, a wrong type, a value out
    /// of range: the error says where, and what is allowed.
    pub fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(Config::default());
        }
        if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
            return Err(ConfigError {
                path: String::new(),
                problem: "expected a JSON object as text: give it as a \
                          google.protobuf.StringValue (a Struct reaches a module as protobuf)"
                    .to_owned(),
            });
        }
        let config: Config =
            serde_json::from_slice(bytes).map_err(|error| explain(bytes, &error.to_string()))?;
        check_shapes(bytes)?;
        config.check_ranges()?;
        config.check_reasons()?;
        config.check_owner()?;
        Ok(config)
    }

    fn check_reasons(&self) -> Result<(), ConfigError> {
        let names = Fault::ALL.map(Fault::as_str);
        match self.reasons.keys().find(|reason| !names.contains(&reason.as_str())) {
            None => Ok(()),
            Some(unknown) => Err(ConfigError {
                path: format!("reasons.{unknown}"),
                problem: format!("unknown reason, expected one of `{}`", names.join("`, `")),
            }),
        }
    }

    /// The pin is taken from every request, and set.
    fn check_owner(&self) -> Result<(), ConfigError> {
        match &self.owner.pin_header {
            Some(name) if UNPINNABLE.contains(&name.as_str()) => Err(ConfigError {
                path: "owner.pin_header".to_owned(),
                problem: format!(
                    "`{}` has a meaning of its own, choose a header that nobody else uses",
                    name.as_str()
                ),
            }),
            _ => Ok(()),
        }
    }

    fn check_ranges(&self) -> Result<(), ConfigError> {
        let (state, limits, retention) = (&self.state, &self.limits, &self.retention);
        let values = [
            Some(state.sessions.into()),
            Some(state.streams_per_session.into()),
            Some(state.ids_per_stream.into()),
            Some(state.idle_seconds.into()),
            Some(limits.event_id_bytes.into()),
            Some(limits.request_body_bytes.into()),
            retention.events_per_stream,
            retention.seconds,
            retention.finished_stream_seconds,
        ];
        for ((path, least, most), value) in RANGES.into_iter().zip(values) {
            if let Some(value) = value
                && !(least..=most).contains(&value)
            {
                return Err(ConfigError {
                    path: path.to_owned(),
                    problem: format!("{value} is out of range, {least} to {most} is allowed"),
                });
            }
        }
        Ok(())
    }

    /// What the operator decided for a fault, if anything.
    pub fn reason_policy(&self, fault: Fault) -> Option<ReasonPolicy> {
        self.reasons.get(fault.as_str()).copied()
    }

    /// Whether requests on this path are guarded.
    pub fn guards(&self, path: &[u8]) -> bool {
        self.paths.is_empty() || self.paths.iter().any(|guarded| guarded.matches(path))
    }
}

/// What the types of the configuration don't say to the schema by themselves.
#[cfg(feature = "schema")]
mod schema {
    use std::borrow::Cow;

    use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

    use super::{GuardedPath, HeaderName, ReasonPolicy, UNPINNABLE};
    use crate::verdict::Fault;

    impl JsonSchema for GuardedPath {
        fn schema_name() -> Cow<'static, str> {
            "GuardedPath".into()
        }

        fn json_schema(_: &mut SchemaGenerator) -> Schema {
            json_schema!({
                "description": "An exact path, without query, fragment, blank or `*`.",
                "type": "string",
                "pattern": "^/[^?# *]*$",
            })
        }
    }

    impl JsonSchema for HeaderName {
        fn schema_name() -> Cow<'static, str> {
            "HeaderName".into()
        }

        fn json_schema(_: &mut SchemaGenerator) -> Schema {
            json_schema!({
                "description": "A header's name: a token (RFC 9110, section 5.6.2).",
                "type": "string",
                "pattern": "^[0-9A-Za-z!#$%&'*+.^_`|~-]+$",
            })
        }
    }

    pub fn reasons(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "propertyNames": { "enum": Fault::ALL.map(Fault::as_str) },
            "additionalProperties": generator.subschema_for::<ReasonPolicy>(),
        })
    }

    pub fn pin_header(generator: &mut SchemaGenerator) -> Schema {
        // Whatever its case.
        let letter = |c: char| match c {
            '-' => "-".to_owned(),
            c => format!("[{}{c}]", c.to_ascii_uppercase()),
        };
        let taken = UNPINNABLE.map(|name| name.chars().map(letter).collect::<String>());
        json_schema!({
            "anyOf": [
                {
                    "allOf": [generator.subschema_for::<HeaderName>()],
                    "not": { "pattern": format!("^({})$", taken.join("|")) },
                },
                { "type": "null" },
            ],
        })
    }
}

/// serde takes a list for an object, its members in their order, and an object
/// with one member for an enumeration's value.
fn check_shapes(text: &[u8]) -> Result<(), ConfigError> {
    let expect = |path: String, value: &RawValue, shape: &str| {
        // A string, a number, a word.
        let is_plain = !value.get().starts_with(['{', '[']);
        let is_right = if shape.is_empty() { is_plain } else { value.get().starts_with(shape) };
        let expected = match shape {
            "" => "a single value",
            "[" => "a list",
            _ => "an object",
        };
        let problem = format!("wrong type, expected {expected}");
        if is_right { Ok(()) } else { Err(ConfigError { path, problem }) }
    };
    for (key, value) in members(text) {
        let shape = match key.as_str() {
            "paths" => "[",
            "reasons" | "reject" | "retention" | "owner" | "replay" | "state" | "limits" => "{",
            _ => "",
        };
        expect(key.clone(), value, shape)?;
        for (inner, value) in members(value.get().as_bytes()) {
            expect(format!("{key}.{inner}"), value, "")?;
        }
    }
    Ok(())
}

/// What serde refuses, with where that is and what is allowed there.
fn explain(text: &[u8], problem: &str) -> ConfigError {
    let path = refused_member(text);
    if let Err(error) = check_shapes(text)
        && error.path == path
    {
        return error;
    }
    let allowed = match RANGES.into_iter().find(|(number, ..)| *number == path) {
        Some((_, least, most)) => format!(": a number, {least} to {most} is allowed"),
        None if problem.contains("expected value") => choices(&path),
        None => String::new(),
    };
    ConfigError { path, problem: format!("{problem}{allowed}") }
}

/// What serde says to a word that is none of those that are allowed.
fn choices(path: &str) -> String {
    let nested = match path.split_once('.') {
        Some((outer, inner)) => format!(r#"{{{}:{{{}:"?"}}}}"#, quoted(outer), quoted(inner)),
        None => format!(r#"{{{}:"?"}}"#, quoted(path)),
    };
    let refused =
        serde_json::from_slice::<Config>(nested.as_bytes()).map_err(|error| error.to_string());
    let said = refused.err().unwrap_or_default();
    let choices = said.split_once(", expected ").and_then(|(_, rest)| rest.split_once(" at line"));
    choices.map(|(choices, _)| format!(": {choices} is allowed")).unwrap_or_default()
}

/// The path of the first member that is refused by itself, too; empty if there
/// is none.
///
/// serde doesn't tell it, and a crate that does costs a tenth of the module.
fn refused_member(text: &[u8]) -> String {
    let is_refused = |text: &str| serde_json::from_slice::<Config>(text.as_bytes()).is_err();
    let outer = members(text).into_iter().find_map(|(key, value)| {
        let text = format!("{{{}:{value}}}", quoted(&key));
        is_refused(&text).then_some((key, value))
    });
    let Some((key, value)) = outer else { return String::new() };
    let name = quoted(&key);
    if is_refused(&format!("{{{name}:{{}}}}")) && is_refused(&format!("{{{name}:[]}}")) {
        return key;
    }
    for (inner, value) in members(value.get().as_bytes()) {
        if is_refused(&format!("{{{name}:{{{}:{value}}}}}", quoted(&inner))) {
            return format!("{key}.{inner}");
        }
    }
    let elements: Vec<&RawValue> =
        serde_json::from_slice(value.get().as_bytes()).unwrap_or_default();
    let wrong = elements.iter().position(|value| is_refused(&format!("{{{name}:[{value}]}}")));
    wrong.map_or(key.clone(), |number| format!("{key}[{number}]"))
}

/// The members of a JSON object in their order; none if it is no object.
fn members(text: &[u8]) -> Vec<(String, &RawValue)> {
    struct Members;

    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(String, &'de RawValue)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
            let mut members = Vec::new();
            while let Some(member) = map.next_entry()? {
                members.push(member);
            }
            Ok(members)
        }
    }

    serde_json::Deserializer::from_slice(text).deserialize_map(Members).unwrap_or_default()
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Config::parse(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn nothing_means_the_defaults() {
        for text in ["", " \n", "{}"] {
            assert_eq!(Config::parse(text.as_bytes()), Ok(Config::default()));
        }
    }

    #[test]
    fn a_refusal_says_what_is_allowed() {
        for (text, path, allowed) in [
            (r#"{"mode":null}"#, "mode", "`enforce` or `observe` is allowed"),
            (r#"{"replay":{"gap":true}}"#, "replay.gap", "`report` or `cut` is allowed"),
            (r#"{"reasons":{"below_floor":3}}"#, "reasons.below_floor", "`session` is allowed"),
            (r#"{"state":{"sessions":99999999999}}"#, "state.sessions", "1 to 1000000 is allowed"),
            (
                r#"{"limits":{"event_id_bytes":-1}}"#,
                "limits.event_id_bytes",
                "1 to 65536 is allowed",
            ),
            (r#"{"retention":{"seconds":1.5}}"#, "retention.seconds", "1 to 31536000 is allowed"),
            (r#"{"reject":"status"}"#, "reject", "expected an object"),
            (r#"{"state":null}"#, "state", "expected an object"),
            (r#"{"paths":"/mcp"}"#, "paths", "expected a list"),
        ] {
            let refused = refused(text);
            let is_told = refused.contains(&format!("`{path}`")) && refused.ends_with(allowed);
            assert!(is_told, "{text}: {refused}");
        }
    }

    #[test]
    fn the_documented_defaults_are_the_defaults() {
        let documented = r#"{
          "mode": "enforce", "paths": [], "history": "shared", "on_unverified": "pass",
          "escalation": "cursor", "reasons": {}, "reject": { "pending_calls": "settle" },
          "retention": { "events_per_stream": null, "seconds": null, "finished_stream_seconds": null },
          "replay_buffer": "unknown",
          "owner": { "identity_header": null, "pin_header": null },
          "replay": { "gap": "cut", "foreign_session": "cut", "foreign_stream": "report", "repeated": "report" },
          "state": { "sessions": 8192, "streams_per_session": 16, "ids_per_stream": 64, "idle_seconds": 1800 },
          "limits": { "event_id_bytes": 4096, "request_body_bytes": 65536 }
        }"#;
        assert_eq!(Config::parse(documented.as_bytes()), Ok(Config::default()));
    }

    #[test]
    fn a_refusal_names_the_key_and_what_is_allowed() {
        for (text, expected) in [
            (r#"{"mod":"observe"}"#, &["`mod`", "`mode`"][..]),
            (r#"{"state":{"session":1}}"#, &["`state.session`", "`sessions`"]),
            (r#"{"mode":"audit"}"#, &["`mode`", "`enforce`", "`observe`"]),
            (r#"{"state":{"sessions":0}}"#, &["`state.sessions`", "1 to 1000000"]),
            (r#"{"state":{"sessions":-1}}"#, &["`state.sessions`"]),
            (r#"{"state":{"streams_per_session":300}}"#, &["`state.streams_per_session`"]),
            (r#"{"retention":{"seconds":0}}"#, &["`retention.seconds`", "1 to"]),
            (r#"{"retention":{"seconds":"5"}}"#, &["`retention.seconds`", "u64"]),
            (r#"{"reasons":{"stale":"pass"}}"#, &["`reasons.stale`", "`below_floor`"]),
            (r#"{"reasons":{"below_floor":"ignore"}}"#, &["`reasons.below_floor`", "`session`"]),
            (r#"{"paths":["mcp"]}"#, &["`paths[0]`", "begin with `/`"]),
            (r#"{"state":[1,2,3,4]}"#, &["`state`", "an object"]),
            (r#"{"reject":[]}"#, &["`reject`", "an object"]),
            (r#"{"mode":{"observe":null}}"#, &["`mode`", "a single value"]),
            (r#"{"reasons":{"below_floor":{"pass":null}}}"#, &["`reasons.below_floor`", "single"]),
            (r#"{"owner":{"pin_header":"a b"}}"#, &["`owner.pin_header`", "header name"]),
            (
                r#"{"owner":{"pin_header":"Mcp-Session-Id"}}"#,
                &["`owner.pin_header`", "meaning of its own"],
            ),
            (r#"{"mode":"observe","mode":"enforce"}"#, &["duplicate field `mode`"]),
            (r#"{"mode":"observe"} x"#, &["trailing characters"]),
            ("[]", &["StringValue"]),
            ("\u{a}\u{b}", &[]),
            ("\u{a}\u{12}mode", &["StringValue"]),
        ] {
            if expected.is_empty() {
                continue;
            }
            let error = refused(text);
            for part in expected {
                assert!(error.contains(part), "{text} -> {error}");
            }
        }
    }

    #[test]
    fn paths_are_compared_without_query_and_trailing_slash() {
        let config = Config::parse(br#"{"paths":["/mcp/","/"]}"#).unwrap();
        for (path, guarded) in [
            ("/mcp", true),
            ("/mcp/", true),
            ("/mcp?a=/b", true),
            ("/mcp/?a", true),
            ("/", true),
            ("/?x", true),
            ("/mcp/x", false),
            ("/mcpx", false),
            ("/MCP", false),
        ] {
            assert_eq!(config.guards(path.as_bytes()), guarded, "{path}");
        }
        assert!(Config::default().guards(b"/anything"));
    }
}
