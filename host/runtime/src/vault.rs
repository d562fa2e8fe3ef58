//! Secrets at rest: sealed with a key that lies beside the database, and opened only to be put into a request.
//!
//! Whoever has a copy of the database alone has no secret. A row is bound to its agent and its name: one that was moved to
//! another does not open. So are the secrets of webhooks bound to the webhook.
//!
//! A key is never made while something is sealed with one that is gone: the old one may be in a backup.

use crate::{AgentName, RuntimeError, SecretName, capability::log::now_ms};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    rand::{SecureRandom, SystemRandom},
};
use skep_outbound::{Origins, check_secret_value};
use skep_store::{SecretRow, Store};
use std::{
    io,
    path::{Path, PathBuf},
};
use tokio::sync::OnceCell;

const KEY_BYTES: usize = 32;
/// Of all agents together.
const MAX_SECRETS: usize = 10_000;

pub(crate) struct Vault {
    store: Store,
    /// `None`: the key lives as long as the process, as the store does.
    key_file: Option<PathBuf>,
    key: OnceCell<Key>,
    /// Whether `key` lasts as long as the store.
    kept: OnceCell<()>,
}

struct Key {
    cipher: LessSafeKey,
    origin: KeyOrigin,
}

enum KeyOrigin {
    File,
    /// Made now, and in no file yet.
    Drawn([u8; KEY_BYTES]),
}

/// A secret without its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretSummary {
    pub name: String,
    /// `None`: of every agent that is granted it.
    pub agent: Option<String>,
    /// Where it may go.
    pub hosts: Vec<String>,
    pub updated_at_ms: u64,
}

/// A secret that was opened.
pub(crate) struct OpenSecret {
    pub(crate) name: String,
    pub(crate) value: String,
    pub(crate) hosts: Origins,
}

impl Vault {
    pub(crate) fn new(store: Store, key_file: Option<PathBuf>) -> Self {
        Vault { store, key_file, key: OnceCell::new(), kept: OnceCell::new() }
    }

    pub(crate) async fn set(
        &self,
        agent: Option<&AgentName>,
        name: &SecretName,
        value: &str,
        hosts: &Origins,
    ) -> Result<(), RuntimeError> {
        let invalid = |message: String| RuntimeError::InvalidSecret { name: name.to_string(), message };
        check_secret_value(value).map_err(invalid)?;
        if hosts.is_empty() {
            return Err(invalid(
                "it names no host that it may be sent to; name such as \"https://api.example.com\", or \"*\""
                    .to_owned(),
            ));
        }
        let known = self.store.secrets().await?;
        let agent = agent.map(AgentName::to_string);
        let is_known = known.iter().any(|row| row.agent == agent && row.name == name.as_str());
        if known.len() >= MAX_SECRETS && !is_known {
            return Err(invalid(format!(
                "{MAX_SECRETS} secrets are set, as many as a host keeps; delete one first"
            )));
        }
        let sealed = seal(self.lasting_key().await?, of_agent(agent.as_deref(), name.as_str()), value)?;
        let hosts = serde_json::to_string(hosts).expect("a list of texts is always JSON");
        let row = SecretRow { agent, name: name.to_string(), hosts, sealed, updated_at_ms: now_ms() };
        Ok(self.store.put_secret(&row).await?)
    }

    pub(crate) async fn list(&self) -> Result<Vec<SecretSummary>, RuntimeError> {
        let summary = |row: SecretRow| {
            let hosts = hosts(&row)?.patterns().map(ToString::to_string).collect();
            let SecretRow { agent, name, updated_at_ms, .. } = row;
            Ok(SecretSummary { name, agent, hosts, updated_at_ms })
        };
        self.store.secrets().await?.into_iter().map(summary).collect()
    }

    pub(crate) async fn delete(
        &self,
        agent: Option<&AgentName>,
        name: &SecretName,
    ) -> Result<(), RuntimeError> {
        match self.store.delete_secret(agent.map(AgentName::as_str), name.as_str()).await? {
            true => Ok(()),
            false => {
                let (name, agent) = (name.to_string(), agent.map(AgentName::to_string));
                Err(RuntimeError::SecretNotFound { name, agent })
            }
        }
    }

    /// Those of an agent's secrets that `wanted` names.
    pub(crate) async fn open(
        &self,
        agent: &str,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<OpenSecret>, RuntimeError> {
        let rows = self.store.secrets_for(agent).await?;
        let mut opened = Vec::new();
        for row in rows.into_iter().filter(|row| wanted(&row.name)) {
            let bound_to = of_agent(row.agent.as_deref(), &row.name);
            let value =
                unseal(self.key().await?, bound_to, &row.sealed).ok_or_else(|| unreadable(&row.name))?;
            opened.push(OpenSecret { hosts: hosts(&row)?, name: row.name, value });
        }
        Ok(opened)
    }

    /// The secret of a webhook, as the store may have it. One of the configuration is sealed anew at each start, with
    /// whichever key.
    pub(crate) async fn seal_for_webhook(
        &self,
        id: &str,
        secret: &str,
        is_configured: bool,
    ) -> Result<String, RuntimeError> {
        let key = if is_configured { self.key().await? } else { self.lasting_key().await? };
        Ok(STANDARD.encode(seal(key, of_webhook(id), secret)?))
    }

    pub(crate) async fn open_for_webhook(&self, id: &str, sealed: &str) -> Result<String, RuntimeError> {
        let key = self.key().await?;
        let opened = STANDARD.decode(sealed).ok().and_then(|sealed| unseal(key, of_webhook(id), &sealed));
        opened.ok_or_else(|| {
            internal(format!(
                "the secret of webhook {id} does not open with this host's key; remove the webhook and add it again"
            ))
        })
    }

    /// Says in the log which secrets do not open, so that this is known before an agent needs one.
    pub(crate) async fn report_unreadable(&self) -> Result<(), RuntimeError> {
        if !self.seals_anything().await? {
            return Ok(());
        }
        let key = match self.any_key().await {
            Ok(key) => key,
            Err(error) => {
                tracing::error!("no secret can be read: {error}");
                return Ok(());
            }
        };
        if matches!(key.origin, KeyOrigin::Drawn(_)) && self.key_file.is_some() {
            tracing::error!("no secret can be read: {}", self.key_is_lost());
            return Ok(());
        }
        for row in self.store.secrets().await? {
            let bound_to = of_agent(row.agent.as_deref(), &row.name);
            if unseal(&key.cipher, bound_to, &row.sealed).is_none() {
                tracing::error!(agent = row.agent, "{}", unreadable(&row.name));
            }
        }
        for webhook in self.store.webhooks().await?.into_iter().filter(|webhook| !webhook.configured) {
            if let Err(error) = self.open_for_webhook(&webhook.id, &webhook.sealed_secret).await {
                tracing::error!("{error}");
            }
        }
        Ok(())
    }

    /// The key to open with.
    async fn key(&self) -> Result<&LessSafeKey, RuntimeError> {
        Ok(&self.any_key().await?.cipher)
    }

    /// The key to seal with what has to be opened after a restart. It is in its file.
    async fn lasting_key(&self) -> Result<&LessSafeKey, RuntimeError> {
        let key = self.any_key().await?;
        let keep = async || {
            let (KeyOrigin::Drawn(bytes), Some(path)) = (&key.origin, self.key_file.clone()) else {
                return Ok(());
            };
            if self.seals_anything().await? {
                return Err(internal(self.key_is_lost()));
            }
            let bytes = *bytes;
            self.on_file("writing", move || write(&path, &bytes)).await
        };
        self.kept.get_or_try_init(keep).await?;
        Ok(&key.cipher)
    }

    async fn any_key(&self) -> Result<&Key, RuntimeError> {
        let load = async || {
            let read = match self.key_file.clone() {
                Some(path) => self.on_file("reading", move || read(&path)).await?,
                None => None,
            };
            let (bytes, origin) = match read {
                Some(bytes) => (bytes, KeyOrigin::File),
                None => {
                    let drawn = random()?;
                    (drawn, KeyOrigin::Drawn(drawn))
                }
            };
            let key = UnboundKey::new(&AES_256_GCM, &bytes).expect("the key has the cipher's length");
            Ok(Key { cipher: LessSafeKey::new(key), origin })
        };
        self.key.get_or_try_init(load).await
    }

    /// Does something with the key's file, of which the error says the name.
    async fn on_file<T: Send + 'static>(
        &self,
        doing: &str,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, RuntimeError> {
        let done = tokio::task::spawn_blocking(work).await;
        let done = done.map_err(|error| internal(format!("{doing} a key panicked: {error}")))?;
        done.map_err(|error| internal(format!("the key of secrets, {}: {error}", self.key_name())))
    }

    /// Whether the store has what only the key of before opens.
    async fn seals_anything(&self) -> Result<bool, RuntimeError> {
        let has_secrets = !self.store.secrets().await?.is_empty();
        Ok(has_secrets || self.store.webhooks().await?.iter().any(|webhook| !webhook.configured))
    }

    fn key_is_lost(&self) -> String {
        format!(
            "{}, the key with which secrets were sealed, is not there; put it back from a backup and start the host \
             again, or give up what it sealed with `skep secret delete NAME` and `skep webhook remove ID`, and then set \
             each secret again with `skep secret set NAME`",
            self.key_name()
        )
    }

    fn key_name(&self) -> std::path::Display<'_> {
        self.key_file.as_deref().unwrap_or(Path::new("in memory")).display()
    }
}

/// A nonce of its own, then the ciphertext with its tag.
fn seal(key: &LessSafeKey, bound_to: Vec<u8>, value: &str) -> Result<Vec<u8>, RuntimeError> {
    let nonce: [u8; NONCE_LEN] = random()?;
    let mut sealed = value.as_bytes().to_vec();
    key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(bound_to), &mut sealed)
        .map_err(|_| internal("a secret cannot be sealed".to_owned()))?;
    Ok([nonce.as_slice(), &sealed].concat())
}

fn unseal(key: &LessSafeKey, bound_to: Vec<u8>, sealed: &[u8]) -> Option<String> {
    let (nonce, sealed) = sealed.split_first_chunk::<NONCE_LEN>()?;
    let mut opened = sealed.to_vec();
    let nonce = Nonce::assume_unique_for_key(*nonce);
    let opened = key.open_in_place(nonce, Aad::from(bound_to), &mut opened).ok()?;
    String::from_utf8(opened.to_vec()).ok()
}

/// No agent's name, no secret's and no webhook's id has a zero in it.
fn of_agent(agent: Option<&str>, name: &str) -> Vec<u8> {
    [agent.unwrap_or_default().as_bytes(), &[0], name.as_bytes()].concat()
}

fn of_webhook(id: &str) -> Vec<u8> {
    [&[0, 0], id.as_bytes()].concat()
}

fn unreadable(name: &str) -> RuntimeError {
    internal(format!(
        "the secret {name:?} does not open with this host's key; set it again with `skep secret set {name}`"
    ))
}

fn hosts(row: &SecretRow) -> Result<Origins, RuntimeError> {
    serde_json::from_str(&row.hosts)
        .map_err(|error| internal(format!("the hosts of secret {:?} are unreadable: {error}", row.name)))
}

/// The key, if there is one. Nobody else may be able to read it.
fn read(path: &Path) -> io::Result<Option<[u8; KEY_BYTES]>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    #[cfg(unix)]
    {
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(path)?.permissions());
        if mode & 0o077 != 0 {
            return Err(io::Error::other("others may read it; allow only its owner with `chmod 600`"));
        }
    }
    bytes.try_into().map(Some).map_err(|_| io::Error::other(format!("it does not have {KEY_BYTES} bytes")))
}

/// Writes the key where there is none.
fn write(path: &Path, key: &[u8; KEY_BYTES]) -> io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    io::Write::write_all(&mut file, key)?;
    file.sync_all()
}

fn random<const BYTES: usize>() -> Result<[u8; BYTES], RuntimeError> {
    let mut bytes = [0; BYTES];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| internal("the machine gives no random numbers".to_owned()))?;
    Ok(bytes)
}

fn internal(message: String) -> RuntimeError {
    RuntimeError::Internal { message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> SecretName {
        SecretName::new(name).expect("valid")
    }

    fn hosts() -> Origins {
        Origins::try_from(vec!["https://api.example.com".parse().expect("an origin")]).expect("one")
    }

    async fn opened(vault: &Vault, agent: &str) -> Result<Vec<String>, RuntimeError> {
        Ok(vault.open(agent, |_| true).await?.into_iter().map(|secret| secret.value).collect())
    }

    #[tokio::test]
    async fn a_secret_is_opened_with_the_same_key_and_the_store_holds_nothing_readable() {
        let dir = tempfile::tempdir().expect("a folder");
        let (store, path) = (Store::in_memory().await.expect("a database"), dir.path().join("secrets.key"));
        let vault = Vault::new(store.clone(), Some(path.clone()));
        vault.set(None, &name("KEY"), "s3cret-value", &hosts()).await.expect("valid");
        let row = store.secrets().await.expect("read").remove(0);
        assert!(!row.sealed.windows(6).any(|window| window == b"s3cret"));
        let again = Vault::new(store.clone(), Some(path.clone()));
        assert_eq!(opened(&again, "a").await.expect("the same key"), ["s3cret-value"]);
        std::fs::write(&path, [7; KEY_BYTES]).expect("it is there");
        let other = Vault::new(store, Some(path));
        let error = opened(&other, "a").await.expect_err("another key").to_string();
        assert!(error.contains("`skep secret set KEY`"), "{error}");
    }

    #[tokio::test]
    async fn no_key_is_made_while_a_secret_is_sealed_with_one_that_is_gone() {
        let dir = tempfile::tempdir().expect("a folder");
        let (store, path) = (Store::in_memory().await.expect("a database"), dir.path().join("secrets.key"));
        let vault = Vault::new(store.clone(), Some(path.clone()));
        vault.set(None, &name("KEY"), "s3cret-value", &hosts()).await.expect("valid");
        let backup = std::fs::read(&path).expect("the key is written");
        std::fs::remove_file(&path).expect("it is there");

        let without = Vault::new(store.clone(), Some(path.clone()));
        opened(&without, "a").await.expect_err("the key is gone");
        let error = without.set(None, &name("B"), "s3cret-value", &hosts()).await.expect_err("it is gone");
        for fix in ["put it back", "`skep secret delete NAME`", "`skep secret set NAME`"] {
            assert!(error.to_string().contains(fix), "{error}");
        }
        without.seal_for_webhook("wh_1", "whsec", false).await.expect_err("it would have to last");
        let sealed = without.seal_for_webhook("wh_2", "whsec", true).await.expect("for this process");
        assert_eq!(without.open_for_webhook("wh_2", &sealed).await.expect("the same key"), "whsec");
        assert!(!path.exists(), "the place is free for the old key");

        without.delete(None, &name("KEY")).await.expect("it needs no key");
        without.set(None, &name("KEY"), "s3cret-value", &hosts()).await.expect("nothing is lost any more");
        assert_ne!(std::fs::read(&path).expect("a new key"), backup);
        let again = Vault::new(store, Some(path));
        assert_eq!(opened(&again, "a").await.expect("the same key"), ["s3cret-value"]);
    }

    #[tokio::test]
    async fn a_row_that_was_moved_to_another_agent_does_not_open() {
        let store = Store::in_memory().await.expect("a database");
        let vault = Vault::new(store.clone(), None);
        let owner = AgentName::new("owner").expect("valid");
        vault.set(Some(&owner), &name("KEY"), "s3cret-value", &hosts()).await.expect("valid");
        assert_eq!(opened(&vault, "owner").await.expect("its own"), ["s3cret-value"]);
        let row = store.secrets().await.expect("read").remove(0);
        store.put_secret(&SecretRow { agent: Some("thief".into()), ..row }).await.expect("stored");
        assert!(opened(&vault, "thief").await.is_err());
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_key_that_others_may_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("secrets.key");
        write(&path, &[7; KEY_BYTES]).expect("made");
        let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).expect("it is ours");
        let vault = Vault::new(Store::in_memory().await.expect("a database"), Some(path));
        let error = vault.set(None, &name("KEY"), "s3cret-value", &hosts()).await.expect_err("readable");
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[tokio::test]
    async fn a_value_has_a_size_and_a_place_to_go() {
        let vault = Vault::new(Store::in_memory().await.expect("a database"), None);
        for (value, hosts, expected) in [
            ("hunter2", hosts(), "12 to 4096"),
            (&*"x".repeat(4_097), hosts(), "12 to 4096"),
            ("password1234", hosts(), "can be guessed"),
            ("s3cret-value", Origins::default(), "no host"),
        ] {
            let error = vault.set(None, &name("KEY"), value, &hosts).await.expect_err(expected);
            assert_eq!(error.code(), "invalid_secret");
            assert!(error.to_string().contains(expected) && !error.to_string().contains(value), "{error}");
        }
    }
}
