//! The log of requests to models.

use anyhow::Result;
use reqwest::{Method, RequestBuilder, Response};
use skep_api::{ModelRequest, ModelRequestPage};

use super::{Client, Follower};

/// Selects requests.
#[derive(Debug, Clone, Default)]
pub struct RequestQuery {
    pub model: Option<String>,
    pub agent: Option<String>,
    pub session: Option<String>,
    pub tenant: Option<String>,
    pub key: Option<String>,
    pub status: Option<String>,
    pub error: Option<String>,
    pub since_ms: Option<u64>,
    pub until_ms: Option<u64>,
    /// Selects requests whose prompt or answer contains this text.
    pub search: Option<String>,
    /// Whether the records include prompts and answers.
    pub bodies: bool,
}

impl Client {
    /// Returns a page, the newest first. `cursor` is the `next` of the page before.
    pub async fn requests(
        &self,
        query: &RequestQuery,
        limit: u32,
        cursor: Option<&str>,
    ) -> Result<ModelRequestPage> {
        let request = self.requests_request(query)?.query(&[("limit", limit)]);
        let cursor: Vec<_> = cursor.map(|cursor| ("cursor", cursor)).into_iter().collect();
        self.json(request.query(&cursor)).await
    }

    /// Returns all records as JSON Lines, the oldest first.
    pub async fn requests_jsonl(&self, query: &RequestQuery, limit: Option<u32>) -> Result<Response> {
        let request = self.requests_request(query)?.query(&[("format", "jsonl")]);
        let limit: Vec<_> = limit.map(|limit| ("limit", limit)).into_iter().collect();
        self.answer(request.query(&limit)).await
    }

    /// Streams the records after the position `after`, or from now on.
    pub async fn follow_requests(
        &self,
        query: &RequestQuery,
        after: Option<i64>,
    ) -> Result<Follower<ModelRequest>> {
        self.follow_events(self.requests_request(query)?, "request", after).await
    }

    /// Returns the record of one request, with its messages if they are kept.
    pub async fn model_request(&self, id: &str) -> Result<ModelRequest> {
        self.json(self.request(Method::GET, &["v1", "requests", id])?).await
    }

    fn requests_request(&self, query: &RequestQuery) -> Result<RequestBuilder> {
        let RequestQuery { model, agent, session, tenant, key, status, error, .. } = query;
        let time = |at: Option<u64>| at.map(|at| at.to_string());
        let (since_ms, until_ms) = (time(query.since_ms), time(query.until_ms));
        let bodies = query.bodies.then(|| "true".to_owned());
        let parameters = [
            ("model", model),
            ("agent", agent),
            ("session", session),
            ("tenant", tenant),
            ("key", key),
            ("status", status),
            ("error", error),
            ("since_ms", &since_ms),
            ("until_ms", &until_ms),
            ("q", &query.search),
            ("bodies", &bodies),
        ];
        let given = parameters.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        let request = self.request(Method::GET, &["v1", "requests"])?;
        Ok(request.query(&given.collect::<Vec<_>>()))
    }
}
