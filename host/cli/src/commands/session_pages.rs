//! `skep session warm`, `pin` and `unpin`: the KV pages of a session on disk.

use anyhow::Result;
use skep_api::{SessionPin, WarmedConversation};

use super::{HostArgs, out};

#[derive(Debug, clap::Args)]
struct OneSession {
    /// Name of the agent
    agent: String,
    /// Id of the session
    session: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Read the KV pages of a session from the disk before its next turn needs them
///
/// Computes nothing, and takes only memory that running requests leave. MISSING is what the next turn has to
/// compute.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session warm concierge room-7
  skep session warm concierge room-7 --json | jq .conversations[0].read_tokens")]
pub struct WarmArgs {
    #[command(flatten)]
    one: OneSession,
}

/// Evict the KV pages of a session last from the disk, as far as pin_percent in [kv] allows
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session pin concierge room-7
  skep kv status                                            lists the pinned sessions")]
pub struct PinArgs {
    #[command(flatten)]
    one: OneSession,
}

/// Undo a pin
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session unpin concierge room-7")]
pub struct UnpinArgs {
    #[command(flatten)]
    one: OneSession,
}

/// Reads the KV pages of a session into memory, and prints what was found.
pub async fn warm(WarmArgs { one }: WarmArgs) -> Result<()> {
    let OneSession { agent, session, json, host } = one;
    let warmed = host.client()?.warm_session(&agent, &session).await?;
    if json {
        return out::json(&warmed);
    }
    if warmed.conversations.is_empty() {
        return out::line("the session has no conversations");
    }
    let row = |conversation: &WarmedConversation| {
        let WarmedConversation { name, tokens, in_memory_tokens, on_disk_tokens, .. } = conversation;
        [
            name.clone(),
            tokens.to_string(),
            in_memory_tokens.to_string(),
            on_disk_tokens.to_string(),
            conversation.read_tokens.to_string(),
            conversation.missing_tokens.to_string(),
        ]
    };
    let rows: Vec<_> = warmed.conversations.iter().map(row).collect();
    out::table(["CONVERSATION", "TOKENS", "IN MEMORY", "ON DISK", "READ", "MISSING"], &rows)?;
    for WarmedConversation { name, model, skipped, .. } in &warmed.conversations {
        if let Some(why) = skipped {
            out::line(&format!("{name} was not looked up: {why} ({model})"))?;
        }
    }
    Ok(())
}

/// Pins the KV pages of a session.
pub async fn pin(PinArgs { one }: PinArgs) -> Result<()> {
    set(one, true).await
}

/// Removes the pin of a session.
pub async fn unpin(UnpinArgs { one }: UnpinArgs) -> Result<()> {
    set(one, false).await
}

async fn set(one: OneSession, is_pinned: bool) -> Result<()> {
    let OneSession { agent, session, json, host } = one;
    let pin = host.client()?.pin_session(&agent, &session, is_pinned).await?;
    if json {
        return out::json(&pin);
    }
    let SessionPin { is_pinned, has_changed, .. } = pin;
    out::line(&match (is_pinned, has_changed) {
        (true, true) => format!("pinned {session}"),
        (true, false) => format!("{session} was pinned already"),
        (false, true) => format!("unpinned {session}"),
        (false, false) => format!("{session} was not pinned"),
    })
}
