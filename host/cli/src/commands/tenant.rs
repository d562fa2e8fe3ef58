//! `skep tenant`: lists and deletes tenants.

use anyhow::Result;
use skep_api::DeletedTenant;

use super::{HostArgs, confirmation::confirmed, out};

/// List and delete tenants
///
/// A tenant is made by its first API key: skep key create --tenant NAME. Its limits are under [tenants.NAME] in skep.toml.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    List(ListArgs),
    #[command(alias = "rm")]
    Delete(DeleteArgs),
}

/// List the tenants that have valid API keys or sessions
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep tenant list
  skep tenant list --json | jq -r '.[].name'")]
pub struct ListArgs {
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Delete a tenant with everything that belongs to it
///
/// Deletes its API keys, sessions, batches, files, responses, events, the log of its requests with what was said in them, and its
/// KV pages, and cancels its running turns. Its usage is kept for bills, unless --forget-usage removes it as well. Its
/// limits in skep.toml stay.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep usage --tenant acme --csv > acme.csv                 saves its bill first
  skep tenant delete acme
  skep tenant delete acme --forget-usage --yes              without asking, for scripts")]
pub struct DeleteArgs {
    /// Name of the tenant
    tenant: String,
    /// Remove its usage of models as well
    #[arg(long)]
    forget_usage: bool,
    /// Do not ask for confirmation
    #[arg(long, short)]
    yes: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Lists or deletes tenants.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::List(args) => list(args).await,
        Command::Delete(args) => delete(args).await,
    }
}

async fn list(args: ListArgs) -> Result<()> {
    let tenants = args.host.client()?.tenants().await?;
    if args.json {
        return out::json(&tenants);
    }
    if tenants.is_empty() {
        return out::line("no tenants yet; make one with: skep key create --tenant NAME");
    }
    let row = |tenant: &skep_api::Tenant| {
        [tenant.name.clone(), tenant.keys.to_string(), tenant.sessions.to_string()]
    };
    out::table(["TENANT", "KEYS", "SESSIONS"], &tenants.iter().map(row).collect::<Vec<_>>())
}

async fn delete(args: DeleteArgs) -> Result<()> {
    let DeleteArgs { tenant, forget_usage, yes, json, host } = args;
    let client = host.client()?;
    if !yes {
        let tenants = client.tenants().await?;
        let known = tenants.iter().find(|known| known.name == tenant);
        let (keys, sessions) = known.map_or((0, 0), |known| (known.keys, known.sessions));
        let (keys, sessions) = (out::count(keys, "key"), out::count(sessions, "session"));
        if !confirmed(&format!("permanently delete tenant {tenant} with {keys} and {sessions}?"))? {
            return out::line("nothing was deleted");
        }
    }
    let deleted = client.delete_tenant(&tenant, forget_usage).await?;
    if json { out::json(&deleted) } else { out::line(&summary(&deleted, forget_usage)) }
}

fn summary(deleted: &DeletedTenant, forgets_usage: bool) -> String {
    let DeletedTenant { name, keys, sessions, batches, files, responses, events, requests, kv_pages, .. } =
        deleted;
    let parts = [
        (*keys, "key"),
        (*sessions, "session"),
        (*batches, "batch"),
        (*files, "file"),
        (*responses, "response"),
        (*events, "event"),
        (*requests, "logged request"),
        (*kv_pages, "KV page"),
    ];
    let parts: Vec<String> = parts
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| match (count, what) {
            (2.., "batch") => format!("{count} batches"),
            _ => out::count(count, what),
        })
        .collect();
    let with = if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) };
    let usage = if forgets_usage { "its usage, too" } else { "its usage is kept" };
    format!("deleted {name}{with}; {usage}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_deletion_is_summed_up() {
        let mut counts = json!({"object": "tenant.deleted", "name": "acme", "keys": 2, "sessions": 1, "batches": 2, "files": 0,
            "responses": 0, "events": 0, "requests": 3, "kv_pages": 0, "usage": 0});
        let line = |counts: &serde_json::Value, forgets| {
            summary(&serde_json::from_value(counts.clone()).expect("a deletion"), forgets)
        };
        assert_eq!(
            line(&counts, false),
            "deleted acme: 2 keys, 1 session, 2 batches, 3 logged requests; its usage is kept"
        );
        for part in ["keys", "sessions", "batches", "requests"] {
            counts[part] = json!(0);
        }
        assert_eq!(line(&counts, true), "deleted acme; its usage, too");
    }
}
