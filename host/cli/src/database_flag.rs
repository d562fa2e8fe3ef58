//! The address of a database.

use anyhow::{Result, bail};
use clap::Args;
use serde::Deserialize;
use std::{fmt, path::PathBuf, str::FromStr};

/// The flag `--database`, which several commands have.
#[derive(Args, Debug, Default, Clone)]
pub struct DatabaseFlag {
    /// Database: sqlite:PATH or postgres://USER@HOST/DATABASE; a password may be in PGPASSWORD or in the file that
    /// PGPASSFILE names [default: sqlite, in the data folder]
    #[arg(long, value_name = "ADDRESS")]
    pub database: Option<DatabaseAddress>,
}

/// A database of the operator's choice.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum DatabaseAddress {
    Sqlite(PathBuf),
    /// An address, which may contain a password.
    Postgres(String),
}

impl FromStr for DatabaseAddress {
    type Err = anyhow::Error;

    fn from_str(address: &str) -> Result<Self> {
        if let Some(path) = address.strip_prefix("sqlite:").filter(|path| !path.is_empty()) {
            return Ok(DatabaseAddress::Sqlite(path.into()));
        }
        if ["postgres://", "postgresql://"].iter().any(|scheme| address.starts_with(scheme)) {
            return Ok(DatabaseAddress::Postgres(address.to_owned()));
        }
        bail!("is not the address of a database\n  hint: sqlite:PATH, or postgres://USER@HOST:5432/DATABASE")
    }
}

impl TryFrom<String> for DatabaseAddress {
    type Error = anyhow::Error;

    fn try_from(address: String) -> Result<Self> {
        address.parse()
    }
}

/// Shows no password.
impl fmt::Display for DatabaseAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DatabaseAddress::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            DatabaseAddress::Postgres(address) => {
                let rest = address.split_once("://").map_or("", |(_, rest)| rest);
                let server = rest.rsplit_once('@').map_or(rest, |(_, server)| server);
                let server = server.split_once('?').map_or(server, |(server, _)| server);
                write!(f, "postgres://{server}")
            }
        }
    }
}

impl fmt::Debug for DatabaseAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_without_its_password() {
        for (address, shown) in [
            ("sqlite:data/skep.db", "sqlite:data/skep.db"),
            ("postgres://ann:p@ss@db:5432/skep?sslmode=require", "postgres://db:5432/skep"),
            ("postgresql://db/skep", "postgres://db/skep"),
        ] {
            let address: DatabaseAddress = address.parse().unwrap();
            assert_eq!((address.to_string().as_str(), format!("{address:?}").as_str()), (shown, shown));
        }
        for wrong in ["", "sqlite:", "mysql://db", "skep.db"] {
            let error = wrong.parse::<DatabaseAddress>().unwrap_err().to_string();
            assert!(error.contains("hint: sqlite:PATH"), "{error}");
        }
    }
}
