//! The entries of the catalog: what is known about a model without its file.
//!
//! The data is in `catalog.toml` beside this file. Whether a model runs is not written there: it follows from what the model
//! crate reads of the architecture, the weights and the vocabulary that the entry says the model has.

use std::sync::LazyLock;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use skep_model::{Architecture, Sampling, reads_pre_tokenizer, reads_vocabulary_file, reads_weights};
use skep_runtime::{Currency, Rate};

use super::reference::{Reference, is_sha256};

const DATA: &str = include_str!("catalog.toml");
const MILLION: f64 = 1e6;
/// Bytes of a value in the KV cache by default.
const KV_VALUE_BYTES: u64 = 2;

/// A model that Skep knows by name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CatalogEntry {
    pub name: String,
    /// Other names that mean the same model.
    #[serde(default)]
    pub aliases: Vec<String>,
    pub family: String,
    pub kind: Kind,
    #[serde(deserialize_with = "reference")]
    pub source: Reference,
    pub file: ModelFile,
    pub parameters: Parameters,
    /// Number of tokens that the model was made for.
    pub context: u64,
    pub license: String,
    /// Form of the prompt that the model was trained with.
    pub template: String,
    pub tool_markup: ToolMarkup,
    pub good_for: String,
    pub requires: Requirements,
    /// `None` for a model without a KV cache.
    pub kv: Option<KvShape>,
    /// Settings that the publisher recommends.
    #[serde(default)]
    pub sampling: SamplingDefaults,
    /// The price that a provider charges for the model.
    pub list_price: Option<ListPrice>,
}

/// The published price of a model that a provider serves, for a million tokens.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListPrice {
    pub input: Rate,
    /// The price of input by the provider's cache; the same as `input` if it has no such price.
    pub cached_input: Rate,
    pub output: Rate,
    pub currency: Currency,
    pub provider: String,
}

/// The use of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    Chat,
    Embedding,
}

/// The markup in which a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToolMarkup {
    None,
    Hermes,
    #[serde(rename = "llama-3")]
    Llama3,
    Mistral,
    Harmony,
    Glm,
    Kimi,
}

/// Size and digest of a model's weights.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFile {
    /// Exact size. It is known whenever the digest is.
    pub bytes: Option<u64>,
    /// Size as the publisher rounds it, where it is not known exactly.
    pub approximate_bytes: Option<u64>,
    /// Size of what is downloaded, if it differs.
    pub download_bytes: Option<u64>,
    pub sha256: Option<String>,
}

/// Number of parameters, in millions.
#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Parameters {
    pub total: u64,
    /// Parameters that one token is multiplied with.
    pub active: u64,
    /// Bytes of weights that one token reads, if they are not its share of the file.
    #[serde(skip_serializing)]
    read_bytes: Option<u64>,
}

/// The parts of a model's files that an engine has to read.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirements {
    /// Name of the architecture in the model's file.
    pub architecture: String,
    /// Names of the parts of an unsupported architecture, for messages.
    #[serde(default)]
    parts: Vec<String>,
    /// Formats that most of the weights in a GGUF file have.
    #[serde(default)]
    weights: Vec<String>,
    /// Value of `tokenizer.ggml.pre` of a byte-level vocabulary in a GGUF file.
    pre_tokenizer: Option<String>,
    /// File of the vocabulary in a folder of safetensors.
    vocabulary: Option<String>,
}

/// Values that a model keeps of each token in each layer.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged)]
pub enum KvShape {
    Heads { layers: u64, heads: u64, head_size: u64 },
    Latent { layers: u64, latent: u64 },
}

/// The sampling parameters that the publisher of a model recommends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingDefaults {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
}

impl SamplingDefaults {
    /// Returns the parameters of a request that sets none, or `None` if the card recommends nothing.
    pub fn parameters(&self) -> Option<Sampling> {
        let SamplingDefaults { temperature, top_p, top_k, min_p } = *self;
        if *self == SamplingDefaults::default() {
            return None;
        }
        let usual = Sampling::default();
        Some(Sampling {
            temperature: temperature.unwrap_or(usual.temperature),
            top_p: top_p.unwrap_or(usual.top_p),
            top_k: top_k.unwrap_or(usual.top_k),
            min_p: min_p.unwrap_or(usual.min_p),
            ..usual
        })
    }
}

/// Whether this version of Skep runs a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Support {
    Runs,
    /// The names of what is missing.
    Lacks(Vec<String>),
}

impl CatalogEntry {
    /// Returns the size of the weights, which may be rounded.
    pub fn bytes(&self) -> u64 {
        self.file.bytes.or(self.file.approximate_bytes).unwrap_or(0)
    }

    /// Returns the size as people read it. A rounded size is marked as such.
    pub fn size_text(&self) -> String {
        let about = if self.file.bytes.is_some() { "" } else { "~" };
        format!("{about}{}", indicatif::DecimalBytes(self.bytes()))
    }

    /// Returns whether a name is that of this entry, or one of its aliases.
    pub fn is_called(&self, name: &str) -> bool {
        self.name == name || self.aliases.iter().any(|alias| alias == name)
    }

    /// Returns whether Skep runs the model, and otherwise which parts it lacks.
    pub fn support(&self) -> Support {
        let Requirements { architecture, parts, weights, pre_tokenizer, vocabulary } = &self.requires;
        let mut lacks = Vec::new();
        if self.kind == Kind::Embedding {
            lacks.push("a route for embeddings".to_owned());
        }
        if !Architecture::is_read(architecture) {
            match parts.is_empty() {
                true => lacks.push(format!("the architecture {architecture}")),
                false => lacks.extend(parts.iter().cloned()),
            }
        }
        let weights = weights.iter().filter(|format| !reads_weights(format));
        lacks.extend(weights.map(|format| format!("{format} weights")));
        if let Some(name) = pre_tokenizer.as_ref().filter(|name| !reads_pre_tokenizer(name)) {
            lacks.push(format!("the pre-tokenizer {name}"));
        }
        if let Some(file) = vocabulary.as_ref().filter(|file| !reads_vocabulary_file(file)) {
            lacks.push(format!("vocabularies in {file}"));
        }
        if lacks.is_empty() { Support::Runs } else { Support::Lacks(lacks) }
    }

    /// Returns the bytes of weights that have to be read for one token: the active share of the file.
    pub fn weight_bytes_per_token(&self) -> f64 {
        let Parameters { total, active, read_bytes } = self.parameters;
        match read_bytes {
            Some(bytes) => bytes as f64,
            None => self.bytes() as f64 * active as f64 / total as f64,
        }
    }

    /// Returns the bits that the file has for each parameter.
    pub fn bits_per_parameter(&self) -> f64 {
        self.bytes() as f64 * 8.0 / (self.parameters.total as f64 * MILLION)
    }

    /// Returns the size of a KV cache in 16 bits for `tokens` tokens. Layers with a sliding window count in full.
    pub fn kv_bytes(&self, tokens: u64) -> u64 {
        let values = match self.kv {
            Some(KvShape::Heads { layers, heads, head_size }) => 2 * layers * heads * head_size,
            Some(KvShape::Latent { layers, latent }) => layers * latent,
            None => 0,
        };
        values * KV_VALUE_BYTES * tokens
    }

    fn check(&self) -> Result<()> {
        let ModelFile { bytes, approximate_bytes, sha256, .. } = &self.file;
        if bytes.is_some() == approximate_bytes.is_some() {
            bail!("needs either `bytes` or `approximate_bytes`");
        }
        if bytes.is_some() != sha256.is_some() {
            bail!("an exact size and a digest belong together");
        }
        if sha256.as_deref().is_some_and(|digest| !is_sha256(digest)) {
            bail!("`sha256` is not a SHA-256");
        }
        let texts = [&self.name, &self.family, &self.license, &self.template, &self.good_for];
        if texts.iter().any(|text| text.trim().is_empty()) {
            bail!("a text is empty");
        }
        if let Some(sampling) = self.sampling.parameters() {
            sampling.validate().map_err(anyhow::Error::msg).context("`sampling`")?;
        }
        if self.list_price.as_ref().is_some_and(|price| price.cached_input > price.input) {
            bail!("cached input costs more than input");
        }
        let Parameters { total, active, .. } = self.parameters;
        if active == 0 || active > total || self.context == 0 || self.bytes() == 0 {
            bail!("a number is out of range");
        }
        Ok(())
    }
}

/// Returns all entries, the default first.
pub fn entries() -> &'static [CatalogEntry] {
    static ENTRIES: LazyLock<Vec<CatalogEntry>> =
        LazyLock::new(|| parse(DATA).expect("a test checks the embedded catalog"));
    &ENTRIES
}

fn parse(text: &str) -> Result<Vec<CatalogEntry>> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Catalog {
        model: Vec<CatalogEntry>,
    }
    let Catalog { model } = toml::from_str(text)?;
    for (index, entry) in model.iter().enumerate() {
        entry.check().with_context(|| format!("the catalog's entry {}", entry.name))?;
        let earlier = &model[..index];
        let names = std::iter::once(&entry.name).chain(&entry.aliases);
        if let Some(name) = names.clone().find(|name| earlier.iter().any(|other| other.is_called(name))) {
            bail!("two entries of the catalog are called {name}");
        }
    }
    Ok(model)
}

fn reference<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Reference, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests;
