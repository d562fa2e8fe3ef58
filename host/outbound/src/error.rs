//! Why a request was not made, or not answered. A refusal names the line that would allow it.

use crate::Origin;
use std::net::IpAddr;

/// What became of a request that has no response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutboundError {
    #[error("the URL {url:?} cannot be requested: {problem}")]
    Url { url: String, problem: String },
    #[error("the method {method:?} cannot be used; it may be GET, HEAD, POST, PUT, PATCH, DELETE or OPTIONS")]
    Method { method: String },
    #[error("the header {name:?} cannot be sent: {problem}")]
    Header { name: String, problem: String },
    #[error("{pattern:?} is no origin: {problem}; write such as \"https://api.example.com\"")]
    Pattern { pattern: String, problem: String },
    #[error(
        "{range:?} is no range of addresses; write such as \"10.1.0.0/16\", \"10.1.2.3\" or \"10.1.2.3:8080\""
    )]
    Range { range: String },
    #[error("{origin} is not granted; add \"{origin}\" to {line}")]
    NotGranted { origin: Origin, line: String },
    #[error("the secret {name:?} is not for {origin}; add \"{origin}\" to {line}")]
    SecretNotGranted { name: String, origin: Origin, line: String },
    #[error("the secret {name:?} stands in the path of a URL; send it in a header, the query or the body")]
    SecretMisplaced { name: String },
    #[error("the secret {name:?} has no value; the operator sets it with `skep secret set {name}`")]
    SecretUnset { name: String },
    #[error(
        "{host} is at {address}, which is {kind}; the operator can allow it with allow_private = [\"{address}\"] under \
         [outbound] in skep.toml"
    )]
    AddressDenied { host: String, address: IpAddr, kind: &'static str },
    #[error("the name {host:?} cannot be resolved: {problem}")]
    Resolve { host: String, problem: String },
    #[error("{origin} cannot be reached: {problem}")]
    Connect { origin: Origin, problem: String },
    /// The connection broke, or what came is no HTTP.
    #[error("the exchange with {origin} broke off: {problem}")]
    Exchange { origin: Origin, problem: String },
    #[error("the request has {bytes} bytes; {limit} are allowed")]
    RequestTooLarge { bytes: usize, limit: usize },
    #[error("the response has more than the {limit} bytes that are allowed")]
    ResponseTooLarge { limit: usize },
    #[error("the request led through more than {limit} redirects")]
    TooManyRedirects { limit: usize },
    #[error("the redirect of {origin} cannot be followed: {problem}")]
    Redirect { origin: Origin, problem: String },
    #[error(
        "the answer of {origin} cannot be searched for the secret that the request carried, and is not given out: {problem}"
    )]
    Concealed { origin: Origin, problem: String },
    #[error("there was no whole response before the deadline")]
    DeadlineExceeded,
}

impl OutboundError {
    /// A stable name for machines.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Url { .. } => "invalid_url",
            Self::Method { .. } => "invalid_method",
            Self::Header { .. } => "invalid_header",
            Self::Pattern { .. } => "invalid_origin",
            Self::Range { .. } => "invalid_range",
            Self::NotGranted { .. } => "not_granted",
            Self::SecretNotGranted { .. } => "secret_not_granted",
            Self::SecretMisplaced { .. } => "secret_misplaced",
            Self::SecretUnset { .. } => "secret_unset",
            Self::AddressDenied { .. } => "address_denied",
            Self::Resolve { .. } => "unresolved",
            Self::Connect { .. } => "unreachable",
            Self::Exchange { .. } => "broken_off",
            Self::RequestTooLarge { .. } => "request_too_large",
            Self::ResponseTooLarge { .. } => "response_too_large",
            Self::TooManyRedirects { .. } => "too_many_redirects",
            Self::Redirect { .. } => "redirect_refused",
            Self::Concealed { .. } => "response_concealed",
            Self::DeadlineExceeded => "deadline_exceeded",
        }
    }
}
