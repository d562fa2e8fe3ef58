//! Streamed chat completions from any server that speaks OpenAI's protocol.
//!
//! This module knows only the route that benchmarks use, and nothing that is specific to a Skep host, so that
//! other servers can be measured with the same client. Its types are its own and not those of `skep-api`, whose
//! fields a Skep host always writes: another server may leave any of them out, or send `null`.

use anyhow::{Context as _, Result, anyhow, bail};
use reqwest::{Response, StatusCode, Url, header};
use serde::Deserialize;
use serde_json::Value;
use skep_api::{ErrorBody, ErrorDetail};

use super::events::EventParser;
use super::{address, build, client_builder, send, under};
use crate::failure::Refused;

const EXAMPLE: &str = "http://127.0.0.1:8080/v1";

/// A client of the server at one base address, which ends in `/v1`.
#[derive(Debug, Clone)]
pub struct ChatClient {
    base: Url,
    http: reqwest::Client,
}

/// The answer of a server to a request that it understood.
pub enum ChatAnswer {
    Stream(Box<ChatReader>),
    /// 429: the request does not run; try again later.
    Busy {
        retry_after_s: Option<u64>,
        error: Option<ErrorDetail>,
    },
}

/// A streamed completion. Dropping it cancels the generation.
pub struct ChatReader {
    response: Response,
    parser: EventParser,
    usage: Option<ChatUsage>,
    done: bool,
}

/// Token counts of the server. A count that the server does not report is `None` or 0.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ChatUsage {
    #[serde(default)]
    pub prompt_tokens: u64,
    #[serde(default)]
    pub completion_tokens: u64,
    prompt_tokens_details: Option<PromptDetails>,
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct CompletionDetails {
    forced_tokens: Option<u64>,
    accepted_prediction_tokens: Option<u64>,
    rejected_prediction_tokens: Option<u64>,
}

impl ChatUsage {
    /// Returns the number of prompt tokens that the server had cached; 0 if it does not report them.
    pub fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens).unwrap_or(0)
    }

    /// Returns the number of output tokens that a grammar forced.
    pub fn forced_tokens(&self) -> Option<u64> {
        self.completion_tokens_details.as_ref()?.forced_tokens
    }

    /// Returns the number of draft tokens that were accepted.
    pub fn accepted_tokens(&self) -> Option<u64> {
        self.completion_tokens_details.as_ref()?.accepted_prediction_tokens
    }

    /// Returns the number of draft tokens that were rejected.
    pub fn rejected_tokens(&self) -> Option<u64> {
        self.completion_tokens_details.as_ref()?.rejected_prediction_tokens
    }
}

impl ChatClient {
    /// Creates a client of the server at a base URL, such as `http://127.0.0.1:8080/v1`.
    pub fn new(base: &str) -> Result<Self> {
        // Some servers close idle connections, and a request that is sent just then would count as failed.
        let base = address(base, EXAMPLE)?;
        let client = client_builder(&base, None)?.pool_max_idle_per_host(0);
        Ok(Self { base, http: build(client)? })
    }

    /// Sends a request whose body has `"stream": true`; `session` names the session whose cache holds its
    /// prefix.
    pub async fn start(&self, body: &Value, session: Option<&str>) -> Result<ChatAnswer> {
        let mut request = self.http.post(under(&self.base, &["chat", "completions"])?).json(body);
        if let Some(session) = session {
            request = request.header("x-session-affinity", session);
        }
        let response = send(&self.base, request).await?;
        if response.status().is_success() {
            let parser = EventParser::default();
            let reader = ChatReader { response, parser, usage: None, done: false };
            return Ok(ChatAnswer::Stream(Box::new(reader)));
        }
        let retry_after = response.headers().get(header::RETRY_AFTER);
        let retry_after_s = retry_after.and_then(|value| value.to_str().ok()?.parse().ok());
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            let text = response.text().await.unwrap_or_default();
            let error = serde_json::from_str::<ErrorBody>(&text).ok().map(|body| body.error);
            return Ok(ChatAnswer::Busy { retry_after_s, error });
        }
        Err(self.refusal(response).await)
    }

    /// Sends a request for a whole answer and returns it as the server wrote it.
    pub async fn complete(&self, body: &Value) -> Result<Value> {
        let request = self.http.post(under(&self.base, &["chat", "completions"])?).json(body);
        let response = send(&self.base, request).await?;
        match response.status().is_success() {
            true => response.json().await.with_context(|| format!("{} did not answer with JSON", self.base)),
            false => Err(self.refusal(response).await),
        }
    }

    async fn refusal(&self, response: Response) -> anyhow::Error {
        let status = response.status();
        let text = response.text().await.unwrap_or_default();
        match serde_json::from_str::<ErrorBody>(&text) {
            Ok(ErrorBody { error }) => anyhow!(Refused { code: error.code, message: error.message }),
            Err(_) => anyhow!("{} answered {status}: {text}", self.base),
        }
    }
}

impl ChatReader {
    /// Returns the next chunk of the answer's text, which is never empty; `None` after the last one. A stream
    /// that does not end with `[DONE]` is an error.
    pub async fn next(&mut self) -> Result<Option<String>> {
        loop {
            while let Some((_, data)) = self.parser.pop() {
                if let Some(text) = self.take(&data)? {
                    return Ok(Some(text));
                }
            }
            match self.response.chunk().await.context("the stream broke off")? {
                Some(chunk) => self.parser.push(&chunk)?,
                None if self.done => return Ok(None),
                None => bail!("the server ended the stream before the answer was done"),
            }
        }
    }

    /// Returns the server's token counts, once the stream has ended.
    pub fn usage(&self) -> Option<&ChatUsage> {
        self.usage.as_ref()
    }

    fn take(&mut self, data: &str) -> Result<Option<String>> {
        #[derive(Deserialize)]
        struct Chunk {
            #[serde(default)]
            choices: Vec<Choice>,
            usage: Option<ChatUsage>,
            error: Option<ErrorDetail>,
        }
        #[derive(Deserialize)]
        struct Choice {
            delta: Delta,
        }
        #[derive(Deserialize)]
        struct Delta {
            content: Option<String>,
        }
        if data == "[DONE]" {
            self.done = true;
            return Ok(None);
        }
        let chunk: Chunk =
            serde_json::from_str(data).with_context(|| format!("not a chunk of a chat: {data}"))?;
        if let Some(error) = chunk.error {
            bail!(Refused { code: error.code, message: error.message });
        }
        self.usage = chunk.usage.or(self.usage.take());
        let text: String = chunk.choices.into_iter().filter_map(|choice| choice.delta.content).collect();
        Ok((!text.is_empty()).then_some(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    /// Starts a server that sends `answer` to the first client and closes the connection.
    async fn server_that_says(answer: &'static str) -> ChatClient {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base = format!("http://{}/v1", listener.local_addr().expect("an address"));
        tokio::spawn(async move {
            let (mut connection, _) = listener.accept().await.expect("a client");
            let mut request = Vec::new();
            while !request.ends_with(b"{}") {
                connection.read_buf(&mut request).await.expect("a request");
            }
            connection.write_all(answer.as_bytes()).await.expect("the client reads");
        });
        ChatClient::new(&base).expect("an address")
    }

    async fn read(answer: &'static str) -> (String, Result<Option<ChatUsage>>) {
        let client = server_that_says(answer).await;
        let ChatAnswer::Stream(mut reader) = client.start(&serde_json::json!({}), None).await.expect("200")
        else {
            panic!("a stream")
        };
        let mut text = String::new();
        loop {
            match reader.next().await {
                Ok(Some(piece)) => text.push_str(&piece),
                Ok(None) => return (text, Ok(reader.usage().cloned())),
                Err(error) => return (text, Err(error)),
            }
        }
    }

    #[tokio::test]
    async fn text_and_usage_of_any_server_are_read() {
        let (text, usage) = read(
            "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n\
             data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null}}],\"usage\":null}\n\n\
             data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n\
             data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2,\
             \"prompt_tokens_details\":{\"cached_tokens\":5}}}\n\ndata: [DONE]\n\n",
        )
        .await;
        let usage = usage.expect("it ended well").expect("usage");
        assert_eq!(text, "ab");
        assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()), (7, 2, 5));
        assert_eq!((usage.forced_tokens(), usage.accepted_tokens()), (None, None));
    }

    #[tokio::test]
    async fn stream_without_an_end_is_an_error() {
        let chunk = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        let (text, ended) = read(chunk).await;
        assert_eq!(text, "a");
        assert!(ended.expect_err("it broke off").to_string().contains("before the answer was done"));
    }

    #[tokio::test]
    async fn busy_server_reports_when_to_retry() {
        let client = server_that_says(
            "HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\nconnection: close\r\n\r\n\
             {\"error\":{\"message\":\"full\",\"code\":\"busy\"}}",
        )
        .await;
        match client.start(&serde_json::json!({}), None).await.expect("an answer") {
            ChatAnswer::Busy { retry_after_s: Some(3), error: Some(error) } => assert_eq!(error.code, "busy"),
            _ => panic!("429 with Retry-After"),
        }
    }
}
