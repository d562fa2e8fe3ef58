//! A new key for everything that is sealed.
//!
//! A crash at any point loses nothing: the file has the new key and the old ones until all rows are sealed with the new
//! one, and all rows change in one transaction.

use super::{
    SealingKey, of_agent, of_webhook,
    sealing_key::{Keys, random},
    unreadable, webhook_unreadable,
};
use crate::RuntimeError;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use skep_store::{SecretRow, Store, WebhookRow};

/// The number of values that were sealed with a new key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resealed {
    pub secrets: u64,
    pub webhooks: u64,
}

/// How many values are sealed, and how many of them the keys do not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sealed {
    pub values: u64,
    pub unreadable: u64,
}

/// Tries the keys on everything that is sealed.
pub async fn check_sealed(store: &Store, place: &SealingKey) -> Result<Sealed, RuntimeError> {
    let keys = Keys::new(&place.read().await?.unwrap_or_default());
    let secrets = store.secrets().await?;
    let webhooks = store.webhooks().await?.into_iter().filter(|webhook| !webhook.configured);
    let opens = secrets
        .iter()
        .map(|row| keys.open(&of_agent(row.agent.as_deref(), &row.name), &row.sealed).is_some());
    let opens: Vec<bool> =
        opens.chain(webhooks.map(|webhook| open_webhook(&keys, &webhook).is_some())).collect();
    let unreadable = opens.iter().filter(|opens| !**opens).count();
    Ok(Sealed { values: opens.len() as u64, unreadable: unreadable as u64 })
}

/// Seals everything with a new key, in a database that no host uses. A new key is drawn if the keys are in a file; a
/// program has to print the new one first, before the old ones.
pub async fn reseal(store: &Store, place: &SealingKey) -> Result<Resealed, RuntimeError> {
    let old = place.read().await?;
    let secrets = store.secrets().await?;
    let webhooks = store.webhooks().await?;
    let Some(old) = old else {
        return match (secrets.is_empty(), webhooks.iter().all(|webhook| webhook.configured)) {
            (true, true) => Ok(Resealed { secrets: 0, webhooks: 0 }),
            _ => Err(super::internal(format!(
                "{place}, the key with which secrets were sealed, is missing; put it back from a backup"
            ))),
        };
    };
    let keys = match place {
        SealingKey::Command(_) => old,
        _ => [vec![random()?], old].concat(),
    };
    let cipher = Keys::new(&keys);
    let mut sealed_again = Vec::with_capacity(secrets.len());
    for row in secrets {
        let bound_to = of_agent(row.agent.as_deref(), &row.name);
        let value = cipher.open(&bound_to, &row.sealed).ok_or_else(|| unreadable(&row.name))?;
        sealed_again.push(SecretRow { sealed: cipher.seal(bound_to, &value)?, ..row });
    }
    let mut resealed_webhooks = Vec::new();
    // The secrets of configured webhooks are sealed again at each start.
    for webhook in webhooks.into_iter().filter(|webhook| !webhook.configured) {
        let value = open_webhook(&cipher, &webhook).ok_or_else(|| webhook_unreadable(&webhook.id))?;
        let sealed_secret = STANDARD.encode(cipher.seal(of_webhook(&webhook.id), &value)?);
        resealed_webhooks.push(WebhookRow { sealed_secret, ..webhook });
    }
    let resealed = Resealed { secrets: sealed_again.len() as u64, webhooks: resealed_webhooks.len() as u64 };
    let newest = keys[..1].to_vec();
    place.replace(keys).await?;
    store.put_resealed(sealed_again, resealed_webhooks).await?;
    place.replace(newest).await?;
    Ok(resealed)
}

fn open_webhook(keys: &Keys, webhook: &WebhookRow) -> Option<String> {
    keys.open(&of_webhook(&webhook.id), &STANDARD.decode(&webhook.sealed_secret).ok()?)
}
