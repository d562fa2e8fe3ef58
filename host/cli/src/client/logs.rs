//! What agents log, read as it comes.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use reqwest::{RequestBuilder, header};

use super::events::EventParser;
use super::{Client, LogLine, wire};

/// A host says that it is still there more often than this.
const SILENCE: Duration = Duration::from_secs(60);

/// Which lines are wanted.
#[derive(Debug, Clone, Default)]
pub struct LogQuery {
    /// `None`: of all.
    pub agent: Option<String>,
    pub session: Option<String>,
    /// This one and those above it.
    pub level: Option<String>,
    pub since_ms: Option<u64>,
    /// The newest so many.
    pub limit: u32,
}

/// Lines as they come.
pub struct LogStream {
    response: reqwest::Response,
    parser: EventParser,
}

impl Client {
    /// The newest lines.
    pub async fn logs(&self, query: &LogQuery) -> Result<Vec<LogLine>> {
        let list: wire::List<LogLine> = self.json(self.logs_request(query)?).await?;
        Ok(list.data)
    }

    /// The lines after the id `after`, without an end; without it the newest ones first.
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
    /// The next line. The stream ends only with an error: the host is gone.
    pub async fn next(&mut self) -> Result<LogLine> {
        loop {
            if let Some((name, data)) = self.parser.pop() {
                if name == "log" {
                    return serde_json::from_str(&data)
                        .context("a log line in a form that this `skep` does not know");
                }
                continue;
            }
            let chunk = tokio::time::timeout(SILENCE, self.response.chunk()).await;
            match chunk.context("the host says nothing any more")?.context("the log broke off")? {
                Some(chunk) => self.parser.push(&chunk)?,
                None => bail!("the host ended the log"),
            }
        }
    }
}
