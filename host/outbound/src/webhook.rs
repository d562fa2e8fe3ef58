//! Webhooks: events sent to a URL, signed according to Standard Webhooks.
//!
//! The signature covers the message id, the timestamp and the body, so a receiver can verify who sent the message,
//! that it was not changed, and that it is not a replay of an old one.

use crate::{Bounds, Client, Origins, OutboundError, Policy, Request};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use ring::hmac::{Context, HMAC_SHA256, Key};
use std::{
    fmt,
    time::{Duration, Instant},
};

const PREFIX: &str = "whsec_";
/// Key length that the specification requires.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 24..=64;
/// Timeout of one attempt, from connecting to the end of the response.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum number of bytes read of a response, whose content is not used.
const MAX_ANSWER_BYTES: usize = 64 << 10;
const MAX_MESSAGE_BYTES: usize = 2 << 20;
/// Maximum number of bytes of a response that are returned in [`WebhookAnswer::text`].
const MAX_SHOWN_BYTES: usize = 1 << 10;
/// Timeout of the name lookup that checks an address before anything is sent.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

/// The key that messages are signed with and that a receiver verifies signatures with.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookSecret(Vec<u8>);

/// One message to one URL.
#[derive(Clone, Copy, Debug)]
pub struct WebhookMessage<'a> {
    pub url: &'a str,
    pub secret: &'a WebhookSecret,
    /// The id of the message, which stays the same in every attempt.
    pub id: &'a str,
    /// The time of this attempt, in seconds since 1970-01-01 UTC.
    pub timestamp_s: u64,
    /// The JSON to send.
    pub body: &'a [u8],
}

/// The receiver's response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookAnswer {
    pub status: u16,
    pub retry_after: Option<String>,
    /// The beginning of the body; invalid UTF-8 is replaced.
    pub text: String,
}

impl WebhookSecret {
    /// Parses `whsec_` followed by base64 of 24 to 64 bytes.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || {
            "a webhook's secret must be whsec_ followed by base64 of 24 to 64 bytes; omit it to have the host generate one"
                .to_owned()
        };
        let bytes = STANDARD.decode(text.strip_prefix(PREFIX).ok_or_else(wrong)?).map_err(|_| wrong())?;
        Self::new(bytes).ok_or_else(wrong)
    }

    /// Creates a secret from a key, or returns `None` if the key does not have 24 to 64 bytes.
    pub fn new(bytes: Vec<u8>) -> Option<Self> {
        SECRET_BYTES.contains(&bytes.len()).then_some(WebhookSecret(bytes))
    }

    /// Returns the secret in the form that [`WebhookSecret::parse`] reads. Show it only to the receiver.
    pub fn reveal(&self) -> String {
        format!("{PREFIX}{}", STANDARD.encode(&self.0))
    }

    fn sign(&self, id: &str, timestamp_s: u64, body: &[u8]) -> String {
        let mut signed = Context::with_key(&Key::new(HMAC_SHA256, &self.0));
        signed.update(format!("{id}.{timestamp_s}.").as_bytes());
        signed.update(body);
        format!("v1,{}", STANDARD.encode(signed.sign()))
    }
}

impl fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WebhookSecret")
    }
}

/// Checks that `url` is a URL that messages can be sent to, without resolving its host.
pub fn check_webhook_url(url: &str) -> Result<(), OutboundError> {
    Request::new("POST", url).map(drop)
}

impl Client {
    /// Refuses a URL whose address [`Client::send_webhook`] would not connect to. A name that cannot be resolved is
    /// accepted, because it may be resolvable later.
    pub async fn check_webhook_address(&self, url: &str) -> Result<(), OutboundError> {
        let request = Request::new("POST", url)?;
        let check = tokio::time::timeout(LOOKUP_TIMEOUT, self.check_addresses(request.origin()));
        match check.await {
            Ok(Err(error @ OutboundError::AddressDenied { .. })) => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Sends a message to its URL, at an allowed address. Redirects are not followed.
    pub async fn send_webhook(&self, message: &WebhookMessage<'_>) -> Result<WebhookAnswer, OutboundError> {
        let WebhookMessage { url, secret, id, timestamp_s, body } = *message;
        let request = Request::new("POST", url)?
            .header("content-type", "application/json")?
            .header("user-agent", "skep")?
            .header("webhook-id", id)?
            .header("webhook-timestamp", &timestamp_s.to_string())?
            .header("webhook-signature", &secret.sign(id, timestamp_s, body))?
            .body(body.to_vec());
        let bounds = Bounds {
            deadline: Instant::now() + TIMEOUT,
            request_bytes: MAX_MESSAGE_BYTES,
            response_bytes: MAX_ANSWER_BYTES,
            redirects: 0,
        };
        let everywhere = Origins::try_from(vec!["*".parse()?])?;
        let policy = Policy::default().and(everywhere, "the webhooks");
        let response = self.send(request, &policy, &bounds).await?;
        let retry_after = response.headers.get("retry-after").and_then(|value| value.to_str().ok());
        let retry_after = retry_after.map(str::to_owned);
        let shown = &response.body[..response.body.len().min(MAX_SHOWN_BYTES)];
        let text = String::from_utf8_lossy(shown).into_owned();
        Ok(WebhookAnswer { status: response.status, retry_after, text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_match_the_specification() {
        // This is the example of the specification's reference libraries.
        let secret = WebhookSecret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").expect("valid");
        let body = br#"{"test": 2432232314}"#;
        assert_eq!(
            secret.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, body),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        );
        assert_eq!(WebhookSecret::parse(&secret.reveal()), Ok(secret));
    }

    #[test]
    fn rejects_invalid_secrets_and_urls() {
        for bad in
            ["", "secret", "whsec_", "whsec_????", "whsec_c2hvcnQ=", &format!("whsec_{}", "AAAA".repeat(30))]
        {
            assert!(WebhookSecret::parse(bad).expect_err(bad).contains("24 to 64 bytes"));
        }
        for bad in ["", "example.com", "ftp://example.com", "https://user:word@example.com"] {
            check_webhook_url(bad).expect_err(bad);
        }
        check_webhook_url("https://example.com/hook").expect("valid");
    }
}
