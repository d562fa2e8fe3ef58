//! The ways in which one attempt fails, and what each of them means for the caller.

use std::time::Duration;

use skep_engine::{EngineError, UpstreamFault};

use crate::key::Key;

/// Maximum length of a server's text in an error.
const MAX_MESSAGE_BYTES: usize = 500;
/// Retry delay that callers get if a busy server names none.
const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// The reason that an attempt brought no answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server cannot be reached, fails, or takes too long.
    Unavailable { message: String, again: Again },
    /// The server did not begin to answer in time. Asking it again would take as long.
    Slow { message: String },
    /// The server is busy.
    Busy { message: String, retry_after: Option<Duration> },
    /// The server would refuse this request again.
    Refused { message: String },
    /// The prompt is too long for the model.
    TooLong { message: String },
    /// The response does not follow the wire format.
    Malformed { message: String },
}

/// Whether the same server may be asked again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    Soon,
    After(Duration),
    Never,
}

impl Failure {
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Failure::Unavailable { message: message.into(), again: Again::Soon }
    }

    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Failure::Malformed { message: message.into() }
    }

    /// Classifies a status that is not a success. `message` is the server's explanation.
    pub(crate) fn of_status(status: u16, message: &str, retry_after: Option<Duration>) -> Self {
        let message = match message.trim() {
            "" => format!("status {status}"),
            text => format!("status {status}: {text}"),
        };
        match status {
            429 | 529 => Failure::Busy { message, retry_after },
            // The key, the account or the model is at fault, so another server may answer, but not this one.
            401..=404 | 407 => Failure::Unavailable { message, again: Again::Never },
            300..=399 => Failure::Unavailable {
                message: format!("{message}; redirects are not followed, so correct the upstream's `url`"),
                again: Again::Never,
            },
            408 | 409 | 425 | 500.. => {
                Failure::Unavailable { message, again: retry_after.map_or(Again::Soon, Again::After) }
            }
            _ => Failure::Refused { message },
        }
    }

    /// Cuts the server's text, and removes the key from it.
    pub(crate) fn cleaned(mut self, key: Option<&Key>) -> Self {
        let (Failure::Unavailable { message, .. }
        | Failure::Slow { message }
        | Failure::Busy { message, .. }
        | Failure::Refused { message }
        | Failure::TooLong { message }
        | Failure::Malformed { message }) = &mut self;
        let text = std::mem::take(message);
        *message = shortened(match key {
            Some(key) => key.redact(text),
            None => text,
        });
        self
    }

    /// Returns the wait that the server asks for before the next attempt, or `None` if there must be none.
    pub(crate) fn again(&self) -> Option<Duration> {
        match self {
            Failure::Unavailable { again: Again::Soon, .. } => Some(Duration::ZERO),
            Failure::Unavailable { again: Again::After(wait), .. } => Some(*wait),
            Failure::Busy { retry_after, .. } => Some(retry_after.unwrap_or_default()),
            Failure::Malformed { .. } => Some(Duration::ZERO),
            Failure::Unavailable { again: Again::Never, .. }
            | Failure::Slow { .. }
            | Failure::Refused { .. }
            | Failure::TooLong { .. } => None,
        }
    }

    /// Returns whether the failure counts against the server's health. A wrong key or an unknown model does not.
    pub(crate) fn is_unhealthy(&self) -> bool {
        match self {
            Failure::Unavailable { again, .. } => *again != Again::Never,
            Failure::Slow { .. } | Failure::Malformed { .. } => true,
            Failure::Busy { .. } | Failure::Refused { .. } | Failure::TooLong { .. } => false,
        }
    }

    /// Returns the failure's name in metrics.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Failure::Unavailable { .. } => "unavailable",
            Failure::Slow { .. } => "slow",
            Failure::Busy { .. } => "busy",
            Failure::Refused { .. } => "refused",
            Failure::TooLong { .. } => "context_overflow",
            Failure::Malformed { .. } => "malformed",
        }
    }

    pub(crate) fn message(&self) -> String {
        match self {
            Failure::Unavailable { message, .. }
            | Failure::Slow { message }
            | Failure::Busy { message, .. }
            | Failure::Refused { message }
            | Failure::TooLong { message }
            | Failure::Malformed { message } => message.clone(),
        }
    }

    /// Returns the error for the caller. Once a part of the answer was sent, it is `CutOff`, unless the server has refused the rest.
    pub(crate) fn into_error(self, upstream: &str, has_output: bool) -> EngineError {
        let upstream = upstream.to_owned();
        let fault = match &self {
            Failure::Refused { .. } => UpstreamFault::Refused,
            _ if has_output => UpstreamFault::CutOff,
            Failure::Unavailable { .. } | Failure::Slow { .. } => UpstreamFault::Unavailable,
            Failure::Busy { retry_after, .. } => {
                let wait = retry_after.unwrap_or(DEFAULT_RETRY_AFTER).as_millis();
                UpstreamFault::Busy { retry_after_ms: u32::try_from(wait).unwrap_or(u32::MAX) }
            }
            Failure::TooLong { .. } => UpstreamFault::Refused,
            Failure::Malformed { .. } => UpstreamFault::Malformed,
        };
        EngineError::Upstream { upstream, fault, message: self.message() }
    }
}

/// Cuts a text to the length that an error may have.
pub(crate) fn shortened(mut text: String) -> String {
    if text.len() > MAX_MESSAGE_BYTES {
        text.truncate(text.floor_char_boundary(MAX_MESSAGE_BYTES));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_decides_what_may_be_tried_next() {
        let wait = Some(Duration::from_secs(3));
        for (status, outcome, again) in [
            (429, "busy", wait),
            (529, "busy", wait),
            (500, "unavailable", wait),
            (503, "unavailable", wait),
            (408, "unavailable", wait),
            (401, "unavailable", None),
            (404, "unavailable", None),
            (302, "unavailable", None),
            (400, "refused", None),
            (422, "refused", None),
        ] {
            let failure = Failure::of_status(status, "why", wait);
            assert_eq!((failure.outcome(), failure.again()), (outcome, again), "{status}");
        }
    }

    #[test]
    fn texts_of_servers_are_cut_and_lose_the_key() {
        let key = Key::new("sk-12345").expect("valid");
        let failure = Failure::of_status(400, &format!("sk-12345 {}", "é".repeat(600)), None);
        let error = failure.cleaned(Some(&key)).into_error("a", false).to_string();
        assert!(
            error.contains("status 400: [key] é") && error.len() < 600 && error.ends_with('…'),
            "{error}"
        );
    }

    #[test]
    fn after_the_first_output_every_fault_but_a_refusal_is_a_cut_off() {
        for failure in [Failure::unavailable("x"), Failure::malformed("x"), Failure::of_status(429, "", None)]
        {
            let error = failure.into_error("a", true);
            assert_eq!(error.code(), "upstream_cut_off", "{error}");
        }
        let refused = Failure::of_status(400, "", None).into_error("a", true);
        assert_eq!(refused.code(), "upstream_refused", "the same request would be refused again");
    }
}
