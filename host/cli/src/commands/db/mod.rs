//! `skep db`: checks, migrates and moves the database of a host.

mod check;
mod moving;
mod rotation;

use std::path::PathBuf;

use anyhow::{Result, bail};
use skep_runtime::SealingKey;
use skep_store::{Durability, Store, TableRows, inspect_file, inspect_server, known_schema};

use super::out;
use crate::config::Config;
use crate::data_lock::DataLock;
use crate::database_flag::DatabaseAddress;
use crate::server_options::DataDir;
use crate::{paths, server};

/// Check, migrate, export and import the database of a host
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Check(CheckArgs),
    Migrate(MigrateArgs),
    Export(ExportArgs),
    Import(ImportArgs),
    RotateKey(RotateKeyArgs),
}

/// Check that a host can use a database, and show what is in it; a host may be running
///
/// Reads the whole file of an SQLite database to find damage. Of a PostgreSQL server it checks the version, the
/// encoding, the user's privileges, that there is no transaction pooler, and that enough connections are free.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep db check --data data
  skep db check --database postgres://skep@db.example/skep?sslmode=verify-full
  skep db check --database postgres://skep@db.example/skep --json | jq .rows.sessions")]
pub struct CheckArgs {
    #[command(flatten)]
    target: DatabaseArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Create the tables of a database, or migrate them to this version, while no host is running
///
/// A host does the same when it starts, unless hosts of the older version could not use the tables of a PostgreSQL
/// database afterwards. Make a backup of such a database first; an SQLite database is copied before it is changed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep db migrate --data data
  skep db migrate --database postgres://skep@db.example/skep")]
pub struct MigrateArgs {
    #[command(flatten)]
    target: DatabaseArgs,
}

/// Write everything in a database to a file, while no host is running
///
/// The file is an SQLite database, which `skep db import` reads. It contains secrets only in sealed form: the key
/// that opens them, secrets.key in the data folder, is not in it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep db export skep-export.db --database postgres://skep@db.example/skep
  skep db export skep-export.db --data data --json")]
pub struct ExportArgs {
    /// File to write, which must not exist
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    target: DatabaseArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Read everything from a file into an empty database
///
/// The file is one that `skep db export` wrote, or the skep.db of a data folder whose host is stopped. Either all of
/// it is written or nothing. Work in flight continues in the new database, so do not start a host on the old one again.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep db import data/skep.db --database postgres://skep@db.example/skep
  skep db import skep-export.db --data new-data")]
pub struct ImportArgs {
    /// File to read
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    target: DatabaseArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Seal all secrets with a new key, while no host is running
///
/// Generates a new key in secrets.key, or in the file that [secrets] key_file names. A crash halfway loses nothing.
/// A program of [secrets] key_command has to print the new key on its first line and the old one below; afterwards it
/// need not print the old one anymore.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep db rotate-key --data data
  skep db rotate-key --config skep.toml")]
pub struct RotateKeyArgs {
    #[command(flatten)]
    target: DatabaseArgs,
}

/// The database that a command works on.
#[derive(Debug, clap::Args)]
struct DatabaseArgs {
    /// File of settings, for `data`, `database` and `[secrets]`; see `skep up --help`
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Data folder of the host [default: the user's data folder]
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Database, if it is not the file skep.db in the data folder: sqlite:PATH or postgres://USER@HOST/DATABASE; a
    /// password may be in PGPASSWORD or in the file that PGPASSFILE names
    #[arg(long, value_name = "ADDRESS")]
    database: Option<DatabaseAddress>,
}

/// A database, and the keys of the secrets in it.
struct DatabaseTarget {
    address: DatabaseAddress,
    sealing_key: SealingKey,
}

/// Checks, migrates or moves a database, or changes the key that its secrets are sealed with.
pub async fn run(command: Command) -> Result<()> {
    match command {
        Command::Check(CheckArgs { target, json }) => check::run(&target.resolve()?, json).await,
        Command::Migrate(MigrateArgs { target }) => migrate(&target.resolve()?.address).await,
        Command::Export(ExportArgs { file, target, json }) => {
            moving::export(&target.resolve()?.address, &file, json).await
        }
        Command::Import(ImportArgs { file, target, json }) => {
            moving::import(&file, &target.resolve()?.address, json).await
        }
        Command::RotateKey(RotateKeyArgs { target }) => rotation::run(&target.resolve()?).await,
    }
}

impl DatabaseArgs {
    fn resolve(&self) -> Result<DatabaseTarget> {
        let config = self.config.as_deref().map_or_else(|| Ok(Config::default()), Config::read)?;
        let data = self.data.clone().or(config.data).map_or_else(paths::data_dir, Ok)?;
        let configured = config.secrets.sealing_key()?.unwrap_or_default();
        let database = self.database.clone().or(config.database);
        Ok(DatabaseTarget {
            address: database.unwrap_or_else(|| DatabaseAddress::Sqlite(server::database(&data))),
            sealing_key: server::sealing_key(&DataDir::Path(data), &configured),
        })
    }
}

async fn migrate(address: &DatabaseAddress) -> Result<()> {
    let before = match address {
        DatabaseAddress::Postgres(url) => inspect_server(url).await?.schema,
        DatabaseAddress::Sqlite(path) if path.try_exists()? => inspect_file(path).await?.schema,
        DatabaseAddress::Sqlite(_) => 0,
    };
    match address {
        DatabaseAddress::Postgres(url) => Store::connect_to_migrate(url).await?.close().await,
        DatabaseAddress::Sqlite(_) => {
            let (store, _lock) = alone(address).await?;
            store.close().await;
        }
    }
    let known = known_schema();
    out::line(&match before {
        0 => format!("created the tables of {address} (schema {known})"),
        before if before == known => format!("{address} has the schema of this version, {known}"),
        before if before > known => {
            format!(
                "{address} has the newer schema {before}, which this version can use as well; it was not changed"
            )
        }
        before => format!("brought {address} from schema {before} to {known}"),
    })
}

/// Opens a database that no host uses, and keeps hosts away from it. Its tables are created or migrated.
async fn alone(address: &DatabaseAddress) -> Result<(Store, Option<DataLock>)> {
    Ok(match address {
        DatabaseAddress::Postgres(url) => (Store::connect(url).await?, None),
        DatabaseAddress::Sqlite(path) => {
            let lock = DataLock::take(&server::folder_of(path))?;
            (Store::open(path, Durability::Power).await?, Some(lock))
        }
    })
}

/// Prints the tables that have rows.
fn print_rows(rows: &[TableRows]) -> Result<()> {
    let rows: Vec<_> = rows
        .iter()
        .filter(|table| table.rows > 0)
        .map(|TableRows { table, rows }| [table.clone(), rows.to_string()])
        .collect();
    out::table(["TABLE", "ROWS"], &rows)
}

/// Returns an object with the number of rows of each table.
fn rows_as_json(rows: &[TableRows]) -> serde_json::Value {
    rows.iter().map(|TableRows { table, rows }| (table.clone(), serde_json::Value::from(*rows))).collect()
}

fn rows_of(rows: &[TableRows], name: &str) -> u64 {
    rows.iter().find(|found| found.table == name).map_or(0, |found| found.rows)
}

fn refuse_absent(path: &std::path::Path) -> Result<()> {
    if path.is_file() {
        return Ok(());
    }
    bail!(
        "there is no database {}\n  hint: name the data folder with --data, or the file with --database",
        path.display()
    )
}
