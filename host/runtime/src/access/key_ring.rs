//! The keys of a host: made, listed, revoked, and told from strings that are none.
//!
//! A key is 256 random bits, so its SHA-256 is stored without salt and found by an index. A key that was found is believed
//! for a second; that is how long one lives that another process revoked. Strings that are no key cost one read each, one
//! after the other, so that whoever guesses waits for himself and not for the readers of others.

use super::{ApiKey, NewApiKey, Tenant};
use crate::{AgentName, RuntimeError, capability::log::now_ms};
use sha2::{Digest, Sha256};
use skep_store::{ApiKeyRow, Store};
use std::{
    collections::HashMap,
    num::NonZeroU32,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// What every key begins with, so that scanners for leaked secrets find it.
const PREFIX: &str = "skep_";
const KEY_BYTES: usize = 32;
const BELIEVED: Duration = Duration::from_secs(1);
const DAY_MS: u64 = 24 * 3600 * 1000;

type KeyDigest = [u8; 32];

/// A handle; clones are the same ring.
#[derive(Clone)]
pub struct KeyRing {
    inner: Arc<Inner>,
}

struct Inner {
    store: Store,
    /// Only keys that exist are in here, so it is as small as their table.
    believed: Mutex<HashMap<KeyDigest, Believed>>,
    reading: tokio::sync::Mutex<()>,
}

struct Believed {
    key: Arc<ApiKey>,
    read_at: Instant,
}

impl KeyRing {
    pub fn new(store: Store) -> Self {
        KeyRing { inner: Arc::new(Inner { store, believed: Mutex::default(), reading: Default::default() }) }
    }

    /// Makes a key. The second value is the key itself, which is nowhere else.
    pub async fn create(&self, new: NewApiKey) -> Result<(ApiKey, String), RuntimeError> {
        new.check()?;
        let secret = format!("{PREFIX}{}", hex(&rand::random::<[u8; KEY_BYTES]>()));
        let at_ms = now_ms();
        let key = ApiKey {
            id: format!("key-{}", hex(&rand::random::<[u8; 6]>())),
            tenant: new.tenant,
            role: new.role,
            agents: new.agents,
            name: new.name,
            created_at_ms: at_ms,
            expires_at_ms: new.expires_in.map(|time| {
                at_ms.saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)).min(i64::MAX as u64)
            }),
            revoked_at_ms: None,
            last_used_day: None,
            requests_per_minute: new.requests_per_minute,
        };
        self.inner.store.put_api_key(&row(&key, digest(&secret))).await?;
        tracing::info!(
            key = key.id,
            tenant = key.tenant.as_str(),
            role = key.role.as_str(),
            "an API key was made"
        );
        Ok((key, secret))
    }

    /// All keys, the oldest first.
    pub async fn list(&self) -> Result<Vec<ApiKey>, RuntimeError> {
        self.inner.store.api_keys().await?.into_iter().map(api_key).collect()
    }

    /// A revoked key is refused from now on, and stays listed.
    pub async fn revoke(&self, id: &str) -> Result<ApiKey, RuntimeError> {
        let row = self.inner.store.revoke_api_key(id, now_ms()).await?;
        let row = row.ok_or_else(|| RuntimeError::KeyNotFound { id: id.chars().take(80).collect() })?;
        self.inner.believed().remove(&row.digest);
        tracing::info!(key = id, "an API key was revoked");
        api_key(row)
    }

    /// The key that this string is.
    pub async fn authenticate(&self, presented: &str) -> Result<Arc<ApiKey>, RuntimeError> {
        if presented.len() != PREFIX.len() + 2 * KEY_BYTES || !presented.starts_with(PREFIX) {
            return Err(refused("it is not a key of this host"));
        }
        let digest = digest(presented);
        let key = match self.inner.believed_key(&digest) {
            Some(key) => key,
            None => self.inner.read(&digest).await?,
        };
        let now = now_ms();
        if key.revoked_at_ms.is_some() {
            return Err(refused("it was revoked"));
        }
        if key.expires_at_ms.is_some_and(|at| at <= now) {
            return Err(refused("it has expired"));
        }
        Ok(key)
    }
}

impl Inner {
    /// As the store has it, and used today.
    async fn read(&self, digest: &KeyDigest) -> Result<Arc<ApiKey>, RuntimeError> {
        let _one = self.reading.lock().await;
        if let Some(key) = self.believed_key(digest) {
            return Ok(key);
        }
        let Some(row) = self.store.api_key(digest).await? else {
            self.believed().remove(digest);
            return Err(refused("it is not a key of this host"));
        };
        let mut key = api_key(row)?;
        let today = u32::try_from(now_ms() / DAY_MS).unwrap_or(u32::MAX);
        if key.last_used_day != Some(today) {
            self.store.use_api_key(&key.id, today).await?;
            key.last_used_day = Some(today);
        }
        let key = Arc::new(key);
        self.believed().insert(*digest, Believed { key: key.clone(), read_at: Instant::now() });
        Ok(key)
    }

    fn believed_key(&self, digest: &KeyDigest) -> Option<Arc<ApiKey>> {
        let believed = self.believed();
        let found = believed.get(digest)?;
        (found.read_at.elapsed() < BELIEVED).then(|| found.key.clone())
    }

    fn believed(&self) -> MutexGuard<'_, HashMap<KeyDigest, Believed>> {
        self.believed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused(reason: &'static str) -> RuntimeError {
    RuntimeError::KeyRefused { reason }
}

fn digest(secret: &str) -> KeyDigest {
    Sha256::digest(secret).into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn row(key: &ApiKey, digest: KeyDigest) -> ApiKeyRow {
    let agents = key.agents.as_ref().map(|agents| {
        let names: Vec<&str> = agents.iter().map(AgentName::as_str).collect();
        names.join(",")
    });
    ApiKeyRow {
        id: key.id.clone(),
        digest,
        tenant: key.tenant.to_string(),
        role: key.role.to_string(),
        agents,
        name: key.name.clone(),
        created_at_ms: key.created_at_ms,
        expires_at_ms: key.expires_at_ms,
        revoked_at_ms: key.revoked_at_ms,
        last_used_day: key.last_used_day,
        requests_per_minute: key.requests_per_minute.map(NonZeroU32::get),
    }
}

fn api_key(row: ApiKeyRow) -> Result<ApiKey, RuntimeError> {
    let agents = row.agents.map(|names| names.split(',').map(AgentName::new).collect::<Result<Vec<_>, _>>());
    Ok(ApiKey {
        id: row.id,
        tenant: Tenant::new(&row.tenant)?,
        role: row.role.parse()?,
        agents: agents.transpose()?,
        name: row.name,
        created_at_ms: row.created_at_ms,
        expires_at_ms: row.expires_at_ms,
        revoked_at_ms: row.revoked_at_ms,
        last_used_day: row.last_used_day,
        requests_per_minute: row.requests_per_minute.and_then(NonZeroU32::new),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Role;

    fn new(expires_in: Option<Duration>) -> NewApiKey {
        NewApiKey {
            tenant: Tenant::new("acme").expect("a name"),
            role: Role::Invoke,
            agents: Some(vec![AgentName::new("a").expect("a name"), AgentName::new("b").expect("a name")]),
            name: "ci".into(),
            expires_in,
            requests_per_minute: NonZeroU32::new(30),
        }
    }

    async fn ring() -> KeyRing {
        KeyRing::new(Store::in_memory().await.expect("a database in memory"))
    }

    #[tokio::test]
    async fn a_key_is_known_by_itself_alone_and_is_not_stored() {
        let ring = ring().await;
        let (made, secret) = ring.create(new(None)).await.expect("made");
        assert_eq!((secret.len(), &secret[..5]), (69, "skep_"));
        let found = ring.authenticate(&secret).await.expect("its own key");
        assert_eq!(*found, ApiKey { last_used_day: found.last_used_day, ..made.clone() });
        assert!(found.last_used_day.is_some());
        let rows = ring.inner.store.api_keys().await.expect("reads");
        assert_eq!(rows[0].digest, digest(&secret));
        assert!(!format!("{rows:?}{made:?}").contains(&secret[5..]));

        let other = format!("skep_{}", "0".repeat(64));
        for wrong in ["", "skep_", &secret[..68], &secret.to_uppercase(), &other] {
            let error = ring.authenticate(wrong).await.expect_err(wrong);
            assert_eq!(error.code(), "invalid_api_key");
        }
    }

    #[tokio::test]
    async fn a_key_that_was_revoked_or_has_expired_is_refused_with_the_reason() {
        let ring = ring().await;
        let (key, secret) = ring.create(new(None)).await.expect("made");
        ring.authenticate(&secret).await.expect("valid");
        ring.revoke(&key.id).await.expect("there");
        let error = ring.authenticate(&secret).await.expect_err("revoked").to_string();
        assert!(error.contains("revoked"), "{error}");
        assert_eq!(ring.revoke("key-none").await.expect_err("not there").code(), "key_not_found");

        // Shorter than what a clock of milliseconds shows.
        let (_, secret) = ring.create(new(Some(Duration::from_nanos(1)))).await.expect("made");
        let error = ring.authenticate(&secret).await.expect_err("expired").to_string();
        assert!(error.contains("expired"), "{error}");
    }

    #[tokio::test]
    async fn what_another_process_revoked_is_believed_no_longer_than_told() {
        let ring = ring().await;
        let (key, secret) = ring.create(new(None)).await.expect("made");
        ring.authenticate(&secret).await.expect("valid");
        KeyRing::new(ring.inner.store.clone()).revoke(&key.id).await.expect("there");
        for believed in ring.inner.believed().values_mut() {
            believed.read_at -= BELIEVED;
        }
        ring.authenticate(&secret).await.expect_err("revoked elsewhere");
    }
}
