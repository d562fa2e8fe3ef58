//! `skep kv`: KV pages on disk.

use anyhow::Result;
use indicatif::HumanBytes;
use skep_api::{KvClusterCache, KvDisk, KvDiskTotals, KvPeers, KvPin};

use super::{HostArgs, confirmation::confirmed, out};

/// Show and erase the KV pages that a host keeps on disk
///
/// The pages of finished turns are written to the data folder, so that a session continues without computing its
/// prompt again after its pages were evicted from memory or the host restarted. See [kv] in skep.toml.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Status(StatusArgs),
    Purge(PurgeArgs),
}

/// Show what the disk holds, and what was read and written since the host started
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep kv status
  skep kv status --json | jq .read_pages
  skep kv status --url http://10.0.0.2:8080   # each host of a cluster has its own")]
pub struct StatusArgs {
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Erase pages from the disk; sessions are kept and recompute pages when they need them
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep kv purge --tenant acme
  skep kv purge --agent concierge --session ada
  skep kv purge --yes")]
pub struct PurgeArgs {
    /// Erase the pages of this tenant only
    #[arg(long, value_name = "NAME", conflicts_with = "agent")]
    tenant: Option<String>,
    /// Erase the pages that are used only by sessions of this agent
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// Erase the pages that are used only by this session of the agent
    #[arg(long, value_name = "ID", requires = "agent")]
    session: Option<String>,
    /// Erase everything without asking
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Shows or erases the KV pages on disk.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Status(args) => {
            let status = args.host.client()?.kv_disk().await?;
            if args.json { out::json(&status) } else { show(&status) }
        }
        Command::Purge(PurgeArgs { tenant, agent, session, yes, host }) => {
            let is_all = tenant.is_none() && agent.is_none();
            if is_all && !yes && !confirmed("erase the KV pages of all tenants from the disk?")? {
                return out::line("nothing was erased");
            }
            let filter = [("tenant", tenant), ("agent", agent), ("session", session)];
            let purged = host.client()?.purge_kv_disk(&filter).await?;
            out::line(&format!("erased {}", out::count(purged.erased_pages, "page")))
        }
    }
}

fn show(status: &KvDisk) -> Result<()> {
    if !status.is_on {
        return out::line("the host keeps no KV pages on disk");
    }
    let KvDisk { max_bytes, used_bytes, pages, tenants, pages_at_start, .. } = status;
    out::line(&format!(
        "{} of {} used: {} of {} ({pages_at_start} found at startup)",
        HumanBytes(*used_bytes),
        HumanBytes(*max_bytes),
        out::count(*pages, "page"),
        out::count(*tenants, "tenant"),
    ))?;
    let KvDiskTotals { written_bytes, written_pages, read_bytes, read_pages, .. } = &status.totals;
    let KvDisk { queued_bytes, written_today_bytes, written_yesterday_bytes, .. } = status;
    out::line(&format!(
        "since startup: {read_pages} pages read ({}), {written_pages} written ({}), {} queued",
        HumanBytes(*read_bytes),
        HumanBytes(*written_bytes),
        HumanBytes(*queued_bytes),
    ))?;
    let KvDiskTotals { evicted_pages, erased_pages, damaged_pages, dropped_pages, .. } = &status.totals;
    out::line(&format!(
        "pages: {evicted_pages} evicted, {erased_pages} erased, {damaged_pages} damaged, {dropped_pages} not written (disk \
         full or slow)"
    ))?;
    out::line(&format!(
        "written today (UTC): {}, yesterday: {}",
        HumanBytes(*written_today_bytes),
        HumanBytes(*written_yesterday_bytes),
    ))?;
    if let Some(peers) = &status.peers {
        let KvPeers { questions, missed, fetched_pages, fetched_bytes, given_pages, given_bytes, lane } =
            peers;
        out::line(&format!(
            "other hosts, over {lane}: {fetched_pages} pages fetched ({}), {given_pages} given ({}); asked {}, {missed} of them with \
             no answer or some pages missing",
            HumanBytes(*fetched_bytes),
            HumanBytes(*given_bytes),
            out::count(*questions, "time"),
        ))?;
    }
    if let Some(cache) = &status.cluster_cache {
        show_cluster_cache(cache)?;
    }
    for KvPin { agent, session, bytes, is_protected, .. } in &status.pins {
        let state = if *is_protected { "" } else { ", beyond the share of pins" };
        out::line(&format!("pinned: {agent} {session} ({}{state})", HumanBytes(*bytes)))?;
    }
    Ok(())
}

fn show_cluster_cache(cache: &KvClusterCache) -> Result<()> {
    let state = match (&cache.problem, cache.is_up) {
        (_, true) => "in use".to_owned(),
        (Some(problem), false) => format!("away, pages are computed ({problem})"),
        (None, false) => "connecting".to_owned(),
    };
    out::line(&format!("cluster cache ({} at {}): {state}", cache.kind, cache.master))?;
    out::line(&format!(
        "cluster cache: {} pages fetched ({}), {} put ({}), {} not put, {} removed; asked {}, {} of them with \
         no answer or some pages missing",
        cache.fetched_pages,
        HumanBytes(cache.fetched_bytes),
        cache.put_pages,
        HumanBytes(cache.put_bytes),
        cache.dropped_pages,
        cache.removed_pages,
        out::count(cache.questions, "time"),
        cache.missed,
    ))
}
