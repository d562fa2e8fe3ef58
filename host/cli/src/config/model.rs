//! `model` in `skep.toml`: one model by its source, or several as `[[model]]`.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use skep_engine::chat::Markup;
use skep_model::{DeviceChoice, MemoryFraction, WeightConversion};

use super::{fraction, parsed};
use crate::model_options::{self, LoadPolicy, ModelOptions};
use crate::model_prices::PricesConfig;
use crate::number::number;
use crate::server_options::ServerOptions;

/// Maximum number of models in a file.
const MAX_MODELS: usize = 64;

/// `model` as written.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelSetting {
    /// A catalog name, `hf:OWNER/REPO[:FILE]`, `pip:PACKAGE==VERSION/FILE`, or a path.
    One(String),
    Several(Vec<ModelConfig>),
}

/// One `[[model]]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// The name that requests use.
    pub name: Option<String>,
    /// A catalog name, `hf:OWNER/REPO[:FILE]`, `pip:PACKAGE==VERSION/FILE`, or a path; by default `name`.
    pub source: Option<String>,
    /// Other names of the model.
    pub aliases: Vec<String>,
    /// Whether requests without a model get this one.
    pub default: bool,
    #[serde(deserialize_with = "parsed")]
    pub device: Option<DeviceChoice>,
    #[serde(deserialize_with = "number::<1, 64, _, _>")]
    pub replicas: Option<NonZeroUsize>,
    #[serde(deserialize_with = "number::<1, 64, _, _>")]
    pub tp: Option<usize>,
    #[serde(deserialize_with = "number::<1, 64, _, _>")]
    pub pp: Option<usize>,
    /// Maximum number of tokens of a sequence.
    #[serde(deserialize_with = "number::<16, 16_777_216, _, _>")]
    pub context: Option<usize>,
    /// Size of each replica's KV cache in tokens.
    #[serde(deserialize_with = "number::<256, 4_294_967_295, _, _>")]
    pub kv_tokens: Option<usize>,
    /// Fraction of a CUDA device's memory that the model may take.
    #[serde(deserialize_with = "fraction")]
    pub gpu_memory: Option<MemoryFraction>,
    /// Format that the weights are converted to when they are loaded on the CPU.
    #[serde(deserialize_with = "parsed")]
    pub weights: Option<WeightConversion>,
    pub load: LoadConfig,
    /// The markup in which the model writes tool calls; by default the one that its chat template shows.
    pub markup: Option<String>,
    /// Time that a request waits for the model to be loaded.
    #[serde(deserialize_with = "number::<1, 3_600, _, _>")]
    pub load_wait_s: Option<u64>,
    /// Time without requests after which the model is unloaded.
    #[serde(deserialize_with = "number::<1, 31_536_000, _, _>")]
    pub idle_unload_s: Option<u64>,
    pub prices: Option<PricesConfig>,
}

/// When a model is loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadConfig {
    #[default]
    Start,
    Demand,
}

impl ModelSetting {
    /// Sets the options of the models.
    pub(super) fn apply(&self, options: &mut ServerOptions) -> Result<()> {
        let configs = match self {
            ModelSetting::One(source) => {
                options.model.clone_from(source);
                return Ok(());
            }
            ModelSetting::Several(configs) => configs,
        };
        if configs.is_empty() || configs.len() > MAX_MODELS {
            bail!("[[model]]: there are {} models; 1 to {MAX_MODELS} are allowed", configs.len());
        }
        options.models =
            configs.iter().map(ModelConfig::options).collect::<Result<_>>().context("[[model]]")?;
        model_options::check(&options.models).context("[[model]]")
    }

    /// Resolves paths relative to the folder of the file.
    pub(super) fn relative_to(&mut self, dir: &Path) {
        let ModelSetting::Several(configs) = self else { return };
        for source in configs.iter_mut().filter_map(|config| config.source.as_mut()) {
            let beside = dir.join(&*source);
            if !source.starts_with("hf:")
                && beside.exists()
                && let Some(beside) = beside.to_str()
            {
                *source = beside.to_owned();
            }
        }
    }
}

impl ModelConfig {
    /// Returns the name that requests use. `None` means that there is no such model.
    pub(super) fn served_name(&self) -> Option<String> {
        self.options().ok()?.served_name()
    }

    fn options(&self) -> Result<ModelOptions> {
        let Some(source) = self.source.clone().or_else(|| self.name.clone()) else {
            bail!(
                "a model has neither `name` nor `source`\n  hint: `source` is a name that `skep model list` shows, or a path"
            );
        };
        Ok(ModelOptions {
            name: self.name.clone(),
            source,
            aliases: self.aliases.clone(),
            is_default: self.default,
            device: self.device,
            replicas: self.replicas,
            tensor_parallel: self.tp,
            pipeline_parallel: self.pp,
            context: self.context,
            kv_tokens: self.kv_tokens,
            gpu_memory: self.gpu_memory,
            weights: self.weights,
            markup: self.markup.as_deref().map(markup).transpose()?,
            load: match self.load {
                LoadConfig::Start => LoadPolicy::Start,
                LoadConfig::Demand => LoadPolicy::Demand,
            },
            load_wait: self.load_wait_s.map(Duration::from_secs),
            idle_unload: self.idle_unload_s.map(Duration::from_secs),
        })
    }
}

fn markup(name: &str) -> Result<&'static str> {
    Markup::named(name).map(|markup| markup.name).map_err(|why| {
        anyhow!("markup: {why}\n  hint: leave it out to use the markup that the model's chat template shows")
    })
}

impl<'de> Deserialize<'de> for ModelSetting {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct OneOrSeveral;

        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = ModelSetting;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a model as text, or [[model]] sections")
            }

            fn visit_str<E: Error>(self, source: &str) -> Result<ModelSetting, E> {
                Ok(ModelSetting::One(source.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, models: A) -> Result<ModelSetting, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(models)).map(ModelSetting::Several)
            }
        }

        reader.deserialize_any(OneOrSeveral)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn applied(text: &str) -> Result<ServerOptions> {
        let mut options = ServerOptions::default();
        Config::parse(text)?.apply(&mut options)?;
        Ok(options)
    }

    #[test]
    fn several_models_come_from_the_file_with_their_settings() {
        let text = "[[model]]\nsource = \"smollm2-135m\"\n[[model]]\nname = \"big\"\nsource = \"hf:a/b\"\n\
                    aliases = [\"smart\"]\ndefault = true\ndevice = \"cuda:1\"\nreplicas = 2\ntp = 2\npp = 1\ncontext = 4096\n\
                    kv_tokens = 8192\ngpu_memory = 0.5\nload = \"demand\"\nload_wait_s = 5\nidle_unload_s = 600\nmarkup = \"kimi-k2\"\n";
        let models = applied(text).expect("valid").models;
        assert_eq!(models[0], ModelOptions::of("smollm2-135m"));
        let big = &models[1];
        assert_eq!((big.name.as_deref(), big.source.as_str(), big.is_default), (Some("big"), "hf:a/b", true));
        assert_eq!((&big.aliases[..], big.load), (&["smart".to_owned()][..], LoadPolicy::Demand));
        assert_eq!(big.device.expect("given").to_string(), "cuda:1");
        assert_eq!((big.replicas.map(NonZeroUsize::get), big.tensor_parallel), (Some(2), Some(2)));
        assert_eq!((big.context, big.kv_tokens), (Some(4096), Some(8192)));
        assert_eq!(big.gpu_memory.expect("given").to_string(), "0.5");
        assert_eq!(big.markup, Some("kimi-k2"));
        assert_eq!(big.load_wait, Some(Duration::from_secs(5)));
        assert_eq!(big.idle_unload, Some(Duration::from_secs(600)));
        assert_eq!(applied("model = \"x.gguf\"").expect("valid").model, "x.gguf");
    }

    #[test]
    fn mistakes_in_models_are_reported_with_their_position() {
        for (text, expected) in [
            ("model = 3", "line 1: model: "),
            ("[[model]]\n", "[[model]]: a model has neither `name` nor `source`"),
            ("[[model]]\nname = \"a\"\n[[model]]\nname = \"a\"\n", "[[model]]: two models are called \"a\""),
            ("[[model]]\nname = \"a/b\"\n", "contains \"/\""),
            ("[[model]]\nname = \"a\"\nmarkup = \"klingon\"\n", "the markups are deepseek-v3, "),
            ("[[model]]\nname = \"a\"\nloads = \"demand\"\n", "line 3"),
            ("[[model]]\nname = \"a\"\ncontext = 1\n", "must be between 16 and 16777216"),
            ("[[model]]\nname = \"a\"\ngpu_memory = 2\n", "a fraction of a device's memory is from 0.1 to 1"),
        ] {
            let error = format!("{:#}", applied(text).expect_err(expected));
            assert!(error.contains(expected), "{error}");
        }
    }
}
