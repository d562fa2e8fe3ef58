//! The operator's configuration of a running host.

use crate::marker;
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// The active settings. Those that are not listed have their default.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Config {
    #[schema(inline)]
    pub object: marker::Config,
    /// The path of the file; `null` if the host was started without one.
    #[schema(required)]
    pub file: Option<String>,
    /// The settings of the file and the flags, by section.
    pub settings: Vec<Setting>,
    /// Settings that the file had another value for when it was last read. They apply after a restart.
    pub needs_restart: Vec<SettingChange>,
}

/// A setting with its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Setting {
    /// The section, such as `[tenants.acme]` or `[[upstream]] near`; empty for settings above all sections.
    pub section: String,
    pub key: String,
    /// The value as the file would have it; `(hidden)` for a secret.
    pub value: String,
    /// The flag that set the value instead of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub flag: Option<String>,
}

/// A setting that has another value than before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SettingChange {
    pub section: String,
    /// The setting; empty for the list of a section's entries, such as the names of all `[[model]]`.
    pub key: String,
    /// The former value; `null` if there was none, and `(hidden)` for a secret.
    #[schema(required)]
    pub from: Option<String>,
    /// The value from now on, in the same form.
    #[schema(required)]
    pub to: Option<String>,
}

/// The result of reading the configuration again.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ConfigReload {
    #[schema(inline)]
    pub object: marker::ConfigReload,
    pub file: String,
    /// Settings that have changed and now apply.
    pub changed: Vec<SettingChange>,
    /// Settings that differ from those that the host was started with, and apply after a restart.
    pub needs_restart: Vec<SettingChange>,
    /// Likely mistakes, such as grants of models that do not exist.
    pub warnings: Vec<String>,
}

/// Writes the change as a line, such as `[tenants.acme] requests_per_minute: 10 → 20`.
impl fmt::Display for SettingChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SettingChange { section, key, from, to } = self;
        let space = if section.is_empty() || key.is_empty() { "" } else { " " };
        write!(f, "{section}{space}{key}: ")?;
        match (from, to) {
            (Some(from), Some(to)) if from == to => f.write_str("changed"),
            (from, to) => {
                let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "not set".to_owned());
                write!(f, "{} → {}", shown(from), shown(to))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_a_line() {
        let line = |section: &str, key: &str, from: Option<&str>, to: Option<&str>| {
            let owned = |text: Option<&str>| text.map(str::to_owned);
            let (section, key) = (section.to_owned(), key.to_owned());
            SettingChange { section, key, from: owned(from), to: owned(to) }.to_string()
        };
        assert_eq!(
            line("[tenants.acme]", "requests_per_minute", Some("10"), Some("20")),
            "[tenants.acme] requests_per_minute: 10 → 20"
        );
        assert_eq!(line("", "listen", None, Some("\"[::1]:1\"")), "listen: not set → \"[::1]:1\"");
        assert_eq!(line("[[model]]", "", Some("[\"a\"]"), None), "[[model]]: [\"a\"] → not set");
        let hidden = Some("(hidden)");
        assert_eq!(
            line("[[webhook]] http://a/", "secret", hidden, hidden),
            "[[webhook]] http://a/ secret: changed"
        );
    }
}
