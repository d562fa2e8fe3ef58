//! `skep mcp`: lists the MCP servers of a host.

use anyhow::Result;
use skep_api::McpTool;

use super::{HostArgs, out};

/// List the MCP servers that skep.toml names
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
skep.toml names a server, and grants its tools to agents that ask for them:
  [mcp.files]
  command = [\"python3\", \"server.py\"]       # started on this machine; or url = \"https://…/mcp\"
  env = { TOKEN = \"${FILES_TOKEN}\" }       # from the host's environment; with a url: headers
  tools = [\"read\", \"list\"]                 # default: all of them
  timeout_ms = 30000
  [grants]
  tools = [\"mcp:files/*\"]

agent.toml asks for them:
  [grants]
  tools = [\"mcp:files/read\"]")]
pub enum Command {
    List(ListArgs),
}

/// List the MCP servers of a running host, whether they answer, and their tools
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep mcp list
  skep mcp list --json | jq -r '.[] | select(.state != \"connected\") | .error'")]
pub struct ListArgs {
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Lists the MCP servers of the host.
pub async fn run(command: Command) -> Result<()> {
    let Command::List(args) = command;
    let servers = args.host.client()?.mcp_servers().await?;
    if args.json {
        return out::json(&servers);
    }
    if servers.is_empty() {
        return out::line("no MCP servers; add one to skep.toml, see: skep mcp --help");
    }
    let rows = servers.into_iter().map(|server| {
        let tools = server.tools.into_iter().map(|McpTool { name, hints, .. }| match hints.words() {
            words if words.is_empty() => name,
            words => format!("{name} ({words})"),
        });
        let tools: Vec<String> = tools.collect();
        [server.name, server.state.to_string(), server.error.unwrap_or_else(|| tools.join(", "))]
    });
    out::table(["NAME", "STATE", "TOOLS"], &rows.collect::<Vec<_>>())
}
