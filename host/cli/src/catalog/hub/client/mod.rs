//! The hub's HTTP API: the files of a repository, what the hub says about a file, and the file.
//!
//! Files are written with blocking calls: the client has a thread of its own.

mod answer;
mod download;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use reqwest::header::{AUTHORIZATION, LOCATION};
use reqwest::redirect::Policy;
use reqwest::{Client, Method, RequestBuilder, Response, Url};
use serde::Deserialize;

use self::answer::{checked, description};
use crate::authorities::tls_for;

pub(super) use self::answer::Description;
pub(super) use self::download::resumable;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// Maximum time that the hub may be silent.
const SILENCE: Duration = Duration::from_secs(60);
const MAX_INFO_BYTES: usize = 16 << 20;
const MAX_REDIRECTS: usize = 5;

/// A client of one hub.
pub(super) struct HubClient {
    endpoint: Url,
    token: Option<String>,
    /// Follows redirects, also to other hosts, which do not get the token.
    download: Client,
    /// Returns redirects as they are: the hub describes a file in the answer that redirects to it.
    describe: Client,
}

/// A file on the hub.
#[derive(Debug, Clone, Copy)]
pub(super) struct RemoteFile<'a> {
    pub(super) repository: &'a str,
    pub(super) revision: &'a str,
    pub(super) name: &'a str,
}

#[derive(Deserialize)]
struct RepositoryInfo {
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl HubClient {
    /// Creates a client of the hub at `HF_ENDPOINT`, with the access token of the environment or of the user's file.
    /// `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY` apply.
    pub(super) fn from_environment() -> Result<Self> {
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        Self::new(&endpoint, variable("HF_TOKEN").or_else(token_of_user))
    }

    /// Creates a client of the hub at `endpoint`, with an access token if there is one.
    pub(super) fn new(endpoint: &str, token: Option<String>) -> Result<Self> {
        let problem = || format!("HF_ENDPOINT={endpoint}: this is not an address such as {DEFAULT_ENDPOINT}");
        let endpoint = Url::parse(endpoint).with_context(problem)?;
        if !endpoint.has_host() || !matches!(endpoint.scheme(), "http" | "https") {
            bail!(problem());
        }
        let tls = tls_for(&endpoint)?;
        let client = |redirects: Policy| {
            Client::builder()
                .tls_backend_preconfigured(tls.config.clone())
                .user_agent(concat!("skep/", env!("CARGO_PKG_VERSION")))
                .connect_timeout(Duration::from_secs(10))
                .read_timeout(SILENCE)
                .redirect(redirects)
                .build()
                .context("cannot set up the hub's client")
        };
        let (download, describe) = (client(Policy::limited(MAX_REDIRECTS))?, client(Policy::none())?);
        Ok(HubClient { endpoint, token, download, describe })
    }

    /// Returns the names of the files of a repository.
    pub(super) async fn files(&self, repository: &str, revision: &str) -> Result<Vec<String>> {
        let url = self.url(&["api", "models"], repository, &["revision", revision])?;
        let response = self.send(self.request(&self.download, Method::GET, url)).await?;
        let mut response = checked(response, repository)?;
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await? {
            if body.len() + chunk.len() > MAX_INFO_BYTES {
                bail!("the hub's description of {repository} has more than {MAX_INFO_BYTES} bytes");
            }
            body.extend_from_slice(&chunk);
        }
        let info: RepositoryInfo =
            serde_json::from_slice(&body).context("the hub's answer does not describe a repository")?;
        Ok(info.siblings.into_iter().map(|sibling| sibling.rfilename).collect())
    }

    /// Asks the hub for the size and the digest of a file.
    pub(super) async fn describe(&self, file: RemoteFile<'_>) -> Result<Description> {
        let mut url = self.file_url(file)?;
        for _ in 0..MAX_REDIRECTS {
            let response = self.send(self.request(&self.describe, Method::HEAD, url.clone())).await?;
            if !response.status().is_redirection() {
                return description(checked(response, file.name)?.headers(), file.name);
            }
            // A repository that was renamed redirects on the same host. A large file redirects to its storage.
            let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
            let next = url.join(location.context("the hub sent a redirect without a location")?)?;
            if next.origin() != url.origin() || response.headers().contains_key("x-linked-size") {
                return description(response.headers(), file.name);
            }
            url = next;
        }
        bail!("the hub redirects more than {MAX_REDIRECTS} times for {}", file.name)
    }

    fn file_url(&self, file: RemoteFile<'_>) -> Result<Url> {
        self.url(&[], file.repository, &["resolve", file.revision, file.name])
    }

    fn request(&self, client: &Client, method: Method, url: Url) -> RequestBuilder {
        let request = client.request(method, url);
        match &self.token {
            Some(token) => request.header(AUTHORIZATION, format!("Bearer {token}")),
            None => request,
        }
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response> {
        request.send().await.with_context(|| {
            format!(
                "no answer from {}\n  hint: check the network; HTTPS_PROXY names a proxy, and HF_ENDPOINT a mirror of the hub",
                self.endpoint
            )
        })
    }

    fn url(&self, before: &[&str], repository: &str, after: &[&str]) -> Result<Url> {
        let mut url = self.endpoint.clone();
        let mut path =
            url.path_segments_mut().map_err(|()| anyhow!("HF_ENDPOINT cannot be extended by a path"))?;
        let segments = before.iter().copied().chain([repository]).chain(after.iter().copied());
        path.pop_if_empty().extend(segments.flat_map(|segment| segment.split('/')));
        drop(path);
        Ok(url)
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the access token that the hub's own tools stored.
fn token_of_user() -> Option<String> {
    let home = variable("HF_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(directories::BaseDirs::new()?.home_dir().join(".cache/huggingface")))?;
    let token = std::fs::read_to_string(home.join("token")).ok()?;
    Some(token.trim().to_owned()).filter(|token| !token.is_empty())
}

#[cfg(test)]
mod tests;
