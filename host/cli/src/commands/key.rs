//! `skep key`: creates, lists and revokes API keys.
//!
//! It works over HTTP, as an admin, or in the data folder of a host, which needs no key but access to the
//! folder.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use skep_api::Key;
use skep_runtime::{AgentName, Clock, KeyRing, NewApiKey, Role, Tenant};
use skep_store::{Durability, Store, StoreError};

use super::{HostArgs, out};
use crate::client::Client;
use crate::data_lock::DataLock;
use crate::database_flag::DatabaseAddress;
use crate::failure::Usage;
use crate::{server, style};

/// Create, list and revoke API keys
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Create(CreateArgs),
    List(ListArgs),
    Revoke(RevokeArgs),
}

/// Create an API key and print it, once
///
/// A key belongs to one tenant, which has its own sessions; agents and models are shared by all tenants. The
/// roles: `read` sees lists, sessions and logs; `invoke` can also send messages and generate; `admin` is the
/// operator's role, can do everything for all tenants, and is only for keys of the tenant `local`; `metrics`
/// reads /metrics and nothing else, and is also only for `local`. The first key of a host is created in its
/// data folder, with --data.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep key create --role admin --data ~/.local/share/skep
  export SKEP_API_KEY=$(skep key create --role admin --data data)
  skep key create --tenant acme --role invoke --name ci --expires 30d
  skep key create --tenant acme --role invoke --agents concierge,echo --requests-per-minute 30
  skep key create --role admin --bodies --data data")]
pub struct CreateArgs {
    /// Tenant that the key belongs to; `local` has the sessions of a host that requires no keys
    #[arg(long, default_value = "local")]
    tenant: String,
    /// Role: read or invoke; for the tenant `local` also admin or metrics
    #[arg(long)]
    role: String,
    /// Agents that the key may use [default: all of them, and the models]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    agents: Vec<String>,
    /// Name of the key, for people
    #[arg(long, default_value = "", hide_default_value = true)]
    name: String,
    /// Lifetime of the key, such as 90s, 45m, 12h or 30d [default: until it is revoked]
    #[arg(long, value_name = "TIME", value_parser = lifetime)]
    expires: Option<Duration>,
    /// Maximum requests per minute, all of which may arrive at once; more get 429 with Retry-After. All keys of
    /// a tenant together have the limit of [tenants.NAME] in skep.toml [default: only that limit]
    #[arg(long, value_name = "N")]
    requests_per_minute: Option<NonZeroU32>,
    /// The key may read what was said in requests to models, see `skep requests --help`. No role includes
    /// this, and over HTTP only a key that may do so can create another one
    #[arg(long)]
    bodies: bool,
    #[command(flatten)]
    store: KeyStoreArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// List the API keys of a host; the keys themselves are not stored
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep key list
  skep key list --data data
  skep key list --json | jq -r '.[] | select(.revoked_at_ms == null) | .id'")]
pub struct ListArgs {
    #[command(flatten)]
    store: KeyStoreArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Revoke a key, which is refused from now on
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep key revoke key-5f0c2a9b81d4
  skep key revoke key-5f0c2a9b81d4 --data data")]
pub struct RevokeArgs {
    /// Id of the key, as `skep key list` prints it
    id: String,
    #[command(flatten)]
    store: KeyStoreArgs,
}

/// The data folder or the host that stores the keys.
#[derive(Debug, clap::Args)]
struct KeyStoreArgs {
    #[command(flatten)]
    host: HostArgs,
    /// Use the data folder of a host on this machine, whether or not the host runs; no key is needed
    #[arg(long, value_name = "DIR", conflicts_with = "url")]
    data: Option<PathBuf>,
    /// Use a PostgreSQL database directly, whether or not a host uses it: postgres://USER@HOST/DATABASE
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["url", "data"])]
    database: Option<DatabaseAddress>,
}

/// Treatment of a data folder that no host has used yet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Absent {
    /// It is created, because the first key of a host comes before the host.
    IsMade,
    IsAnError,
}

enum Keys {
    OfHost(Box<Client>),
    InFolder { ring: Box<KeyRing>, store: Box<Store> },
}

/// Creates, lists or revokes API keys.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Create(args) => create(args).await,
        Command::List(args) => list(args).await,
        Command::Revoke(args) => revoke(args).await,
    }
}

async fn create(args: CreateArgs) -> Result<()> {
    let agents = args.agents.iter().map(|name| AgentName::new(name)).collect::<Result<Vec<_>, _>>();
    let agents = agents.map_err(usage)?;
    let new = NewApiKey {
        tenant: Tenant::new(&args.tenant).map_err(usage)?,
        role: args.role.parse::<Role>().map_err(usage)?,
        agents: (!agents.is_empty()).then_some(agents),
        name: args.name,
        expires_in: args.expires,
        requests_per_minute: args.requests_per_minute,
        bodies: args.bodies,
    };
    // The key is checked before a folder is created for it.
    new.check().map_err(usage)?;
    let made = Keys::at(&args.store, Absent::IsMade).await?.create(new).await?;
    if args.json {
        return out::json(&made);
    }
    style::warn(&made.warnings);
    let about = format!(
        "  {} of tenant {} with the role {}; it will not be shown again",
        made.id,
        made.tenant,
        role(&made)
    );
    eprintln!("{}", style::stderr().dim(&about));
    out::line(made.key.as_deref().context("the host did not return the key")?)
}

async fn list(args: ListArgs) -> Result<()> {
    let keys = Keys::at(&args.store, Absent::IsAnError).await?.list().await?;
    if args.json {
        return out::json(&keys);
    }
    if keys.is_empty() {
        return out::line("no keys yet; create one with: skep key create --role admin");
    }
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
    let rows: Vec<_> = keys
        .into_iter()
        .map(|key| {
            let (state, role) = (state(&key, now_ms), role(&key));
            let agents = key.agents.map_or_else(|| "all".to_owned(), |agents| agents.join(", "));
            let rate = key.requests_per_minute.map_or_else(String::new, |rate| format!("{rate}/min"));
            let used = key.last_used_at_ms.map_or_else(|| "never".to_owned(), |day| used(day, now_ms));
            [key.id, key.tenant, role, agents, rate, key.name, out::ago(key.created_at_ms), used, state]
        })
        .collect();
    out::table(["KEY", "TENANT", "ROLE", "AGENTS", "RATE", "NAME", "CREATED", "USED", "STATE"], &rows)
}

async fn revoke(args: RevokeArgs) -> Result<()> {
    let key = Keys::at(&args.store, Absent::IsAnError).await?.revoke(&args.id).await?;
    out::line(&format!("{} of tenant {} is refused from now on", key.id, key.tenant))
}

impl Keys {
    async fn at(store: &KeyStoreArgs, absent: Absent) -> Result<Self> {
        match (&store.data, &store.database) {
            (Some(dir), _) => Self::in_folder(dir, absent).await,
            (None, Some(database)) => Self::in_database(database).await,
            (None, None) => Ok(Keys::OfHost(Box::new(store.host.client()?))),
        }
    }

    async fn in_database(database: &DatabaseAddress) -> Result<Self> {
        let DatabaseAddress::Postgres(url) = database else {
            bail!("{database} is a file\n  hint: name the data folder of its host with --data");
        };
        let store = match Store::connect_beside(url).await {
            // There are no tables yet, or those of an older version, which no host of this version uses.
            Err(StoreError::OlderSchema { .. }) => Store::connect(url).await?,
            connected => connected?,
        };
        let ring = Box::new(KeyRing::new(store.clone(), Clock::default()));
        Ok(Keys::InFolder { ring, store: Box::new(store) })
    }

    async fn in_folder(dir: &Path, absent: Absent) -> Result<Self> {
        let database = server::database(dir);
        let is_there = database.try_exists().with_context(|| format!("cannot read {}", dir.display()))?;
        if !is_there && absent == Absent::IsAnError {
            bail!(
                "{} is not the data folder of a host: there is no {}\n  hint: `skep up` prints the folder that it uses",
                dir.display(),
                database.display()
            );
        }
        // A host may be using the tables, so they are not changed, except if they are of an older version or
        // do not exist, and no host uses the folder.
        let store = match is_there {
            true => match Store::open_beside(&database, Durability::Power).await {
                Err(StoreError::OlderSchema { .. }) => open_alone(dir, &database).await?,
                opened => opened?,
            },
            false => {
                let store = open_alone(dir, &database).await?;
                eprintln!("  created a new data folder, {}", dir.display());
                store
            }
        };
        let ring = Box::new(KeyRing::new(store.clone(), Clock::default()));
        Ok(Keys::InFolder { ring, store: Box::new(store) })
    }

    async fn create(self, new: NewApiKey) -> Result<Key> {
        match self {
            Keys::OfHost(client) => client.create_key(new).await,
            Keys::InFolder { ring, store } => {
                let warnings = ring.warnings(&new).await?;
                let (key, secret) = ring.create(new).await?;
                store.close().await;
                Ok(Key { key: Some(secret), warnings, ..skep_gateway::describe_key(key) })
            }
        }
    }

    async fn list(self) -> Result<Vec<Key>> {
        match self {
            Keys::OfHost(client) => client.keys().await,
            Keys::InFolder { ring, store } => {
                let keys = ring.list().await?;
                store.close().await;
                Ok(keys.into_iter().map(skep_gateway::describe_key).collect())
            }
        }
    }

    async fn revoke(self, id: &str) -> Result<Key> {
        match self {
            Keys::OfHost(client) => client.revoke_key(id).await,
            Keys::InFolder { ring, store } => {
                let key = ring.revoke(id).await?;
                store.close().await;
                Ok(skep_gateway::describe_key(key))
            }
        }
    }
}

/// Brings the tables up to date, or creates them.
async fn open_alone(dir: &Path, database: &Path) -> Result<Store> {
    let _lock = DataLock::take(dir)?;
    Ok(Store::open(database, Durability::Power).await?)
}

fn role(key: &Key) -> String {
    if key.bodies { format!("{}, bodies", key.role) } else { key.role.to_string() }
}

fn state(key: &Key, now_ms: u64) -> String {
    match (key.revoked_at_ms, key.expires_at_ms) {
        (Some(_), _) => "revoked".to_owned(),
        (None, Some(at)) if at <= now_ms => "expired".to_owned(),
        (None, Some(at)) => format!("valid for {}", rounded(at - now_ms)),
        (None, None) => "valid".to_owned(),
    }
}

/// Describes a time to the nearest minute, hour or day. A key of 30 days has a second less when it is listed.
fn rounded(ms: u64) -> String {
    const MINUTE_MS: u64 = 60_000;
    const HOUR_MS: u64 = 60 * MINUTE_MS;
    const DAY_MS: u64 = 24 * HOUR_MS;
    match ms {
        ..MINUTE_MS => "less than a minute".to_owned(),
        ms if ms < 2 * HOUR_MS - MINUTE_MS / 2 => format!("{} min", (ms + MINUTE_MS / 2) / MINUTE_MS),
        ms if ms < 2 * DAY_MS - HOUR_MS / 2 => format!("{} h", (ms + HOUR_MS / 2) / HOUR_MS),
        ms => format!("{} days", (ms + DAY_MS / 2) / DAY_MS),
    }
}

fn used(day_ms: u64, now_ms: u64) -> String {
    match now_ms.saturating_sub(day_ms) / (24 * 3_600_000) {
        0 => "today".to_owned(),
        1 => "yesterday".to_owned(),
        days => format!("{days} days ago"),
    }
}

fn usage(error: skep_runtime::RuntimeError) -> anyhow::Error {
    anyhow::anyhow!(Usage(error.to_string()))
}

/// Parses a number and a unit.
fn lifetime(text: &str) -> Result<Duration> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => bail!("a duration is a number followed by s, m, h or d, such as 30d"),
    };
    let number: u64 =
        number.parse().context("a duration is a number followed by s, m, h or d, such as 30d")?;
    let seconds = number.checked_mul(seconds).filter(|seconds| *seconds > 0 && *seconds <= MAX_LIFETIME_S);
    seconds.map(Duration::from_secs).context("a key can be valid for one second to ten years")
}

const MAX_LIFETIME_S: u64 = 3_653 * 86_400;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_tables_of_a_folder_in_use_are_not_brought_up_to_date() {
        let folder = tempfile::tempdir().expect("a folder");
        let database = server::database(folder.path());
        Keys::in_folder(folder.path(), Absent::IsMade).await.expect("made").list().await.expect("no keys");
        let lock = DataLock::take(folder.path()).expect("a host");
        let keys = Keys::in_folder(folder.path(), Absent::IsAnError).await.expect("of this version");
        keys.list().await.expect("no keys");
        // Imitates the file of an older host: SQLite keeps the number of the schema at this offset.
        let mut bytes = std::fs::read(&database).expect("a file");
        let older = u32::try_from(skep_store::known_schema() - 1).expect("small");
        bytes[60..64].copy_from_slice(&older.to_be_bytes());
        std::fs::write(&database, &bytes).expect("written");
        let refused = Keys::in_folder(folder.path(), Absent::IsAnError).await;
        let error = refused.err().expect("a host uses it").to_string();
        assert!(error.contains("in use by another host"), "{error}");
        assert_eq!(std::fs::read(&database).expect("a file")[60..64], older.to_be_bytes());
        drop(lock);
    }

    #[test]
    fn a_remaining_time_is_rounded_to_its_unit() {
        let hour = 3_600_000;
        for (ms, expected) in [
            (30 * 24 * hour - 900, "30 days"),
            (29 * 24 * hour + 11 * hour, "29 days"),
            (2 * 24 * hour - 1, "2 days"),
            (36 * hour - 1, "36 h"),
            (2 * hour - 1, "2 h"),
            (45 * 60_000 - 1, "45 min"),
            (59_000, "less than a minute"),
        ] {
            assert_eq!(rounded(ms), expected, "{ms}");
        }
    }

    #[test]
    fn a_lifetime_is_a_number_and_a_unit() {
        for (text, seconds) in [("90s", 90), ("45m", 2_700), ("12h", 43_200), ("30d", 2_592_000)] {
            assert_eq!(lifetime(text).expect(text).as_secs(), seconds);
        }
        for text in ["", "30", "d", "0d", "-1d", "1.5h", "1w", "99999999d", "99999999999999999999d"] {
            lifetime(text).expect_err(text);
        }
    }
}
