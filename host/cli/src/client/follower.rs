//! An endless stream of events of one kind, such as log lines.

use std::marker::PhantomData;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use reqwest::{RequestBuilder, header};
use serde::de::DeserializeOwned;

use super::Client;
use super::events::EventParser;

/// Timeout for a chunk of the stream; a host sends keep-alive messages more often than this.
const SILENCE: Duration = Duration::from_secs(60);

/// A stream of events with one name.
pub struct Follower<T> {
    response: reqwest::Response,
    parser: EventParser,
    name: &'static str,
    kind: PhantomData<T>,
}

impl Client {
    /// Streams the events that follow the one with the id `after`, without an end.
    pub(super) async fn follow_events<T>(
        &self,
        request: RequestBuilder,
        name: &'static str,
        after: Option<i64>,
    ) -> Result<Follower<T>> {
        let mut request = request.header(header::ACCEPT, "text/event-stream");
        if let Some(after) = after {
            request = request.header("last-event-id", after);
        }
        let (response, parser) = (self.answer(request).await?, EventParser::default());
        Ok(Follower { response, parser, name, kind: PhantomData })
    }
}

impl<T: DeserializeOwned> Follower<T> {
    /// Returns the next event and its id. The stream ends only with an error, when the host is gone.
    pub async fn next(&mut self) -> Result<(Option<i64>, T)> {
        loop {
            if let Some((name, data)) = self.parser.pop() {
                if name == self.name {
                    let event = serde_json::from_str(&data)
                        .with_context(|| format!("a {name} in a format that this `skep` does not know"))?;
                    return Ok((self.parser.last_id(), event));
                }
                continue;
            }
            let chunk = tokio::time::timeout(SILENCE, self.response.chunk()).await;
            match chunk.context("the host no longer responds")?.context("the stream broke off")? {
                Some(chunk) => self.parser.push(&chunk)?,
                None => bail!("the host ended the stream"),
            }
        }
    }
}
