//! A client of a running host. It uses only the host's public HTTP interface, as any other client would.

mod ai;
mod approvals;
mod chat;
mod cluster;
mod config;
mod engine;
mod events;
mod follower;
mod held;
mod keys;
mod kv;
mod logs;
mod models;
mod outbox;
mod requests;
mod secrets;
mod sessions;
mod status;
mod tenants;
mod tools;
mod usage;

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use reqwest::{Method, RequestBuilder, Response, Url, header};
use serde::de::DeserializeOwned;
use skep_runtime::SessionId;

use crate::authorities::tls_for;
use crate::failure::{Refused, Unreachable, Usage};
pub use ai::AiReader;
pub use chat::{ChatAnswer, ChatClient, ChatReader, ChatUsage};
use events::StreamedTurn;
pub use events::TurnStream;
pub use follower::Follower;
pub use logs::LogQuery;
pub use requests::RequestQuery;
pub use sessions::{ImportOptions, SaidQuery};
use skep_api::{
    AcceptedTurn, Agent, AgentVersion, Agents, ErrorBody, Rollback, SendMessage, Timeline, Turn, TurnStatus,
    VersionList,
};
pub use usage::UsageQuery;

/// Environment variable with the address of the host.
pub const URL_VARIABLE: &str = "SKEP_URL";
/// Environment variable with the API key, for hosts that require one.
pub const KEY_VARIABLE: &str = "SKEP_API_KEY";
/// The address that `skep up` listens on by default.
pub const DEFAULT_URL: &str = "http://127.0.0.1:8080";
/// Time in which a host has to answer whether it accepts work.
const READY_TIMEOUT: Duration = Duration::from_secs(4);

/// A client of the host at one address.
#[derive(Debug, Clone)]
pub struct Client {
    base: Url,
    http: reqwest::Client,
}

impl Client {
    /// Creates a client of the host at `url`, `$SKEP_URL` or the default address, with the key in
    /// `$SKEP_API_KEY` if it is set.
    pub fn new(url: Option<&str>) -> Result<Self> {
        Self::with_key(url, None)
    }

    /// Creates a client that sends `key`, or the key in `$SKEP_API_KEY` if none is given.
    pub fn with_key(url: Option<&str>, key: Option<&str>) -> Result<Self> {
        let from_environment = std::env::var(URL_VARIABLE).ok().filter(|url| !url.is_empty());
        let url = url.map(str::to_owned).or(from_environment).unwrap_or_else(|| DEFAULT_URL.to_owned());
        let base = address(&url, DEFAULT_URL)?;
        Ok(Self { http: build(client_builder(&base, key)?)?, base })
    }

    /// Deploys a component with the text of its `agent.toml`.
    pub async fn deploy(&self, manifest: &str, component: Vec<u8>) -> Result<Agent> {
        let component = reqwest::multipart::Part::bytes(component).file_name("agent.wasm");
        let form = reqwest::multipart::Form::new()
            .text("manifest", manifest.to_owned())
            .part("component", component);
        self.json(self.request(Method::POST, &["v1", "agents"])?.multipart(form)).await
    }

    /// Checks that the host accepts work. The error says why it does not. A host that hangs counts as one that does not
    /// answer.
    pub async fn check_ready(&self) -> Result<()> {
        let request = self.request(Method::GET, &["readyz"])?.timeout(READY_TIMEOUT);
        self.answer(request).await.map(drop)
    }

    /// Returns the deployed agents.
    pub async fn agents(&self) -> Result<Agents> {
        self.json(self.request(Method::GET, &["v1", "agents"])?).await
    }

    /// Checks that an agent exists. The host's error lists the agents that do, or says why this one does not
    /// start.
    pub async fn find_agent(&self, name: &str) -> Result<()> {
        self.answer(self.request(Method::GET, &["v1", "agents", name])?).await.map(drop)
    }

    /// Removes an agent and everything that belongs to it.
    pub async fn delete_agent(&self, name: &str) -> Result<()> {
        self.answer(self.request(Method::DELETE, &["v1", "agents", name])?).await.map(drop)
    }

    /// Returns the stored versions of an agent, newest first.
    pub async fn versions(&self, agent: &str) -> Result<Vec<AgentVersion>> {
        let request = self.request(Method::GET, &["v1", "agents", agent, "versions"])?;
        let list: VersionList = self.json(request).await?;
        Ok(list.data)
    }

    /// Activates a version; without a number, the one before the active version.
    pub async fn rollback(&self, agent: &str, version: Option<u64>) -> Result<Agent> {
        let request = self.request(Method::POST, &["v1", "agents", agent, "rollback"])?;
        self.json(request.json(&Rollback { version })).await
    }

    /// Sends a message and waits for the whole answer.
    pub async fn send(&self, agent: &str, session: &str, text: &str) -> Result<Turn> {
        self.json(self.message(agent, session, text)?).await
    }

    /// Sends a message whose turn does not end with this client.
    pub async fn send_detached(
        &self,
        agent: &str,
        session: &str,
        text: &str,
        idempotency_key: Option<&str>,
    ) -> Result<AcceptedTurn> {
        let request = self.message(agent, session, text)?.header("prefer", "respond-async");
        self.json(with_key(request, idempotency_key)).await
    }

    /// Returns the state of a turn, as the host describes it. `turn` is its id or its number.
    pub async fn turn(&self, agent: &str, session: &str, turn: &str) -> Result<TurnStatus> {
        self.json(self.request(Method::GET, &turn_path(agent, session, turn))?).await
    }

    /// Returns the timeline of a turn, which also says what the turn used of its limits.
    pub async fn timeline(&self, agent: &str, session: &str, turn: &str) -> Result<Timeline> {
        let mut path = turn_path(agent, session, turn).to_vec();
        path.push("timeline");
        self.json(self.request(Method::GET, &path)?).await
    }

    /// Cancels a turn.
    pub async fn cancel_turn(&self, agent: &str, session: &str, turn: &str) -> Result<()> {
        self.answer(self.request(Method::DELETE, &turn_path(agent, session, turn))?).await.map(drop)
    }

    /// Streams the events of a turn, from the first one until the turn has ended.
    pub async fn follow(&self, agent: &str, session: &str, turn: &str) -> Result<TurnStream> {
        let mut path = turn_path(agent, session, turn).to_vec();
        path.push("events");
        let turn =
            StreamedTurn { agent: agent.to_owned(), session: session.to_owned(), id: Some(turn.to_owned()) };
        Ok(TurnStream::new(self.answer(self.request(Method::GET, &path)?).await?, turn))
    }

    /// Sends a message and streams the events of its turn. Dropping the stream cancels the turn.
    pub async fn stream(&self, agent: &str, session: &str, text: &str) -> Result<TurnStream> {
        self.stream_once(agent, session, text, None).await
    }

    /// Does the same as `stream`; with an idempotency key, a message that is sent again is the same turn.
    pub async fn stream_once(
        &self,
        agent: &str,
        session: &str,
        text: &str,
        idempotency_key: Option<&str>,
    ) -> Result<TurnStream> {
        let request = self.message(agent, session, text)?.header(header::ACCEPT, "text/event-stream");
        let turn = StreamedTurn { agent: agent.to_owned(), session: session.to_owned(), id: None };
        Ok(TurnStream::new(self.answer(with_key(request, idempotency_key)).await?, turn))
    }

    fn message(&self, agent: &str, session: &str, text: &str) -> Result<RequestBuilder> {
        let path = ["v1", "agents", agent, "sessions", session, "messages"];
        let message = SendMessage::<serde_json::Value> { text: text.to_owned(), data: None };
        Ok(self.request(Method::POST, &path)?.json(&message))
    }

    fn request(&self, method: Method, path: &[&str]) -> Result<RequestBuilder> {
        Ok(self.http.request(method, self.url(path)?))
    }

    /// Returns the address of the host.
    pub fn address(&self) -> String {
        self.base.as_str().trim_end_matches('/').to_owned()
    }

    fn url(&self, path: &[&str]) -> Result<Url> {
        under(&self.base, path)
    }

    async fn json<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T> {
        let bytes = self.answer(request).await?.bytes().await.map_err(reqwest::Error::without_url);
        let bytes = bytes.context("the host's answer broke off")?;
        serde_json::from_slice(&bytes)
            .with_context(|| format!("{} answered in a format that this `skep` does not know", self.base))
    }

    /// Returns the response if the host accepted the request, and the host's error otherwise.
    async fn answer(&self, request: RequestBuilder) -> Result<Response> {
        let response = send(&self.base, request).await?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = response.text().await.unwrap_or_default();
        match serde_json::from_str::<ErrorBody>(&body) {
            Ok(body) => bail!(Refused { code: body.error.code, message: body.error.message }),
            Err(_) => bail!("{} answered {status}, but not as a Skep host does", self.base),
        }
    }
}

/// Parses a base address: that of a host, or of a TLS proxy in front of one.
fn address(url: &str, example: &str) -> Result<Url> {
    match Url::parse(url).ok().filter(|base| matches!(base.scheme(), "http" | "https") && base.has_host()) {
        Some(base) => Ok(base),
        None => {
            bail!(Usage(format!(
                "{url:?} is not the address of a host\n  hint: an address looks like {example}"
            )))
        }
    }
}

/// Returns the address of `path`, whose segments reach the host unchanged. Segments that an address cannot
/// hold are refused: they would be dropped or changed, and the request would be about something else.
fn under(base: &Url, path: &[&str]) -> Result<Url> {
    let is_changed =
        |segment: &&&str| matches!(**segment, "" | "." | "..") || segment.contains(['\t', '\n', '\r']);
    if let Some(segment) = path.iter().find(is_changed) {
        let rule = match SessionId::new(segment) {
            Err(error) if path.contains(&"sessions") => error.to_string(),
            _ => format!("{segment:?} cannot be a name or an id"),
        };
        bail!(Usage(rule));
    }
    let mut url = base.clone();
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.pop_if_empty().extend(path);
    }
    Ok(url)
}

/// Returns the builder of an HTTP client that sends an API key with every request: the given one, or `$SKEP_API_KEY`.
fn client_builder(base: &Url, key: Option<&str>) -> Result<reqwest::ClientBuilder> {
    let tls = tls_for(base)?;
    let from_environment = std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty());
    let mut headers = header::HeaderMap::new();
    if let Some(key) = key.map(str::to_owned).or(from_environment) {
        let mut value = header::HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| {
            anyhow::anyhow!(Usage(format!(
                "--api-key or {KEY_VARIABLE} is not an API key: it has invalid characters"
            )))
        })?;
        value.set_sensitive(true);
        headers.insert(header::AUTHORIZATION, value);
    }
    Ok(reqwest::Client::builder()
        .tls_backend_preconfigured(tls.config)
        .default_headers(headers)
        .connect_timeout(Duration::from_secs(5))
        .tcp_nodelay(true)
        .no_proxy())
}

fn build(client: reqwest::ClientBuilder) -> Result<reqwest::Client> {
    client.build().context("cannot set up the HTTP client")
}

/// Sends a request and returns any response. An error means that nobody listens at `base`, or that the
/// connection broke.
async fn send(base: &Url, request: RequestBuilder) -> Result<Response> {
    match request.send().await {
        Ok(response) => Ok(response),
        Err(error) if error.is_connect() || error.is_timeout() => {
            let cause = innermost(&error);
            bail!(Unreachable { url: base.as_str().trim_end_matches('/').to_owned(), cause });
        }
        // The address in the error would show names escaped, and not as they were typed.
        Err(error) => Err(error.without_url()).context("the host did not answer"),
    }
}

fn turn_path<'a>(agent: &'a str, session: &'a str, turn: &'a str) -> [&'a str; 7] {
    ["v1", "agents", agent, "sessions", session, "turns", turn]
}

fn with_key(request: RequestBuilder, idempotency_key: Option<&str>) -> RequestBuilder {
    match idempotency_key {
        Some(key) => request.header("idempotency-key", key),
        None => request,
    }
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_in_paths() {
        let client = Client::new(Some("http://127.0.0.1:1/base/")).expect("an address");
        let request = client.message("a", "x/y z", "hi").expect("a path").build().expect("a request");
        assert_eq!(request.url().path(), "/base/v1/agents/a/sessions/x%2Fy%20z/messages");
    }

    #[test]
    fn a_name_that_a_url_would_change_is_refused() {
        let client = Client::new(Some("http://127.0.0.1:1")).expect("an address");
        for session in ["", ".", "..", "a\tb", "a\nb", "a\rb"] {
            let error = client.message("a", session, "hi").expect_err(session);
            assert_eq!(crate::failure::exit_code(&error), crate::failure::EXIT_USAGE);
            assert!(error.to_string().contains("1 to 128 visible ASCII characters"), "{error}");
        }
        let error = client.url(&["v1", "agents", ".."]).expect_err("no name");
        assert!(error.to_string().contains("\"..\" cannot be a name"), "{error}");
        // Any other mistake in an id reaches the host unchanged, and the host reports it.
        for session in ["...", "%2e%2e", " ", "a\\b", "a?b#c", "ä", "\u{1}"] {
            let url = client.url(&["v1", "agents", "a", "sessions", session]).expect(session);
            let sent =
                url.path_segments().and_then(|mut segments| segments.nth(4)).expect(session).to_owned();
            let mut sent = sent.bytes();
            let mut arrived = Vec::new();
            while let Some(byte) = sent.next() {
                arrived.push(match byte {
                    b'%' => {
                        let digits = [sent.next().expect("a digit"), sent.next().expect("a digit")];
                        let digits = std::str::from_utf8(&digits).expect("ASCII");
                        u8::from_str_radix(digits, 16).expect("hexadecimal")
                    }
                    byte => byte,
                });
            }
            assert_eq!(arrived, session.as_bytes(), "{url}");
        }
    }

    #[test]
    fn an_address_has_http_or_https_and_a_host() {
        for good in ["http://127.0.0.1:8080", "https://agents.example.com", "HTTPS://example.com/skep/"] {
            assert!(Client::new(Some(good)).is_ok(), "{good}");
        }
        let secure = Client::new(Some("https://example.com/skep")).expect("an address");
        let url = secure.url(&["v1", "agents"]).expect("a path");
        assert_eq!(url.as_str(), "https://example.com/skep/v1/agents");
        for bad in ["localhost:8080", "example.com", "ftp://example.com", "file:///tmp", "https://", ""] {
            let error = Client::new(Some(bad)).expect_err(bad);
            assert_eq!(crate::failure::exit_code(&error), crate::failure::EXIT_USAGE, "{bad}");
        }
    }

    #[tokio::test]
    async fn absent_host_is_distinguished_from_a_refusal() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        drop(listener);
        let error = Client::new(Some(&url)).expect("an address").agents().await.expect_err("nobody listens");
        assert_eq!(crate::failure::exit_code(&error), crate::failure::EXIT_UNREACHABLE);
        assert!(error.to_string().contains("skep up"), "{error}");
    }
}
