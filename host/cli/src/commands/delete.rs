//! `skep delete`: removes an agent.

use anyhow::Result;

use super::{HostArgs, confirmation::confirmed, out};

/// Maximum number of sessions that are counted.
const COUNTED_SESSIONS: u32 = 1_000;

/// Remove an agent with everything that belongs to it
///
/// Deletes its versions, schedules, secrets, log lines and the sessions of all tenants, and cancels its
/// running turns. To go back to an earlier version, use skep rollback; to delete one session, use skep
/// session delete.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep session export concierge room-7 -o room-7.json      saves a session first
  skep delete concierge
  skep delete concierge --yes                               without asking, for scripts")]
pub struct Args {
    /// Name of the agent
    agent: String,
    /// Do not ask for confirmation
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Deletes the agent, once the user has confirmed it.
pub async fn run(args: Args) -> Result<()> {
    let Args { agent, yes, host } = args;
    let client = host.client()?;
    let (sessions, has_more) = client.sessions(&agent, None, None, COUNTED_SESSIONS).await?;
    let sessions = counted(sessions.len(), has_more);
    if !yes && !confirmed(&format!("permanently delete agent {agent} with {sessions}?"))? {
        return out::line("nothing was deleted");
    }
    client.delete_agent(&agent).await?;
    out::line(&format!("deleted {agent} with {sessions}"))
}

/// Describes the caller's own sessions; those of other tenants can only be listed one tenant at a time.
fn counted(sessions: usize, has_more: bool) -> String {
    match (sessions, has_more) {
        (0, _) => "no session of yours".to_owned(),
        (1, false) => "1 session of yours".to_owned(),
        (count, false) => format!("{count} sessions of yours"),
        (count, true) => format!("{count} of your sessions, and more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_counted_as_far_as_they_are_read() {
        assert_eq!(counted(0, false), "no session of yours");
        assert_eq!(counted(1, false), "1 session of yours");
        assert_eq!(counted(12, false), "12 sessions of yours");
        assert_eq!(counted(1_000, true), "1000 of your sessions, and more");
    }
}
