//! Creates, lists, revokes and authenticates the API keys of a host.
//!
//! A key consists of 256 random bits, so its SHA-256 is stored without salt. Requests are checked
//! against the keys in memory, see [`KnownKeys`]; the use of a key is recorded in the background.

use super::{
    ApiKey, NewApiKey, Role,
    known_keys::{KeyDigest, KnownKey, KnownKeys},
};
use crate::{AgentName, Clock, RuntimeError, Tenant, tenancy::Tenancy, text::did_you_mean, text::excerpt};
use sha2::{Digest, Sha256};
use skep_store::{ApiKeyRow, Store};
use std::{num::NonZeroU32, sync::Arc};

/// Prefix of every key, so that scanners for leaked secrets find it.
const PREFIX: &str = "skep_";
const KEY_BYTES: usize = 32;
const DAY_MS: u64 = 24 * 3600 * 1000;

/// A handle. Clones refer to the same key ring.
#[derive(Clone)]
pub struct KeyRing {
    store: Store,
    known: KnownKeys,
    clock: Clock,
}

impl KeyRing {
    /// Creates a ring for the keys in `store`, which are read when a request needs them.
    pub fn new(store: Store, clock: Clock) -> Self {
        KeyRing { known: KnownKeys::new(store.clone()), store, clock }
    }

    /// Returns the flag that says whether there are keys of several tenants.
    pub(crate) fn tenancy(&self) -> Tenancy {
        self.known.tenancy()
    }

    /// Loads the keys before anyone presents one.
    pub(crate) async fn load(&self) {
        self.known.look_again().await;
    }

    /// Creates a key. The second value is the key itself, which is stored nowhere else.
    pub async fn create(&self, new: NewApiKey) -> Result<(ApiKey, String), RuntimeError> {
        new.check()?;
        let secret = format!("{PREFIX}{}", hex(&rand::random::<[u8; KEY_BYTES]>()));
        let at_ms = self.clock.now_ms();
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
            bodies: new.bodies,
        };
        self.store.put_api_key(&row(&key, digest(&secret))).await?;
        self.known.look_again().await;
        tracing::info!(
            key = key.id,
            tenant = key.tenant.as_str(),
            role = key.role.as_str(),
            "an API key was created"
        );
        Ok((key, secret))
    }

    /// Returns what is likely a mistake in a key, although it can be created: agents that do not exist.
    pub async fn warnings(&self, new: &NewApiKey) -> Result<Vec<String>, RuntimeError> {
        let Some(agents) = &new.agents else { return Ok(Vec::new()) };
        let rows = self.store.agents().await?;
        let known: Vec<&str> = rows.iter().map(|row| row.agent.name.as_str()).collect();
        let unknown = agents.iter().map(AgentName::as_str).filter(|name| !known.contains(name));
        Ok(unknown
            .map(|name| {
                let meant = did_you_mean(name, known.iter().copied());
                format!("agent {name:?} is not deployed{meant}; the key will work once it is")
            })
            .collect())
    }

    /// Returns all keys, oldest first.
    pub async fn list(&self) -> Result<Vec<ApiKey>, RuntimeError> {
        let readable = |row: ApiKeyRow| {
            let id = row.id.clone();
            let unreadable =
                |error| tracing::error!(key = id, "an API key cannot be read and is refused: {error}");
            api_key(row).map_err(unreadable).ok()
        };
        Ok(self.store.api_keys().await?.into_iter().filter_map(readable).collect())
    }

    /// Returns whether work that was requested earlier for a tenant, with the key of this id, is an operator's. Work without
    /// a key is the operator's if it is for `local`, because it was requested on a host without keys. A key that was revoked
    /// or removed is nobody's.
    pub(crate) async fn is_operator(&self, tenant: &str, id: Option<&str>) -> Result<bool, RuntimeError> {
        let Some(id) = id else { return Ok(tenant == Tenant::local().as_str()) };
        let keys = self.list().await?;
        Ok(keys.iter().any(|key| key.id == id && key.role == Role::Admin && key.revoked_at_ms.is_none()))
    }

    /// Revokes a key, which stays listed. This host refuses it from now on; another host on the
    /// same folder refuses it within a second.
    pub async fn revoke(&self, id: &str) -> Result<ApiKey, RuntimeError> {
        let row = self.store.revoke_api_key(id, self.clock.now_ms()).await?;
        let row = row.ok_or_else(|| RuntimeError::KeyNotFound { id: excerpt(id) })?;
        self.known.look_again().await;
        tracing::info!(key = id, "an API key was revoked");
        api_key(row)
    }

    /// Removes the keys of a tenant. This host refuses them from now on; another host on the same folder refuses them
    /// within a second. Returns their number.
    pub(crate) async fn remove_of(&self, tenant: &Tenant) -> Result<u64, RuntimeError> {
        let removed = self.store.remove_api_keys(tenant.as_str()).await?;
        self.known.look_again().await;
        Ok(removed)
    }

    /// Returns the key that matches the presented string.
    pub async fn authenticate(&self, presented: &str) -> Result<Arc<ApiKey>, RuntimeError> {
        if presented.len() != PREFIX.len() + 2 * KEY_BYTES || !presented.starts_with(PREFIX) {
            return Err(refused("it is not a key of this host"));
        }
        let found = self.known.find(&digest(presented)).await?;
        let found = found.ok_or_else(|| refused("it is not a key of this host"))?;
        let now = self.clock.now_ms();
        if found.key.revoked_at_ms.is_some() {
            return Err(refused("it was revoked"));
        }
        if found.key.expires_at_ms.is_some_and(|at| at <= now) {
            return Err(refused("it has expired"));
        }
        self.note_use(&found, u32::try_from(now / DAY_MS).unwrap_or(u32::MAX));
        Ok(found.key.clone())
    }

    /// Records the first use of a key per day. The request does not wait for the write, because the
    /// writer may be busy for seconds.
    fn note_use(&self, used: &Arc<KnownKey>, today: u32) {
        if !used.is_first_use(today) {
            return;
        }
        let (store, used) = (self.store.clone(), used.clone());
        tokio::spawn(async move {
            if let Err(error) = store.use_api_key(&used.key.id, today).await {
                tracing::warn!(key = used.key.id, "cannot record the use of an API key: {error}");
                used.forget_use();
            }
        });
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
        bodies: key.bodies,
    }
}

pub(super) fn api_key(row: ApiKeyRow) -> Result<ApiKey, RuntimeError> {
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
        bodies: row.bodies,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn new(expires_in: Option<Duration>) -> NewApiKey {
        NewApiKey {
            tenant: Tenant::new("acme").expect("a name"),
            role: Role::Invoke,
            agents: Some(vec![AgentName::new("a").expect("a name"), AgentName::new("b").expect("a name")]),
            name: "ci".into(),
            expires_in,
            requests_per_minute: NonZeroU32::new(30),
            bodies: true,
        }
    }

    async fn ring() -> KeyRing {
        KeyRing::new(Store::for_tests().await.expect("a database in memory"), Clock::default())
    }

    #[tokio::test]
    async fn only_the_exact_key_authenticates_and_it_is_not_stored() {
        let ring = ring().await;
        let (made, secret) = ring.create(new(None)).await.expect("made");
        assert_eq!((secret.len(), &secret[..5]), (69, "skep_"));
        let found = ring.authenticate(&secret).await.expect("the created key");
        assert_eq!(*found, made);
        let rows = ring.store.api_keys().await.expect("reads");
        assert_eq!(rows[0].digest, digest(&secret));
        assert!(!format!("{rows:?}{made:?}").contains(&secret[5..]));

        let other = format!("skep_{}", "0".repeat(64));
        for wrong in ["", "skep_", &secret[..68], &secret.to_uppercase(), &other] {
            let error = ring.authenticate(wrong).await.expect_err(wrong);
            assert_eq!(error.code(), "invalid_api_key");
        }
    }

    #[tokio::test]
    async fn revoked_and_expired_keys_are_refused_with_the_reason() {
        let ring = ring().await;
        let (key, secret) = ring.create(new(None)).await.expect("made");
        ring.authenticate(&secret).await.expect("valid");
        ring.revoke(&key.id).await.expect("there");
        let error = ring.authenticate(&secret).await.expect_err("revoked").to_string();
        assert!(error.contains("revoked"), "{error}");
        assert_eq!(ring.revoke("key-none").await.expect_err("not there").code(), "key_not_found");

        // Shorter than the resolution of a millisecond clock.
        let (_, secret) = ring.create(new(Some(Duration::from_nanos(1)))).await.expect("made");
        let error = ring.authenticate(&secret).await.expect_err("expired").to_string();
        assert!(error.contains("expired"), "{error}");
    }

    #[tokio::test]
    async fn the_use_of_a_key_is_recorded_once_a_day() {
        let mut ring = ring().await;
        // The day does not end during the test.
        ring.clock = Clock::at(20_000 * 86_400_000);
        let (_, secret) = ring.create(new(None)).await.expect("made");
        ring.authenticate(&secret).await.expect("valid");
        let used = async || ring.list().await.expect("reads")[0].last_used_day;
        soon(async || used().await.is_some()).await;
        let before = ring.store.api_key_changes().await.expect("reads");
        ring.authenticate(&secret).await.expect("valid");
        assert_eq!(ring.store.api_key_changes().await.expect("reads"), before);
    }

    #[tokio::test]
    async fn changes_by_another_process_take_effect_within_a_second() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("skep.db");
        let host = Store::open_for_tests(&path).await.expect("a database");
        let other = Store::open_beside_for_tests(&path).await.expect("the same database");
        let [host, other] = [host, other].map(|store| KeyRing::new(store, Clock::default()));
        host.authenticate(&bogus(0)).await.expect_err("no key");
        let (key, secret) = other.create(new(None)).await.expect("made");
        soon(async || host.authenticate(&secret).await.is_ok()).await;
        other.revoke(&key.id).await.expect("there");
        soon(async || host.authenticate(&secret).await.is_err()).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn bogus_keys_neither_delay_valid_ones_nor_are_cached() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("skep.db");
        let ring = KeyRing::new(Store::open_for_tests(&path).await.expect("a database"), Clock::default());
        let (_, secret) = ring.create(new(None)).await.expect("made");
        let attack = tokio::spawn({
            let ring = ring.clone();
            async move {
                let mut refused = Vec::new();
                // Runs for longer than a key is trusted without a refresh.
                for round in 0..40 {
                    for number in 0..500 {
                        let ring = ring.clone();
                        refused.push(tokio::spawn(async move {
                            ring.authenticate(&bogus(round * 500 + number)).await.expect_err("no key")
                        }));
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                for refused in refused {
                    assert_eq!(refused.await.expect("no panic").code(), "invalid_api_key");
                }
            }
        });
        let mut waits = Vec::new();
        while !attack.is_finished() {
            let asked = Instant::now();
            ring.authenticate(&secret).await.expect("valid");
            waits.push(asked.elapsed());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        attack.await.expect("every bogus key was refused");
        waits.sort();
        // A busy machine may stop this process for a while.
        let late = waits[waits.len() * 9 / 10];
        assert!(
            late < Duration::from_millis(250),
            "a tenth of {} answers took {late:?} or more",
            waits.len()
        );
        assert_eq!(ring.known.len(), 1);
    }

    /// Returns a well-formed key that does not exist.
    fn bogus(number: usize) -> String {
        format!("{PREFIX}{number:064x}")
    }

    /// Waits until something is so, which takes a second on an idle machine.
    async fn soon(is_so: impl AsyncFn() -> bool) {
        let begun = Instant::now();
        while !is_so().await {
            assert!(begun.elapsed() < Duration::from_secs(10), "not within 10 seconds");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
