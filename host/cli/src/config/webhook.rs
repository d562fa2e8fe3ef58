//! `[[webhook]]` of `skep.toml`: addresses that the operator has events sent to.

use serde::Deserialize;
use skep_runtime::{NewWebhook, TopicPattern};

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookConfig {
    pub url: String,
    pub topics: Vec<TopicPattern>,
    /// `whsec_` and base64 of 24 to 64 bytes. Without it nobody could check a signature.
    pub secret: String,
}

impl From<&WebhookConfig> for NewWebhook {
    fn from(config: &WebhookConfig) -> Self {
        let WebhookConfig { url, topics, secret } = config.clone();
        NewWebhook { url, topics, secret: Some(secret) }
    }
}
