//! `[[upstream]]` in `skep.toml`: servers that compute models, which callers name `UPSTREAM/MODEL`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::future::BoxFuture;
use serde::Deserialize;
use skep_providers::{
    BreakerOptions, Capabilities, Key, KeySource, LimitOptions, ReasoningControl, RetryOptions,
    StructuredOutput, Timeouts, UpstreamKind, UpstreamModelOptions, UpstreamOptions,
};

use crate::model_prices::PricesConfig;
use crate::number::number;

/// Maximum of every time in milliseconds: an hour.
const LONGEST_MS: u64 = 3_600_000;
const LONGEST_CONTEXT: u64 = 1 << 30;
/// Prefix of a key that is in the host's vault.
const SECRET: &str = "secret:";

/// One server.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpstreamConfig {
    pub name: String,
    pub kind: UpstreamKindConfig,
    pub url: String,
    /// `secret:NAME`, which names a secret of the host.
    pub key: Option<String>,
    /// Environment variable that holds the key.
    pub key_env: Option<String>,
    #[serde(default)]
    pub models: Vec<UpstreamModelConfig>,
    #[serde(default, deserialize_with = "number::<1, 1_000_000_000, _, _>")]
    pub requests_per_minute: Option<u32>,
    #[serde(default, deserialize_with = "number::<1, 4_000_000_000, _, _>")]
    pub tokens_per_minute: Option<u32>,
    #[serde(default, deserialize_with = "number::<1, 65_536, _, _>")]
    pub max_in_flight: Option<usize>,
    /// Maximum time that a request waits for a free slot.
    #[serde(default, deserialize_with = "number::<0, LONGEST_MS, _, _>")]
    pub max_wait_ms: Option<u64>,
    #[serde(default, deserialize_with = "number::<1, LONGEST_MS, _, _>")]
    pub connect_ms: Option<u64>,
    /// Time from sending a request to the first part of its answer.
    #[serde(default, deserialize_with = "number::<1, LONGEST_MS, _, _>")]
    pub first_token_ms: Option<u64>,
    /// Time between two parts of an answer.
    #[serde(default, deserialize_with = "number::<1, LONGEST_MS, _, _>")]
    pub idle_ms: Option<u64>,
    /// Maximum number of attempts for a request, all before any part of an answer was sent.
    #[serde(default, deserialize_with = "number::<1, 100, _, _>")]
    pub attempts: Option<u32>,
    /// Number of failures in a row after which nothing is sent for a while.
    #[serde(default, deserialize_with = "number::<1, 1_000_000, _, _>")]
    pub breaker_failures: Option<u32>,
    #[serde(default, deserialize_with = "number::<1, LONGEST_MS, _, _>")]
    pub breaker_cool_down_ms: Option<u64>,
}

/// The API that an upstream speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpstreamKindConfig {
    /// A server with OpenAI's API.
    #[serde(rename = "openai")]
    OpenAi,
    Anthropic,
    WorkersAi,
}

/// One model of a server.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpstreamModelConfig {
    pub name: String,
    /// The name that the server knows; the same name by default.
    pub remote_name: Option<String>,
    /// Number of tokens that prompt and answer may have together.
    #[serde(default, deserialize_with = "number::<1, LONGEST_CONTEXT, _, _>")]
    pub context_length: Option<usize>,
    /// Maximum number of tokens of an answer.
    #[serde(default, deserialize_with = "number::<1, LONGEST_CONTEXT, _, _>")]
    pub max_output: Option<usize>,
    pub tools: Option<bool>,
    pub structured: Option<StructuredConfig>,
    /// Whether the model gets its earlier reasoning again.
    pub reasoning: Option<bool>,
    /// The fields in which the server takes how much the model reasons.
    pub reasoning_control: Option<ReasoningConfig>,
    /// Whether the model sees images.
    pub images: Option<bool>,
    pub prices: Option<PricesConfig>,
}

/// The server's means of structured output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StructuredConfig {
    JsonSchema,
    Tool,
    None,
}

/// The fields in which a server takes how much its model reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReasoningConfig {
    None,
    Effort,
    Budget,
    Template,
}

/// Returns the source of a key in the host's vault.
pub type SecretKeys<'a> = &'a dyn Fn(&str) -> Arc<dyn KeySource>;

impl UpstreamConfig {
    /// Returns the options of the upstream. `secrets` finds a secret of the host by its name.
    pub fn options(&self, secrets: SecretKeys<'_>) -> Result<UpstreamOptions> {
        self.read(secrets, |name| std::env::var(name).ok())
            .with_context(|| format!("[[upstream]] with the name {:?}", self.name))
    }

    fn read(
        &self,
        secrets: SecretKeys<'_>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<UpstreamOptions> {
        if self.models.is_empty() {
            bail!("it has no models\n  hint: add [[upstream.models]] with name = \"…\" below it");
        }
        let key = self.key(secrets, variable)?;
        let models = self.models.iter().map(UpstreamModelConfig::options).collect();
        let ms = |value: Option<u64>, default: Duration| value.map_or(default, Duration::from_millis);
        let mut options = UpstreamOptions::new(&self.name, self.kind.into(), &self.url);
        let LimitOptions { max_in_flight, max_wait, .. } = options.limits;
        options.limits = LimitOptions {
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            max_in_flight: self.max_in_flight.unwrap_or(max_in_flight),
            max_wait: ms(self.max_wait_ms, max_wait),
        };
        let Timeouts { connect, first_token, idle, total } = options.timeouts;
        options.timeouts = Timeouts {
            connect: ms(self.connect_ms, connect),
            first_token: ms(self.first_token_ms, first_token),
            idle: ms(self.idle_ms, idle),
            total,
        };
        let retries = options.retries;
        options.retries = RetryOptions { attempts: self.attempts.unwrap_or(retries.attempts), ..retries };
        let BreakerOptions { failures, cool_down, max_cool_down } = options.breaker;
        let cool_down = ms(self.breaker_cool_down_ms, cool_down);
        options.breaker = BreakerOptions {
            failures: self.breaker_failures.unwrap_or(failures),
            cool_down,
            max_cool_down: max_cool_down.max(cool_down),
        };
        options.key = key;
        options.models = models;
        options.check()?;
        Ok(options)
    }

    fn key(
        &self,
        secrets: SecretKeys<'_>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Arc<dyn KeySource>>> {
        match (&self.key, &self.key_env) {
            (None, None) => Ok(None),
            (Some(key), None) => match key.strip_prefix(SECRET) {
                Some(name) if !name.is_empty() => Ok(Some(secrets(name))),
                // The value is not repeated, because it may be the key itself.
                _ => bail!(
                    "key must be \"secret:NAME\", the name of a secret of the host\n  hint: store the key with \
                     `skep secret set NAME --to ORIGIN`, or name an environment variable with key_env"
                ),
            },
            (None, Some(name)) => {
                let text = variable(name).with_context(|| {
                    format!("key_env names the environment variable {name:?}, which is not set\n  hint: export {name}=…")
                })?;
                let valid = Key::new(&text).map_err(|problem| anyhow::anyhow!("key_env {name:?}: {problem}"));
                valid.map(|_| Some(Arc::new(EnvironmentKey(name.clone())) as Arc<dyn KeySource>))
            }
            (Some(_), Some(_)) => bail!("set either `key` or `key_env`, not both"),
        }
    }
}

impl UpstreamModelConfig {
    fn options(&self) -> UpstreamModelOptions {
        let Capabilities { tools, structured, reasoning, images } = Capabilities::default();
        UpstreamModelOptions {
            name: self.name.clone(),
            remote_name: self.remote_name.clone(),
            context_length: self.context_length,
            max_output: self.max_output,
            capabilities: Capabilities {
                tools: self.tools.unwrap_or(tools),
                structured: self.structured.map_or(structured, StructuredOutput::from),
                reasoning: self.reasoning.unwrap_or(reasoning),
                images: self.images.unwrap_or(images),
            },
            reasoning_control: self.reasoning_control.map_or(ReasoningControl::None, ReasoningControl::from),
        }
    }
}

impl From<UpstreamKindConfig> for UpstreamKind {
    fn from(kind: UpstreamKindConfig) -> Self {
        match kind {
            UpstreamKindConfig::OpenAi => UpstreamKind::OpenAi,
            UpstreamKindConfig::Anthropic => UpstreamKind::Anthropic,
            UpstreamKindConfig::WorkersAi => UpstreamKind::WorkersAi,
        }
    }
}

impl From<ReasoningConfig> for ReasoningControl {
    fn from(control: ReasoningConfig) -> Self {
        match control {
            ReasoningConfig::None => ReasoningControl::None,
            ReasoningConfig::Effort => ReasoningControl::Effort,
            ReasoningConfig::Budget => ReasoningControl::Budget,
            ReasoningConfig::Template => ReasoningControl::Template,
        }
    }
}

impl From<StructuredConfig> for StructuredOutput {
    fn from(structured: StructuredConfig) -> Self {
        match structured {
            StructuredConfig::JsonSchema => StructuredOutput::JsonSchema,
            StructuredConfig::Tool => StructuredOutput::Tool,
            StructuredConfig::None => StructuredOutput::None,
        }
    }
}

/// A key in the environment of this process.
struct EnvironmentKey(String);

impl KeySource for EnvironmentKey {
    fn key(&self) -> BoxFuture<'_, Result<Key, String>> {
        let text =
            std::env::var(&self.0).map_err(|_| format!("the environment variable {} is not set", self.0));
        Box::pin(std::future::ready(text.and_then(|text| Key::new(&text))))
    }
}

impl fmt::Debug for EnvironmentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EnvironmentKey").field(&self.0).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_providers::FixedKey;

    fn options(text: &str) -> Result<UpstreamOptions> {
        let config: UpstreamConfig = toml::from_str(text)?;
        let secrets = |name: &str| {
            assert_eq!(name, "OPENAI");
            Arc::new(FixedKey(Key::new("sk-1").expect("valid"))) as Arc<dyn KeySource>
        };
        config.read(&secrets, |name| (name == "SET").then(|| "sk-2".to_owned()))
    }

    const BEGINNING: &str = "name = \"a\"\nkind = \"openai\"\nurl = \"https://a.example/v1\"\n";
    const MODEL: &str = "[[models]]\nname = \"m\"\n";

    #[test]
    fn an_upstream_is_read_with_its_limits_and_models() {
        let text = "name = \"cloud\"\nkind = \"workers-ai\"\nurl = \"https://a.example\"\nkey = \"secret:OPENAI\"\n\
            requests_per_minute = 60\ntokens_per_minute = 100000\nmax_in_flight = 8\nfirst_token_ms = 1500\n\
            attempts = 2\nbreaker_failures = 9\n[[models]]\nname = \"big\"\nremote_name = \"@cf/big\"\n\
            context_length = 1000\nmax_output = 100\nstructured = \"tool\"\nreasoning = true\nimages = true\n";
        let read = options(text).expect("valid");
        assert_eq!((read.kind, read.key.is_some()), (UpstreamKind::WorkersAi, true));
        assert_eq!((read.limits.requests_per_minute, read.limits.max_in_flight), (Some(60), 8));
        assert_eq!(read.timeouts.first_token, Duration::from_millis(1500));
        assert_eq!((read.retries.attempts, read.breaker.failures), (2, 9));
        let model = &read.models[0];
        assert_eq!((model.remote_name(), model.context_length), ("@cf/big", Some(1000)));
        assert_eq!(model.capabilities.structured, StructuredOutput::Tool);
        let Capabilities { tools, reasoning, images, .. } = model.capabilities;
        assert!(tools && reasoning && images);
        let defaults = options(&format!("{BEGINNING}{MODEL}")).expect("valid");
        assert!(!defaults.models[0].capabilities.images);
        assert_eq!((defaults.timeouts, defaults.limits), (Timeouts::default(), LimitOptions::default()));
        options(&format!("{BEGINNING}key_env = \"SET\"\n{MODEL}")).expect("valid");
    }

    #[test]
    fn mistakes_are_reported_with_their_reason() {
        for (text, why) in [
            (BEGINNING.to_owned(), "hint: add [[upstream.models]]"),
            (
                format!("{BEGINNING}key = \"sk-real\"\n{MODEL}"),
                "hint: store the key with `skep secret set NAME --to ORIGIN`",
            ),
            (format!("{BEGINNING}key = \"secret:\"\n{MODEL}"), "key must be \"secret:NAME\""),
            (format!("{BEGINNING}key_env = \"UNSET\"\n{MODEL}"), "hint: export UNSET=…"),
            (
                format!("{BEGINNING}key = \"secret:A\"\nkey_env = \"SET\"\n{MODEL}"),
                "either `key` or `key_env`",
            ),
            (format!("{BEGINNING}attempts = 0\n{MODEL}"), "it must be between 1 and 100"),
            (format!("{BEGINNING}timeout = 1\n{MODEL}"), "unknown field `timeout`"),
            (
                format!("{BEGINNING}{MODEL}reasoning_control = \"budget\"\n"),
                "upstreams of the kind openai do not take the reasoning of \"m\" in this way",
            ),
            (format!("{BEGINNING}{MODEL}{MODEL}"), "two models are called \"m\""),
            (format!("{}{MODEL}", BEGINNING.replace("openai", "other")), "unknown variant `other`"),
            (format!("{}{MODEL}", BEGINNING.replace("https", "ftp")), "neither https:// nor http://"),
        ] {
            let error = format!("{:#}", options(&text).expect_err(why));
            assert!(error.contains(why) && !error.contains("sk-real"), "{text}: {error}");
        }
    }
}
