//! Writes GGUF files of random weights that have the widths of published mixtures, cut to their first layers: they compute as fast as
//! trained models of the same shape, in every program that reads such files.
//!
//! Invariant: a file depends on its options and on the vocabulary alone. Memory is bounded by one part of a tensor, and the output
//! gets its name once it is complete and has been opened.

mod content;
mod shape;
#[cfg(test)]
mod tests;

use std::path::Path;

use skep_kernels::DType;

use crate::checkpoint::{Checkpoint, Random};
use crate::config::MAX_CONTEXT;
use crate::error::ModelError;
use crate::gguf::header::{NewTensor, header};
use crate::gguf::{DEFAULT_ALIGNMENT, formats};
use crate::output::{Sink, Staged};
use content::{Content, Tensor, Values};
use shape::{Attention, Latent, SHAPES, Shape};

/// Alignment of the tensors.
const ALIGNMENT: usize = DEFAULT_ALIGNMENT as usize;
/// Number of blocks that are made at once.
const BLOCKS_AT_ONCE: usize = 1 << 14;
/// Numbers of layers by which llama.cpp recognizes DeepSeek-V2-Lite, whose queries have no narrow row.
const LAYERS_OF_LITE: [usize; 2] = [26, 27];

/// The options of a file.
#[derive(Clone, Copy, Debug)]
pub struct SynthesisOptions<'a> {
    /// The model whose widths the file has, one of [`names`].
    pub like: &'a str,
    /// Number of layers, from the first on. `None` means all.
    pub layers: Option<usize>,
    /// Number of tokens that a sequence may have. `None` means that of the model.
    pub context: Option<usize>,
    /// Format of the matrices. Norms and routers are in F32.
    pub weights: DType,
    pub seed: u64,
}

/// A checked plan of a file, which can be written.
pub struct Synthesis {
    header: Vec<u8>,
    tensors: Vec<Tensor>,
    family: &'static str,
    layers: usize,
    seed: u64,
    bytes: u64,
}

/// Returns the names of the models whose widths are known.
pub fn names() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|shape| shape.name)
}

/// Returns the format of weights with this name, in letters of either case.
pub fn weight_format(name: &str) -> Result<DType, String> {
    formats().find(|format| format.to_string().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let known: Vec<String> = formats().map(|format| format.to_string().to_lowercase()).collect();
        format!("unknown format {name:?}; expected one of {}", known.join(", "))
    })
}

impl Synthesis {
    /// Checks the options. The file gets the vocabulary and the chat template of a model in a GGUF file.
    pub fn plan(vocabulary: &Checkpoint, options: &SynthesisOptions<'_>) -> Result<Self, ModelError> {
        let shape = SHAPES.iter().find(|shape| shape.name == options.like).ok_or_else(|| {
            let known: Vec<&str> = names().collect();
            refused("like", format!("{:?} is unknown; possible values: {}", options.like, known.join(", ")))
        })?;
        let layers = layers(shape, options.layers)?;
        let context = options.context.unwrap_or(shape.context);
        if !(1..=MAX_CONTEXT).contains(&context) {
            return Err(refused("context", format!("{context} is outside 1..={MAX_CONTEXT}")));
        }
        let Some((file, files)) = vocabulary.gguf() else {
            let problem = "the model with the vocabulary has to be a GGUF file";
            return Err(refused("tokenizer", problem.to_owned()));
        };
        let tokens = file.array("tokenizer.ggml.tokens")?.map_or(0, |tokens| tokens.count);
        if tokens == 0 {
            return Err(refused("tokenizer", format!("{} has no vocabulary", file.path().display())));
        }
        let content = Content { shape, layers, context, vocabulary: tokens, weights: options.weights };
        let mut keys = content.keys();
        for (key, value) in file.raw_keys(&files[0])? {
            if key.starts_with("tokenizer.") {
                keys.push((key.to_owned(), value.to_vec()));
            }
        }
        let tensors = content.tensors();
        let entries: Vec<NewTensor<'_>> = tensors.iter().map(Tensor::entry).collect();
        let header = header(&keys, &entries, ALIGNMENT)?;
        let padded = |length: usize| length.next_multiple_of(ALIGNMENT) as u64;
        let bytes = padded(header.len()) + entries.iter().map(|entry| padded(entry.length())).sum::<u64>();
        Ok(Synthesis { header, tensors, family: content.family(), layers, seed: options.seed, bytes })
    }

    /// Returns `general.architecture` of the file.
    pub fn family(&self) -> &'static str {
        self.family
    }

    /// Returns the number of layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Returns the number of weights.
    pub fn parameters(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.dimensions.iter().product::<usize>() as u64).sum()
    }

    /// Returns the size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes the file. `watch` is called with the number of bytes that are written. A path that exists is refused, and a failure
    /// leaves nothing.
    pub fn write(&self, path: &Path, watch: &dyn Fn(u64)) -> Result<(), ModelError> {
        let staged = Staged::beside(path)?;
        let mut sink = Sink::create(staged.path().to_owned(), watch)?;
        sink.write(&self.header)?;
        sink.pad(ALIGNMENT)?;
        for (number, tensor) in self.tensors.iter().enumerate() {
            let mut random = Random(self.seed);
            let mut random = Random(random.next() ^ number as u64);
            let mut part = vec![0; BLOCKS_AT_ONCE * tensor.dtype.block_bytes()];
            let mut missing = tensor.entry().length();
            while missing > 0 {
                let next = missing.min(part.len());
                match tensor.values {
                    Values::Weights => random.fill(tensor.dtype, &mut part[..next]),
                    Values::Norm => random.fill_norms(&mut part[..next]),
                }
                sink.write(&part[..next])?;
                missing -= next;
            }
            sink.pad(ALIGNMENT)?;
        }
        sink.finish()?;
        Checkpoint::open(staged.path())?;
        staged.publish()
    }
}

/// Returns the number of layers, of which one at least has experts.
fn layers(shape: &Shape, wanted: Option<usize>) -> Result<usize, ModelError> {
    let layers = wanted.unwrap_or(shape.layers);
    let possible = shape.experts.dense_layers + 1..=shape.layers;
    if !possible.contains(&layers) {
        let (least, most) = possible.into_inner();
        let problem = format!("{layers} is outside {least}..={most}, the possible numbers of {}", shape.name);
        return Err(refused("layers", problem));
    }
    let has_narrow_queries = matches!(shape.attention, Attention::Latent(Latent { query_rank: Some(_), .. }));
    if has_narrow_queries && LAYERS_OF_LITE.contains(&layers) {
        let problem =
            format!("llama.cpp reads a file with {layers} layers as DeepSeek-V2-Lite; choose another number");
        return Err(refused("layers", problem));
    }
    Ok(layers)
}

fn refused(option: &str, problem: String) -> ModelError {
    ModelError::Option { option: option.to_owned(), problem }
}
