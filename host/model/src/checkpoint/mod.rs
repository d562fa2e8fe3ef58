//! A model on disk in any supported format: tensors under Hugging Face names, a checked configuration, a tokenizer
//! and a chat template.
//!
//! Invariant: an open checkpoint holds every tensor that its configuration requires, each with the right shape and
//! all its bytes. This module does not compute.

mod coded;
#[cfg(test)]
mod damage_tests;
mod file_parts;
mod folder;
mod gguf_files;
mod layout;
#[cfg(test)]
mod mixtral_tests;
mod sampling_defaults;
#[cfg(test)]
mod shards_tests;
mod synthetic;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use skep_kernels::DType;

use crate::chat_template::ChatTemplate;
use crate::config::{ModelConfig, from_gguf};
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::mapping::Mapping;
use crate::sampling::Sampling;
use crate::tokenizer::{self, Tokenizer};
use coded::StoredAs;
#[cfg(test)]
pub(crate) use coded::tests as fixtures;
pub(crate) use coded::{Coding, fp8_format};
pub(crate) use file_parts::FilePart;
use folder::Folder;
pub use folder::reads_vocabulary_file;
pub(crate) use synthetic::{Random, scales as block_scales};

/// An open model. Weights stay in the mapped files.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    source: Source,
    files: Vec<Mapping>,
    tensors: BTreeMap<String, TensorLocation>,
    config: ModelConfig,
}

/// The bytes of a tensor and their format.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The Hugging Face name.
    pub name: &'a str,
    pub dtype: DType,
    /// Row-major shape, outermost dimension first: `[out, in]`.
    pub shape: &'a [usize],
    /// The tensor's bytes as they are stored: exactly as many as its type and shape require, unless they are codes.
    /// [`Tensor::content`] returns them in the tensor's type.
    pub data: &'a [u8],
    pub(crate) coding: Coding<'a>,
}

#[derive(Debug)]
enum Source {
    Gguf(GgufFile),
    Folder(Box<Folder>),
    /// Random weights, without a tokenizer or a chat template.
    Synthetic,
    /// A configuration without weights.
    Described,
}

/// The location of a tensor.
#[derive(Debug)]
struct TensorLocation {
    format: Format,
    shape: Vec<usize>,
    file: usize,
    bytes: Range<usize>,
    stored: StoredAs,
}

#[derive(Debug)]
enum Format {
    Weights(DType),
    /// A type that weights cannot have, such as that of the index tensors in some files.
    Other(String),
}

impl Checkpoint {
    /// Opens `X.gguf` or the parts of a split one, `X.safetensors` with config.json next to it, a Hugging Face folder, or a folder with one GGUF
    /// file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let metadata =
            std::fs::metadata(path).map_err(|source| ModelError::Io { path: path.to_owned(), source })?;
        if metadata.is_dir() {
            return match path.join("config.json").is_file() {
                true => Self::open_folder(path, path, None),
                false => Self::open_gguf(&folder::only_gguf_file(path)?),
            };
        }
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => {
                let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                Self::open_folder(path, folder.unwrap_or(Path::new(".")), Some(path))
            }
            _ => Self::open_gguf(path),
        }
    }

    /// Reads only the tokenizer of a model, which needs no weights: a GGUF file or a folder with config.json.
    pub fn tokenizer_of(path: &Path) -> Result<Option<Tokenizer>, ModelError> {
        match path.is_dir() {
            true => Folder::open(path)?.tokenizer(),
            false => {
                let (file, files) = gguf_files::open(path)?;
                tokenizer::from_gguf(&file, &files[0])
            }
        }
    }

    /// Describes a model of which only the configuration is known: the shapes of its weights, each in the format that
    /// `dtype` returns for its name and the length of its rows. It is for plans alone, because its tensors have no bytes.
    pub(crate) fn described(
        config: ModelConfig,
        dtype: impl Fn(&str, usize) -> DType,
    ) -> Result<Self, ModelError> {
        const NAME: &str = "a model without weights";
        let location = |(name, shape): (String, Vec<usize>)| {
            let columns = shape.last().copied().unwrap_or(1);
            let (format, stored) = (Format::Weights(dtype(&name, columns)), StoredAs::Values);
            (name, TensorLocation { format, shape, file: 0, bytes: 0..0, stored })
        };
        let tensors = layout::required(&config).map(location).collect();
        let files = vec![Mapping::made(NAME, Vec::new())];
        Self { path: PathBuf::from(NAME), source: Source::Described, files, tensors, config }.checked()
    }

    /// Returns the checked configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    #[cfg(test)]
    pub(crate) fn set_context_length(&mut self, tokens: usize) {
        self.config.context_length = tokens;
    }

    /// Returns the tensor with this name.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let (name, location) = self
            .tensors
            .get_key_value(name)
            .ok_or_else(|| ModelError::TensorMissing { name: name.to_owned(), path: self.path.clone() })?;
        match &location.format {
            Format::Weights(dtype) => Ok(self.view(name, location, *dtype)),
            Format::Other(format) => {
                Err(ModelError::tensor(name, format!("has the type {format}; supported: F32, F16, BF16")))
            }
        }
    }

    /// Returns the tensor with this name if it has the given shape.
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.tensor(name)?;
        if tensor.shape != shape {
            return Err(ModelError::tensor(
                name,
                format!("has the shape {:?}, but the configuration requires {shape:?}", tensor.shape),
            ));
        }
        Ok(tensor)
    }

    /// Returns whether there is a tensor with this name, in any format.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns every tensor that can be a weight, ordered by name.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.tensors.iter().filter_map(|(name, location)| match location.format {
            Format::Weights(dtype) => Some(self.view(name, location, dtype)),
            Format::Other(_) => None,
        })
    }

    /// Builds the tokenizer on every call. Returns `None` if the model has none.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>, ModelError> {
        match &self.source {
            Source::Gguf(file) => tokenizer::from_gguf(file, &self.files[0]),
            Source::Folder(folder) => folder.tokenizer(),
            Source::Synthetic | Source::Described => Ok(None),
        }
    }

    /// Returns the chat template, or `None` if the model has none.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, ModelError> {
        match &self.source {
            Source::Gguf(file) => self.gguf_template(file),
            Source::Folder(folder) => folder.chat_template(),
            Source::Synthetic | Source::Described => Ok(None),
        }
    }

    /// Returns the sampling parameters that the model's authors recommend, or `None` if the files name none.
    pub fn sampling(&self) -> Result<Option<Sampling>, ModelError> {
        match &self.source {
            Source::Gguf(file) => sampling_defaults::from_gguf(file),
            Source::Folder(folder) => folder.sampling(),
            Source::Synthetic | Source::Described => Ok(None),
        }
    }

    /// Returns the human-readable name of the format.
    pub fn format(&self) -> &'static str {
        match self.source {
            Source::Gguf(_) => "GGUF",
            Source::Folder(_) => "safetensors",
            Source::Synthetic => "random weights",
            Source::Described => "configuration",
        }
    }

    /// Returns the format that most bytes of the weights have.
    pub fn weight_format(&self) -> Option<String> {
        let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
        for tensor in self.tensors() {
            *sizes.entry(tensor.dtype.to_string()).or_default() += tensor.data.len();
        }
        sizes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(format, _)| format)
    }

    /// Returns the names and shapes of the weights that the configuration requires, which are all there.
    pub(crate) fn required(&self) -> Vec<(String, Vec<usize>)> {
        layout::required(&self.config).collect()
    }

    /// Returns the header of a GGUF model, and its files in the order of their numbers.
    pub(crate) fn gguf(&self) -> Option<(&GgufFile, &[Mapping])> {
        match &self.source {
            Source::Gguf(file) => Some((file, &self.files)),
            Source::Folder(_) | Source::Synthetic | Source::Described => None,
        }
    }

    /// Returns the folder with the files of a Hugging Face checkpoint.
    pub(crate) fn folder(&self) -> Option<&Path> {
        match &self.source {
            Source::Folder(folder) => Some(folder.path()),
            Source::Gguf(_) | Source::Synthetic | Source::Described => None,
        }
    }

    /// Returns the total size of all files in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.len() as u64).sum()
    }

    /// Returns the paths of the files with weights.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(Mapping::path)
    }

    /// Returns the size in the files of the weights that the model needs. Files may have others, such as those of a vision tower.
    pub fn weight_bytes(&self) -> u64 {
        let needed = self.required();
        needed.iter().filter_map(|(name, _)| self.tensor(name).ok()).map(|tensor| tensor.stored_bytes()).sum()
    }

    /// Lets the operating system drop the pages of a tensor after it has been repacked. Memory then holds only the
    /// packed weights and the tensor that is being packed.
    pub fn release(&self, name: &str) {
        if let Some(location) = self.tensors.get(name) {
            self.files[location.file].release(location.bytes.clone());
        }
    }

    fn view<'a>(&'a self, name: &'a str, location: &'a TensorLocation, dtype: DType) -> Tensor<'a> {
        Tensor {
            name,
            dtype,
            shape: &location.shape,
            data: &self.files[location.file][location.bytes.clone()],
            coding: location.stored.coding(&self.files),
        }
    }

    fn open_gguf(path: &Path) -> Result<Self, ModelError> {
        let (file, files) = gguf_files::open(path)?;
        let config = from_gguf(&file, &files[0])?;
        let tensors = gguf_files::tensors(&file)?;
        Self { path: path.to_owned(), source: Source::Gguf(file), files, tensors, config }.checked()
    }

    fn open_folder(path: &Path, folder: &Path, weights: Option<&Path>) -> Result<Self, ModelError> {
        let folder = Folder::open(folder)?;
        let (files, mut tensors) = folder.read_weights(weights)?;
        coded::join(folder.coding()?.as_ref(), &mut tensors, &files)?;
        folder.keep_text_part(&mut tensors);
        let config = folder.config(tensors.contains_key("lm_head.weight"))?;
        Self { path: path.to_owned(), source: Source::Folder(Box::new(folder)), files, tensors, config }
            .checked()
    }

    fn checked(self) -> Result<Self, ModelError> {
        layout::check(&self)?;
        Ok(self)
    }

    fn gguf_template(&self, file: &GgufFile) -> Result<Option<ChatTemplate>, ModelError> {
        let Some(source) = file.string("tokenizer.chat_template")? else { return Ok(None) };
        let tokens = file.array("tokenizer.ggml.tokens")?;
        let text = |key: &str| -> Result<Option<String>, ModelError> {
            let Some(id) = file.unsigned(key)? else { return Ok(None) };
            let mut texts = tokens.and_then(|tokens| tokens.strings(&self.files[0]));
            Ok(texts.as_mut().and_then(|texts| texts.nth(usize::try_from(id).ok()?)).map(str::to_owned))
        };
        let bos = text("tokenizer.ggml.bos_token_id")?;
        let eos = text("tokenizer.ggml.eos_token_id")?;
        ChatTemplate::new(source, bos, eos).map(Some)
    }
}
