//! The reasons why a request was not sent or got no usable response. A refusal names the line that would allow
//! it.

use crate::{Origin, origin::OriginError};
use std::net::IpAddr;

/// The reason why a request has no response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutboundError {
    #[error(transparent)]
    Origin(#[from] OriginError),
    #[error("the method {method:?} is not supported; use GET, HEAD, POST, PUT, PATCH, DELETE or OPTIONS")]
    Method { method: String },
    #[error("the header {name:?} cannot be sent: {problem}")]
    Header { name: String, problem: String },
    #[error(
        "{range:?} is not a valid address range; use a form such as \"10.1.0.0/16\", \"10.1.2.3\" or \
         \"10.1.2.3:8080\""
    )]
    Range { range: String },
    #[error("{origin} is not granted; add \"{origin}\" to {line}")]
    NotGranted { origin: Origin, line: String },
    #[error("the secret {name:?} may not be sent to {origin}; add \"{origin}\" to {line}")]
    SecretNotGranted { name: String, origin: Origin, line: String },
    #[error("the secret {name:?} is in the path of a URL; send it in a header, the query or the body")]
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
    /// The connection broke, or the response is not valid HTTP.
    #[error("the exchange with {origin} failed: {problem}")]
    Exchange { origin: Origin, problem: String },
    #[error("the request has {bytes} bytes; {limit} are allowed")]
    RequestTooLarge { bytes: usize, limit: usize },
    #[error("the response is larger than the {limit} bytes that are allowed")]
    ResponseTooLarge { limit: usize },
    #[error("the request exceeded the limit of {limit} redirects")]
    TooManyRedirects { limit: usize },
    #[error("the redirect from {origin} cannot be followed: {problem}")]
    Redirect { origin: Origin, problem: String },
    #[error(
        "the response from {origin} is withheld because it cannot be searched for the secret that the request carried: \
         {problem}"
    )]
    Concealed { origin: Origin, problem: String },
    #[error("the response was not complete before the deadline")]
    DeadlineExceeded,
}

impl OutboundError {
    /// Returns the stable, machine-readable code of this error.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Origin(OriginError::Url { .. }) => "invalid_url",
            Self::Origin(OriginError::Pattern { .. }) => "invalid_origin",
            Self::Method { .. } => "invalid_method",
            Self::Header { .. } => "invalid_header",
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
