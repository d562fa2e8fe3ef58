//! The drafts of JSON Schema, and the differences between them.
//!
//! Invariant: a schema that names no draft is read as 2020-12, but older forms that have no meaning there (a
//! list of `items`, a boolean `exclusiveMinimum`) keep their old meaning.

use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Draft {
    Draft4,
    Draft6,
    Draft7,
    Draft2019,
    Draft2020,
}

impl Draft {
    /// Returns the draft that the root names in `$schema`.
    pub fn of(root: &Value) -> Draft {
        let named = root.get("$schema").and_then(Value::as_str).unwrap_or_default();
        let known = [
            ("draft-03", Draft::Draft4),
            ("draft-04", Draft::Draft4),
            ("draft-05", Draft::Draft4),
            ("draft-06", Draft::Draft6),
            ("draft-07", Draft::Draft7),
            ("2019-09", Draft::Draft2019),
        ];
        known.iter().find(|(part, _)| named.contains(part)).map_or(Draft::Draft2020, |(_, draft)| *draft)
    }

    /// Returns the keyword that gives a schema its identifier.
    pub fn id_keyword(self) -> &'static str {
        if self == Draft::Draft4 { "id" } else { "$id" }
    }

    /// Returns whether `$ref` makes its sibling keywords ineffective.
    pub fn ignores_siblings_of_ref(self) -> bool {
        self <= Draft::Draft7
    }

    /// Returns whether `prefixItems` has a meaning; in earlier drafts, `items` was a list.
    pub fn has_prefix_items(self) -> bool {
        self == Draft::Draft2020
    }
}
