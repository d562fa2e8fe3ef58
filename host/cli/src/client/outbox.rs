//! Schedules, events and webhooks of a running host.

use anyhow::Result;
use reqwest::Method;
use serde_json::Value;
use skep_api::{
    AddedWebhook, DeadLetter, DeadLetterPage, Event, EventPage, NewEvent, NewWebhook, PublishedEvent,
    Schedule, SchedulePage, WebhookPage, WebhookState, WebhookTest,
};

use super::Client;

impl Client {
    /// Returns the schedules of one agent, or of all agents.
    pub async fn schedules(&self, agent: Option<&str>, limit: u32) -> Result<Vec<Schedule>> {
        let mut url = self.url(&["v1", "schedules"])?;
        url.query_pairs_mut().append_pair("limit", &limit.to_string());
        if let Some(agent) = agent {
            url.query_pairs_mut().append_pair("agent", agent);
        }
        let list: SchedulePage = self.json(self.http.get(url)).await?;
        Ok(list.data)
    }

    /// Cancels a schedule.
    pub async fn cancel_schedule(&self, agent: &str, id: &str) -> Result<()> {
        let request = self.request(Method::DELETE, &["v1", "agents", agent, "schedules", id])?;
        self.answer(request).await.map(drop)
    }

    /// Makes a schedule due now.
    pub async fn run_schedule(&self, agent: &str, id: &str) -> Result<()> {
        let request = self.request(Method::POST, &["v1", "agents", agent, "schedules", id, "run"])?;
        self.answer(request).await.map(drop)
    }

    /// Publishes an event.
    pub async fn send_event(
        &self,
        topic: &str,
        data: Option<&Value>,
        id: Option<&str>,
    ) -> Result<PublishedEvent> {
        let event = NewEvent {
            topic: topic.to_owned(),
            data: data.cloned(),
            id: id.map(str::to_owned),
            time: None,
            source: Some("cli".to_owned()),
        };
        self.json(self.request(Method::POST, &["v1", "events"])?.json(&event)).await
    }

    /// Returns the newest events.
    pub async fn events(&self, limit: u32) -> Result<Vec<Event>> {
        let mut url = self.url(&["v1", "events"])?;
        url.query_pairs_mut().append_pair("limit", &limit.to_string());
        let list: EventPage = self.json(self.http.get(url)).await?;
        Ok(list.data)
    }

    /// Adds a webhook, and returns it with its secret.
    pub async fn add_webhook(
        &self,
        url: &str,
        topics: &[String],
        secret: Option<&str>,
    ) -> Result<AddedWebhook> {
        let (url, topics) = (url.to_owned(), topics.to_vec());
        let body = NewWebhook { url, topics, secret: secret.map(str::to_owned) };
        self.json(self.request(Method::POST, &["v1", "webhooks"])?.json(&body)).await
    }

    /// Returns all webhooks with the state of their deliveries.
    pub async fn webhooks(&self) -> Result<Vec<WebhookState>> {
        let list: WebhookPage = self.json(self.request(Method::GET, &["v1", "webhooks"])?).await?;
        Ok(list.data)
    }

    /// Removes a webhook.
    pub async fn remove_webhook(&self, id: &str) -> Result<()> {
        self.answer(self.request(Method::DELETE, &["v1", "webhooks", id])?).await.map(drop)
    }

    /// Sends a test message to a webhook, and returns how it answered.
    pub async fn test_webhook(&self, id: &str) -> Result<WebhookTest> {
        self.json(self.request(Method::POST, &["v1", "webhooks", id, "test"])?).await
    }

    /// Returns the newest dead letters.
    pub async fn dead_letters(&self, limit: u32) -> Result<Vec<DeadLetter>> {
        let mut url = self.url(&["v1", "webhooks", "dead-letters"])?;
        url.query_pairs_mut().append_pair("limit", &limit.to_string());
        let list: DeadLetterPage = self.json(self.http.get(url)).await?;
        Ok(list.data)
    }

    /// Makes a dead letter due again.
    pub async fn redeliver(&self, id: i64) -> Result<()> {
        let id = id.to_string();
        let request = self.request(Method::POST, &["v1", "webhooks", "dead-letters", &id, "redeliver"])?;
        self.answer(request).await.map(drop)
    }
}
