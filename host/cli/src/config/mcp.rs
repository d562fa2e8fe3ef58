//! `[mcp.NAME]` in `skep.toml`: MCP servers whose tools agents may be granted as `mcp:NAME/TOOL`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use skep_outbound::header::{HeaderName, HeaderValue};
use skep_outbound::{McpBounds, McpForms, McpOptions, McpServer, McpTransport, ToolServer, Url};

use crate::number::number;

/// Environment variables that a process inherits: where programs are, who the user is, and the language. All
/// others are in `env`.
const INHERITED: [&str; 6] = ["PATH", "HOME", "USER", "LANG", "TMPDIR", "SYSTEMROOT"];
const LONGEST_CALL_MS: u64 = 3_600_000;

/// One server, with either `command` or `url`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct McpConfig {
    /// A program and its arguments, started in the folder of this file.
    pub command: Option<Vec<String>>,
    /// Environment of the program; `${NAME}` is a variable of the host's environment.
    pub env: BTreeMap<String, String>,
    /// Address of a server that speaks streamable HTTP.
    pub url: Option<String>,
    /// Sent with every request; `${NAME}` is a variable of the host's environment.
    pub headers: BTreeMap<String, String>,
    /// Maximum time of a call.
    #[serde(deserialize_with = "number::<1, LONGEST_CALL_MS, _, _>")]
    pub timeout_ms: Option<u64>,
    /// The tools that are offered; all of them by default.
    pub tools: Option<Vec<String>>,
    /// The answer to forms of the server.
    pub elicitation: Elicitation,
    /// Folder of this file.
    #[serde(skip)]
    pub folder: Option<PathBuf>,
}

/// The answer to a form with which a server asks for what a person knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Elicitation {
    /// Nobody fills in forms.
    #[default]
    Refuse,
    /// A form is accepted with its default values.
    Defaults,
}

/// Adds the servers to those that agents may be granted, with the environment variables that they name.
pub(super) fn apply(
    servers: &BTreeMap<String, McpConfig>,
    tool_servers: &mut BTreeMap<String, Arc<dyn ToolServer>>,
) -> Result<()> {
    let variable = |name: &str| std::env::var(name).ok();
    for (name, config) in servers {
        let server = config.server(name, variable).with_context(|| format!("[mcp.{name}]"))?;
        tool_servers.insert(name.clone(), Arc::new(server) as Arc<dyn ToolServer>);
    }
    Ok(())
}

/// Makes each server start in the folder of the file of settings.
pub(super) fn relative_to(servers: &mut BTreeMap<String, McpConfig>, folder: &Path) {
    // A file that is given without a folder is in the current folder.
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    for server in servers.values_mut() {
        server.folder = Some(folder.to_owned());
    }
}

impl McpConfig {
    fn server(&self, name: &str, variable: impl Fn(&str) -> Option<String>) -> Result<McpServer> {
        let character = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if !(1..=64).contains(&name.len()) || !name.bytes().all(character) {
            bail!("a server's name has 1 to 64 of the characters a-z, 0-9 and -");
        }
        let transport = match (&self.command, &self.url) {
            (Some(command), None) => self.process(command, variable)?,
            (None, Some(url)) => self.http(url, variable)?,
            _ => {
                bail!("a server has either `command = [\"program\", \"argument\"]` or `url = \"https://…\"`")
            }
        };
        let mut bounds = McpBounds::default();
        bounds.call = self.timeout_ms.map_or(bounds.call, Duration::from_millis);
        let forms = match self.elicitation {
            Elicitation::Refuse => McpForms::Refused,
            Elicitation::Defaults => McpForms::Defaults,
        };
        Ok(McpServer::new(name, McpOptions { transport, tools: self.tools.clone(), forms, bounds }))
    }

    fn process(&self, command: &[String], variable: impl Fn(&str) -> Option<String>) -> Result<McpTransport> {
        let Some((program, arguments)) = command.split_first() else {
            bail!("command is empty; write command = [\"program\", \"argument\"]");
        };
        if !self.headers.is_empty() {
            bail!("headers are for servers with a url; a process gets `env`");
        }
        let inherited = INHERITED.iter().filter_map(|name| Some(((*name).to_owned(), variable(name)?)));
        let mut environment: HashMap<String, String> = inherited.collect();
        for (name, value) in &self.env {
            environment.insert(name.clone(), filled(value, &variable)?);
        }
        let (program, arguments) = (program.clone(), arguments.to_vec());
        Ok(McpTransport::Process { program, arguments, environment, folder: self.folder.clone() })
    }

    fn http(&self, url: &str, variable: impl Fn(&str) -> Option<String>) -> Result<McpTransport> {
        let parsed: Url = url.parse().with_context(|| format!("url {url:?} is not a valid address"))?;
        if !matches!(parsed.scheme(), "http" | "https") {
            bail!("url {url:?} begins with neither https:// nor http://");
        }
        if !self.env.is_empty() {
            bail!("env is for servers with a command; one with a url gets `headers`");
        }
        let mut headers = HashMap::new();
        for (name, value) in &self.headers {
            let header: HeaderName =
                name.parse().with_context(|| format!("headers: {name:?} is not a valid header name"))?;
            let mut value = HeaderValue::from_str(&filled(value, &variable)?)
                .with_context(|| format!("headers: the value of {name} cannot be sent"))?;
            value.set_sensitive(true);
            headers.insert(header, value);
        }
        Ok(McpTransport::Http { url: parsed, headers })
    }
}

/// Replaces the variables in a text with their values.
fn filled(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String> {
    let mut parts = text.split("${");
    let mut filled = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let Some((name, rest)) = part.split_once('}') else {
            bail!("{text:?} starts a variable with ${{ but does not end it");
        };
        let value = variable(name)
            .with_context(|| format!("{text:?} names the environment variable {name}, which is not set"))?;
        filled.push_str(&value);
        filled.push_str(rest);
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Config, server_options::ServerOptions};

    fn server(text: &str) -> Result<McpTransport> {
        let config: McpConfig = toml::from_str(text).expect("a table");
        let variable = |name: &str| ["PATH", "TOKEN"].contains(&name).then(|| format!("the {name}"));
        config.server("files", variable)?;
        match (&config.command, &config.url) {
            (Some(command), _) => config.process(command, variable),
            (_, url) => config.http(url.as_deref().expect("a command or a url"), variable),
        }
    }

    #[test]
    fn a_process_gets_its_own_environment_and_little_else() {
        let text = "command = [\"python3\", \"server.py\"]\nenv = { KEY = \"a ${TOKEN}!\" }";
        let McpTransport::Process { program, arguments, environment, .. } = server(text).expect("valid")
        else {
            panic!("not a process");
        };
        assert_eq!((program.as_str(), arguments), ("python3", vec!["server.py".to_owned()]));
        let expected = [("KEY", "a the TOKEN!"), ("PATH", "the PATH")];
        assert_eq!(environment, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
    }

    #[test]
    fn headers_of_a_server_are_filled_in_and_marked_as_sensitive() {
        let text = "url = \"https://mcp.example/mcp\"\nheaders = { authorization = \"Bearer ${TOKEN}\" }";
        let McpTransport::Http { url, headers } = server(text).expect("valid") else {
            panic!("not over HTTP")
        };
        assert_eq!(url.as_str(), "https://mcp.example/mcp");
        let value = &headers[&HeaderName::from_static("authorization")];
        assert_eq!(value, "Bearer the TOKEN");
        assert_eq!(format!("{value:?}"), "Sensitive");
    }

    #[test]
    fn mistakes_are_reported_with_their_reason() {
        for (text, why) in [
            ("", "either `command"),
            ("command = [\"a\"]\nurl = \"http://a\"", "either `command"),
            ("command = []", "command is empty"),
            ("command = [\"a\"]\nheaders = { a = \"b\" }", "a process gets `env`"),
            ("command = [\"a\"]\nenv = { A = \"${NOWHERE}\" }", "NOWHERE, which is not set"),
            ("command = [\"a\"]\nenv = { A = \"${TOKEN\" }", "does not end it"),
            ("url = \"files\"", "is not a valid address"),
            ("url = \"ftp://files\"", "neither https:// nor http://"),
            ("url = \"http://a\"\nheaders = { \"a b\" = \"c\" }", "is not a valid header name"),
            ("url = \"http://a\"\nenv = { A = \"b\" }", "gets `headers`"),
        ] {
            let error = server(text).err().unwrap_or_else(|| panic!("{text} is valid"));
            assert!(format!("{error:#}").contains(why), "{text}: {error:#}");
        }
    }

    #[test]
    fn servers_come_from_the_file_and_an_error_names_its_server() {
        let apply = |text: &str| {
            let mut options = ServerOptions::default();
            let applied = Config::parse(text).expect("valid").apply(&mut options);
            applied.map(|()| options.tool_servers.into_keys().collect::<Vec<_>>())
        };
        let text = "[mcp.files]\ncommand = [\"a\"]\n[mcp.search]\nurl = \"https://a\"\n";
        assert_eq!(apply(text).expect("both"), ["files", "search"]);
        let error = apply("[mcp.\"My files\"]\ncommand = [\"a\"]\n").expect_err("no name");
        assert!(format!("{error:#}").starts_with("[mcp.My files]: a server's name has"), "{error:#}");
    }
}
