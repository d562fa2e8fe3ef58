//! A Hugging Face checkpoint folder: its files and their contents.
//!
//! Invariant: the size of a JSON file is checked before the file is read, and no file name inside one
//! leads out of the folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::coded::StoredAs;
use super::{Format, TensorLocation, gguf_files, sampling_defaults};
use crate::chat_template::ChatTemplate;
use crate::config::{HuggingFaceFiles, ModelConfig, WeightCoding, from_huggingface, token_text};
use crate::error::ModelError;
use crate::mapping::Mapping;
use crate::safetensors_file;
use crate::sampling::Sampling;
use crate::tokenizer::Tokenizer;

const MAX_JSON_BYTES: u64 = 16 << 20;
const MAX_INDEX_BYTES: u64 = 64 << 20;
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
const MAX_SHARDS: usize = 4096;
/// The files of vocabularies that are read.
const VOCABULARY_FILES: [&str; 2] = [TOKENIZER_JSON, TIKTOKEN];
const TOKENIZER_JSON: &str = "tokenizer.json";
const TIKTOKEN: &str = "tiktoken.model";

/// The folder and its parsed small files.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    config: Value,
    generation: Option<Value>,
    tokenizer_config: Option<Value>,
    /// The parts of tokenizer.json that affect the configuration.
    tokenizer: Option<Value>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The contents of tokenizer.json without the vocabulary.
#[derive(Deserialize)]
struct TokenizerParts {
    #[serde(default)]
    added_tokens: Value,
    #[serde(default)]
    post_processor: Value,
}

type Weights = (Vec<Mapping>, BTreeMap<String, TensorLocation>);

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Self, ModelError> {
        let json = |name: &str| read_json::<Value>(&path.join(name), MAX_JSON_BYTES);
        let config = json("config.json")?.ok_or_else(|| ModelError::NotAModel {
            path: path.to_owned(),
            problem: "it has no config.json".into(),
        })?;
        let tokenizer = read_json::<TokenizerParts>(&path.join(TOKENIZER_JSON), MAX_TOKENIZER_BYTES)?;
        Ok(Self {
            path: path.to_owned(),
            config,
            generation: json("generation_config.json")?,
            tokenizer_config: json("tokenizer_config.json")?,
            tokenizer: tokenizer.map(|parts| {
                serde_json::json!({ "added_tokens": parts.added_tokens, "post_processor": parts.post_processor })
            }),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn config(&self, has_head: bool) -> Result<ModelConfig, ModelError> {
        from_huggingface(&HuggingFaceFiles {
            config: &self.config,
            generation: self.generation.as_ref(),
            tokenizer_config: self.tokenizer_config.as_ref(),
            tokenizer: self.tokenizer.as_ref(),
            has_head,
        })
    }

    /// Returns how the weights are quantized, if they are.
    pub(super) fn coding(&self) -> Result<Option<WeightCoding>, ModelError> {
        WeightCoding::read(&self.config)
    }

    /// Gives the weights of a model's text part the names of a model without other parts, and drops those.
    pub(super) fn keep_text_part(&self, tensors: &mut BTreeMap<String, TensorLocation>) {
        const TEXT: &str = "language_model.";
        if !self.config.get("text_config").is_some_and(Value::is_object) {
            return;
        }
        let all = std::mem::take(tensors);
        let has_prefix = all.keys().any(|name| name.starts_with(TEXT));
        tensors.extend(all.into_iter().filter_map(|(name, location)| match name.strip_prefix(TEXT) {
            Some(text) => Some((text.to_owned(), location)),
            None => (!has_prefix).then_some((name, location)),
        }));
    }

    pub(super) fn tokenizer(&self) -> Result<Option<Tokenizer>, ModelError> {
        if let Some(bytes) = read_bounded(&self.path.join(TOKENIZER_JSON), MAX_TOKENIZER_BYTES)? {
            return Tokenizer::from_json(&bytes).map(Some);
        }
        let ranks = read_bounded(&self.path.join(TIKTOKEN), MAX_TOKENIZER_BYTES)?;
        let config = self.tokenizer_config.as_ref().unwrap_or(&Value::Null);
        ranks.map(|ranks| Tokenizer::from_tiktoken(&ranks, config)).transpose()
    }

    pub(super) fn chat_template(&self) -> Result<Option<ChatTemplate>, ModelError> {
        let Some(source) = self.template_source()? else { return Ok(None) };
        let token = |key: &str| {
            let value = self.tokenizer_config.as_ref().and_then(|config| config.get(key));
            value.and_then(token_text).map(str::to_owned)
        };
        ChatTemplate::new(&source, token("bos_token"), token("eos_token")).map(Some)
    }

    pub(super) fn sampling(&self) -> Result<Option<Sampling>, ModelError> {
        let Some(generation) = &self.generation else { return Ok(None) };
        sampling_defaults::from_generation_config(generation).map_err(|problem| ModelError::Malformed {
            path: self.path.join("generation_config.json"),
            problem,
        })
    }

    /// Reads the weights from the given file, or else from model.safetensors, or else from the shards that
    /// the index lists.
    pub(super) fn read_weights(&self, file: Option<&Path>) -> Result<Weights, ModelError> {
        let single = self.path.join("model.safetensors");
        if let Some(file) = file {
            return read_shards(&[file.to_owned()]);
        }
        if single.is_file() {
            return read_shards(&[single]);
        }
        let path = self.path.join("model.safetensors.index.json");
        let index: Index = read_json(&path, MAX_INDEX_BYTES)?.ok_or_else(|| ModelError::NotAModel {
            path: self.path.clone(),
            problem: "it has neither model.safetensors nor model.safetensors.index.json".into(),
        })?;
        let mut names: Vec<&str> = index.weight_map.values().map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        let damaged = |problem: String| ModelError::Malformed { path: path.clone(), problem };
        if names.is_empty() || names.len() > MAX_SHARDS {
            return Err(damaged(format!("it names {} files; 1..={MAX_SHARDS} are allowed", names.len())));
        }
        if let Some(name) = names.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
            return Err(damaged(format!("it names the file {name:?}, which is not in its folder")));
        }
        let shards: Vec<PathBuf> = names.iter().map(|name| self.path.join(name)).collect();
        let (files, tensors) = read_shards(&shards)?;
        for (tensor, file) in &index.weight_map {
            match tensors.get(tensor) {
                Some(location) if names[location.file] == file => {}
                _ => {
                    return Err(ModelError::tensor(
                        tensor,
                        format!("is not in {file}, where the index lists it"),
                    ));
                }
            }
        }
        Ok((files, tensors))
    }

    fn template_source(&self) -> Result<Option<String>, ModelError> {
        let path = self.path.join("chat_template.jinja");
        if let Some(bytes) = read_bounded(&path, MAX_TEMPLATE_BYTES)? {
            return String::from_utf8(bytes)
                .map(Some)
                .map_err(|_| ModelError::Malformed { path, problem: "it is not valid UTF-8".into() });
        }
        let separate: Option<Value> = read_json(&self.path.join("chat_template.json"), MAX_JSON_BYTES)?;
        let holders = [separate.as_ref(), self.tokenizer_config.as_ref()];
        let template = holders.into_iter().flatten().find_map(|holder| holder.get("chat_template"));
        match template {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(source)) => Ok(Some(source.clone())),
            Some(Value::Array(templates)) => Ok(templates
                .iter()
                .find(|template| template.get("name").and_then(Value::as_str) == Some("default"))
                .and_then(|template| template.get("template")?.as_str())
                .map(str::to_owned)),
            Some(_) => {
                Err(ModelError::config("chat_template", "is neither a string nor a list of named templates"))
            }
        }
    }
}

/// Returns whether a vocabulary in a file of this name, in the folder of a model, is read.
pub fn reads_vocabulary_file(name: &str) -> bool {
    VOCABULARY_FILES.contains(&name)
}

/// Returns the only GGUF file of a folder.
pub(super) fn only_gguf_file(folder: &Path) -> Result<PathBuf, ModelError> {
    let io = |source| ModelError::Io { path: folder.to_owned(), source };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "gguf") {
            found.push(path);
        }
    }
    // The parts of a split file are one model, and its first part stands for all.
    found.sort();
    if let [first, rest @ ..] = &found[..]
        && gguf_files::is_part(first)
    {
        let first = gguf_files::first_part(first);
        if rest.iter().all(|path| gguf_files::first_part(path) == first) {
            return Ok(first);
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(ModelError::NotAModel {
            path: folder.to_owned(),
            problem: "it has neither config.json nor a GGUF file".into(),
        }),
        count => Err(ModelError::NotAModel {
            path: folder.to_owned(),
            problem: format!("it has {count} GGUF files; give the path of one of them"),
        }),
    }
}

fn read_shards(paths: &[PathBuf]) -> Result<Weights, ModelError> {
    let mut files = Vec::new();
    let mut tensors = BTreeMap::new();
    for (file, path) in paths.iter().enumerate() {
        let mapping = Mapping::open(path)?;
        for tensor in safetensors_file::parse(mapping.path(), &mapping)? {
            let format = match safetensors_file::weight_dtype(tensor.dtype) {
                Some(dtype) => Format::Weights(dtype),
                None => Format::Other(format!("{:?}", tensor.dtype)),
            };
            let (shape, bytes, stored) = (tensor.shape, tensor.bytes, StoredAs::Values);
            let location = TensorLocation { format, shape, file, bytes, stored };
            if tensors.insert(tensor.name.clone(), location).is_some() {
                return Err(ModelError::tensor(tensor.name, "appears twice"));
            }
        }
        files.push(mapping);
    }
    Ok((files, tensors))
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path, limit_bytes: u64) -> Result<Option<T>, ModelError> {
    let Some(bytes) = read_bounded(path, limit_bytes)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| ModelError::Malformed {
        path: path.to_owned(),
        problem: format!("it is not the expected JSON: {error}"),
    })
}

fn read_bounded(path: &Path, limit_bytes: u64) -> Result<Option<Vec<u8>>, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io(error)),
        Ok(metadata) if !metadata.is_file() => {
            Err(ModelError::NotAModel { path: path.to_owned(), problem: "it is not a regular file".into() })
        }
        Ok(metadata) if metadata.len() > limit_bytes => Err(ModelError::Malformed {
            path: path.to_owned(),
            problem: format!("it has {} bytes; up to {limit_bytes} are allowed", metadata.len()),
        }),
        Ok(_) => std::fs::read(path).map(Some).map_err(io),
    }
}
