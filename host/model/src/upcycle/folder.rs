//! A mixture as a folder of Hugging Face: configuration, tokenizer, and weights in one file of safetensors.
//!
//! Invariant: the header states where each tensor is before any weight is read, and the weights follow in its order.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::config_json::{config_json, generation_config, tokenizer_config};
use super::encoding::Encoding;
use super::weights::{Reader, Slice};
use super::{Cut, GROUP, UpcycleFormat, refused};
use crate::checkpoint::Checkpoint;
use crate::config::{ModelConfig, RopePairing, RopeScaling};
use crate::error::ModelError;
use crate::output::{Sink, failed};

/// Number of values that are encoded at once if the encoding is plain.
const VALUES_AT_ONCE: usize = 1 << 20;
/// Files of the source that are copied if they exist.
const COPIED: [&str; 11] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
];
/// The projections of a feed-forward block, in the order of the experts' names.
const PROJECTIONS: [&str; 3] = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"];
const GATE: usize = 0;
const DOWN: usize = 2;

/// The files of the folder.
pub(super) struct FolderPlan {
    header: Vec<u8>,
    parts: Vec<Part>,
    weight_bytes: u64,
    others: Vec<(&'static str, Content)>,
}

/// The content of a file without weights.
enum Content {
    Text(String),
    Copied(PathBuf),
}

/// A weight of the mixture.
struct Part {
    name: String,
    shape: Vec<usize>,
    encoding: Encoding,
    values: Values,
}

enum Values {
    Dense(Slice),
    /// Values that the dense model does not have.
    Made(Vec<f32>),
}

impl FolderPlan {
    pub(super) fn new(checkpoint: &Checkpoint, cut: &Cut, format: UpcycleFormat) -> Result<Self, ModelError> {
        let config = checkpoint.config();
        if matches!(config.rope.scaling, RopeScaling::Factors(_)) {
            let problem = format!(
                "{format} has a config.json, which cannot state the factors of rope_freqs.weight; gguf keeps them"
            );
            return Err(refused("format", problem));
        }
        let parts = Parts { config, cut, format, list: Vec::new() }.all(checkpoint.required());
        let mut header = Map::new();
        header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
        let mut end = 0;
        for stored in parts.iter().flat_map(|part| part.encoding.stored(&part.name, &part.shape)) {
            let offsets = [end, end + stored.bytes];
            end += stored.bytes;
            let entry = json!({"dtype": stored.dtype, "shape": stored.shape, "data_offsets": offsets});
            header.insert(stored.name, entry);
        }
        Ok(FolderPlan {
            header: padded(Value::Object(header).to_string()),
            parts,
            weight_bytes: end,
            others: others(checkpoint, cut, format)?,
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.weight_bytes
    }

    /// Creates the folder and its files.
    pub(super) fn write(
        &self,
        checkpoint: &Checkpoint,
        folder: &Path,
        watch: &dyn Fn(u64),
    ) -> Result<(), ModelError> {
        std::fs::create_dir(folder).map_err(|source| failed(folder, source))?;
        for (name, content) in &self.others {
            let path = folder.join(name);
            let written = match content {
                Content::Text(text) => std::fs::write(&path, text),
                Content::Copied(from) => std::fs::copy(from, &path).map(|_| ()),
            };
            written.map_err(|source| failed(&path, source))?;
        }
        let mut sink = Sink::create(folder.join("model.safetensors"), watch)?;
        sink.write(&self.header)?;
        let mut reader = Reader::new(checkpoint);
        for part in &self.parts {
            part.write(&mut reader, &mut sink)?;
        }
        sink.finish()
    }
}

impl Part {
    fn write(&self, reader: &mut Reader<'_>, sink: &mut Sink<'_>) -> Result<(), ModelError> {
        let rows = self.shape.first().copied().unwrap_or(0);
        let columns = self.shape.get(1).copied().unwrap_or(1);
        let slice = match &self.values {
            Values::Made(values) => return sink.write(&self.encoding.encode(values, columns)),
            Values::Dense(slice) => slice,
        };
        let at_once = if self.encoding.is_plain() { (VALUES_AT_ONCE / columns).max(1) } else { rows.max(1) };
        for first in (0..rows).step_by(at_once) {
            let values = reader.rows(slice, first..(first + at_once).min(rows))?;
            sink.write(&self.encoding.encode(&values, columns))?;
        }
        Ok(())
    }
}

/// Collects the weights of the mixture.
struct Parts<'a> {
    config: &'a ModelConfig,
    cut: &'a Cut,
    format: UpcycleFormat,
    list: Vec<Part>,
}

impl Parts<'_> {
    fn all(mut self, required: Vec<(String, Vec<usize>)>) -> Vec<Part> {
        for (name, shape) in required {
            match feed_forward(&name) {
                Some((layer, projection)) => {
                    if projection == GATE {
                        self.router(layer);
                    }
                    self.experts(layer, projection, &name);
                }
                None => self.whole(name, shape),
            }
        }
        self.list
    }

    fn plain(&self) -> Encoding {
        if self.format == UpcycleFormat::F32 { Encoding::F32 } else { Encoding::Bf16 }
    }

    /// Adds a weight that stays as it is.
    fn whole(&mut self, name: String, shape: Vec<usize>) {
        let columns = shape.get(1).copied().unwrap_or(1);
        let is_projection = name.ends_with("_proj.weight") && columns.is_multiple_of(GROUP);
        let encoding = match self.format {
            UpcycleFormat::Fp8 if is_projection => Encoding::Fp8,
            _ => self.plain(),
        };
        // The rows of rotated heads, and what belongs to them.
        let is_rotated = ["q_proj.", "k_proj.", "q_norm.", "k_norm."].iter().any(|part| name.contains(part));
        let is_interleaved = is_rotated && self.config.rope.pairing == RopePairing::Interleaved;
        let slice = Slice {
            name: name.clone(),
            rows: 0..shape.first().copied().unwrap_or(0),
            columns: 0..columns,
            factor: 1.0,
            interleaved: is_interleaved.then_some(self.config.head_size),
        };
        self.list.push(Part { name, shape, encoding, values: Values::Dense(slice) });
    }

    /// Adds the router of a layer.
    fn router(&mut self, layer: &str) {
        let (cut, hidden) = (self.cut, self.config.hidden_size);
        let form = cut.family.form();
        let name = format!("model.layers.{layer}.{}.{}", form.module(), form.router());
        let values = Values::Made(cut.router(layer.parse().unwrap_or(0), hidden));
        let (encoding, shape) = (self.plain(), vec![cut.experts, hidden]);
        self.list.push(Part { name: format!("{name}.weight"), shape, encoding, values });
        if cut.family.has_factor() {
            self.list.push(Part {
                name: format!("{name}.e_score_correction_bias"),
                shape: vec![cut.experts],
                encoding: Encoding::F32,
                values: Values::Made(vec![0.0; cut.experts]),
            });
        }
    }

    /// Adds the part of a projection that each expert of a layer has.
    fn experts(&mut self, layer: &str, projection: usize, source: &str) {
        let (cut, hidden) = (self.cut, self.config.hidden_size);
        let form = cut.family.form();
        let encoding = match self.format {
            UpcycleFormat::Int4 => Encoding::Int4,
            UpcycleFormat::Fp8 => Encoding::Fp8,
            _ => self.plain(),
        };
        for expert in 0..cut.experts {
            let own = expert * cut.width..(expert + 1) * cut.width;
            let (rows, columns, factor) = match projection {
                DOWN => (0..hidden, own, cut.down_factor()),
                _ => (own, 0..hidden, 1.0),
            };
            let part = form.projections()[projection];
            self.list.push(Part {
                name: format!("model.layers.{layer}.{}.experts.{expert}.{part}.weight", form.module()),
                shape: vec![rows.len(), columns.len()],
                encoding,
                values: Values::Dense(Slice {
                    name: source.to_owned(),
                    rows,
                    columns,
                    factor,
                    interleaved: None,
                }),
            });
        }
    }
}

/// Returns the layer of a weight of a dense feed-forward block, and its place in [`PROJECTIONS`].
fn feed_forward(name: &str) -> Option<(&str, usize)> {
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once(".mlp.")?;
    let projection = PROJECTIONS.iter().position(|known| *known == part)?;
    Some((layer, projection))
}

/// Returns the header of a file of safetensors behind its length, padded so that the data is aligned.
fn padded(mut json: String) -> Vec<u8> {
    let length = json.len().next_multiple_of(8);
    json.extend(std::iter::repeat_n(' ', length - json.len()));
    [&(length as u64).to_le_bytes()[..], json.as_bytes()].concat()
}

/// Returns the files without weights.
fn others(
    checkpoint: &Checkpoint,
    cut: &Cut,
    format: UpcycleFormat,
) -> Result<Vec<(&'static str, Content)>, ModelError> {
    let text = |value: Value| Content::Text(format!("{value:#}\n"));
    let mut files = vec![("config.json", text(config_json(checkpoint.config(), cut, format)))];
    if let Some(folder) = checkpoint.folder() {
        let found =
            COPIED.into_iter().map(|name| (name, folder.join(name))).filter(|(_, path)| path.is_file());
        files.extend(found.map(|(name, path)| (name, Content::Copied(path))));
        return Ok(files);
    }
    files.push(("generation_config.json", text(generation_config(checkpoint)?)));
    if let Some(tokenizer) = checkpoint.tokenizer()? {
        files.push(("tokenizer.json", Content::Text(tokenizer.to_json()?)));
        files.push(("tokenizer_config.json", text(tokenizer_config(checkpoint, &tokenizer)?)));
    }
    Ok(files)
}
