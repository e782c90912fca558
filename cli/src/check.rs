//! Configurations of the guard, wherever they stand, and what the filter says
//! of them.

use anyhow::{Context, Result, bail};
use mcp_resume_guard::config::Config;
use mcp_resume_guard::ledger::Ledger;
use mcp_resume_guard::store::memory::SharedData;
use mcp_resume_guard::telemetry;
use serde_json::Value;

/// Envoy's wasm filter, in a configuration of Envoy.
const WASM: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
const STRING_VALUE: &str = "type.googleapis.com/google.protobuf.StringValue";

/// A configuration of the guard in a file.
#[derive(Debug, PartialEq)]
pub struct Configuration {
    /// Where it stands.
    pub place: String,
    /// As the filter gets it.
    bytes: Vec<u8>,
}

impl Configuration {
    /// What it means, or why the filter refuses it.
    pub fn check(&self) -> Result<String, String> {
        let config = Config::parse(&self.bytes).map_err(|error| error.to_string())?;
        let (ledger, _) = Ledger::join(&SharedData::default(), &config.state, [0; 16]);
        Ok(telemetry::meaning(&config, &ledger))
    }
}

/// The configurations in a text that is one, or that has some.
pub fn configurations(text: &str) -> Result<Vec<Configuration>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).context("no JSON and no YAML")?;
    let mut filters: Vec<Filter> = documents.iter().flat_map(filters_in).collect();
    if filters.iter().any(|filter| filter.is_guard) {
        filters.retain(|filter| filter.is_guard);
    }
    if !filters.is_empty() {
        return Ok(filters.into_iter().map(|filter| filter.configuration).collect());
    }
    let [document] = documents.as_slice() else {
        bail!("no wasm filter in any of {} documents", documents.len());
    };
    if document.get("kind").is_some() || document.get("static_resources").is_some() {
        bail!("no wasm filter in it");
    }
    // JSON goes in as it is, with all that may be wrong with it.
    let is_json = serde_json::from_str::<Value>(text).is_ok() || text.trim_start().starts_with('{');
    let bytes = if is_json { text.as_bytes().to_vec() } else { json(document) };
    Ok(vec![Configuration { place: "configuration".to_owned(), bytes }])
}

/// A wasm filter, which may be another than the guard.
struct Filter {
    is_guard: bool,
    configuration: Configuration,
}

impl Filter {
    fn new(place: String, filter: &Value, bytes: Vec<u8>) -> Self {
        let text = filter.to_string();
        let is_guard = ["resume-guard", "resume_guard"].iter().any(|name| text.contains(name));
        Filter { is_guard, configuration: Configuration { place, bytes } }
    }
}

/// The wasm filters of a document.
fn filters_in(document: &Value) -> Vec<Filter> {
    let kind = document["kind"].as_str().unwrap_or_default();
    let name = document["metadata"]["name"].as_str().unwrap_or_default();
    let resource = format!("{kind} {name}");
    let spec = &document["spec"];
    match kind {
        // The API has an object here, and the control plane sends it as text.
        "WasmPlugin" => {
            let place = format!("{resource}, spec.pluginConfig");
            vec![Filter::new(place, document, json(&spec["pluginConfig"]))]
        }
        "TrafficExtension" => {
            let place = format!("{resource}, spec.wasm.pluginConfig");
            vec![Filter::new(place, document, json(&spec["wasm"]["pluginConfig"]))]
        }
        "EnvoyExtensionPolicy" => {
            let filters = spec["wasm"].as_array().into_iter().flatten().enumerate();
            filters
                .map(|(number, filter)| {
                    let place = format!("{resource}, spec.wasm[{number}].config");
                    Filter::new(place, filter, json(&filter["config"]))
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
    if value["@type"].as_str() == Some(WASM) {
        let name = value["config"]["name"].as_str().unwrap_or("without a name");
        let configuration = &value["config"]["configuration"];
        let bytes = match (configuration["@type"].as_str(), &configuration["value"]) {
            (None, _) => Vec::new(),
            (Some(STRING_VALUE), Value::String(text)) => text.clone().into_bytes(),
            // Any other message reaches the filter as protobuf: a field's tag
            // and a length, whatever is in it.
            _ => vec![0x0a, 0],
        };
        filters.push(Filter::new(format!("{place}filter {name}"), value, bytes));
        return;
    }
    match value {
        Value::Array(values) => values.iter().for_each(|value| search(value, place, filters)),
        Value::Object(values) => values.values().for_each(|value| search(value, place, filters)),
        _ => {}
    }
}

/// As a control plane sends it; nothing where there is nothing.
fn json(value: &Value) -> Vec<u8> {
    if value.is_null() { Vec::new() } else { value.to_string().into_bytes() }
}
