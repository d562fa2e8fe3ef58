//! `skep db export` and `skep db import`.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, bail};
use serde_json::json;
use skep_store::{Durability, RowProgress, Store, StoreError, TableRows, snapshot};

use super::{alone, out, print_rows, refuse_absent, rows_as_json, rows_of};
use crate::data_lock::DataLock;
use crate::database_flag::DatabaseAddress;
use crate::progress::{Progress, Silent, Step, Terminal};
use crate::server;

/// Writes a database to a new file.
pub async fn export(from: &DatabaseAddress, to: &Path, as_json: bool) -> Result<()> {
    if to.try_exists()? {
        bail!("{} already exists\n  hint: choose another name", to.display());
    }
    let rows = match from {
        DatabaseAddress::Sqlite(path) => {
            refuse_absent(path)?;
            let _lock = DataLock::take(&server::folder_of(path))?;
            copy_file(path, to).await?
        }
        DatabaseAddress::Postgres(_) => {
            let (source, _lock) = alone(from).await?;
            let target = Store::open(to, Durability::Power).await?;
            let filled = fill(&target, &source, as_json).await;
            target.close().await;
            source.close().await;
            filled.inspect_err(|_| remove(to))?
        }
    };
    done(&format!("exported {from} to {}", to.display()), &rows, as_json)
}

/// Reads a file into an empty database.
pub async fn import(from: &Path, to: &DatabaseAddress, as_json: bool) -> Result<()> {
    refuse_absent(from)?;
    // Only the database of a data folder can have a host.
    let folder = server::folder_of(from);
    let _lock = if DataLock::is_known(&folder) { Some(DataLock::take(&folder)?) } else { None };
    let rows = match to {
        DatabaseAddress::Sqlite(path) => {
            if path.try_exists()? {
                bail!(
                    "{} already exists\n  hint: choose a data folder that no host has used",
                    path.display()
                );
            }
            let _lock = DataLock::take(&server::folder_of(path))?;
            copy_file(from, path).await?
        }
        DatabaseAddress::Postgres(_) => {
            let source = open_file(from).await?;
            let (target, _lock) = alone(to).await?;
            let filled = fill(&target, &source, as_json).await;
            target.close().await;
            source.close().await;
            filled?
        }
    };
    done(&format!("imported {} to {to}", from.display()), &rows, as_json)
}

async fn copy_file(from: &Path, to: &Path) -> Result<Vec<TableRows>> {
    snapshot(from, to).await.inspect_err(|_| remove(to))?;
    restrict(to)?;
    let store = open_file(to).await?;
    let rows = store.table_rows().await?;
    store.close().await;
    Ok(rows)
}

async fn open_file(path: &Path) -> Result<Store> {
    match Store::open_beside(path, Durability::Power).await {
        Err(error @ StoreError::OlderSchema { .. }) => {
            let hint =
                format!("`skep db migrate --database sqlite:{}` brings it to this version", path.display());
            bail!("{} cannot be moved: {error}\n  hint: {hint}", path.display())
        }
        opened => Ok(opened?),
    }
}

async fn fill(target: &Store, source: &Store, is_silent: bool) -> Result<Vec<TableRows>> {
    let shown: &'static dyn Progress = if is_silent { &Silent } else { &Terminal };
    let step: Arc<Mutex<Option<Box<dyn Step>>>> = Arc::default();
    let progress: RowProgress = {
        let step = step.clone();
        Arc::new(move |done, total| {
            let mut step = step.lock().unwrap_or_else(PoisonError::into_inner);
            step.get_or_insert_with(|| shown.count("moving rows", total)).advance_to(done);
        })
    };
    let rows = target.fill_from(source, progress).await?;
    if let Some(step) = step.lock().unwrap_or_else(PoisonError::into_inner).take() {
        step.finish("");
    }
    Ok(rows)
}

fn done(what: &str, rows: &[TableRows], as_json: bool) -> Result<()> {
    if as_json {
        return out::json(&json!({ "rows": rows_as_json(rows) }));
    }
    print_rows(rows)?;
    out::line(&format!("{what}; the row counts of all tables match"))?;
    if rows_of(rows, "secrets") + rows_of(rows, "webhooks") > 0 {
        out::line(
            "next: copy secrets.key from the old data folder to the new one, or no secret can be opened",
        )?;
    }
    out::line("start a host on one of the two databases only: work in flight continues in it")
}

/// Removes a file that is not complete.
fn remove(path: &Path) {
    for ending in ["", "-wal", "-shm"] {
        let mut name = path.as_os_str().to_owned();
        name.push(ending);
        let _ = std::fs::remove_file(name);
    }
}

/// Lets nobody but its owner read a file.
fn restrict(path: &Path) -> Result<()> {
    #[cfg(unix)]
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .with_context(|| format!("cannot restrict {} to its owner", path.display()))?;
    Ok(())
}
