//! `skep secret`: sets, lists and deletes secrets.

use std::io::{IsTerminal as _, Read as _};

use anyhow::{Context as _, Result, bail};

use super::{HostArgs, out};
use crate::failure::Usage;

/// Manage secrets that agents can send but never see
///
/// An agent that is granted a secret gets a placeholder, which the host replaces with the value on the way
/// out: in the headers, the query and the body of requests to the origins that are given here, and to no
/// others.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Set(SetArgs),
    List(ListArgs),
    Delete(DeleteArgs),
}

/// Set a secret, or replace it; its value is read from standard input
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep secret set STRIPE_KEY --to https://api.stripe.com              asks for the value
  pass stripe | skep secret set STRIPE_KEY --to https://api.stripe.com
  skep secret set API_KEY --to 'https://*.example.com' --agent concierge < key.txt

The agent asks for it in agent.toml:
  [grants]
  hosts = [\"https://api.stripe.com\"]
  secrets = [{ name = \"STRIPE_KEY\", hosts = [\"https://api.stripe.com\"] }]")]
pub struct SetArgs {
    /// Name, made of A-Z, 0-9 and _
    name: String,
    /// Origin that it may be sent to; may be repeated
    #[arg(long, required = true, value_name = "ORIGIN")]
    to: Vec<String>,
    /// Only for this agent; it takes precedence over a secret of the same name for all agents
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    #[command(flatten)]
    host: HostArgs,
}

/// List the secrets that are set, without their values
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep secret list
  skep secret list --json | jq -r '.[].name'")]
pub struct ListArgs {
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Delete a secret
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep secret delete STRIPE_KEY
  skep secret delete API_KEY --agent concierge")]
pub struct DeleteArgs {
    /// Name of the secret
    name: String,
    /// Delete the secret of this agent
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    #[command(flatten)]
    host: HostArgs,
}

/// Maximum size of a value.
const MAX_INPUT_BYTES: u64 = 64 << 10;

/// Sets, lists or deletes secrets.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Set(args) => {
            let client = args.host.client()?;
            let value = read_value(&args.name)?;
            client.set_secret(&args.name, &value, &args.to, args.agent.as_deref()).await?;
            out::line(&format!("{} is set", args.name))
        }
        Command::List(args) => list(args).await,
        Command::Delete(args) => {
            args.host.client()?.delete_secret(&args.name, args.agent.as_deref()).await?;
            out::line(&format!("{} is deleted", args.name))
        }
    }
}

async fn list(args: ListArgs) -> Result<()> {
    let secrets = args.host.client()?.secrets().await?;
    if args.json {
        return out::json(&secrets);
    }
    if secrets.is_empty() {
        return out::line("no secrets yet; set one with: skep secret set NAME --to ORIGIN");
    }
    let rows: Vec<_> = secrets
        .into_iter()
        .map(|secret| {
            let agent = secret.agent.unwrap_or_else(|| "(all)".to_owned());
            [secret.name, agent, secret.hosts.join(", "), out::ago(secret.updated_at_ms)]
        })
        .collect();
    out::table(["SECRET", "AGENT", "TO", "SET"], &rows)
}

/// Reads a value, without the line break at its end. It never comes from the command line, which other
/// processes may read.
fn read_value(name: &str) -> Result<String> {
    let mut value = if std::io::stdin().is_terminal() {
        let terminal = console::Term::stderr();
        terminal.write_str(&format!("{name}: "))?;
        terminal.read_secure_line().context("cannot read the value from the terminal")?
    } else {
        let mut value = String::new();
        let input = std::io::stdin().lock().take(MAX_INPUT_BYTES);
        { input }.read_to_string(&mut value).context("the value on standard input is not UTF-8")?;
        value
    };
    value.truncate(value.trim_end_matches(['\r', '\n']).len());
    if value.is_empty() {
        bail!(Usage(format!(
            "the value is empty\n  hint: pipe it in, as in: skep secret set {name} --to ORIGIN < FILE"
        )));
    }
    Ok(value)
}
