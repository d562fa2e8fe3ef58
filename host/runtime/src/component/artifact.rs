//! A cache of compiled components on disk, so that a restart loads code instead of compiling it.
//!
//! Loaded code runs unchecked. Therefore a file is loaded only if it has exactly the bytes that this host wrote, according to
//! the checksum in the database, and if it was compiled from this component for this engine, which its name encodes. Any
//! other file is removed, and its component is compiled again. The files are only a cache: without the folder the host
//! compiles.
#![allow(unsafe_code)]

use crate::{Clock, RuntimeError, text::hex};
use sha2::{Digest, Sha256};
use skep_store::{ArtifactRow, Store, StoreError};
use std::{
    collections::HashSet,
    hash::{Hash, Hasher},
    io::{Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
};
use wasmtime::{Engine, component::Component};

const SUFFIX: &str = "cwasm";

/// A folder of compiled components. Clones share the folder.
#[derive(Clone)]
pub(crate) struct ArtifactCache {
    inner: Arc<Inner>,
}

struct Inner {
    store: Store,
    clock: Clock,
    engine: Engine,
    dir: PathBuf,
    max_bytes: u64,
    /// Held while a row and its file are changed, so that they change together.
    writing: tokio::sync::Mutex<()>,
}

/// The reason why nothing was loaded.
enum Miss {
    Absent,
    Damaged(String),
}

impl ArtifactCache {
    /// Creates the folder, accessible to this user only, and removes files without a row in the database.
    pub(crate) async fn open(
        store: Store,
        clock: Clock,
        engine: Engine,
        dir: PathBuf,
        max_bytes: u64,
    ) -> Result<Self, RuntimeError> {
        let cache = ArtifactCache {
            inner: Arc::new(Inner {
                store,
                clock,
                engine,
                dir,
                max_bytes,
                writing: tokio::sync::Mutex::default(),
            }),
        };
        let known = cache.inner.store.artifacts().await?.into_iter().map(|row| row.key).collect();
        let dir = cache.inner.dir.clone();
        let opened = off_thread(move || make_private(&dir).and_then(|()| sweep(&dir, &known))).await;
        opened.map_err(|error| RuntimeError::Internal {
            message: format!(
                "the folder {} for compiled code cannot be used: {error}",
                cache.inner.dir.display()
            ),
        })?;
        Ok(cache)
    }

    /// Loads the component with this digest, if its code is cached and intact.
    pub(crate) async fn load(&self, digest: &str) -> Option<Component> {
        let key = self.key(digest);
        let (component, outcome) = match self.try_load(&key).await {
            Ok(component) => (Some(component), "hit"),
            Err(Miss::Absent) => (None, "miss"),
            Err(Miss::Damaged(reason)) => {
                tracing::warn!(digest, reason, "compiled code is damaged; the component is compiled again");
                self.forget(&key).await;
                (None, "damaged")
            }
        };
        metrics::counter!(crate::metric::ARTIFACT_LOADS, "outcome" => outcome).increment(1);
        component
    }

    /// Stores the code of a component, and evicts the least recently used code if the cache becomes too large. A failure to
    /// write is only logged, because it costs nothing but time.
    pub(crate) async fn keep(&self, digest: &str, component: &Component) {
        let _alone = self.inner.writing.lock().await;
        let key = self.key(digest);
        if let Err(reason) = self.try_keep(&key, component.clone()).await {
            tracing::warn!(digest, reason, "compiled code was not cached; the next start compiles it again");
        }
    }

    async fn try_load(&self, key: &str) -> Result<Component, Miss> {
        let row = self.inner.store.use_artifact(key, self.inner.clock.now_ms()).await;
        let row = row.map_err(|error| Miss::Damaged(error.to_string()))?.ok_or(Miss::Absent)?;
        let (path, engine) = (self.path(key), self.inner.engine.clone());
        off_thread(move || load_verified(&engine, &path, &row)).await.map_err(Miss::Damaged)
    }

    async fn try_keep(&self, key: &str, component: Component) -> Result<(), String> {
        let (dir, path, max_bytes) = (self.inner.dir.clone(), self.path(key), self.inner.max_bytes);
        let written = off_thread(move || {
            let code = component.serialize().map_err(|error| format!("{error:#}"))?;
            let bytes = code.len() as u64;
            if bytes > max_bytes {
                return Err(format!("it has {bytes} bytes, but `max_artifact_bytes` is {max_bytes}"));
            }
            write_atomically(&dir, &path, &code).map_err(|error| format!("{}: {error}", path.display()))?;
            Ok((hex(&Sha256::digest(&code)), bytes))
        });
        let (checksum, bytes) = written.await?;
        let row = ArtifactRow { key: key.to_owned(), checksum, bytes, used_at_ms: self.inner.clock.now_ms() };
        self.inner.store.put_artifact(&row).await.map_err(|error| error.to_string())?;
        self.evict(key).await.map_err(|error| error.to_string())
    }

    async fn evict(&self, kept: &str) -> Result<(), StoreError> {
        let rows = self.inner.store.artifacts().await?;
        let mut total: u64 = rows.iter().map(|row| row.bytes).sum();
        for row in rows.into_iter().filter(|row| row.key != kept) {
            if total <= self.inner.max_bytes {
                break;
            }
            total -= row.bytes;
            self.forget(&row.key).await;
        }
        Ok(())
    }

    async fn forget(&self, key: &str) {
        if let Err(error) = self.inner.store.delete_artifact(key).await {
            tracing::warn!(key, "a row of compiled code was not deleted: {error}");
        }
        let path = self.path(key);
        // The file may never have existed. One that stays is removed at the next start.
        let _ = off_thread(move || std::fs::remove_file(path).map_err(|error| error.to_string())).await;
    }

    /// Returns the cache key: a hash of the component and of everything that its code depends on, namely wasmtime's version,
    /// the compiler's settings and the CPU.
    fn key(&self, digest: &str) -> String {
        let mut hasher = Sha256Hasher(Sha256::new_with_prefix(digest));
        self.inner.engine.precompile_compatibility_hash().hash(&mut hasher);
        hex(&hasher.0.finalize())
    }

    fn path(&self, key: &str) -> PathBuf {
        self.inner.dir.join(key).with_extension(SUFFIX)
    }
}

fn load_verified(engine: &Engine, path: &Path, row: &ArtifactRow) -> Result<Component, String> {
    let mut code = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    file.take(row.bytes + 1).read_to_end(&mut code).map_err(|error| error.to_string())?;
    if hex(&Sha256::digest(&code)) != row.checksum {
        return Err(format!("the checksum of {} differs from the recorded one", path.display()));
    }
    // SAFETY: `deserialize` requires bytes that `Component::serialize` returned. These are such bytes: they are in this
    // process's own memory, where nothing changes them anymore, and their SHA-256 equals the one that `try_keep` computed
    // from the output of `serialize` and recorded in the database. Anyone who can change that row can change the host
    // itself. Code from another version or configuration of wasmtime is refused by `deserialize`.
    unsafe { Component::deserialize(engine, &code) }.map_err(|error| format!("{error:#}"))
}

/// Writes a file atomically, accessible to this user only.
fn write_atomically(dir: &Path, path: &Path, code: &[u8]) -> std::io::Result<()> {
    let mut file = tempfile::Builder::new().prefix("writing-").tempfile_in(dir)?;
    file.write_all(code)?;
    file.persist(path)?;
    Ok(())
}

fn make_private(dir: &Path) -> Result<(), String> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir).map_err(|error| error.to_string())
}

fn sweep(dir: &Path, known: &HashSet<String>) -> Result<(), String> {
    for entry in std::fs::read_dir(dir).map_err(|error| error.to_string())?.flatten() {
        let path = entry.path();
        let is_known = path.extension().is_some_and(|suffix| suffix == SUFFIX)
            && path.file_stem().and_then(|stem| stem.to_str()).is_some_and(|stem| known.contains(stem));
        if !is_known {
            std::fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
    }
    Ok(())
}

/// Runs file access and hashing on a blocking thread, where no turn waits for it.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|stopped| Err(stopped.to_string()))
}

/// A `Hasher` that feeds SHA-256, because file names must not collide.
struct Sha256Hasher(Sha256);

impl Hasher for Sha256Hasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        let digest = self.0.clone().finalize();
        u64::from_le_bytes(digest[..8].try_into().expect("a digest has 32 bytes"))
    }
}
