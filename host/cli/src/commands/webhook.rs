//! `skep webhook`: adds, lists, tests and removes webhooks, and retries their dead letters.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use skep_api::{AddedWebhook, WebhookState};

use super::{HostArgs, out};

/// Send events to webhooks, and see what could not be delivered
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Add(AddArgs),
    List(ListArgs),
    Test(TestArgs),
    Remove(RemoveArgs),
    DeadLetters(DeadLettersArgs),
    Redeliver(RedeliverArgs),
}

/// Send events of some topics to an address
///
/// Each event is sent as a POST with JSON, signed as Standard Webhooks describes: webhook-id,
/// webhook-timestamp, webhook-signature. The secret is printed once.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep webhook add https://example.com/hook 'order.*' skep.turn.failed
  skep webhook add https://example.com/hook '*' --secret whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")]
pub struct AddArgs {
    /// URL to send events to
    address: String,
    /// Topics; * stands for one part, or as the last part for everything that follows
    #[arg(required = true)]
    topics: Vec<String>,
    /// Secret: whsec_ and base64 of 24 to 64 bytes [default: the host makes one]
    #[arg(long)]
    secret: Option<String>,
    /// Print the webhook, with its secret, as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// List the webhooks: the result of the last attempt, what waits, and when the next attempt is
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep webhook list
  skep webhook list --json | jq -r '.[].id'")]
pub struct ListArgs {
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Send one signed test event to a webhook now, and print the response
///
/// The topic is skep.webhook.test. The event is not sent again, and the exit code says whether it was
/// accepted.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep webhook test wh_0199f3c2b7a87d3e9d1c4a5b6c7d8e9f
  skep webhook test wh_0199f3c2b7a87d3e9d1c4a5b6c7d8e9f --json | jq .status")]
pub struct TestArgs {
    /// Id of the webhook, as `skep webhook list` shows it
    id: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Remove a webhook, with its undelivered events
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep webhook remove wh_0199f3c2b7a87d3e9d1c4a5b6c7d8e9f")]
pub struct RemoveArgs {
    /// Id of the webhook, as `skep webhook list` shows it
    id: String,
    #[command(flatten)]
    host: HostArgs,
}

/// List the newest deliveries, to webhooks and to agents, that failed permanently
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep webhook dead-letters
  skep webhook dead-letters --json | jq -r '.[].id' | xargs -n1 skep webhook redeliver")]
pub struct DeadLettersArgs {
    /// Maximum number of dead letters
    #[arg(long, short = 'n', default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Try to deliver a dead letter again
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep webhook redeliver 42")]
pub struct RedeliverArgs {
    /// Id of the dead letter, as `skep webhook dead-letters` shows it
    id: i64,
    #[command(flatten)]
    host: HostArgs,
}

/// Adds, lists, tests or removes webhooks, or retries their dead letters.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Add(args) => add(args).await,
        Command::List(args) => list(args).await,
        Command::Test(args) => test(args).await,
        Command::Remove(RemoveArgs { id, host }) => {
            host.client()?.remove_webhook(&id).await?;
            out::line(&format!("{id} is removed"))
        }
        Command::DeadLetters(args) => dead_letters(args).await,
        Command::Redeliver(RedeliverArgs { id, host }) => {
            host.client()?.redeliver(id).await?;
            out::line(&format!("{id} will be tried again"))
        }
    }
}

async fn add(args: AddArgs) -> Result<()> {
    let added = args.host.client()?.add_webhook(&args.address, &args.topics, args.secret.as_deref()).await?;
    if args.json {
        return out::json(&added);
    }
    let AddedWebhook { webhook, secret } = added;
    out::line(&format!("{} gets the events {}", webhook.url, webhook.topics.join(", ")))?;
    out::line(&format!("id      {}", webhook.id))?;
    out::line(&format!("secret  {}", secret))
}

async fn list(args: ListArgs) -> Result<()> {
    let webhooks = args.host.client()?.webhooks().await?;
    if args.json {
        return out::json(&webhooks);
    }
    if webhooks.is_empty() {
        return out::line("no webhooks yet; add one with: skep webhook add URL TOPIC");
    }
    let rows: Vec<_> = webhooks
        .into_iter()
        .map(|WebhookState { webhook, waiting, next_try_at_ms }| {
            let last = match &webhook.last_try {
                None => "never".to_owned(),
                Some(last) => {
                    let status =
                        last.status.map_or_else(|| "no answer".to_owned(), |status| format!("HTTP {status}"));
                    format!("{status}, {}", out::ago(last.at_ms))
                }
            };
            let next = next_try_at_ms
                .map_or_else(String::new, |at_ms| format!("{waiting} waiting, {}", until(at_ms)));
            let state =
                match (webhook.disabled, webhook.last_try.and_then(|last| last.error), webhook.configured) {
                    (Some(why), _, _) => format!("disabled: {why}"),
                    (None, Some(error), _) => error,
                    (None, None, true) => "from skep.toml".to_owned(),
                    (None, None, false) => String::new(),
                };
            [webhook.id, webhook.url, webhook.topics.join(", "), last, next, state]
        })
        .collect();
    out::table(["ID", "URL", "TOPICS", "LAST", "NEXT", ""], &rows)
}

/// Describes how long it is until a time.
fn until(at_ms: u64) -> String {
    let left = (UNIX_EPOCH + Duration::from_millis(at_ms)).duration_since(SystemTime::now());
    match left.unwrap_or_default().as_secs() {
        0 => "now".to_owned(),
        seconds @ 1..120 => format!("in {seconds} s"),
        seconds @ 120..7_200 => format!("in {} min", seconds / 60),
        seconds => format!("in {} h", seconds / 3_600),
    }
}

async fn test(args: TestArgs) -> Result<()> {
    let test = args.host.client()?.test_webhook(&args.id).await?;
    if args.json {
        out::json(&test)?;
    } else if let Some(status) = test.status {
        out::line(&format!("{} answered HTTP {status} in {} ms", test.webhook, test.took_ms))?;
        if !test.answer.trim().is_empty() {
            out::line(test.answer.trim_end())?;
        }
    }
    match test.error {
        None => Ok(()),
        Some(error) => bail!("the test event was not accepted: {error}"),
    }
}

async fn dead_letters(args: DeadLettersArgs) -> Result<()> {
    let dead = args.host.client()?.dead_letters(args.limit).await?;
    if args.json {
        return out::json(&dead);
    }
    if dead.is_empty() {
        return out::line("no dead letters");
    }
    let rows: Vec<_> = dead
        .into_iter()
        .map(|dead| {
            let to = match (dead.webhook, dead.agent, dead.session) {
                (Some(webhook), _, _) => webhook,
                (None, Some(agent), Some(session)) => format!("{agent}/{session}"),
                (None, agent, _) => agent.unwrap_or_default(),
            };
            [dead.id.to_string(), dead.topic, dead.event_id, to, dead.attempts.to_string(), dead.error]
        })
        .collect();
    out::table(["ID", "TOPIC", "EVENT", "TO", "ATTEMPTS", "ERROR"], &rows)
}
