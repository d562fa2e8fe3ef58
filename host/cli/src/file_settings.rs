//! The settings of a file as they were written, by section and key: to show them and to compare two versions of a file.
//!
//! Invariant: it holds no secret. A secret is represented by a digest, from which only a change can be seen.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest as _, Sha256};
use skep_api::{Setting, SettingChange};
use skep_outbound::Url;
use skep_runtime::Limits;
use toml::{Table, Value};

/// The value that is shown instead of a secret.
const HIDDEN: &str = "(hidden)";
/// Sections whose settings can change while a host runs.
const RELOADABLE: [&str; 12] = [
    "agents", "ai", "grants", "limits", "mcp", "model", "prices", "requests", "route", "tenants", "upstream",
    "webhook",
];
/// The share of a tenant in the KV pages on disk, which the disk gets when it is opened.
const KV_SHARE: &str = "kv_disk_percent";
/// Keys that can name an entry of a list; the first one that an entry has is its name.
const NAMES: [&str; 5] = ["name", "url", "model", "source", "from"];

/// The settings of a file, and the flags that override them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileSettings(BTreeMap<SettingPath, Entry>);

/// The path of a setting in a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct SettingPath {
    /// The names of the sections from the outside in, with the names of entries of lists.
    path: Vec<String>,
    /// The key, which is empty for the names of a list's entries.
    key: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    /// The section's header, such as `[tenants.acme]`, or for an entry of a list `[[upstream]] near`.
    section: String,
    /// The value without secrets.
    shown: String,
    digest: [u8; 32],
    /// The flag that set the value.
    flag: Option<&'static str>,
}

/// A section while it is read.
#[derive(Clone)]
struct Section {
    path: Vec<String>,
    /// The names in the header.
    header: String,
    /// The name of the entry, if the section is one of a list.
    entry: Option<String>,
}

impl FileSettings {
    /// Reads the settings of a file.
    pub fn new(file: &Table) -> Self {
        let mut written = FileSettings::default();
        written.add(&Section { path: Vec::new(), header: String::new(), entry: None }, file);
        written
    }

    /// Replaces the value of a setting by that of a flag.
    pub fn set_flag(&mut self, section: Option<&str>, key: &str, value: &str, flag: &'static str) {
        let place =
            SettingPath { path: section.map(str::to_owned).into_iter().collect(), key: key.to_owned() };
        let section = section.map(|name| format!("[{name}]")).unwrap_or_default();
        let digest = Sha256::digest(value).into();
        self.0.insert(place, Entry { section, shown: value.to_owned(), digest, flag: Some(flag) });
    }

    /// Removes the entries of a list that do not have one of these names, and the list itself.
    pub fn keep_entries(&mut self, list: &str, names: &[String]) {
        self.0.retain(|place, _| match &place.path[..] {
            [of, name, ..] => of != list || names.contains(name),
            [of] => of != list,
            [] => true,
        });
    }

    /// Returns the settings in the order of their sections.
    pub fn settings(&self) -> Vec<Setting> {
        let settings = self.0.iter().filter(|(place, _)| !place.key.is_empty());
        let shown = |(place, entry): (&SettingPath, &Entry)| Setting {
            section: entry.section.clone(),
            key: place.key.clone(),
            value: entry.shown.clone(),
            flag: entry.flag.map(str::to_owned),
        };
        settings.map(shown).collect()
    }

    /// Returns the settings of this version that can change while the host runs, with the others of `started`.
    pub fn reloaded(&self, started: &FileSettings) -> FileSettings {
        let fixed = started.0.iter().filter(|(place, _)| !place.is_reloadable());
        let new = self.0.iter().filter(|(place, _)| place.is_reloadable());
        FileSettings(fixed.chain(new).map(|(place, entry)| (place.clone(), entry.clone())).collect())
    }

    /// Returns what is different in another version.
    pub fn changes(&self, other: &FileSettings) -> Vec<SettingChange> {
        let places: BTreeSet<&SettingPath> = self.0.keys().chain(other.0.keys()).collect();
        let mut changes = Vec::new();
        for place in places {
            let (from, to) = (self.0.get(place), other.0.get(place));
            if from.map(|entry| entry.digest) == to.map(|entry| entry.digest) {
                continue;
            }
            let shown = |entry: Option<&Entry>| entry.map(|entry| entry.shown.clone());
            changes.push(SettingChange {
                section: from.or(to).map(|entry| entry.section.clone()).unwrap_or_default(),
                key: place.key.clone(),
                from: shown(from),
                to: shown(to),
            });
        }
        changes
    }

    /// Returns whether a section and all sections in it are the same in another version.
    pub fn has_same(&self, other: &FileSettings, section: &[&str]) -> bool {
        let inside = |written: &FileSettings| -> Vec<(SettingPath, [u8; 32])> {
            let inside = written.0.iter().filter(|(place, _)| {
                place.path.iter().map(String::as_str).take(section.len()).eq(section.iter().copied())
            });
            inside.map(|(place, entry)| (place.clone(), entry.digest)).collect()
        };
        inside(self) == inside(other)
    }

    fn add(&mut self, section: &Section, table: &Table) {
        for (key, value) in table {
            match value {
                Value::Table(inner) => self.add(&section.table(key), inner),
                Value::Array(entries) if !entries.is_empty() && entries.iter().all(Value::is_table) => {
                    let names = self.add_entries(section, key, entries);
                    let list = section.entry_of(key, None);
                    self.insert(&list, "", &Value::Array(names.into_iter().map(Value::String).collect()));
                }
                value => self.insert(section, key, value),
            }
        }
    }

    /// Adds the entries of a list, and returns their names.
    fn add_entries(&mut self, section: &Section, key: &str, entries: &[Value]) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for (number, entry) in entries.iter().filter_map(Value::as_table).enumerate() {
            let named = NAMES.iter().find_map(|name| Some((*name, entry.get(*name)?.as_str()?)));
            let name = match named {
                Some(("url", url)) => without_secrets(url),
                Some((_, name)) => name.to_owned(),
                None => format!("#{}", number + 1),
            };
            let name = if names.contains(&name) { format!("{name} #{}", number + 1) } else { name };
            self.add(&section.entry_of(key, Some(&name)), entry);
            names.push(name);
        }
        names
    }

    fn insert(&mut self, section: &Section, key: &str, value: &Value) {
        let path: Vec<&str> = section.path.iter().map(String::as_str).collect();
        let shown = shown(&path, key, value);
        let digest = Sha256::digest(value.to_string()).into();
        let place = SettingPath { path: section.path.clone(), key: key.to_owned() };
        self.0.insert(place, Entry { section: section.to_string(), shown, digest, flag: None });
    }
}

impl SettingPath {
    /// Returns whether the setting can change while the host runs.
    fn is_reloadable(&self) -> bool {
        match &self.path[..] {
            [] => self.key == "model",
            [section, ..] if section == "limits" => !Limits::OF_POOL.contains(&self.key.as_str()),
            [section, ..] if section == "tenants" => self.key != KV_SHARE,
            [section, ..] => RELOADABLE.contains(&section.as_str()),
        }
    }
}

impl Section {
    fn table(&self, key: &str) -> Self {
        Section { header: self.under(key), ..self.inside(key) }
    }

    fn entry_of(&self, key: &str, name: Option<&str>) -> Self {
        let list = Section { header: self.under(key), ..self.inside(key) };
        let Some(name) = name else {
            return Section { entry: Some(self.entry.clone().unwrap_or_default()), ..list };
        };
        let entry = match &self.entry {
            Some(outer) => format!("{outer} {name}"),
            None => name.to_owned(),
        };
        let path = list.path.into_iter().chain([name.to_owned()]).collect();
        Section { path, header: list.header, entry: Some(entry) }
    }

    fn inside(&self, key: &str) -> Self {
        let path = self.path.iter().cloned().chain([key.to_owned()]).collect();
        Section { path, ..self.clone() }
    }

    fn under(&self, key: &str) -> String {
        let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let key =
            if !key.is_empty() && key.chars().all(is_bare) { key.to_owned() } else { format!("{key:?}") };
        if self.header.is_empty() { key } else { format!("{}.{key}", self.header) }
    }
}

/// Writes the header of the section.
impl std::fmt::Display for Section {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.header[..], &self.entry) {
            ("", _) => Ok(()),
            (header, None) => write!(f, "[{header}]"),
            (header, Some(entry)) => f.write_str(format!("[[{header}]] {entry}").trim_end()),
        }
    }
}

/// Returns a value without secrets.
fn shown(path: &[&str], key: &str, value: &Value) -> String {
    match (path, key, value) {
        (["webhook", _], "secret", _) | (["mcp", _, "env" | "headers"], ..) => HIDDEN.to_owned(),
        // Arguments of a program may be secrets.
        (["mcp", _], "command", Value::Array(command)) => match &command[..] {
            [program, _, ..] => format!("[{program}, …]"),
            command => Value::Array(command.to_vec()).to_string(),
        },
        (_, "url" | "otlp_endpoint", Value::String(url)) => Value::String(without_secrets(url)).to_string(),
        _ => value.to_string(),
    }
}

/// Returns an address without the parts that may hold secrets.
fn without_secrets(address: &str) -> String {
    let Ok(mut url) = Url::parse(address) else { return HIDDEN.to_owned() };
    if url.password().is_none()
        && url.username().is_empty()
        && url.query().is_none()
        && url.fragment().is_none()
    {
        return address.to_owned();
    }
    // Only an address without a host has no user, and it has nothing to hide.
    let _ = url.set_username("").and_then(|()| url.set_password(None));
    if url.query().is_some() {
        url.set_query(Some("…"));
    }
    url.set_fragment(None);
    url.to_string().replace("%E2%80%A6", "…")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> FileSettings {
        FileSettings::new(&toml::from_str(text).expect("valid TOML"))
    }

    fn changes(before: &str, after: &str) -> Vec<String> {
        written(before).changes(&written(after)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn changes_are_named_by_section_and_key() {
        for (before, after, expected) in [
            ("a = 1", "a = 1", vec![]),
            ("threads = 1", "threads = 2", vec!["threads: 1 → 2"]),
            (
                "[tenants.acme]\nweight = 1",
                "[tenants.acme]\nmodels = [\"*\"]",
                vec!["[tenants.acme] models: not set → [\"*\"]", "[tenants.acme] weight: 1 → not set"],
            ),
            (
                "[prices.\"near/m\"]\ninput = 0.5",
                "[prices.\"near/m\"]\ninput = 0.6",
                vec!["[prices.\"near/m\"] input: 0.5 → 0.6"],
            ),
            (
                "[ai]\nmodels = { a = \"b\" }",
                "[ai]\nmodels = { a = \"c\" }",
                vec!["[ai.models] a: \"b\" → \"c\""],
            ),
            (
                "[[upstream]]\nname = \"u\"\n[[upstream.models]]\nname = \"m\"\ntools = true",
                "[[upstream]]\nname = \"u\"\nattempts = 2\n[[upstream.models]]\nname = \"m\"",
                vec!["[[upstream]] u attempts: not set → 2", "[[upstream.models]] u m tools: true → not set"],
            ),
            (
                "[[model]]\nsource = \"a\"\n[[model]]\nsource = \"b\"",
                "[[model]]\nsource = \"b\"\n[[model]]\nsource = \"a\"",
                vec!["[[model]]: [\"a\", \"b\"] → [\"b\", \"a\"]"],
            ),
            (
                "[[prices.m]]\nfrom = \"2026-01-01\"\ninput = 1",
                "[[prices.m]]\nfrom = \"2026-01-01\"\ninput = 2",
                vec!["[[prices.m]] 2026-01-01 input: 1 → 2"],
            ),
        ] {
            assert_eq!(changes(before, after), expected, "{before}");
        }
    }

    #[test]
    fn two_entries_of_one_name_are_both_seen() {
        let twice = |second: u8| {
            format!("[[webhook]]\nurl = \"http://a\"\nn = 1\n[[webhook]]\nurl = \"http://a\"\nn = {second}")
        };
        assert_eq!(changes(&twice(1), &twice(2)), ["[[webhook]] http://a #2 n: 1 → 2"]);
        let route = |weight: u8| {
            format!("[[route]]\nname = \"r\"\n[[route.models]]\nmodel = \"m\"\nweight = {weight}")
        };
        assert_eq!(changes(&route(1), &route(2)), ["[[route.models]] r m weight: 1 → 2"]);
    }

    #[test]
    fn secrets_are_never_shown_and_their_changes_are() {
        let file = |secret: &str| {
            format!(
                "[[webhook]]\nurl = \"https://me:{secret}@example.com/hook?token={secret}#{secret}\"\nsecret = \"{secret}\"\n\
                 [mcp.a]\ncommand = [\"run\", \"--key={secret}\"]\nenv = {{ KEY = \"{secret}\" }}\n\
                 [mcp.b]\nurl = \"https://{secret}@example.com/mcp\"\nheaders = {{ authorization = \"{secret}\" }}\n\
                 [telemetry]\notlp_endpoint = \"http://me:{secret}@collector:4318\"\n"
            )
        };
        let (one, two) = (written(&file("hunter1")), written(&file("hunter2")));
        for text in [format!("{one:?}"), format!("{:?}", one.settings()), format!("{:?}", one.changes(&two))]
        {
            assert!(!text.contains("hunter"), "{text}");
        }
        let lines: Vec<String> = one.changes(&two).iter().map(ToString::to_string).collect();
        for line in [
            "[mcp.a] command: changed",
            "[mcp.a.env] KEY: changed",
            "[mcp.b] url: changed",
            "[mcp.b.headers] authorization: changed",
            "[telemetry] otlp_endpoint: changed",
            "[[webhook]] https://example.com/hook?… secret: changed",
            "[[webhook]] https://example.com/hook?… url: changed",
        ] {
            assert!(lines.contains(&line.to_owned()), "{line}: {lines:#?}");
        }
        let shown: Vec<String> = one.settings().into_iter().map(|setting| setting.value).collect();
        assert!(shown.contains(&"[\"run\", …]".to_owned()), "{shown:?}");
        assert!(shown.contains(&"\"http://collector:4318/\"".to_owned()), "{shown:?}");
    }

    #[test]
    fn settings_that_need_a_restart_stay_as_they_were_started() {
        let started = written(
            "listen = \"a\"\nmodel = \"x\"\n[limits]\nmemory_mb = 1\ncpu_ms = 1\n[auth]\nrequired = true",
        );
        let file = written(
            "data = \"b\"\nmodel = \"y\"\n[limits]\nmemory_mb = 2\ncpu_ms = 2\n[tenants.a]\nweight = 1\n\
             kv_disk_percent = 5",
        );
        let active = file.reloaded(&started);
        let lines = |changes: Vec<SettingChange>| changes.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(
            lines(started.changes(&active)),
            ["model: \"x\" → \"y\"", "[limits] cpu_ms: 1 → 2", "[tenants.a] weight: not set → 1"]
        );
        assert_eq!(
            lines(active.changes(&file)),
            [
                "data: not set → \"b\"",
                "listen: \"a\" → not set",
                "[auth] required: true → not set",
                "[limits] memory_mb: 1 → 2",
                "[tenants.a] kv_disk_percent: not set → 5"
            ]
        );
    }

    #[test]
    fn a_flag_hides_what_the_file_says() {
        let with_flag = |text: &str| {
            let mut written = written(text);
            written.keep_entries("model", &["kept".to_owned()]);
            written.set_flag(None, "listen", "\"flag\"", "--listen");
            written.set_flag(Some("auth"), "required", "true", "--auth");
            written
        };
        let models = "[[model]]\nname = \"kept\"\ntp = 1\n[[model]]\nname = \"other\"\ntp = 1\n";
        let (one, two) = (
            with_flag(&format!("listen = \"a\"\n{models}")),
            with_flag(&format!("listen = \"b\"\n{models}")),
        );
        assert_eq!(one.changes(&two), []);
        let shown: Vec<String> = one
            .settings()
            .into_iter()
            .map(|Setting { section, key, value, flag }| {
                format!("{section} {key} {value} {}", flag.unwrap_or_default())
            })
            .collect();
        assert_eq!(
            shown,
            [
                " listen \"flag\" --listen",
                "[auth] required true --auth",
                "[[model]] kept name \"kept\" ",
                "[[model]] kept tp 1 "
            ]
        );
    }

    #[test]
    fn sections_are_compared_with_all_that_is_in_them() {
        let server = |port: u16, key: &str| {
            written(&format!(
                "[mcp.a]\nurl = \"http://a:{port}\"\nheaders = {{ key = \"{key}\" }}\n[mcp.b]\nurl = \"http://b\""
            ))
        };
        let base = server(1, "x");
        assert!(base.has_same(&server(1, "x"), &["mcp", "a"]));
        assert!(
            !base.has_same(&server(2, "x"), &["mcp", "a"]) && !base.has_same(&server(1, "y"), &["mcp", "a"])
        );
        assert!(base.has_same(&server(2, "y"), &["mcp", "b"]) && !base.has_same(&written(""), &["mcp", "b"]));
    }
}
