//! The hub's HTTP API: the files of a repository, and resumable downloads that are checked against their digests.
//!
//! Files are written with blocking calls: the client has a thread of its own.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use reqwest::header::{AUTHORIZATION, CONTENT_RANGE, ETAG, HeaderMap, LOCATION, RANGE};
use reqwest::redirect::Policy;
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, Url};
use serde::Deserialize;

use crate::catalog::checksum;
use crate::progress::Step;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const REVISION: &str = "main";
/// Maximum time that the hub may be silent.
const SILENCE: Duration = Duration::from_secs(60);
const MAX_INFO_BYTES: usize = 16 << 20;
const MAX_FILE_BYTES: u64 = 1 << 42;
const MAX_REDIRECTS: usize = 5;
/// Number of times that a broken download is resumed before it fails.
const RETRIES: u32 = 3;

/// A client of one hub.
pub(super) struct HubClient {
    endpoint: Url,
    token: Option<String>,
    /// Follows redirects, also to other hosts, which do not get the token.
    download: Client,
    /// Returns redirects as they are: the hub describes a file in the answer that redirects to it.
    describe: Client,
}

/// A file as the hub describes it before it sends it.
#[derive(Debug, PartialEq, Eq)]
struct Description {
    bytes: u64,
    /// SHA-256 of the contents in hexadecimal. The hub knows it only for large files.
    sha256: Option<String>,
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
    pub(super) fn from_environment() -> Result<Self> {
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        Self::new(&endpoint, variable("HF_TOKEN").or_else(token_of_user))
    }

    pub(super) fn new(endpoint: &str, token: Option<String>) -> Result<Self> {
        let problem = || format!("HF_ENDPOINT={endpoint}: this is not an address such as {DEFAULT_ENDPOINT}");
        let endpoint = Url::parse(endpoint).with_context(problem)?;
        if !endpoint.has_host() || !matches!(endpoint.scheme(), "http" | "https") {
            bail!(problem());
        }
        skep_outbound::tls::install_provider();
        let client = |redirects: Policy| {
            Client::builder()
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
    pub(super) async fn files(&self, repository: &str) -> Result<Vec<String>> {
        let url = self.url(&["api", "models"], repository, &["revision", REVISION])?;
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

    /// Downloads a file to `target`, and resumes an earlier download of it that broke. `begin` gets the file's size.
    /// The file appears at `target` only when it is complete and its digest is the hub's.
    pub(super) async fn download(
        &self,
        repository: &str,
        file: &str,
        target: &Path,
        begin: impl FnOnce(u64) -> Box<dyn Step>,
    ) -> Result<()> {
        let url = self.url(&[], repository, &["resolve", REVISION, file])?;
        let described = self.describe(url.clone(), file).await?;
        let step = begin(described.bytes);
        let partial = partial_path(target);
        let mut attempt = 0;
        while let Err(error) = self.receive(&url, file, &described, &partial, step.as_ref()).await {
            attempt += 1;
            if !is_transient(&error) {
                return Err(error);
            }
            if attempt > RETRIES {
                return Err(error.context("the download broke\n  hint: run the command again; it resumes"));
            }
            tokio::time::sleep(Duration::from_millis(500) * 2u32.pow(attempt)).await;
        }
        if let Some(expected) = &described.sha256 {
            let verified = checksum::verify(&partial, described.bytes, expected);
            verified.inspect_err(|_| drop(std::fs::remove_file(&partial)))?;
        }
        std::fs::rename(&partial, target)?;
        step.finish(&indicatif::HumanBytes(described.bytes).to_string());
        Ok(())
    }

    async fn describe(&self, mut url: Url, file: &str) -> Result<Description> {
        for _ in 0..MAX_REDIRECTS {
            let response = self.send(self.request(&self.describe, Method::HEAD, url.clone())).await?;
            if !response.status().is_redirection() {
                return description(checked(response, file)?.headers(), file);
            }
            // A repository that was renamed redirects on the same host. A large file redirects to its storage.
            let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
            let next = url.join(location.context("the hub redirects to no location")?)?;
            if next.origin() != url.origin() || response.headers().contains_key("x-linked-size") {
                return description(response.headers(), file);
            }
            url = next;
        }
        bail!("the hub redirects more than {MAX_REDIRECTS} times for {file}")
    }

    /// Receives what `partial` still lacks.
    async fn receive(
        &self,
        url: &Url,
        file: &str,
        described: &Description,
        partial: &Path,
        step: &dyn Step,
    ) -> Result<()> {
        let mut out = File::options().create(true).append(true).open(partial)?;
        let mut received = out.metadata()?.len();
        if received > described.bytes {
            out.set_len(0)?;
            received = 0;
        }
        step.advance_to(received);
        if received == described.bytes {
            return Ok(());
        }
        let mut request = self.request(&self.download, Method::GET, url.clone());
        if received > 0 {
            request = request.header(RANGE, format!("bytes={received}-"));
        }
        let mut response = checked(self.send(request).await?, file)?;
        if received > 0 && !continues_at(&response, received) {
            out.set_len(0)?;
            received = 0;
        }
        while let Some(chunk) = response.chunk().await? {
            received += chunk.len() as u64;
            if received > described.bytes {
                bail!("the hub sends more than the {} bytes of {file}", described.bytes);
            }
            out.write_all(&chunk)?;
            step.advance_to(received);
        }
        out.sync_all()?;
        if received < described.bytes {
            let error = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
            return Err(error).with_context(|| format!("the download of {file} ended early"));
        }
        Ok(())
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
                "no answer from {}\n  hint: check the network, or set HF_ENDPOINT to another hub",
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

/// Returns the path at which a download of `target` is kept until it is complete.
fn partial_path(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

fn description(headers: &HeaderMap, file: &str) -> Result<Description> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let size = text("x-linked-size").or_else(|| text("content-length"));
    let bytes = size.and_then(|size| size.parse().ok());
    let bytes = bytes.with_context(|| format!("the hub does not say how large {file} is"))?;
    if bytes > MAX_FILE_BYTES {
        bail!("{file} has {bytes} bytes; at most {MAX_FILE_BYTES} are allowed");
    }
    let etag = text("x-linked-etag").or_else(|| text(ETAG.as_str())).unwrap_or_default();
    let digest = etag.trim_start_matches("W/").trim_matches('"');
    let is_sha256 = digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
    Ok(Description { bytes, sha256: is_sha256.then(|| digest.to_ascii_lowercase()) })
}

fn checked(response: Response, what: &str) -> Result<Response> {
    match response.status() {
        status if status.is_success() => Ok(response),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => bail!(
            "the hub does not allow access to {what}\n  hint: accept the model's terms on the hub, and set HF_TOKEN to an access token"
        ),
        StatusCode::NOT_FOUND => bail!("the hub has no {what}\n  hint: check the name"),
        status => bail!("the hub answered {status} for {what}"),
    }
}

/// Tells whether a response is the rest of a file from the byte `offset` on.
fn continues_at(response: &Response, offset: u64) -> bool {
    let range = response.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
    response.status() == StatusCode::PARTIAL_CONTENT
        && range.is_some_and(|range| range.starts_with(&format!("bytes {offset}-")))
}

/// Tells whether trying again may help: the connection broke.
fn is_transient(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<reqwest::Error>() || cause.is::<std::io::Error>())
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
