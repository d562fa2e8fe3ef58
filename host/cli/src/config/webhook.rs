//! `[[webhook]]` in `skep.toml`: webhooks that the operator configures.

use anyhow::{Context as _, Result};
use serde::Deserialize;
use skep_runtime::{NewWebhook, RuntimeOptions, TopicPattern};

/// A section `[[webhook]]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WebhookConfig {
    pub url: String,
    pub topics: Vec<TopicPattern>,
    /// `whsec_` and base64 of 24 to 64 bytes. It is required, because without it nobody could check a
    /// signature.
    pub secret: String,
}

impl From<&WebhookConfig> for NewWebhook {
    fn from(config: &WebhookConfig) -> Self {
        let WebhookConfig { url, topics, secret } = config.clone();
        NewWebhook { url, topics, secret: Some(secret) }
    }
}

/// Adds the webhooks, and rejects one that is invalid.
pub(super) fn apply(webhooks: &[WebhookConfig], options: &mut RuntimeOptions) -> Result<()> {
    for config in webhooks {
        let webhook = NewWebhook::from(config);
        webhook.check().with_context(|| format!("[[webhook]] with the url {:?}", config.url))?;
        options.webhooks.push(webhook);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::{config::Config, server_options::ServerOptions};

    fn applied(url: &str, topics: &str, secret: &str) -> anyhow::Result<Vec<String>> {
        let text = format!("[[webhook]]\nurl = \"{url}\"\ntopics = [{topics}]\nsecret = \"{secret}\"\n");
        let mut options = ServerOptions::default();
        Config::parse(&text)?.apply(&mut options)?;
        Ok(options.runtime.webhooks.into_iter().map(|webhook| webhook.url).collect())
    }

    #[test]
    fn webhooks_come_from_the_file_and_are_checked_when_it_is_read() {
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let url = "https://example.com/hook";
        assert_eq!(applied(url, "\"skep.turn.*\"", secret).expect("valid"), [url]);
        for (url, topics, secret, expected) in [
            ("a b", "\"*\"", secret, "[[webhook]] with the url \"a b\": "),
            ("ftp://example.com", "\"*\"", secret, "[[webhook]] with the url \"ftp://example.com\": "),
            (url, "", secret, "a webhook must have 1 to 32 topics, not 0"),
            (url, "\"*\"", "whsec_x", "24 to 64 bytes"),
            (url, "\"or*\"", secret, "line 3: [[webhook]] topics: "),
        ] {
            let error = format!("{:#}", applied(url, topics, secret).expect_err(expected));
            assert!(error.contains(expected), "{error}");
        }
    }
}
