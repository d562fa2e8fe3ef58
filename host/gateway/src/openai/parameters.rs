//! The parameters that chat and text completions share.

use super::fields::{Fields, asks_for_nothing};
use crate::ApiError;
use serde::Deserialize;
use skep_engine::{Sampling, chat::SamplingOverrides};
use std::collections::HashMap;
use utoipa::ToSchema;

/// Maximum number of choices of one request; each is a sequence in the engine.
const MAX_CHOICES: u32 = 16;
const MAX_LOGIT_BIASES: usize = 1024;
/// Longest key that names a session for affinity.
const MAX_CACHE_KEY_BYTES: usize = 256;
/// Fields of other servers that would change the answer, unless their values ask for nothing.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("guided_choice", "use guided_json with an enum, or guided_regex"),
    ("structured_outputs", "use response_format, or one of the guided fields"),
    ("min_tokens", "remove it"),
    ("stop_token_ids", "use stop"),
    ("bad_words", "use logit_bias"),
    ("use_beam_search", "remove it"),
    ("continue_final_message", "send the text to /v1/completions as the prompt"),
    ("prompt_logprobs", "use /v1/completions with echo and logprobs"),
];
/// Tiers of service that are what every request gets.
const TIERS: [&str; 2] = ["auto", "default"];

/// Parameters that chat and text completions share. All are optional.
#[derive(Debug, ToSchema)]
pub(crate) struct Parameters {
    /// Name of a model, or `agent:NAME`; the default is the host's default model.
    pub model: Option<String>,
    /// Number of choices.
    #[schema(minimum = 1, maximum = 16)]
    pub n: Option<u32>,
    /// Must be equal to `n`.
    pub best_of: Option<u32>,
    /// Whether the answer is a stream of events.
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub stop: Option<Stop>,
    pub seed: Option<i64>,
    /// The default is 16 for text completions, 256 in the native schema of Workers AI, and otherwise what is left of the context.
    pub max_tokens: Option<u32>,
    /// Whether the model's end of text is ignored.
    pub ignore_eos: Option<bool>,
    /// The session, with an agent as the model; with a model, the same as `prompt_cache_key`, which takes precedence.
    pub user: Option<String>,
    /// The host looks for the cached prefix where it answered this key last, unless a header names the session.
    #[schema(max_length = 256)]
    pub prompt_cache_key: Option<String>,
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f32>,
    /// 0 and -1 keep all tokens.
    #[schema(minimum = -1)]
    top_k: Option<i64>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f32>,
    #[schema(minimum = 0.01, maximum = 10)]
    repetition_penalty: Option<f32>,
    /// Biases of tokens by their ids, -100 to 100.
    logit_bias: Option<HashMap<String, f32>>,
}

/// Options of a stream.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// Whether the last chunk has the usage.
    #[serde(default)]
    include_usage: bool,
    /// Pieces are never padded, whatever this says.
    #[serde(default)]
    #[expect(dead_code, reason = "it only describes a request, and its type is checked")]
    include_obfuscation: Option<bool>,
}

/// Texts that end the answer.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "stop must be a string or a list of strings")]
pub(crate) enum Stop {
    One(String),
    Many(Vec<String>),
}

impl Parameters {
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        UNSUPPORTED.iter().for_each(|(name, _)| fields.settle(name, asks_for_nothing));
        fields.refuse(UNSUPPORTED)?;
        fields.settle("store", asks_for_nothing);
        fields.settle("service_tier", |tier| tier.as_str().is_some_and(|tier| TIERS.contains(&tier)));
        fields.note_unknown_inside("stream_options", &["include_usage", "include_obfuscation"]);
        Ok(Parameters {
            model: fields.take("model")?,
            n: fields.take("n")?,
            best_of: fields.take("best_of")?,
            stream: fields.take("stream")?,
            stream_options: fields.take("stream_options")?,
            stop: fields.take("stop")?,
            seed: fields.take("seed")?,
            max_tokens: fields.take("max_tokens")?,
            ignore_eos: fields.take("ignore_eos")?,
            user: fields.take("user")?,
            prompt_cache_key: prompt_cache_key(fields.take("prompt_cache_key")?)?,
            temperature: fields.take("temperature")?,
            top_p: fields.take("top_p")?,
            top_k: fields.take("top_k")?,
            min_p: fields.take("min_p")?,
            frequency_penalty: fields.take("frequency_penalty")?,
            presence_penalty: fields.take("presence_penalty")?,
            repetition_penalty: fields.take("repetition_penalty")?,
            logit_bias: fields.take("logit_bias")?,
        })
    }

    pub(crate) fn choices(&self) -> Result<usize, ApiError> {
        if self.best_of.is_some_and(|best_of| best_of != self.n.unwrap_or(1)) {
            return Err(ApiError::parameter(
                "best_of",
                "best_of is not supported; use n and select a choice yourself",
            ));
        }
        match self.n.unwrap_or(1) {
            n @ 1..=MAX_CHOICES => Ok(n as usize),
            n => Err(ApiError::parameter("n", format!("n is {n}; it must be 1 to {MAX_CHOICES}"))),
        }
    }

    /// Returns the session by whose last answer the cached prefix is found.
    pub(crate) fn cache_key(&self) -> Option<&str> {
        let user = self.user.as_deref().filter(|user| (1..=MAX_CACHE_KEY_BYTES).contains(&user.len()));
        self.prompt_cache_key.as_deref().or(user)
    }

    pub(crate) fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub(crate) fn streams_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage)
    }

    pub(crate) fn stops(&self) -> Vec<String> {
        match &self.stop {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop.clone()],
            Some(Stop::Many(stops)) => stops.clone(),
        }
    }

    /// Returns the seed of a choice; each choice draws with a different one.
    pub(crate) fn seed_of(&self, choice: usize) -> Option<u64> {
        self.seed.map(|seed| (seed as u64).wrapping_add(choice as u64))
    }

    /// Returns the sampling parameters, with the model's where the request sets none.
    pub(crate) fn sampling(&self, defaults: &Sampling) -> Result<Sampling, ApiError> {
        let logit_bias = self.logit_biases()?;
        Ok(Sampling { logit_bias, ..self.sampling_overrides()?.over(defaults) })
    }

    /// Returns the sampling parameters that the request sets.
    pub(crate) fn sampling_overrides(&self) -> Result<SamplingOverrides, ApiError> {
        let top_k = |top_k: i64| match top_k {
            // Clients send -1 for "all tokens".
            -1 => Ok(0),
            _ => u32::try_from(top_k).map_err(|_| {
                ApiError::parameter(
                    "top_k",
                    format!("top_k is {top_k}; it must be positive, or 0 to keep all tokens"),
                )
            }),
        };
        Ok(SamplingOverrides {
            temperature: within("temperature", self.temperature, 0.0..=2.0)?,
            top_k: self.top_k.map(top_k).transpose()?,
            top_p: top_p(self.top_p)?,
            min_p: within("min_p", self.min_p, 0.0..=1.0)?,
            frequency_penalty: within("frequency_penalty", self.frequency_penalty, -2.0..=2.0)?,
            presence_penalty: within("presence_penalty", self.presence_penalty, -2.0..=2.0)?,
            repetition_penalty: within("repetition_penalty", self.repetition_penalty, 0.01..=10.0)?,
        })
    }

    fn logit_biases(&self) -> Result<Vec<(u32, f32)>, ApiError> {
        let Some(biases) = &self.logit_bias else { return Ok(Vec::new()) };
        if biases.len() > MAX_LOGIT_BIASES {
            let message =
                format!("logit_bias has {} entries; at most {MAX_LOGIT_BIASES} are allowed", biases.len());
            return Err(ApiError::parameter("logit_bias", message));
        }
        let mut found = Vec::with_capacity(biases.len());
        for (token, bias) in biases {
            let id = token.parse().map_err(|_| {
                ApiError::parameter("logit_bias", format!("{token:?} in logit_bias is not a token id"))
            })?;
            found.push((id, within("logit_bias", Some(*bias), -100.0..=100.0)?.unwrap_or(0.0)));
        }
        found.sort_unstable_by_key(|(id, _)| *id);
        Ok(found)
    }
}

fn prompt_cache_key(key: Option<String>) -> Result<Option<String>, ApiError> {
    match key {
        Some(key) if key.len() > MAX_CACHE_KEY_BYTES => {
            let message = format!(
                "prompt_cache_key has {} bytes; at most {MAX_CACHE_KEY_BYTES} are allowed",
                key.len()
            );
            Err(ApiError::parameter("prompt_cache_key", message))
        }
        key => Ok(key.filter(|key| !key.is_empty())),
    }
}

/// Checks the part of the probability from which tokens are drawn.
pub(crate) fn top_p(value: Option<f32>) -> Result<Option<f32>, ApiError> {
    match within("top_p", value, 0.0..=1.0)? {
        Some(0.0) => Err(ApiError::parameter("top_p", "top_p is 0; it must be over 0 and at most 1")),
        top_p => Ok(top_p),
    }
}

/// Checks that a number is in its range.
pub(crate) fn within(
    name: &str,
    value: Option<f32>,
    range: std::ops::RangeInclusive<f32>,
) -> Result<Option<f32>, ApiError> {
    match value {
        Some(value) if !range.contains(&value) => {
            let message = format!("{name} is {value}; it must be {} to {}", range.start(), range.end());
            Err(ApiError::parameter(name, message))
        }
        value => Ok(value),
    }
}
