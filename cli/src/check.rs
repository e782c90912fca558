//! Configurations of the guard, wherever they stand, and what the filter, or
//! Envoy before it, says of them.

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use mcp_resume_guard::config::Config;
use mcp_resume_guard::ledger::Ledger;
use mcp_resume_guard::store::memory::SharedData;
use mcp_resume_guard::telemetry;
use serde_json::{Map, Value};

/// Envoy's wasm filter, in a configuration of Envoy.
const WASM: &str = "envoy.extensions.filters.http.wasm.v3.Wasm";
/// A message in clear, as control planes write those that they don't know.
const TYPED_STRUCT: [&str; 2] = ["udpa.type.v1.TypedStruct", "xds.type.v3.TypedStruct"];

/// A configuration of the guard in a file.
#[derive(Debug, PartialEq)]
pub struct Configuration {
    /// Where it stands.
    pub place: String,
    /// As the filter gets it, or why Envoy refuses it before.
    sent: Result<Vec<u8>, String>,
}

impl Configuration {
    /// What it means, or why it is refused.
    pub fn check(&self) -> Result<String, String> {
        let bytes = self.sent.as_ref().map_err(String::clone)?;
        let config = Config::parse(bytes).map_err(|error| error.to_string())?;
        let (ledger, _) = Ledger::join(&SharedData::default(), &config.state, [0; 16]);
        // It may stand under a mistyped key.
        let note = if bytes.is_empty() { "no configuration there: the defaults: " } else { "" };
        Ok(format!("{note}{}", telemetry::meaning(&config, &ledger)))
    }
}

/// The configurations in a text that is one, or that has some.
pub fn configurations(text: &str) -> Result<Vec<Configuration>> {
    let as_it_is = || {
        let sent = Ok(text.as_bytes().to_vec());
        vec![Configuration { place: "configuration".to_owned(), sent }]
    };
    if Config::parse(text.as_bytes()).is_ok() {
        return Ok(as_it_is());
    }
    // JSON goes in as it is, with all that may be wrong with it.
    let json_document = serde_json::from_str::<Value>(text);
    let is_json = json_document.is_ok() || begins_with_brace(text);
    let documents = match json_document {
        Ok(document) => vec![document],
        Err(_) => match serde_saphyr::from_multiple(text) {
            Err(_) if is_json => return Ok(as_it_is()),
            documents => documents.context("no JSON and no YAML")?,
        },
    };
    let mut filters: Vec<Filter> = documents.iter().flat_map(filters_in).collect();
    if filters.iter().any(|filter| filter.is_guard) {
        filters.retain(|filter| filter.is_guard);
    }
    if !filters.is_empty() {
        if documents.iter().all(|document| document["kind"].is_null()) && has_merge_key(text) {
            let refused = "a YAML merge key, `<<`, in the file: Envoy doesn't know them";
            filters.iter_mut().for_each(|f| f.configuration.sent = Err(refused.to_owned()));
        }
        return Ok(filters.into_iter().map(|filter| filter.configuration).collect());
    }
    let [document] = documents.as_slice() else {
        bail!("no wasm filter in any of {} documents", documents.len());
    };
    if document.get("kind").is_some() || document.get("static_resources").is_some() {
        bail!("no wasm filter in it");
    }
    if is_json {
        return Ok(as_it_is());
    }
    let sent = Ok(json(document));
    Ok(vec![Configuration { place: "configuration".to_owned(), sent }])
}

/// Whether it is meant as JSON, whatever stands before it.
fn begins_with_brace(text: &str) -> bool {
    let text = text.trim_start_matches('\u{feff}');
    let mut lines = text.lines().map(str::trim_start);
    lines
        .find(|line| !line.is_empty() && !line.starts_with('#'))
        .is_some_and(|l| l.starts_with('{'))
}

/// kubectl merges them, and Envoy doesn't.
fn has_merge_key(text: &str) -> bool {
    let mut options = serde_saphyr::Options::default();
    options.merge_keys = serde_saphyr::MergeKeyPolicy::Error;
    serde_saphyr::from_multiple_with_options::<Value>(text, options).is_err()
        && serde_saphyr::from_multiple::<Value>(text).is_ok()
}

/// A wasm filter, which may be another than the guard.
struct Filter {
    is_guard: bool,
    configuration: Configuration,
}

impl Filter {
    fn new(place: String, filter: &Value, sent: Result<Vec<u8>, String>) -> Self {
        let text = filter.to_string();
        let is_guard = ["resume-guard", "resume_guard"].iter().any(|name| text.contains(name));
        Filter { is_guard, configuration: Configuration { place, sent } }
    }
}

/// The wasm filters of a document.
fn filters_in(document: &Value) -> Vec<Filter> {
    let kind = document["kind"].as_str().unwrap_or_default();
    let name = document["metadata"]["name"].as_str().unwrap_or_default();
    let resource = format!("{kind} {name}");
    let spec = &document["spec"];
    match kind {
        // As `kubectl get` prints several.
        "List" => document["items"].as_array().into_iter().flatten().flat_map(filters_in).collect(),
        // The API has an object here, and the control plane sends it as text.
        "WasmPlugin" => {
            let place = format!("{resource}, spec.pluginConfig");
            vec![Filter::new(place, document, Ok(json(&spec["pluginConfig"])))]
        }
        "TrafficExtension" => {
            let place = format!("{resource}, spec.wasm.pluginConfig");
            vec![Filter::new(place, document, Ok(json(&spec["wasm"]["pluginConfig"])))]
        }
        "EnvoyExtensionPolicy" => {
            let filters = spec["wasm"].as_array().into_iter().flatten().enumerate();
            filters
                .map(|(number, filter)| {
                    let place = format!("{resource}, spec.wasm[{number}].config");
                    Filter::new(place, filter, Ok(json(&filter["config"])))
                })
                .collect()
        }
        _ => {
            let place = if kind.is_empty() { String::new() } else { format!("{resource}, ") };
            let mut filters = Vec::new();
            search(document, &place, &mut filters);
            filters
        }
    }
}

/// Looks for Envoy's wasm filter in whatever has a configuration of Envoy.
fn search(value: &Value, place: &str, filters: &mut Vec<Filter>) {
    if let Some(filter) = wasm_filter(value) {
        let name = filter["config"]["name"].as_str().unwrap_or("without a name");
        let sent = sent_by_envoy(&filter["config"]["configuration"]);
        filters.push(Filter::new(format!("{place}filter {name}"), value, sent));
        return;
    }
    match value {
        Value::Array(values) => values.iter().for_each(|value| search(value, place, filters)),
        Value::Object(values) => values.values().for_each(|value| search(value, place, filters)),
        _ => {}
    }
}

/// The message, if this is an Any that holds a wasm filter's.
fn wasm_filter(any: &Value) -> Option<&Value> {
    let (_, message) = any["@type"].as_str()?.rsplit_once('/')?;
    if message == WASM {
        return Some(any);
    }
    let inner = any["type_url"].as_str().or_else(|| any["typeUrl"].as_str())?;
    let is_wasm = inner.rsplit('/').next() == Some(WASM);
    (TYPED_STRUCT.contains(&message) && is_wasm).then(|| &any["value"])
}

/// What Envoy makes of a `configuration`, a google.protobuf.Any in JSON: the
/// bytes that the filter gets, or a refusal of its own. Tried on Envoy 1.40.
/// A type that isn't here is refused, though an empty message of it would do.
fn sent_by_envoy(configuration: &Value) -> Result<Vec<u8>, String> {
    let nothing = Value::Object(Map::new());
    if configuration.is_null() || *configuration == nothing {
        return Ok(Vec::new());
    }
    let refused = |problem: &str| {
        Err(format!(
            "configuration: {problem}: Envoy expects `\"@type\": \
             type.googleapis.com/google.protobuf.StringValue` and the JSON as text in `value`"
        ))
    };
    let Some(members) = configuration.as_object() else { return refused("no object") };
    let Some(url) = members.get("@type") else { return refused("without `@type`") };
    let message = match url.as_str().and_then(|url| url.rsplit_once('/')) {
        Some((host, message)) if !host.is_empty() => message,
        _ => return refused(&format!("`@type` {url} is no type URL")),
    };
    if let Some(key) = members.keys().find(|key| !["@type", "value"].contains(&key.as_str())) {
        return refused(&format!("unknown field `{key}`"));
    }
    let value = members.get("value").filter(|value| !value.is_null() && **value != nothing);
    match (message, value) {
        ("google.protobuf.Empty", None) if !members.contains_key("value") => Ok(Vec::new()),
        (
            "google.protobuf.StringValue" | "google.protobuf.BytesValue" | "google.protobuf.Struct",
            None,
        ) => Ok(Vec::new()),
        ("google.protobuf.StringValue", Some(Value::String(text))) => Ok(text.clone().into_bytes()),
        ("google.protobuf.BytesValue", Some(Value::String(text))) => {
            bytes(text).map_or_else(|| refused("`value` is no base 64"), Ok)
        }
        // It reaches the filter as protobuf: a field's tag and a length, whatever is in it.
        ("google.protobuf.Struct", Some(Value::Object(_))) => Ok(vec![0x0a, 0]),
        (
            "google.protobuf.StringValue" | "google.protobuf.BytesValue" | "google.protobuf.Struct",
            Some(_),
        ) => refused(&format!("the wrong type of `value` for a {message}")),
        _ => refused(&format!("a {message}")),
    }
}

/// Base 64 as protobuf's JSON has it: in both alphabets, padded or not.
fn bytes(text: &str) -> Option<Vec<u8>> {
    let config =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let engine = GeneralPurpose::new(&base64::alphabet::STANDARD, config);
    engine.decode(text.replace('-', "+").replace('_', "/")).ok()
}

/// As a control plane sends it; nothing where there is nothing.
fn json(value: &Value) -> Vec<u8> {
    if value.is_null() { Vec::new() } else { value.to_string().into_bytes() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of each configuration in it.
    fn said(text: &str) -> Vec<Result<String, String>> {
        let found = configurations(text).unwrap_or_else(|error| panic!("{text}: {error:#}"));
        found.iter().map(Configuration::check).collect()
    }

    #[test]
    fn json_goes_to_the_filter_as_it_is() {
        for text in
            ["", " \n", "{}", "{\"reasons\":{\"below_floor\":\"pass\",\"below_floor\":\"cursor\"}}"]
        {
            assert!(said(text)[0].is_ok(), "{text}");
        }
        for text in [
            "{\"mode\":\"observe\"} x",
            "{\"mode\":\"observe\",\"mode\":\"observe\"}",
            "\u{feff}{\"mode\":\"observe\"}",
            "# why\n{\"mode\":\"observe\"}",
            "\u{feff}\n# why\n  {\"mode\":\"observe\"}",
            "{mode: observe}",
            "{\"mode\":",
            "[]",
            "null",
        ] {
            assert!(said(text)[0].is_err(), "{text}");
        }
        assert!(said("# why\nmode: observe")[0].is_ok());
    }

    #[test]
    fn a_mistyped_key_is_seen() {
        for text in [
            "kind: WasmPlugin\nspec: {pluginconfig: {mode: nonsense}}",
            "kind: EnvoyExtensionPolicy\nspec: {wasm: [{name: guard}]}",
        ] {
            let meaning = said(text).remove(0).unwrap();
            assert!(meaning.starts_with("no configuration there: the defaults: mode enforce"));
        }
        let empty = said("{\"kind\":\"WasmPlugin\",\"spec\":{\"pluginConfig\":{}}}").remove(0);
        assert!(empty.unwrap().starts_with("mode enforce"));
    }

    #[test]
    fn a_list_has_items() {
        let plugin = |mode: &str| {
            format!(
                "{{\"kind\":\"WasmPlugin\",\"spec\":{{\"pluginConfig\":{{\"mode\":\"{mode}\"}}}}}}"
            )
        };
        let items = format!("{},{}", plugin("observe"), plugin("nonsense"));
        // JSON is YAML, too.
        for list in [
            format!("{{\"kind\":\"List\",\"items\":[{items}]}}"),
            format!("kind: List\nitems: [{items}]"),
        ] {
            let [first, second] = said(&list).try_into().unwrap();
            assert!(first.is_ok() && second.is_err(), "{list}");
        }
        assert!(configurations("kind: List\nitems: []").is_err());
    }

    #[test]
    fn merge_keys_are_kubectls() {
        let plugin = "kind: WasmPlugin\nspec: {pluginConfig: {<<: {mode: observe}}}";
        assert!(said(plugin)[0].as_ref().unwrap().starts_with("mode observe"));
        let filter = format!("a: {{\"@type\": x/{WASM}}}\nb: {{<<: {{c: 1}}}}");
        assert!(said(&filter)[0].as_ref().unwrap_err().contains("merge key"));
    }
}
