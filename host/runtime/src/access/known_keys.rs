//! The API keys of a host, in memory.
//!
//! The cache holds exactly the keys of the table, so its memory is bounded by the table, and an
//! unknown string costs one map lookup. A refresh reads one counter and, if that has changed, all
//! keys. At most one refresh runs at a time, and all callers that need it share it. Valid keys
//! trigger a refresh every [`BELIEVED`]. Unknown strings trigger it sooner, so that a new key works
//! immediately, but at most twenty times a second, however many arrive.
//!
//! While the database does not answer, nobody can revoke a key there, so known keys stay valid for [`BELIEVED_ALONE`]: requests that
//! need no database continue.

use super::{ApiKey, key_ring::api_key};
use crate::{RuntimeError, tenancy::Tenancy};
use skep_store::Store;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// Time for which a key counts as valid without a refresh. Including the refresh, a revocation
/// takes effect within a second.
const BELIEVED: Duration = Duration::from_millis(500);
/// Time for which a string counts as unknown without a refresh.
const DISBELIEVED: Duration = Duration::from_millis(50);

/// Time for which a key counts as valid while the database does not answer. A host that is cut off from it does not learn of
/// revocations, so the time is bounded.
const BELIEVED_ALONE: Duration = Duration::from_secs(5 * 60);
/// Time for which a request with a known key waits for a refresh, after which the database counts as away.
const PATIENCE: Duration = Duration::from_millis(1_500);

/// The SHA-256 of a key.
pub(super) type KeyDigest = [u8; 32];

/// A handle. Clones share the same keys.
#[derive(Clone)]
pub(super) struct KnownKeys {
    inner: Arc<Inner>,
}

struct Inner {
    store: Store,
    held: Mutex<Held>,
    tenancy: Tenancy,
    /// Held while the table is read.
    looking: Arc<tokio::sync::Mutex<()>>,
    /// Whether the database did not answer the last refresh. A task then repeats it until one succeeds.
    is_alone: AtomicBool,
}

/// The keys as of the last refresh.
#[derive(Clone, Default)]
struct Held {
    keys: Arc<HashMap<KeyDigest, Arc<KnownKey>>>,
    /// The table's change counter when `keys` were read.
    changes: Option<u64>,
    /// When the last refresh started.
    looked_at: Option<Instant>,
}

/// A key, and when it was last used.
pub(super) struct KnownKey {
    pub(super) key: Arc<ApiKey>,
    /// Days since 1970; 0 means never.
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
                is_alone: AtomicBool::new(false),
            }),
        }
    }

    /// Returns the key with this digest, as it was in the table less than a second ago, or before the database was away.
    pub(super) async fn find(&self, digest: &KeyDigest) -> Result<Option<Arc<KnownKey>>, RuntimeError> {
        let held = self.inner.held().clone();
        let found = held.keys.get(digest).cloned();
        let max_age = if found.is_some() { BELIEVED } else { DISBELIEVED };
        if held.is_younger_than(max_age) {
            return Ok(found);
        }
        if found.is_none() || !held.is_younger_than(BELIEVED_ALONE) {
            return Ok(self.look(max_age).await?.keys.get(digest).cloned());
        }
        if self.inner.is_alone.load(Ordering::Acquire) {
            return Ok(found);
        }
        match tokio::time::timeout(PATIENCE, self.look(max_age)).await {
            Ok(Ok(held)) => Ok(held.keys.get(digest).cloned()),
            Ok(Err(error)) if !is_unreachable(&error) => Err(error),
            Ok(Err(_)) | Err(_) => {
                self.be_alone();
                Ok(found)
            }
        }
    }

    /// Uses the keys as they are until the database answers again, which is then noticed at once.
    fn be_alone(&self) {
        if self.inner.is_alone.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::warn!(
            "the database does not answer; API keys that are known stay valid for {} s",
            BELIEVED_ALONE.as_secs()
        );
        tokio::spawn(look_until_it_answers(Arc::downgrade(&self.inner)));
    }

    /// Returns the flag that says whether there are keys of several tenants. Every refresh updates
    /// it.
    pub(super) fn tenancy(&self) -> Tenancy {
        self.inner.tenancy.clone()
    }

    /// Refreshes after a change by this process. The change is durable, so after a failure no key is believed until a refresh
    /// succeeds: the database was there a moment ago, and a key that was revoked must not outlive that.
    pub(super) async fn look_again(&self) {
        if let Err(error) = self.look(Duration::ZERO).await {
            self.inner.held().looked_at = None;
            tracing::warn!("a changed API key takes effect with the next request: {error}");
        }
    }

    /// Returns the keys of a refresh that started less than `max_age` ago. A started refresh
    /// continues even if its caller is dropped; otherwise callers that give up could make the
    /// others wait forever.
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
        look.await.map_err(|error| RuntimeError::Internal {
            message: format!("cannot read the API keys: {error}"),
        })?
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.inner.held().keys.len()
    }
}

/// Returns whether the database did not answer.
fn is_unreachable(error: &RuntimeError) -> bool {
    matches!(error, RuntimeError::Store(error) if error.is_unreachable())
}

/// Repeats the refresh of keys until one succeeds, or nobody needs them anymore.
async fn look_until_it_answers(inner: Weak<Inner>) {
    while let Some(inner) = inner.upgrade() {
        let known = KnownKeys { inner };
        if known.look(Duration::ZERO).await.is_ok() {
            return;
        }
        drop(known);
        tokio::time::sleep(BELIEVED).await;
    }
}

impl Inner {
    async fn look(&self, before: Held) -> Result<Held, RuntimeError> {
        let looked_at = Some(Instant::now());
        // Read before the keys, so that a change in between is seen by the next refresh.
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
        self.is_alone.store(false, Ordering::Release);
        Ok(held)
    }

    /// Reads all keys. A key that cannot be decoded is omitted and therefore refused.
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
                    "an API key cannot be read and is refused; revoke it and create another: {error}"
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
    /// Returns whether this is the first recorded use of the key on this day.
    pub(super) fn is_first_use(&self, day: u32) -> bool {
        self.used_day.swap(day, Ordering::Relaxed) != day
    }

    /// Makes the next use count as a first use again.
    pub(super) fn forget_use(&self) {
        self.used_day.store(0, Ordering::Relaxed);
    }
}
