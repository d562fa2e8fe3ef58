//! `skep approval`: tool calls that wait for a person's decision.

use anyhow::Result;
use skep_api::{Approval, Decision};

use super::{HostArgs, out};

/// Approve or deny tool calls that wait for a person's decision
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    List(ListArgs),
    Approve(ApproveArgs),
    Deny(DenyArgs),
}

/// List the calls that wait, oldest first
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep approval list
  skep approval list --json | jq -r '.[].id'")]
pub struct ListArgs {
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Approve a call
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep approval approve 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f-3")]
pub struct ApproveArgs {
    /// Id of the call, as `skep approval list` shows it
    id: String,
    #[command(flatten)]
    host: HostArgs,
}

/// Deny a call
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep approval deny 0199f3c2b7a87d3e9d1c4a5b6c7d8e9f-3 --reason 'ask the guest first'")]
pub struct DenyArgs {
    /// Id of the call, as `skep approval list` shows it
    id: String,
    /// Reason that is given to the agent's model
    #[arg(long)]
    reason: Option<String>,
    #[command(flatten)]
    host: HostArgs,
}

/// Lists, approves or denies tool calls that wait for a decision.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::List(args) => {
            let approvals = args.host.client()?.approvals().await?;
            if args.json { out::json(&approvals) } else { list(approvals) }
        }
        Command::Approve(args) => {
            let approval = args.host.client()?.decide(&args.id, Decision::Approve, None).await?;
            out::line(&format!("approved: {} of {}", approval.tool, approval.agent))
        }
        Command::Deny(args) => {
            let approval = args.host.client()?.decide(&args.id, Decision::Deny, args.reason).await?;
            out::line(&format!("denied: {} of {}", approval.tool, approval.agent))
        }
    }
}

fn list(approvals: Vec<Approval>) -> Result<()> {
    if approvals.is_empty() {
        return out::line("no calls wait for approval");
    }
    let rows: Vec<_> = approvals
        .into_iter()
        .map(|approval| {
            let arguments = approval.arguments.to_string();
            [approval.id, approval.agent, approval.session, approval.tool, arguments]
        })
        .collect();
    out::table(["ID", "AGENT", "SESSION", "TOOL", "ARGUMENTS"], &rows)
}
