//! `[mcp]` in `agent.toml`: the prompts and resources that an agent offers to clients of the Model Context Protocol.
//!
//! The agent's own tools make them: a prompt is written by a tool that gets the prompt's arguments, and a resource is read
//! by a tool that gets the variables of the resource's URI.

use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt};

const MAX_PROMPTS: usize = 64;
const MAX_RESOURCES: usize = 64;
const MAX_NAME_BYTES: usize = 64;
const MAX_URI_BYTES: usize = 512;
const MAX_TEXT_BYTES: usize = 4 << 10;
/// The scheme of the host's own resources.
pub const HOST_SCHEME: &str = "skep:";

/// `[mcp]` in `agent.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct McpToml {
    /// Prompts, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub prompts: BTreeMap<String, PromptToml>,
    /// Resources, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub resources: BTreeMap<String, ResourceToml>,
}

/// `[mcp.prompts.NAME]`: a prompt that one of the agent's tools writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptToml {
    /// The tool that writes the prompt. Its arguments are the prompt's.
    pub tool: String,
    /// The description. `None`: the tool's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

/// `[mcp.resources.NAME]`: a resource, or a template of resources, that one of the agent's tools reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResourceToml {
    /// The URI, such as `notes://all` or, as a template, `notes://{id}`.
    pub uri: UriTemplate,
    /// The tool that reads the resource. Its arguments are the variables of the URI, and `uri`, if it has such a parameter.
    pub tool: String,
    /// The description. `None`: the tool's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mime_type: Option<String>,
}

/// A URI in which each `{variable}` stands for one segment: one or more characters other than `/`, of which those that a URI
/// cannot have are percent-encoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct UriTemplate {
    text: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    Variable(String),
}

impl McpToml {
    pub(crate) fn is_empty(&self) -> bool {
        self.prompts.is_empty() && self.resources.is_empty()
    }

    /// Returns whether a tool makes a prompt or a resource. Clients see such a tool only as what it makes.
    pub fn uses(&self, tool: &str) -> bool {
        let mut tools = self.prompts.values().map(|prompt| &prompt.tool);
        tools.any(|used| used == tool) || self.resources.values().any(|resource| resource.tool == tool)
    }

    /// Checks everything but the tools, which are known only when the agent is deployed.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (what, count, most) in
            [("prompts", self.prompts.len(), MAX_PROMPTS), ("resources", self.resources.len(), MAX_RESOURCES)]
        {
            if count > most {
                return Err(format!("{count} {what} under [mcp]; at most {most} are allowed"));
            }
        }
        let prompts = self.prompts.iter().map(|(name, prompt)| (name, &prompt.description));
        let resources = self.resources.iter().map(|(name, resource)| (name, &resource.description));
        for (name, description) in prompts.chain(resources) {
            let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
            if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(plain) {
                return Err(format!(
                    "{name:?} under [mcp] is not a valid name: it must have 1 to {MAX_NAME_BYTES} of the characters a-z, A-Z, \
                     0-9, _ and -"
                ));
            }
            if description.as_ref().is_some_and(|text| text.len() > MAX_TEXT_BYTES) {
                return Err(format!(
                    "the description of {name} under [mcp] is longer than {MAX_TEXT_BYTES} bytes"
                ));
            }
        }
        let mut uris: Vec<&UriTemplate> = self.resources.values().map(|resource| &resource.uri).collect();
        uris.sort_by_key(|uri| &uri.text);
        match uris.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("two resources under [mcp] have the URI {}", pair[0])),
            None => Ok(()),
        }
    }

    /// Checks that the tools exist, and that reading a resource changes nothing. A tool has a name and is read-only or not.
    pub(crate) fn check_tools(&self, tools: &[(&str, bool)], takes_calls: bool) -> Result<(), String> {
        if !self.is_empty() && !takes_calls {
            return Err("agent.toml has [mcp], but the component does not export skep:agent/tool-handler; export it, or \
                        remove [mcp]"
                .to_owned());
        }
        let find = |line: String, tool: &str| {
            tools.iter().find(|(known, _)| *known == tool).ok_or_else(|| {
                let known: Vec<&str> = tools.iter().map(|(name, _)| *name).collect();
                format!(
                    "{line} names the tool {tool:?}, which it does not describe; it describes: {}",
                    known.join(", ")
                )
            })
        };
        for (name, prompt) in &self.prompts {
            find(format!("[mcp.prompts.{name}] in agent.toml"), &prompt.tool)?;
        }
        for (name, resource) in &self.resources {
            let (tool, read_only) = find(format!("[mcp.resources.{name}] in agent.toml"), &resource.tool)?;
            if !read_only {
                return Err(format!(
                    "[mcp.resources.{name}] in agent.toml names the tool {tool:?}, which does not say that it is read-only; a \
                     resource can be read at any time, so its tool must change nothing"
                ));
            }
        }
        Ok(())
    }

    /// Returns the resource that a URI names, and the variables of its URI.
    pub fn resource(&self, uri: &str) -> Option<(&ResourceToml, BTreeMap<String, String>)> {
        self.resources.values().find_map(|resource| Some((resource, resource.uri.variables_of(uri)?)))
    }
}

impl UriTemplate {
    /// Parses a URI in which `{name}` is a variable. The error is a message for its author.
    pub fn parse(text: &str) -> Result<Self, String> {
        let fail = |why: &str| Err(format!("{text:?} is not a valid URI of a resource: {why}"));
        if text.len() > MAX_URI_BYTES {
            return Err(format!(
                "the URI of a resource has {} bytes; at most {MAX_URI_BYTES} are allowed",
                text.len()
            ));
        }
        let scheme = text.split_once(':').map(|(scheme, _)| scheme).unwrap_or_default();
        let of_scheme = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
        if !scheme.starts_with(|c: char| c.is_ascii_alphabetic()) || !scheme.bytes().all(of_scheme) {
            return fail("it must begin with a scheme, as notes://all does");
        }
        if text.starts_with(HOST_SCHEME) {
            return fail("the scheme skep is the host's own; use another one");
        }
        if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return fail("it contains white space");
        }
        let mut parts: Vec<Part> = Vec::new();
        let mut rest = text;
        while let Some((literal, after)) = rest.split_once('{') {
            let Some((name, after)) = after.split_once('}') else { return fail("a { is not closed") };
            let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
            if name.is_empty() || !name.bytes().all(word) {
                return fail("a variable must be a word, such as {id}");
            }
            let variable = Part::Variable(name.to_owned());
            if parts.contains(&variable) {
                return fail("it has a variable twice");
            }
            if literal.is_empty() && !parts.is_empty() {
                return fail("two variables need a fixed part between them");
            }
            if !literal.is_empty() {
                parts.push(Part::Literal(literal.to_owned()));
            }
            parts.push(variable);
            rest = after;
        }
        if rest.contains('}') {
            return fail("a } has no {");
        }
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_owned()));
        }
        Ok(UriTemplate { text: text.to_owned(), parts })
    }

    /// Returns the URI as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns whether the URI has variables, and so stands for many resources.
    pub fn is_template(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, Part::Variable(_)))
    }

    /// Returns the variables, percent-decoded, if `uri` is one of this template's. Each variable ends where the fixed part
    /// after it begins first. A `%` without two digits stays.
    pub fn variables_of(&self, uri: &str) -> Option<BTreeMap<String, String>> {
        if uri.len() > MAX_URI_BYTES {
            return None;
        }
        let mut variables = BTreeMap::new();
        let mut rest = uri;
        let mut parts = self.parts.iter().peekable();
        while let Some(part) = parts.next() {
            match part {
                Part::Literal(literal) => rest = rest.strip_prefix(literal.as_str())?,
                Part::Variable(name) => {
                    let end = match parts.peek() {
                        Some(Part::Literal(next)) => rest.find(next.as_str())?,
                        _ => rest.len(),
                    };
                    let (value, after) = rest.split_at(end);
                    if value.is_empty() || value.contains('/') {
                        return None;
                    }
                    let value = percent_decode_str(value).decode_utf8().ok()?;
                    variables.insert(name.clone(), value.into_owned());
                    rest = after;
                }
            }
        }
        rest.is_empty().then_some(variables)
    }
}

impl fmt::Display for UriTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl TryFrom<String> for UriTemplate {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        UriTemplate::parse(&text)
    }
}

impl From<UriTemplate> for String {
    fn from(uri: UriTemplate) -> Self {
        uri.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_matches_its_uris_and_finds_the_variables() {
        let template = UriTemplate::parse("notes://{user}/by-{day}/text").expect("valid");
        let found = template.variables_of("notes://ann/by-mon/text").expect("matches");
        assert_eq!(
            found.into_iter().collect::<Vec<_>>(),
            [("day".into(), "mon".into()), ("user".into(), "ann".into())]
        );
        for other in [
            "notes://ann/by-/text",
            "notes:///by-mon/text",
            "notes://a/b/by-mon/text",
            "notes://ann/by-mon/text/",
            "x",
        ] {
            assert_eq!(template.variables_of(other), None, "{other}");
        }
        let plain = UriTemplate::parse("notes://all").expect("valid");
        assert!(template.is_template() && !plain.is_template());
        assert_eq!(plain.variables_of("notes://all"), Some(BTreeMap::new()));
        assert_eq!(plain.variables_of("notes://all/"), None);
    }

    #[test]
    fn variables_are_percent_decoded_after_they_are_found() {
        let template = UriTemplate::parse("notes://{user}/by-{day}").expect("valid");
        for (user, decoded) in [
            ("J%C3%BCrgen%20M%c3%bcller", "Jürgen Müller"),
            ("a%2Fb%2F", "a/b/"),
            ("%2525", "%25"),
            ("100%-%4", "100%-%4"),
            ("%+1+1", "%+1+1"),
        ] {
            let found = template.variables_of(&format!("notes://{user}/by-mon")).expect(user);
            assert_eq!(found["user"], decoded, "{user}");
        }
        assert_eq!(template.variables_of("notes://%FF/by-mon"), None, "it is not UTF-8");
        assert_eq!(template.variables_of("notes://ann%2Fby-mon"), None, "the slash is part of a variable");
    }

    #[test]
    fn invalid_uris_are_refused_with_the_reason() {
        for (text, why) in [
            ("all", "must begin with a scheme"),
            ("://all", "must begin with a scheme"),
            ("skep://agents/a", "the host's own"),
            ("notes://a b", "white space"),
            ("notes://{id", "not closed"),
            ("notes://id}", "has no {"),
            ("notes://{}", "must be a word"),
            ("notes://{a}{b}", "a fixed part between"),
            ("notes://{a}/{a}", "twice"),
        ] {
            let message = UriTemplate::parse(text).expect_err(text);
            assert!(message.contains(why), "{text}: {message}");
        }
        UriTemplate::parse(&format!("notes://{}", "a".repeat(MAX_URI_BYTES))).expect_err("too long");
    }

    #[test]
    fn offers_without_a_tool_or_with_a_writing_tool_are_refused() {
        let offer = |text: &str| toml::from_str::<McpToml>(text).expect("valid TOML");
        let resource = offer("[resources.a]\nuri = \"notes://all\"\ntool = \"read\"");
        assert_eq!(resource.check_tools(&[("read", true)], true), Ok(()));
        assert!(resource.uses("read") && !resource.uses("a"));
        for (found, takes_calls, why) in [
            (vec![("read", false)], true, "does not say that it is read-only"),
            (vec![], true, "names the tool \"read\""),
            (vec![("read", true)], false, "does not export skep:agent/tool-handler"),
        ] {
            let message = resource.check_tools(&found, takes_calls).expect_err(why);
            assert!(message.contains(why), "{message}");
        }
        let prompt = offer("[prompts.a]\ntool = \"write\"");
        prompt.check_tools(&[("read", true)], true).expect_err("it names no tool");
        let twice =
            "[resources.a]\nuri = \"x:y\"\ntool = \"read\"\n[resources.b]\nuri = \"x:y\"\ntool = \"read\"";
        assert!(offer(twice).check().expect_err("twice").contains("two resources"));
        assert!(
            offer("[prompts.\"a b\"]\ntool = \"read\"").check().expect_err("a name").contains("valid name")
        );
    }
}
