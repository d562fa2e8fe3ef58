//! Registration of a webhook for topics.

use super::TopicPattern;
use crate::RuntimeError;
use skep_outbound::{WebhookSecret, check_webhook_url};

const MAX_TOPICS: usize = 32;

/// A webhook to be added.
#[derive(Clone, PartialEq, Eq)]
pub struct NewWebhook {
    pub url: String,
    pub topics: Vec<TopicPattern>,
    /// The secret, as `whsec_` and base64. `None` makes the host generate one.
    pub secret: Option<String>,
}

impl NewWebhook {
    /// Checks everything that can be checked without a host.
    pub fn check(&self) -> Result<(), RuntimeError> {
        let invalid = |message: String| RuntimeError::InvalidWebhook { message };
        check_webhook_url(&self.url).map_err(|error| invalid(error.to_string()))?;
        if self.topics.is_empty() || self.topics.len() > MAX_TOPICS {
            let count = self.topics.len();
            return Err(invalid(format!(
                "a webhook must have 1 to {MAX_TOPICS} topics, not {count}; * matches all"
            )));
        }
        match &self.secret {
            Some(secret) => WebhookSecret::parse(secret).map(drop).map_err(invalid),
            None => Ok(()),
        }
    }
}
