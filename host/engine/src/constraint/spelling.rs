//! The ways to write JSON: the accepted set, and the single spellings that drafts use.
//!
//! Invariant: every single spelling is within the accepted set.

use llguidance::JsonCompileOptions;
use serde_json::Value;

use super::rule_grammar::without_key_order;

/// White space between two parts of a document: nothing, a space, or a line break and the indentation of the
/// next line.
pub(super) const WHITE_SPACE: &str = r" |\r?\n[ \t]{0,20}";

/// One spelling of JSON white space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// `,` and `:`.
    Compact,
    /// `, ` and `: `.
    Spaced,
}

/// The part of the accepted set that a grammar accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AcceptedSpelling {
    Any,
    Single(Spelling),
}

impl AcceptedSpelling {
    /// Returns the schema with the options for its spelling, for `%json` in a grammar.
    pub fn schema(self, schema: &Value, unicode_escapes: bool) -> Value {
        let mut schema = match schema {
            Value::Object(_) => schema.clone(),
            _ => serde_json::json!({}),
        };
        without_key_order(&mut schema);
        self.options(unicode_escapes).apply_to(&mut schema);
        schema
    }

    /// Returns an optional white-space terminal, or an empty string.
    pub fn gap(self) -> &'static str {
        match self {
            AcceptedSpelling::Any => "GAP? ",
            AcceptedSpelling::Single(_) => "",
        }
    }

    /// Returns the rules that [`AcceptedSpelling::gap`] needs.
    pub fn rules(self) -> String {
        match self {
            AcceptedSpelling::Any => format!("GAP: /{WHITE_SPACE}/\n"),
            AcceptedSpelling::Single(_) => String::new(),
        }
    }

    /// Returns a regular expression for the white space at a position where this spelling has `spaced` or
    /// nothing.
    pub fn pattern(self, spaced: &'static str) -> String {
        match self {
            AcceptedSpelling::Any => format!("({WHITE_SPACE})?"),
            AcceptedSpelling::Single(Spelling::Spaced) => spaced.to_string(),
            AcceptedSpelling::Single(Spelling::Compact) => String::new(),
        }
    }

    /// Returns llguidance's options that accept this spelling. `unicode_escapes` allows `\uXXXX` in strings.
    pub fn options(self, unicode_escapes: bool) -> JsonCompileOptions {
        let (item, key) = match self {
            AcceptedSpelling::Single(Spelling::Spaced) => (", ", ": "),
            _ => (",", ":"),
        };
        let escapes = if unicode_escapes { "nrbtf\\\"u" } else { "nrbtf\\\"" };
        JsonCompileOptions {
            item_separator: item.to_string(),
            key_separator: key.to_string(),
            whitespace_flexible: self == AcceptedSpelling::Any,
            whitespace_pattern: (self == AcceptedSpelling::Any).then(|| WHITE_SPACE.to_string()),
            json_allowed_escapes: Some(escapes.to_string()),
            json_allow_general_unicode_escapes: unicode_escapes,
            ..JsonCompileOptions::default()
        }
    }
}
