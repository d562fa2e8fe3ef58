//! Log lines of agents, as a list or as a stream.

use anyhow::Result;
use reqwest::RequestBuilder;
use skep_api::{LogLine, LogLineList};

use super::{Client, Follower};

/// Selects log lines.
#[derive(Debug, Clone, Default)]
pub struct LogQuery {
    /// `None` selects the lines of all agents.
    pub agent: Option<String>,
    pub session: Option<String>,
    /// Selects lines of this level and of higher ones.
    pub level: Option<String>,
    pub since_ms: Option<u64>,
    /// Maximum number of lines; the newest are selected.
    pub limit: u32,
}

impl Client {
    /// Returns the newest lines.
    pub async fn logs(&self, query: &LogQuery) -> Result<Vec<LogLine>> {
        let list: LogLineList = self.json(self.logs_request(query)?).await?;
        Ok(list.data)
    }

    /// Streams the lines after the id `after`, without an end; if there is no id, the stream starts with the
    /// newest lines.
    pub async fn follow_logs(&self, query: &LogQuery, after: Option<i64>) -> Result<Follower<LogLine>> {
        self.follow_events(self.logs_request(query)?, "log", after).await
    }

    fn logs_request(&self, query: &LogQuery) -> Result<RequestBuilder> {
        let LogQuery { agent, session, level, since_ms, limit } = query;
        let path = match agent {
            Some(agent) => vec!["v1", "agents", agent, "logs"],
            None => vec!["v1", "logs"],
        };
        let since_ms = since_ms.map(|at| at.to_string());
        let parameters = [("session", session), ("level", level), ("since_ms", &since_ms)];
        let given = parameters.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        let request = self.request(reqwest::Method::GET, &path)?;
        Ok(request.query(&[("limit", limit)]).query(&given.collect::<Vec<_>>()))
    }
}
