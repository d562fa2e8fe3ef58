//! Reads the hub's answers: sizes, digests, ranges, refusals.

use std::fmt;

use anyhow::{Context as _, Result, bail};
use reqwest::header::{CONTENT_RANGE, ETAG, HeaderMap};
use reqwest::{Response, StatusCode};

use crate::catalog::reference::is_sha256;

const MAX_FILE_BYTES: u64 = 1 << 42;
/// Header in which the hub says why it refuses.
const ERROR_CODE: &str = "x-error-code";

/// A file as the hub describes it before it sends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Description {
    pub(in super::super) bytes: u64,
    /// SHA-256 of the contents in hexadecimal. The hub knows it only for large files.
    pub(in super::super) sha256: Option<String>,
    /// Identifies these contents: another text means other contents.
    pub(super) etag: Option<String>,
}

/// The hub cannot answer at present, but may later.
#[derive(Debug)]
pub(super) struct Unavailable(StatusCode);

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the hub currently answers {}\n  hint: try again in a minute", self.0)
    }
}

impl std::error::Error for Unavailable {}

/// Reads the description of a file from the headers of an answer.
pub(super) fn description(headers: &HeaderMap, file: &str) -> Result<Description> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let size = text("x-linked-size").or_else(|| text("content-length"));
    let bytes = size.and_then(|size| size.parse().ok());
    let bytes = bytes.with_context(|| format!("the hub does not say how large {file} is"))?;
    if bytes > MAX_FILE_BYTES {
        bail!("{file} has {bytes} bytes; at most {MAX_FILE_BYTES} are allowed");
    }
    let etag = text("x-linked-etag").or_else(|| text(ETAG.as_str()));
    let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned());
    let sha256 = etag.as_deref().filter(|etag| is_sha256(etag)).map(str::to_ascii_lowercase);
    Ok(Description { bytes, sha256, etag })
}

/// Returns the answer if it is a success, and else what the hub refuses and what helps.
pub(super) fn checked(response: Response, what: &str) -> Result<Response> {
    let code = response.headers().get(ERROR_CODE).and_then(|code| code.to_str().ok());
    match (response.status(), code) {
        (status, _) if status.is_success() => Ok(response),
        // Without a token, the hub answers 401 for what does not exist.
        (StatusCode::UNAUTHORIZED, Some("RepoNotFound")) | (StatusCode::NOT_FOUND, Some("RepoNotFound")) => {
            bail!(
                "the hub has no public repository with {what}\n  hint: check the name; for a private repository, set \
             HF_TOKEN to an access token"
            )
        }
        (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => bail!(
            "the hub does not allow access to {what}\n  hint: accept the model's terms on the hub, and set HF_TOKEN to an access token"
        ),
        (StatusCode::NOT_FOUND, _) => bail!("the hub has no {what}\n  hint: check the name"),
        (StatusCode::RANGE_NOT_SATISFIABLE, _) => bail!("the hub has less of {what} than it announced"),
        (status, _) if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            Err(Unavailable(status)).with_context(|| format!("cannot get {what}"))
        }
        (status, _) => bail!("the hub answered {status} for {what}"),
    }
}

/// Returns whether a response is the rest of a file of `bytes` bytes from the byte `offset` on.
pub(super) fn continues_at(response: &Response, offset: u64, bytes: u64) -> bool {
    let range = response.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
    let Some((at, total)) = range.and_then(|range| range.split_once('/')) else { return false };
    response.status() == StatusCode::PARTIAL_CONTENT
        && at.starts_with(&format!("bytes {offset}-"))
        && (total == "*" || total == bytes.to_string())
}

/// Returns whether trying again may help: the connection broke, or the hub is busy.
pub(super) fn is_transient(error: &anyhow::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut, UnexpectedEof};
    error.chain().any(|cause| {
        let broke = cause.downcast_ref::<std::io::Error>().is_some_and(|error| {
            matches!(
                error.kind(),
                BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut | UnexpectedEof
            )
        });
        broke || cause.is::<reqwest::Error>() || cause.is::<Unavailable>()
    })
}
