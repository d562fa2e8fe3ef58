//! The embedded database: one writer and a few readers on one SQLite file.
//!
//! SQLite admits one writer at a time, so there is one writing connection, which the writer task owns. The
//! order of its queue is the order of commits. Reads use other connections and see what was committed when
//! they started.

#[cfg(any(test, feature = "faults"))]
mod fault_injection;

use crate::{
    StoreError, files,
    hosts::HostNumber,
    line_counts::LineCounts,
    membership::Membership,
    postgres::Lease,
    schema, schema_backup,
    sql::{Connection, Dialect, Pool},
    writer::{Joint, JointKind, JointWork, Work, WriteConnection, Writer},
};
use sqlx::{
    ConnectOptions as _,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::sync::{Semaphore, watch};

/// Maximum number of copies and deletions in progress. Each has one chunk at a time among the writes.
pub(crate) const MAX_CHUNKED_WRITES: usize = 2;
/// Time limit of a chunk. After it, other writes get their turn.
pub(crate) const CHUNK_TIME: Duration = Duration::from_millis(10);

/// Whether a commit waits for the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Durability {
    /// Commits survive a crash of the process. A power failure may lose the last commits, but never tears
    /// one.
    #[default]
    Process,
    /// Commits survive a power failure: every commit waits for the disk.
    Power,
}

/// The place of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPlace {
    Folder,
    /// A server of PostgreSQL.
    Postgres,
    /// The memory of the process.
    Memory,
}

/// The handling of a schema that is older than this build's.
#[derive(Clone, Copy)]
enum SchemaMode {
    Migrate,
    Check,
}

/// Handle to the tables. Clones share the connections.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) readers: Pool,
    /// A connection that only reads API keys, so that authentication never waits for a long read.
    pub(crate) key_reader: Pool,
    /// The queue of all writes. Several writes share a transaction.
    pub(crate) writer: Writer,
    /// Permits for writes in chunks.
    pub(crate) chunked_writes: Arc<Semaphore>,
    /// Time limit of one chunk.
    pub(crate) chunk_time: Duration,
    pub(crate) line_counts: LineCounts,
    /// Path of the database file; `None` for an in-memory database.
    pub(crate) path: Option<Arc<PathBuf>>,
    /// Becomes `true` when another host has taken over the database, which only a server has.
    pub(crate) fenced: Option<watch::Receiver<bool>>,
    pub(crate) lease: Option<Lease>,
    pub(crate) host: HostNumber,
    /// The part of this host in a cluster; `None` for the only host.
    pub(crate) membership: Option<Arc<Membership>>,
}

impl Store {
    /// Opens the database file. If it does not exist, creates it with read access for its owner only.
    /// Migrates its schema, after a copy of the file in its folder, so no other process may be using it.
    pub async fn open(path: &Path, durability: Durability) -> Result<Store, StoreError> {
        files::make_for_its_owner(path).map_err(|error| StoreError::opening(path, error.into()))?;
        Self::open_with(path, durability, SchemaMode::Migrate).await
    }

    /// Opens a database file that a host may be using. A file with another schema is refused and stays
    /// unchanged.
    pub async fn open_beside(path: &Path, durability: Durability) -> Result<Store, StoreError> {
        Self::open_with(path, durability, SchemaMode::Check).await
    }

    async fn open_with(path: &Path, durability: Durability, schema: SchemaMode) -> Result<Store, StoreError> {
        let options = connect_options(durability).filename(path);
        let failed = |source| StoreError::opening(path, source);
        let mut connection = options.clone().connect().await.map_err(failed)?;
        let schema = match schema {
            SchemaMode::Migrate => match schema_backup::take(&mut connection, path).await {
                Ok(()) => schema::migrate(&mut connection).await,
                Err(error) => Err(error),
            },
            SchemaMode::Check => schema::check(&mut connection).await,
        };
        schema.map_err(|error| error.of_file(path))?;
        let reading = options.read_only(true);
        let readers = pool(4).connect_with(reading.clone()).await.map_err(failed)?;
        let key_reader = pool(1).connect_lazy_with(reading);
        Ok(Store {
            readers: Pool::Sqlite(readers),
            key_reader: Pool::Sqlite(key_reader),
            writer: Writer::start(WriteConnection::Own(Connection::sqlite(connection))),
            chunked_writes: Arc::new(Semaphore::new(MAX_CHUNKED_WRITES)),
            chunk_time: CHUNK_TIME,
            line_counts: LineCounts::default(),
            path: Some(Arc::new(path.to_owned())),
            fenced: None,
            lease: None,
            host: None,
            membership: None,
        })
    }

    /// Opens an in-memory database that lives as long as the handle.
    pub async fn in_memory() -> Result<Store, StoreError> {
        let options = connect_options(Durability::Process).in_memory(true);
        let failed = |source| StoreError::Open { path: ":memory:".into(), source: Arc::new(source) };
        // An idle connection must not be closed, because it holds the data.
        let single = pool(1).min_connections(1).idle_timeout(None).max_lifetime(None);
        let readers = single.connect_with(options).await.map_err(failed)?;
        let mut connection = readers.acquire().await.map_err(StoreError::while_it("opened a connection"))?;
        schema::migrate(&mut connection).await?;
        drop(connection);
        let readers = Pool::Sqlite(readers);
        Ok(Store {
            writer: Writer::start(WriteConnection::Shared(readers.clone())),
            key_reader: readers.clone(),
            readers,
            chunked_writes: Arc::new(Semaphore::new(MAX_CHUNKED_WRITES)),
            chunk_time: CHUNK_TIME,
            line_counts: LineCounts::default(),
            path: None,
            fenced: None,
            lease: None,
            host: None,
            membership: None,
        })
    }

    /// Runs these statements with this data in a transaction, after all writes that were requested before.
    /// Resolves when they are durable. The statements run even if the caller stops waiting.
    pub(crate) async fn write<D, T>(&self, data: D, work: Work<D, T>) -> Result<T, StoreError>
    where
        D: Send + Sync + 'static,
        T: Send + 'static,
    {
        let written = self.writer.write(data, work, None, false).await;
        written.map_err(|error| self.diagnosed(error))
    }

    /// Writes like [`Store::write`] what the same statements can write for several requests. On PostgreSQL, whose statements are
    /// round trips, the requests of one kind that wait together are written by `joint`. `bytes` is the size of what is written.
    pub(crate) async fn write_jointly<D, T>(
        &self,
        kind: JointKind,
        bytes: usize,
        data: D,
        work: Work<D, T>,
        joint: JointWork<D, T>,
    ) -> Result<T, StoreError>
    where
        D: Send + Sync + 'static,
        T: Send + 'static,
    {
        let joint = Joint { kind, bytes, work: joint };
        let written = self.writer.write(data, work, Some(joint), false).await;
        written.map_err(|error| self.diagnosed(error))
    }

    /// Writes like [`Store::write`] what other hosts may change at the same time. One host at a time does so, and its
    /// statements see what the others have written before.
    pub(crate) async fn write_common<D, T>(&self, data: D, work: Work<D, T>) -> Result<T, StoreError>
    where
        D: Send + Sync + 'static,
        T: Send + 'static,
    {
        let written = self.writer.write(data, work, None, true).await;
        written.map_err(|error| self.diagnosed(error))
    }

    pub(crate) fn is_in_memory(&self) -> bool {
        self.path.is_none() && self.readers.dialect() == Dialect::Sqlite
    }

    /// Returns where the data is.
    pub fn place(&self) -> DataPlace {
        match self.readers.dialect() {
            Dialect::Postgres => DataPlace::Postgres,
            Dialect::Sqlite if self.is_in_memory() => DataPlace::Memory,
            Dialect::Sqlite => DataPlace::Folder,
        }
    }

    /// Returns the longest time that a transaction has held up other writes since the store was opened.
    pub fn longest_hold(&self) -> Duration {
        self.writer.longest_hold()
    }

    /// Waits for queries in progress and closes the file.
    pub async fn close(&self) {
        if !self.is_in_memory() {
            self.readers.close().await;
            self.key_reader.close().await;
        }
        if let Some(membership) = &self.membership {
            // Whoever waits for notices learns of the end here.
            membership.meeting.close().await;
        }
        self.writer.close().await;
    }
}

fn pool(connections: u32) -> SqlitePoolOptions {
    SqlitePoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(10))
        // Embedded connections do not go stale, and the ping before each use would double the number of
        // queries.
        .test_before_acquire(false)
}

fn connect_options(durability: Durability) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .foreign_keys(true)
        .journal_mode(SqliteJournalMode::Wal)
        .busy_timeout(Duration::from_secs(5))
        .statement_cache_capacity(64)
        .synchronous(match durability {
            Durability::Process => SqliteSynchronous::Normal,
            Durability::Power => SqliteSynchronous::Full,
        })
}
