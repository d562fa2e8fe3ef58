//! Log lines of agents, as a list or as a stream.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use reqwest::{RequestBuilder, header};
use skep_api::{LogLine, LogLineList};

use super::Client;
use super::events::EventParser;

/// Timeout for a chunk of the stream; a host sends keep-alive messages more often than this.
const SILENCE: Duration = Duration::from_secs(60);

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

/// A stream of log lines.
pub struct LogStream {
    response: reqwest::Response,
    parser: EventParser,
}

impl Client {
    /// Returns the newest lines.
    pub async fn logs(&self, query: &LogQuery) -> Result<Vec<LogLine>> {
        let list: LogLineList = self.json(self.logs_request(query)?).await?;
        Ok(list.data)
    }

    /// Streams the lines after the id `after`, without an end; if there is no id, the stream starts with the
    /// newest lines.
    pub async fn follow_logs(&self, query: &LogQuery, after: Option<i64>) -> Result<LogStream> {
        let mut request = self.logs_request(query)?.header(header::ACCEPT, "text/event-stream");
        if let Some(after) = after {
            request = request.header("last-event-id", after);
        }
        Ok(LogStream { response: self.answer(request).await?, parser: EventParser::default() })
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

impl LogStream {
    /// Returns the next line. The stream ends only with an error, when the host is gone.
    pub async fn next(&mut self) -> Result<LogLine> {
        loop {
            if let Some((name, data)) = self.parser.pop() {
                if name == "log" {
                    return serde_json::from_str(&data)
                        .context("a log line in a format that this `skep` does not know");
                }
                continue;
            }
            let chunk = tokio::time::timeout(SILENCE, self.response.chunk()).await;
            match chunk.context("the host no longer responds")?.context("the log broke off")? {
                Some(chunk) => self.parser.push(&chunk)?,
                None => bail!("the host ended the log"),
            }
        }
    }
}
