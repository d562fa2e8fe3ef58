//! Schedules, events and webhooks of a running host.

use anyhow::Result;
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Client, wire};

/// A schedule that wakes a session.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Schedule {
    pub id: String,
    pub agent: String,
    pub session: String,
    pub name: String,
    /// Whether the manifest set the schedule, rather than the session.
    pub manifest: bool,
    pub timing: Value,
    pub data: Value,
    pub state: String,
    pub due_at_ms: u64,
    pub attempt: u32,
    pub tries: u32,
    pub last_error: Option<String>,
}

/// An event, and the state of its deliveries.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    pub key: i64,
    pub id: String,
    pub source: String,
    pub topic: String,
    pub data: Value,
    pub at_ms: u64,
    pub published_at_ms: u64,
    pub pending: u32,
    pub dead: u32,
}

/// Result of sending an event.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SentEvent {
    pub id: String,
    pub state: String,
    pub deliveries: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Webhook {
    pub id: String,
    pub url: String,
    pub topics: Vec<String>,
    pub configured: bool,
    pub created_at_ms: u64,
    pub disabled: Option<String>,
    pub last_try: Option<WebhookTry>,
    /// Number of events that wait for delivery to it; only in a list.
    #[serde(default)]
    pub waiting: u64,
    #[serde(default)]
    pub next_try_at_ms: Option<u64>,
    /// Only in the response that adds the webhook.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

/// Result of the last attempt to send something.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WebhookTry {
    pub at_ms: u64,
    pub status: Option<u16>,
    pub error: Option<String>,
}

/// Result of a test event.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WebhookTest {
    pub webhook: String,
    pub event_id: String,
    pub delivered: bool,
    pub status: Option<u16>,
    pub error: Option<String>,
    /// Beginning of the response body.
    pub answer: String,
    pub took_ms: u64,
}

/// A delivery that failed permanently.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeadLetter {
    pub id: i64,
    pub event_id: String,
    pub topic: String,
    pub at_ms: u64,
    pub agent: Option<String>,
    pub session: Option<String>,
    pub webhook: Option<String>,
    pub attempts: u32,
    pub error: String,
}

impl Client {
    /// Returns the schedules of one agent, or of all agents.
    pub async fn schedules(&self, agent: Option<&str>, limit: u32) -> Result<Vec<Schedule>> {
        let mut url = self.url(&["v1", "schedules"])?;
        url.query_pairs_mut().append_pair("limit", &limit.to_string());
        if let Some(agent) = agent {
            url.query_pairs_mut().append_pair("agent", agent);
        }
        let list: wire::List<Schedule> = self.json(self.http.get(url)).await?;
        Ok(list.data)
    }

    pub async fn cancel_schedule(&self, agent: &str, id: &str) -> Result<()> {
        let request = self.request(Method::DELETE, &["v1", "agents", agent, "schedules", id])?;
        self.answer(request).await.map(drop)
    }

    /// Makes a schedule due now.
    pub async fn run_schedule(&self, agent: &str, id: &str) -> Result<()> {
        let request = self.request(Method::POST, &["v1", "agents", agent, "schedules", id, "run"])?;
        self.answer(request).await.map(drop)
    }

    pub async fn send_event(&self, topic: &str, data: Option<&Value>, id: Option<&str>) -> Result<SentEvent> {
        let mut body = json!({"topic": topic, "source": "cli"});
        if let Some(data) = data {
            body["data"] = data.clone();
        }
        if let Some(id) = id {
            body["id"] = json!(id);
        }
        self.json(self.request(Method::POST, &["v1", "events"])?.json(&body)).await
    }

    /// Returns the newest events.
    pub async fn events(&self, limit: u32) -> Result<Vec<Event>> {
        let mut url = self.url(&["v1", "events"])?;
        url.query_pairs_mut().append_pair("limit", &limit.to_string());
        let list: wire::List<Event> = self.json(self.http.get(url)).await?;
        Ok(list.data)
    }

    pub async fn add_webhook(&self, url: &str, topics: &[String], secret: Option<&str>) -> Result<Webhook> {
        let body = json!({"url": url, "topics": topics, "secret": secret});
        self.json(self.request(Method::POST, &["v1", "webhooks"])?.json(&body)).await
    }

    pub async fn webhooks(&self) -> Result<Vec<Webhook>> {
        let list: wire::List<Webhook> = self.json(self.request(Method::GET, &["v1", "webhooks"])?).await?;
        Ok(list.data)
    }

    pub async fn remove_webhook(&self, id: &str) -> Result<()> {
        self.answer(self.request(Method::DELETE, &["v1", "webhooks", id])?).await.map(drop)
    }

    pub async fn test_webhook(&self, id: &str) -> Result<WebhookTest> {
        self.json(self.request(Method::POST, &["v1", "webhooks", id, "test"])?).await
    }

    /// Returns the newest dead letters.
    pub async fn dead_letters(&self, limit: u32) -> Result<Vec<DeadLetter>> {
        let mut url = self.url(&["v1", "webhooks", "dead-letters"])?;
        url.query_pairs_mut().append_pair("limit", &limit.to_string());
        let list: wire::List<DeadLetter> = self.json(self.http.get(url)).await?;
        Ok(list.data)
    }

    pub async fn redeliver(&self, id: i64) -> Result<()> {
        let id = id.to_string();
        let request = self.request(Method::POST, &["v1", "webhooks", "dead-letters", &id, "redeliver"])?;
        self.answer(request).await.map(drop)
    }
}
