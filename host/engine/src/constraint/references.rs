//! The targets of references in a JSON Schema: pointers, anchors and identifiers within the document.
//!
//! Invariant: a target is always a location in the same document. A reference out of the document is an error
//! that says so, because nothing is fetched.

use std::collections::HashMap;

use serde_json::Value;
use skep_validator::percent_decoded;

use super::drafts::Draft;

/// The identified locations in one document.
pub(super) struct Anchors {
    /// The pointer of each schema, by its absolute identifier, with `#name` for an anchor.
    locations: HashMap<String, String>,
    /// The base identifier of each schema that has its own, with the schema's pointer.
    bases: Vec<(String, String)>,
}

impl Anchors {
    /// Creates an empty table.
    pub fn new() -> Self {
        Anchors { locations: HashMap::new(), bases: Vec::new() }
    }

    /// Records the identifiers that the schema at `at` gives itself.
    pub fn record(&mut self, schema: &Value, at: &str, draft: Draft) {
        let base = self.base_of(at).to_string();
        let text = |key: &str| schema.get(key).and_then(Value::as_str);
        let id = text(draft.id_keyword()).or_else(|| text("$id"));
        // The older drafts ignore siblings of `$ref`.
        let ignored = draft.ignores_siblings_of_ref() && schema.get("$ref").is_some();
        let mut base = base;
        match id.filter(|_| !ignored) {
            Some(id) if id.starts_with('#') => {
                self.locations.insert(format!("{base}{id}"), at.to_string());
            }
            Some(id) => {
                base = join(&base, id.trim_end_matches('#'));
                self.locations.entry(base.clone()).or_insert_with(|| at.to_string());
                self.bases.push((at.to_string(), base.clone()));
            }
            None if at.is_empty() => {
                self.locations.insert(String::new(), String::new());
            }
            None => {}
        }
        for key in ["$anchor", "$dynamicAnchor"] {
            if let Some(name) = text(key) {
                self.locations.entry(format!("{base}#{name}")).or_insert_with(|| at.to_string());
            }
        }
    }

    /// Returns the pointer that a reference in the schema at `at` leads to, whether or not the document
    /// contains it.
    pub fn resolve(&self, at: &str, reference: &str) -> Option<String> {
        let (document, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let base = self.base_of(at);
        let target = if document.is_empty() { base.to_string() } else { join(base, document) };
        let root = match self.locations.get(&target) {
            Some(location) => location.as_str(),
            None if document.is_empty() && target.is_empty() => "",
            None => return None,
        };
        if fragment.is_empty() {
            return Some(root.to_string());
        }
        if fragment.starts_with('/') {
            return Some(format!("{root}{}", percent_decoded(fragment)));
        }
        self.locations.get(&format!("{target}#{}", percent_decoded(fragment))).cloned()
    }

    /// Returns the target of a `$dynamicRef`: the root's own anchor of that name, if it has one, or else the
    /// target that the reference has at `at`.
    pub fn resolve_dynamic(&self, at: &str, reference: &str) -> Option<String> {
        let outermost = reference.starts_with('#').then(|| self.resolve("", reference)).flatten();
        outermost.or_else(|| self.resolve(at, reference))
    }

    fn base_of(&self, at: &str) -> &str {
        let encloses = |location: &str| {
            at == location || at.strip_prefix(location).is_some_and(|rest| rest.starts_with('/'))
        };
        let nearest = self
            .bases
            .iter()
            .filter(|(location, _)| encloses(location))
            .max_by_key(|(location, _)| location.len());
        nearest.map_or("", |(_, base)| base)
    }
}

/// Resolves `reference` relative to `base`. Dot segments are not folded; an identifier that has them must be
/// referred to as it is written.
fn join(base: &str, reference: &str) -> String {
    let has_scheme = reference.split_once(':').is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
    });
    if has_scheme || base.is_empty() {
        return reference.to_string();
    }
    let authority_end =
        base.find("://").map_or(0, |at| base[at + 3..].find('/').map_or(base.len(), |to| at + 3 + to));
    if reference.starts_with('/') {
        return format!("{}{reference}", &base[..authority_end]);
    }
    match base[authority_end..].rfind('/') {
        Some(slash) => format!("{}{reference}", &base[..=authority_end + slash]),
        None => format!("{base}/{reference}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn references_lead_to_pointers_anchors_and_identifiers() {
        let mut anchors = Anchors::new();
        let root = json!({"$id": "https://example.com/schemas/root.json"});
        anchors.record(&root, "", Draft::Draft2020);
        anchors.record(&json!({"$id": "item.json"}), "/$defs/item", Draft::Draft2020);
        anchors.record(&json!({"$anchor": "leaf"}), "/$defs/item/properties/leaf", Draft::Draft2020);
        for (from, reference, target) in [
            ("", "#", Some("")),
            ("/properties/a", "#/$defs/a%20b", Some("/$defs/a b")),
            ("/properties/a", "#/$defs/a%+1b", Some("/$defs/a%+1b")),
            ("/properties/a", "#/$defs/%FF%20", Some("/$defs/%FF%20")),
            ("", "item.json", Some("/$defs/item")),
            ("", "/schemas/item.json#/properties/x", Some("/$defs/item/properties/x")),
            ("", "https://example.com/schemas/item.json#leaf", Some("/$defs/item/properties/leaf")),
            ("/$defs/item", "#leaf", Some("/$defs/item/properties/leaf")),
            ("/$defs/item", "root.json", Some("")),
            ("", "#leaf", None),
            ("", "https://example.com/other.json", None),
        ] {
            assert_eq!(anchors.resolve(from, reference).as_deref(), target, "{reference} from {from:?}");
        }
    }
}
