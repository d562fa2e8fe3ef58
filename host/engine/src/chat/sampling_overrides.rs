//! The sampling parameters that a request sets itself.
//!
//! [`ChatOptions::sampling`] has a value for each parameter. These say which of them the request chose: another server gets
//! only those, and a model that a route chooses has its own defaults for all others.

use serde::{Deserialize, Serialize};
use skep_model::Sampling;

use super::options::ChatOptions;

/// The sampling parameters that a request sets; `None` leaves a parameter to the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingOverrides {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub frequency_penalty: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub presence_penalty: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f32>,
}

impl SamplingOverrides {
    /// Returns the sampling parameters, with a model's defaults where the request sets none. They bias no tokens.
    pub fn over(&self, defaults: &Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            logit_bias: Vec::new(),
        }
    }

    pub(super) fn is_default(&self) -> bool {
        *self == SamplingOverrides::default()
    }

    /// Returns the overrides with those of `sampling` that differ from the general defaults.
    fn with_unusual(mut self, sampling: &Sampling) -> Self {
        let usual = Sampling::default();
        for (set, value, usual) in [
            (&mut self.temperature, sampling.temperature, usual.temperature),
            (&mut self.top_p, sampling.top_p, usual.top_p),
            (&mut self.min_p, sampling.min_p, usual.min_p),
            (&mut self.frequency_penalty, sampling.frequency_penalty, usual.frequency_penalty),
            (&mut self.presence_penalty, sampling.presence_penalty, usual.presence_penalty),
            (&mut self.repetition_penalty, sampling.repetition_penalty, usual.repetition_penalty),
        ] {
            if value != usual {
                *set = Some(value);
            }
        }
        if sampling.top_k != usual.top_k {
            self.top_k = Some(sampling.top_k);
        }
        self
    }
}

impl ChatOptions {
    /// Returns the sampling parameters that the request chose: those that it set, and all that differ from the general
    /// defaults.
    pub fn chosen_sampling(&self) -> SamplingOverrides {
        self.sampling_overrides.with_unusual(&self.sampling)
    }

    /// Replaces the parameters that the request did not choose with a model's defaults.
    pub fn fill_sampling(&mut self, defaults: &Sampling) {
        let logit_bias = std::mem::take(&mut self.sampling.logit_bias);
        self.sampling = Sampling { logit_bias, ..self.chosen_sampling().over(defaults) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_that_a_request_did_not_choose_get_the_defaults_of_the_model() {
        let model = Sampling { temperature: 0.2, top_p: 0.9, top_k: 40, ..Sampling::default() };
        let sampling = Sampling { top_k: 7, logit_bias: vec![(3, 1.0)], ..Sampling::default() };
        let sampling_overrides = SamplingOverrides { top_p: Some(1.0), ..SamplingOverrides::default() };
        let mut options = ChatOptions { sampling, sampling_overrides, ..ChatOptions::default() };
        options.fill_sampling(&model);
        let expected = Sampling {
            temperature: 0.2,
            top_p: 1.0,
            top_k: 7,
            logit_bias: vec![(3, 1.0)],
            ..Sampling::default()
        };
        assert_eq!(options.sampling, expected);
    }

    #[test]
    fn stored_options_without_overrides_are_read() {
        let mut stored = serde_json::to_value(ChatOptions::default()).expect("serializable");
        assert!(stored.get("sampling_overrides").is_none(), "{stored}");
        stored["sampling_overrides"] = serde_json::json!({"temperature": 1.0});
        let read: ChatOptions = serde_json::from_value(stored).expect("readable");
        assert_eq!(read.chosen_sampling().temperature, Some(1.0));
    }
}
