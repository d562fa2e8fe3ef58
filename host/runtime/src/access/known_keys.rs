//! The API keys of a host, in memory.
//!
//! Every key of the table is here and nothing else, so memory is bounded by the table, and a string that is no key costs
//! a look into a map. A look at the table reads one number and, when that has changed, all keys. At most one look runs,
//! and everyone who needs it shares it. Valid keys ask for one every [`BELIEVED`], unknown strings sooner, so that a new
//! key works at once, and yet at most twenty times a second, however many come.

use super::{ApiKey, key_ring::api_key};
use crate::{RuntimeError, tenancy::Tenancy};
use skep_store::Store;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// How long a key is taken for valid without a look. With the look itself, a revocation is seen within a second.
const BELIEVED: Duration = Duration::from_millis(500);
/// How long a string is taken for bogus without a look.
const DISBELIEVED: Duration = Duration::from_millis(50);

/// SHA-256 of a key.
pub(super) type KeyDigest = [u8; 32];

/// A handle; clones hold the same keys.
#[derive(Clone)]
pub(super) struct KnownKeys {
    inner: Arc<Inner>,
}

struct Inner {
    store: Store,
    held: Mutex<Held>,
    tenancy: Tenancy,
    /// Held while the table is looked at.
    looking: Arc<tokio::sync::Mutex<()>>,
}

/// The keys as they were at a look.
#[derive(Clone, Default)]
struct Held {
    keys: Arc<HashMap<KeyDigest, Arc<KnownKey>>>,
    /// The table's count of its changes when `keys` were read.
    changes: Option<u64>,
    /// When the last look began.
    looked_at: Option<Instant>,
}

/// A key, and when it was last used.
pub(super) struct KnownKey {
    pub(super) key: Arc<ApiKey>,
    /// In days since 1970; 0 is never.
    used_day: AtomicU32,
}

impl KnownKeys {
    pub(super) fn new(store: Store) -> Self {
        KnownKeys {
            inner: Arc::new(Inner {
                store,
                held: Mutex::default(),
                tenancy: Tenancy::default(),
                looking: Arc::default(),
            }),
        }
    }

    /// The key with this digest, as it was in the table less than a second ago.
    pub(super) async fn find(&self, digest: &KeyDigest) -> Result<Option<Arc<KnownKey>>, RuntimeError> {
        let held = self.inner.held().clone();
        let found = held.keys.get(digest).cloned();
        let max_age = if found.is_some() { BELIEVED } else { DISBELIEVED };
        if held.is_younger_than(max_age) {
            return Ok(found);
        }
        Ok(self.look(max_age).await?.keys.get(digest).cloned())
    }

    /// Whether there are keys of several tenants, which every look finds out.
    pub(super) fn tenancy(&self) -> Tenancy {
        self.inner.tenancy.clone()
    }

    /// Takes note of what this process has changed. That is durable, so a failure only means that it is seen later.
    pub(super) async fn look_again(&self) {
        if let Err(error) = self.look(Duration::ZERO).await {
            tracing::warn!("a changed API key counts in a second, and not yet: {error}");
        }
    }

    /// The keys from a look that began less than `max_age` ago. A look that has begun is not given up with its caller,
    /// or those who give up would make the others wait for ever.
    async fn look(&self, max_age: Duration) -> Result<Held, RuntimeError> {
        let looking = self.inner.looking.clone().lock_owned().await;
        let held = self.inner.held().clone();
        if held.is_younger_than(max_age) {
            return Ok(held);
        }
        let inner = self.inner.clone();
        let look = tokio::spawn(async move {
            let _looking = looking;
            inner.look(held).await
        });
        look.await
            .map_err(|error| RuntimeError::Internal { message: format!("reading the keys: {error}") })?
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.inner.held().keys.len()
    }
}

impl Inner {
    async fn look(&self, before: Held) -> Result<Held, RuntimeError> {
        let looked_at = Some(Instant::now());
        // Before the keys: what changes in between is seen by the next look.
        let changes = Some(self.store.api_key_changes().await?);
        let keys = match before.changes == changes {
            true => before.keys,
            false => Arc::new(self.read(&before).await?),
        };
        let mut tenants =
            keys.values().filter(|known| known.key.revoked_at_ms.is_none()).map(|known| &known.key.tenant);
        let first = tenants.next();
        self.tenancy.set_several(tenants.any(|tenant| Some(tenant) != first));
        let held = Held { keys, changes, looked_at };
        *self.held() = held.clone();
        Ok(held)
    }

    /// All keys. One that cannot be understood is left out, and so refused.
    async fn read(&self, before: &Held) -> Result<HashMap<KeyDigest, Arc<KnownKey>>, RuntimeError> {
        let rows = self.store.api_keys().await?;
        let mut keys = HashMap::with_capacity(rows.len());
        for row in rows {
            let (id, digest) = (row.id.clone(), row.digest);
            match api_key(row) {
                Ok(key) => {
                    let seen =
                        before.keys.get(&digest).map_or(0, |known| known.used_day.load(Ordering::Relaxed));
                    let used_day = AtomicU32::new(key.last_used_day.unwrap_or(0).max(seen));
                    keys.insert(digest, Arc::new(KnownKey { key: Arc::new(key), used_day }));
                }
                Err(error) => tracing::error!(
                    key = id,
                    "an API key cannot be read and is refused; revoke it and make another: {error}"
                ),
            }
        }
        Ok(keys)
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    fn is_younger_than(&self, age: Duration) -> bool {
        self.looked_at.is_some_and(|at| at.elapsed() < age)
    }
}

impl KnownKey {
    /// Whether nobody has said of this day yet that the key was used.
    pub(super) fn is_first_use(&self, day: u32) -> bool {
        self.used_day.swap(day, Ordering::Relaxed) != day
    }

    /// The next use is a first one again.
    pub(super) fn forget_use(&self) {
        self.used_day.store(0, Ordering::Relaxed);
    }
}
