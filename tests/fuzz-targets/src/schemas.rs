//! JSON Schemas from untrusted sources, up to compilation.

use crate::host;
use skep_engine::Constraint;

pub(crate) const WORDS: &[&str] = &[
    "\"type\": \"object\"",
    "\"properties\": {",
    "\"required\": [\"a\"]",
    "\"$ref\": \"#\"",
    "\"$ref\": \"#/$defs/a\"",
    "\"$defs\": {",
    "\"anyOf\": [",
    "\"oneOf\": [",
    "\"allOf\": [",
    "\"not\": {}",
    "\"pattern\": \"^a+$\"",
    "\"pattern\": \"(?=a)\"",
    "\"minLength\": ",
    "\"maxItems\": ",
    "\"minimum\": ",
    "\"multipleOf\": 0.1",
    "\"enum\": [",
    "\"const\": ",
    "\"format\": \"date-time\"",
    "\"if\": {}",
    "\"then\": {}",
    "\"patternProperties\": {",
    "\"additionalProperties\": false",
    "\"uniqueItems\": true",
    "\"x-key-order\": \"any\"",
    "\"$schema\": \"http://json-schema.org/draft-04/schema#\"",
    "{",
    "}",
    "[",
    "]",
    ",",
    "\"",
    "1e308",
    "true",
];

pub(crate) fn schema(input: &[u8]) {
    let Ok(schema) = serde_json::from_slice(input) else { return };
    let engine = host::engine();
    if engine.validate_constraint(&Constraint::JsonSchema(schema)).is_err() {
        return;
    }
    let Ok(schema) = serde_json::from_slice(input) else { return };
    let _ = engine.constraint_warnings(&Constraint::JsonSchema(schema));
}

/// Returns real-world schemas.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let folder = format!("{}/../fixtures/schemas", env!("CARGO_MANIFEST_DIR"));
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    let lines = paths
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .flat_map(|text| text.lines().filter_map(schema_of_line).collect::<Vec<_>>());
    lines.collect()
}

fn schema_of_line(line: &str) -> Option<Vec<u8>> {
    let line: serde_json::Value = serde_json::from_str(line).ok()?;
    let schema = line.get("schema").unwrap_or(&line);
    Some(schema.to_string().into_bytes())
}
