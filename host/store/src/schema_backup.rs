//! The copy of a database that is made before its tables are changed.
//!
//! It is the way back to the version that wrote the database. A copy appears under its name only when it is complete, and
//! nothing is changed before it is.

use crate::{StoreError, files, schema, snapshot};
use sqlx::SqliteConnection;
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

const PREFIX: &str = "backup-before-schema-";
const SUFFIX: &str = ".db";
/// Number of copies that are kept, of different schemas.
const KEPT: usize = 2;
/// Free space that the copy has to leave for the migration, apart from the size of the database.
const SPARE_BYTES: u64 = 16 << 20;

/// Copies the database at `path`, which the connection has open, if its schema is older than that of this build.
pub(crate) async fn take(connection: &mut SqliteConnection, path: &Path) -> Result<(), StoreError> {
    take_within(connection, path, files::free_bytes(folder_of(path))).await
}

/// Copies the database if `free` bytes are enough for the copy and the changes.
async fn take_within(
    connection: &mut SqliteConnection,
    path: &Path,
    free: Option<u64>,
) -> Result<(), StoreError> {
    let found = schema::version(connection).await?;
    if found <= 0 || found >= schema::KNOWN {
        return Ok(());
    }
    let folder = folder_of(path);
    let copy = folder.join(format!("{PREFIX}{}{SUFFIX}", schema::KNOWN));
    // The steps may write every table once more.
    let needed = size_with_log(path).saturating_mul(2).saturating_add(SPARE_BYTES);
    if let Some(free) = free.filter(|free| *free < needed) {
        let (needed_mb, free_mb) = (needed.div_ceil(1 << 20), free >> 20);
        return Err(StoreError::NoRoomForCopy { path: path.to_owned(), needed_mb, free_mb });
    }
    let partial = copy.with_extension("partial");
    let failed = |source: io::Error| StoreError::Copy { path: copy.clone(), source: Arc::new(source) };
    remove_if_present(&partial).and_then(|()| files::make_for_its_owner(&partial)).map_err(failed)?;
    if let Err(error) = snapshot::copy_into(connection, &partial).await {
        // The error of the copy matters more than the rest of it.
        let _ = fs::remove_file(&partial);
        return Err(error);
    }
    put_in_place(&partial, &copy).map_err(failed)?;
    tracing::info!(
        copy = %copy.display(), from = found, to = schema::KNOWN,
        "copied the database before its tables are changed"
    );
    if let Err(error) = remove_oldest(folder) {
        tracing::warn!(%error, "cannot remove an old copy of the database");
    }
    Ok(())
}

fn put_in_place(partial: &Path, copy: &Path) -> io::Result<()> {
    File::open(partial)?.sync_all()?;
    fs::rename(partial, copy)?;
    #[cfg(unix)]
    File::open(folder_of(copy))?.sync_all()?;
    Ok(())
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn remove_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes all copies but the newest ones.
fn remove_oldest(folder: &Path) -> io::Result<()> {
    let mut copies = copies(folder)?;
    copies.sort_unstable_by_key(|(schema, _)| std::cmp::Reverse(*schema));
    copies.iter().skip(KEPT).try_for_each(|(_, path)| fs::remove_file(path))
}

/// Returns the copies in a folder, each with the schema that it was made for.
fn copies(folder: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let schema = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
        if let Some(schema) = schema.and_then(|number| number.parse().ok()) {
            found.push((schema, path));
        }
    }
    Ok(found)
}

/// Returns the size of the database and of the log beside it.
fn size_with_log(path: &Path) -> u64 {
    let mut log = path.to_owned().into_os_string();
    log.push("-wal");
    [path, Path::new(&log)].map(|path| fs::metadata(path).map_or(0, |file| file.len())).iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Durability, Store, schema_steps::STEPS};
    use sqlx::{
        AssertSqlSafe, ConnectOptions as _, Connection as _, query_scalar, sqlite::SqliteConnectOptions,
    };

    async fn connection(path: &Path) -> SqliteConnection {
        SqliteConnectOptions::new().filename(path).create_if_missing(true).connect().await.unwrap()
    }

    /// Makes a database with an agent, as a version that knew only `steps` steps left it.
    async fn older(path: &Path, steps: usize) {
        let mut old = connection(path).await;
        let script = format!(
            "PRAGMA journal_mode = WAL; PRAGMA foreign_keys = OFF; {} PRAGMA user_version = {steps};
             INSERT INTO components VALUES ('d', x'00');
             INSERT INTO agents (name, version) VALUES ('a', 1);
             INSERT INTO deployments VALUES ('a', 1, 'name = \"a\"', 'd', 7, 'ann');",
            STEPS[..steps].concat()
        );
        sqlx::raw_sql(AssertSqlSafe(script)).execute(&mut old).await.expect("the older schema");
        old.close().await.unwrap();
    }

    #[tokio::test]
    async fn an_older_database_is_copied_before_its_tables_change() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("skep.db");
        let known = STEPS.len();
        older(&path, known - 3).await;
        let copy = folder.path().join(format!("backup-before-schema-{known}.db"));
        fs::write(copy.with_extension("partial"), b"left by a crash").unwrap();
        for old in [3, 7] {
            fs::write(folder.path().join(format!("backup-before-schema-{old}.db")), b"").unwrap();
        }
        let store = Store::open(&path, Durability::Process).await.expect("it is brought up to date");
        assert_eq!(store.agents().await.unwrap().len(), 1);
        store.close().await;
        let mut names: Vec<_> = copies(folder.path()).unwrap().iter().map(|(schema, _)| *schema).collect();
        names.sort_unstable();
        assert_eq!(names, [7, known as u32], "the last two are kept");
        assert!(!copy.with_extension("partial").exists());
        #[cfg(unix)]
        assert_eq!(
            std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&copy).unwrap().permissions()) & 0o777,
            0o600
        );

        // The copy is what the older version wrote, and can be brought up to date in its turn.
        let mut old = connection(&copy).await;
        assert_eq!(schema::version(&mut old).await.unwrap(), known as i64 - 3);
        let agents: i64 = query_scalar("SELECT COUNT(*) FROM agents").fetch_one(&mut old).await.unwrap();
        assert_eq!(agents, 1);
        old.close().await.unwrap();

        // A database of this schema is not copied.
        fs::remove_file(&copy).unwrap();
        Store::open(&path, Durability::Process).await.unwrap().close().await;
        assert!(!copy.exists());
    }

    #[tokio::test]
    async fn without_room_for_the_copy_nothing_is_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("skep.db");
        older(&path, STEPS.len() - 1).await;
        let mut connection = connection(&path).await;
        let error =
            take_within(&mut connection, &path, Some(1 << 20)).await.expect_err("1 MiB is too little");
        let said = error.to_string();
        assert!(said.contains("17 MB where 1 MB are free") && said.contains("hint: free space"), "{said}");
        assert_eq!(schema::version(&mut connection).await.unwrap(), STEPS.len() as i64 - 1);
        assert!(copies(folder.path()).unwrap().is_empty());
    }

    #[tokio::test]
    async fn steps_that_fail_leave_the_schema_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("skep.db");
        let steps = 22;
        older(&path, steps).await;
        let mut broken = connection(&path).await;
        // The next step creates a table of this name.
        sqlx::raw_sql("CREATE TABLE file_parts (x)").execute(&mut broken).await.unwrap();
        broken.close().await.unwrap();
        for _ in 0..2 {
            Store::open(&path, Durability::Process).await.expect_err("the table is there already");
        }
        let mut connection = connection(&path).await;
        assert_eq!(schema::version(&mut connection).await.unwrap(), steps as i64);
        let copy = copies(folder.path()).unwrap();
        assert_eq!(copy.len(), 1, "{copy:?}");
    }
}
