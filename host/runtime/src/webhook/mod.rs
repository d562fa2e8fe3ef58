//! Webhooks: their registration and the messages they receive.

mod test;

pub use test::WebhookTest;

use crate::{
    Clock, NewWebhook, RuntimeError, TopicPattern, egress::Egress, event::EventRouter, text::excerpt,
};
use rand::RngExt as _;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use skep_outbound::WebhookSecret;
use skep_store::{Delivery, Store, StoreError, Target, WebhookRow, WebhookTry};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

/// A webhook, without its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookSummary {
    pub id: String,
    pub url: String,
    pub topics: Vec<TopicPattern>,
    /// Whether `skep.toml` defines the webhook, so that it can only be removed there.
    pub is_configured: bool,
    pub created_at_ms: u64,
    /// The reason why events are no longer sent to the webhook.
    pub disabled: Option<String>,
    pub last_try: Option<WebhookTry>,
}

/// A webhook with the state of its deliveries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookState {
    pub webhook: WebhookSummary,
    /// Number of events waiting to be delivered to the webhook.
    pub waiting: u64,
    pub next_try_at_ms: Option<u64>,
}

/// A webhook with the sealed secret that signs its messages.
pub(crate) struct Webhook {
    pub(crate) summary: WebhookSummary,
    sealed_secret: String,
}

/// All webhooks of the host. The map mirrors the store.
pub(crate) struct Webhooks {
    store: Store,
    clock: Clock,
    egress: Arc<Egress>,
    by_id: RwLock<BTreeMap<String, Arc<Webhook>>>,
}

impl Webhooks {
    pub(crate) fn new(store: Store, clock: Clock, egress: Arc<Egress>) -> Self {
        Webhooks { store, clock, egress, by_id: RwLock::default() }
    }

    /// Loads the stored webhooks, and updates the configured ones to match the configuration.
    pub(crate) async fn load(
        &self,
        router: &EventRouter,
        configured: &[NewWebhook],
    ) -> Result<(), RuntimeError> {
        for row in self.store.webhooks().await?.into_iter().filter(|row| !row.configured) {
            if let Err(error) = self.enter(router, row) {
                tracing::error!("{error}; no events are sent to it until it is removed and added again");
            }
        }
        self.configure(router, configured).await
    }

    /// Makes the configured webhooks match the configuration. Those that are loaded and did not change stay untouched.
    pub(crate) async fn configure(
        &self,
        router: &EventRouter,
        configured: &[NewWebhook],
    ) -> Result<(), RuntimeError> {
        configured.iter().try_for_each(NewWebhook::check)?;
        let wanted: Vec<String> = configured.iter().map(|webhook| configured_id(&webhook.url)).collect();
        let rows = self.store.webhooks().await?.into_iter();
        for row in rows.filter(|row| row.configured && !wanted.contains(&row.id)) {
            self.forget(router, &row.id).await?;
        }
        for (webhook, id) in configured.iter().zip(wanted) {
            if !self.is_loaded(&id, webhook).await {
                self.put(router, id, webhook.clone(), true).await?;
            }
        }
        Ok(())
    }

    /// Makes the webhooks in memory those that are stored, after another host changed them.
    pub(crate) async fn reload(&self, router: &EventRouter) -> Result<(), RuntimeError> {
        let rows = self.store.webhooks().await?;
        for known in self.list() {
            if !rows.iter().any(|row| row.id == known.id) {
                router.remove_webhook(&known.id);
                self.by_id.write().unwrap_or_else(PoisonError::into_inner).remove(&known.id);
            }
        }
        for changed in rows.into_iter().filter(|row| !self.is_same(row)) {
            if let Err(error) = self.enter(router, changed) {
                tracing::error!("{error}; no events are sent to it until it is removed and added again");
            }
        }
        Ok(())
    }

    /// Returns whether a webhook is loaded as it is stored, apart from its last attempt.
    fn is_same(&self, stored: &WebhookRow) -> bool {
        self.get(&stored.id).is_some_and(|known| {
            let WebhookRow { url, topics, sealed_secret, configured, created_at_ms, disabled, .. } =
                row(&known.summary, known.sealed_secret.clone());
            (&url, &topics, &sealed_secret) == (&stored.url, &stored.topics, &stored.sealed_secret)
                && (configured, created_at_ms, &disabled)
                    == (stored.configured, stored.created_at_ms, &stored.disabled)
        })
    }

    /// Returns whether a webhook is loaded with exactly this configuration.
    async fn is_loaded(&self, id: &str, webhook: &NewWebhook) -> bool {
        let NewWebhook { url, topics, secret: Some(secret) } = webhook else { return false };
        let Some(known) =
            self.get(id).filter(|known| (&known.summary.url, &known.summary.topics) == (url, topics))
        else {
            return false;
        };
        let reveal = |secret: WebhookSecret| secret.reveal();
        // A secret that cannot be read is replaced.
        self.secret(&known).await.ok().map(reveal) == WebhookSecret::parse(secret).ok().map(reveal)
    }

    /// Adds a webhook, unless nothing could ever be sent to its address. Its secret is returned
    /// only here.
    pub(crate) async fn add(
        &self,
        router: &EventRouter,
        webhook: NewWebhook,
    ) -> Result<(WebhookSummary, String), RuntimeError> {
        webhook.check()?;
        let allowed = self.egress.client.check_webhook_address(&webhook.url).await;
        allowed.map_err(|error| RuntimeError::InvalidWebhook { message: error.to_string() })?;
        let id = format!("wh_{}", uuid::Uuid::now_v7().simple());
        self.put(router, id, webhook, false).await
    }

    pub(crate) fn list(&self) -> Vec<WebhookSummary> {
        let by_id = self.by_id.read().unwrap_or_else(PoisonError::into_inner);
        by_id.values().map(|webhook| webhook.summary.clone()).collect()
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Webhook>> {
        self.by_id.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// Returns all webhooks, with the state of their deliveries.
    pub(crate) async fn states(&self) -> Result<Vec<WebhookState>, StoreError> {
        let queues = self.store.webhook_queues().await?;
        let state = |webhook: WebhookSummary| {
            let queue = queues.iter().find(|queue| queue.webhook == webhook.id);
            WebhookState {
                waiting: queue.map_or(0, |queue| queue.waiting),
                next_try_at_ms: queue.map(|queue| queue.next_try_at_ms),
                webhook,
            }
        };
        Ok(self.list().into_iter().map(state).collect())
    }

    /// Records the result of an attempt and returns that of the previous one. It is stored only if
    /// it differs from the previous one, so that a healthy webhook causes no writes.
    pub(crate) async fn note_try(
        &self,
        id: &str,
        last: WebhookTry,
    ) -> Result<Option<WebhookTry>, StoreError> {
        let before = {
            let mut by_id = self.by_id.write().unwrap_or_else(PoisonError::into_inner);
            let Some(webhook) = by_id.get_mut(id) else { return Ok(None) };
            let mut summary = webhook.summary.clone();
            let before = summary.last_try.replace(last.clone());
            *webhook = Arc::new(Webhook { summary, sealed_secret: webhook.sealed_secret.clone() });
            before
        };
        let is_same = before
            .as_ref()
            .is_some_and(|before| (before.status, &before.error) == (last.status, &last.error));
        if !is_same {
            self.store.note_webhook_try(id, &last).await?;
        }
        Ok(before)
    }

    /// Returns the secret that signs the webhook's messages.
    pub(crate) async fn secret(&self, webhook: &Webhook) -> Result<WebhookSecret, RuntimeError> {
        let Webhook { summary, sealed_secret } = webhook;
        let opened = self.egress.vault.open_for_webhook(&summary.id, sealed_secret).await?;
        WebhookSecret::parse(&opened).map_err(|message| RuntimeError::Internal { message })
    }

    /// Removes an added webhook and its pending deliveries.
    pub(crate) async fn remove(&self, router: &EventRouter, id: &str) -> Result<(), RuntimeError> {
        let not_found = || RuntimeError::WebhookNotFound { id: excerpt(id) };
        let webhook = self.get(id).ok_or_else(not_found)?;
        if webhook.summary.is_configured {
            let message = format!(
                "webhook {id} is defined in skep.toml; remove it there, and run `skep config reload`"
            );
            return Err(RuntimeError::InvalidWebhook { message });
        }
        match self.forget(router, id).await? {
            true => Ok(()),
            false => Err(not_found()),
        }
    }

    /// Removes a webhook and its pending deliveries. Returns whether it was stored.
    async fn forget(&self, router: &EventRouter, id: &str) -> Result<bool, StoreError> {
        router.remove_webhook(id);
        self.by_id.write().unwrap_or_else(PoisonError::into_inner).remove(id);
        self.store.delete_webhook(id).await
    }

    /// Stops sending events to a webhook.
    pub(crate) async fn disable(
        &self,
        router: &EventRouter,
        webhook: &Webhook,
        why: &str,
    ) -> Result<(), RuntimeError> {
        let disabled = Some(why.to_owned());
        // Uses the current summary, which includes the result of this attempt.
        let known =
            self.get(&webhook.summary.id).map_or_else(|| webhook.summary.clone(), |now| now.summary.clone());
        let summary = WebhookSummary { disabled, ..known };
        let row = row(&summary, webhook.sealed_secret.clone());
        self.store.put_webhook(&row).await?;
        self.enter(router, row)
    }

    async fn put(
        &self,
        router: &EventRouter,
        id: String,
        webhook: NewWebhook,
        is_configured: bool,
    ) -> Result<(WebhookSummary, String), RuntimeError> {
        webhook.check()?;
        let NewWebhook { url, topics, secret } = webhook;
        let invalid = |message: String| RuntimeError::InvalidWebhook { message };
        let secret = match secret {
            Some(secret) => WebhookSecret::parse(&secret).map_err(invalid)?,
            None => {
                let bytes = rand::rng().random::<[u8; 32]>().to_vec();
                WebhookSecret::new(bytes).expect("32 bytes are enough")
            }
        };
        router.check_room(None, 1)?;
        let summary = WebhookSummary {
            url,
            topics,
            is_configured,
            created_at_ms: self.clock.now_ms(),
            disabled: None,
            last_try: self.stored_try(&id).await?,
            id,
        };
        let vault = &self.egress.vault;
        let sealed = vault.seal_for_webhook(&summary.id, &secret.reveal(), is_configured).await?;
        let row = row(&summary, sealed);
        self.store.put_webhook(&row).await?;
        self.enter(router, row)?;
        Ok((summary, secret.reveal()))
    }

    /// Returns the stored last attempt of a configured webhook, whose row is rewritten at each
    /// start.
    async fn stored_try(&self, id: &str) -> Result<Option<WebhookTry>, StoreError> {
        let known = self.store.webhooks().await?.into_iter().find(|row| row.id == id);
        Ok(known.and_then(|row| row.last_try))
    }

    fn enter(&self, router: &EventRouter, row: WebhookRow) -> Result<(), RuntimeError> {
        let unreadable = |why: String| RuntimeError::Internal {
            message: format!("webhook {} is unreadable: {why}", row.id),
        };
        let topics = row.topics.lines().map(TopicPattern::new).collect::<Result<Vec<_>, _>>();
        let topics = topics.map_err(unreadable)?;
        match row.disabled {
            None => router.set_webhook(&row.id, topics.clone()),
            Some(_) => router.remove_webhook(&row.id),
        }
        let summary = WebhookSummary {
            id: row.id.clone(),
            url: row.url,
            topics,
            is_configured: row.configured,
            created_at_ms: row.created_at_ms,
            disabled: row.disabled,
            last_try: row.last_try,
        };
        let webhook = Arc::new(Webhook { summary, sealed_secret: row.sealed_secret });
        self.by_id.write().unwrap_or_else(PoisonError::into_inner).insert(row.id, webhook);
        Ok(())
    }
}

/// Derives the id from the address, so that pending deliveries survive a restart.
fn configured_id(url: &str) -> String {
    format!("wh_{}", short_hash(&[url]))
}

/// Returns the id by which a receiver recognizes a message. It is the same for every attempt.
pub(crate) fn message_id(delivery: &Delivery) -> String {
    let Target::Webhook(webhook) = &delivery.target else { return delivery.event_id.clone() };
    format!("msg_{}", short_hash(&[&delivery.source, &delivery.event_id, &delivery.topic, webhook]))
}

/// Encodes the body of a message.
pub(crate) fn message(delivery: &Delivery) -> Result<Vec<u8>, String> {
    let data = delivery.data.as_deref().map(serde_json::from_slice::<Value>).transpose();
    let data = data.map_err(|error| format!("the data of the event is unreadable: {error}"))?;
    let Delivery { topic, at_ms, event_id, source, .. } = delivery;
    let mut message = envelope(topic, *at_ms, event_id, source, &json!(data));
    if delivery.restored {
        message["restored"] = json!(true);
    }
    Ok(message.to_string().into_bytes())
}

/// Builds the JSON envelope of an event for webhooks.
pub(super) fn envelope(topic: &str, at_ms: u64, id: &str, source: &str, data: &Value) -> Value {
    let at = jiff::Timestamp::from_millisecond(at_ms.cast_signed()).unwrap_or_default();
    json!({"type": topic, "timestamp": at.to_string(), "id": id, "source": source, "data": data})
}

fn row(summary: &WebhookSummary, sealed_secret: String) -> WebhookRow {
    let WebhookSummary { id, url, topics, is_configured, created_at_ms, disabled, last_try } =
        summary.clone();
    let topics: Vec<&str> = topics.iter().map(TopicPattern::as_str).collect();
    WebhookRow {
        id,
        url,
        topics: topics.join("\n"),
        sealed_secret,
        configured: is_configured,
        created_at_ms,
        disabled,
        last_try,
    }
}

fn short_hash(parts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Omits the secret.
impl fmt::Debug for NewWebhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewWebhook")
            .field("url", &self.url)
            .field("topics", &self.topics)
            .finish_non_exhaustive()
    }
}
