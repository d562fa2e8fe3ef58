//! Turns a dense model into a mixture of experts: each feed-forward block is cut along its width into experts.
//!
//! Invariant: with the uniform router, each token passes through all experts, and the weighted sum of their outputs is the
//! output of the dense block. In exact arithmetic, the mixture is the dense model. The source is only read, and the output
//! gets its name once it is complete and has been opened.

mod config_json;
mod encoding;
mod family;
mod folder;
mod gguf_file;
#[cfg(test)]
mod tests;
mod weights;

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::checkpoint::{Checkpoint, Random};
use crate::config::{Architecture, MAX_EXPERTS, MAX_USED};
use crate::error::ModelError;
use crate::output::Staged;
use family::Family;
use folder::FolderPlan;
use gguf_file::GgufPlan;

/// Maximum number of values of a row that share a scale in the formats with scales.
const GROUP: usize = 32;

/// The options of a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpcycleOptions {
    /// Number of experts that each feed-forward block is cut into.
    pub experts: usize,
    /// Number of experts that each token passes through. `None` means all.
    pub used: Option<usize>,
    pub router: UpcycleRouter,
    pub format: UpcycleFormat,
}

/// The router of each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpcycleRouter {
    /// All experts get the same weight, so all of them have to be chosen.
    Uniform,
    /// Experts are chosen by random weights, so the mixture is another model than the dense one.
    Random { seed: u64 },
}

/// The files that are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpcycleFormat {
    /// Safetensors in F32.
    F32,
    /// Safetensors in BF16.
    #[default]
    Bf16,
    /// Safetensors in BF16, with experts in 4-bit integers that share a scale in groups of 32.
    Int4,
    /// Safetensors in BF16, with experts and the projections of attention in 8-bit floats that share a scale in blocks of
    /// 128 × 128.
    Fp8,
    /// A GGUF file, in which weights have the formats of the source.
    Gguf,
}

impl UpcycleFormat {
    const ALL: [UpcycleFormat; 5] = [
        UpcycleFormat::Bf16,
        UpcycleFormat::F32,
        UpcycleFormat::Int4,
        UpcycleFormat::Fp8,
        UpcycleFormat::Gguf,
    ];
}

impl fmt::Display for UpcycleFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            UpcycleFormat::F32 => "f32",
            UpcycleFormat::Bf16 => "bf16",
            UpcycleFormat::Int4 => "int4",
            UpcycleFormat::Fp8 => "fp8",
            UpcycleFormat::Gguf => "gguf",
        })
    }
}

impl FromStr for UpcycleFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|format| format.to_string() == text);
        found.ok_or_else(|| {
            let known = Self::ALL.map(|format| format.to_string()).join(", ");
            format!("unknown format {text:?}; expected one of {known}")
        })
    }
}

/// A checked cut of a dense model, which can be written.
pub struct Upcycle<'a> {
    checkpoint: &'a Checkpoint,
    cut: Cut,
    files: Files<'a>,
}

enum Files<'a> {
    Folder(FolderPlan),
    Gguf(GgufPlan<'a>),
}

/// How the feed-forward blocks are cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    family: Family,
    experts: usize,
    /// Number of experts that each token passes through.
    used: usize,
    /// Width of one expert.
    width: usize,
    router: UpcycleRouter,
}

impl<'a> Upcycle<'a> {
    /// Checks that the model can be cut, and plans the files. Only weights whose format has to change are read.
    pub fn plan(checkpoint: &'a Checkpoint, options: &UpcycleOptions) -> Result<Self, ModelError> {
        let cut = Cut::new(checkpoint, options)?;
        let files = match options.format {
            UpcycleFormat::Gguf => Files::Gguf(GgufPlan::new(checkpoint, &cut)?),
            format => Files::Folder(FolderPlan::new(checkpoint, &cut, format)?),
        };
        Ok(Upcycle { checkpoint, cut, files })
    }

    /// Returns the family of the mixture.
    pub fn architecture(&self) -> Architecture {
        self.cut.family.architecture()
    }

    /// Returns the width of one expert.
    pub fn expert_width(&self) -> usize {
        self.cut.width
    }

    /// Returns the number of experts that each token passes through.
    pub fn used(&self) -> usize {
        self.cut.used
    }

    /// Returns the size of the file with the weights in bytes.
    pub fn bytes(&self) -> u64 {
        match &self.files {
            Files::Folder(plan) => plan.bytes(),
            Files::Gguf(plan) => plan.bytes(),
        }
    }

    /// Writes the model to a new folder, or to a new file in the format GGUF. `watch` is called with the number of bytes of the
    /// file with the weights that are written. A path that exists is refused, and a failure leaves nothing.
    pub fn write(&self, path: &Path, watch: &dyn Fn(u64)) -> Result<(), ModelError> {
        let staged = Staged::beside(path)?;
        match &self.files {
            Files::Folder(plan) => plan.write(self.checkpoint, staged.path(), watch)?,
            Files::Gguf(plan) => plan.write(staged.path(), watch)?,
        }
        Checkpoint::open(staged.path())?;
        staged.publish()
    }
}

impl Cut {
    fn new(checkpoint: &Checkpoint, options: &UpcycleOptions) -> Result<Self, ModelError> {
        let config = checkpoint.config();
        let family = Family::of(config)?;
        let UpcycleOptions { experts, router, format, .. } = *options;
        let used = options.used.unwrap_or(experts);
        let unit = unit(checkpoint, format)?;
        let width = config.feed_forward_size;
        let divides = |experts: usize| width.is_multiple_of(experts * unit);
        if !(2..=MAX_EXPERTS).contains(&experts) || !divides(experts) {
            let possible: Vec<String> =
                (2..=MAX_USED).filter(|count| divides(*count)).map(|count| count.to_string()).collect();
            let possible = if possible.is_empty() { "none".to_owned() } else { possible.join(", ") };
            let problem = format!(
                "{experts} cannot divide the feed-forward width {width} in units of {unit}, which {format} keeps together; \
                 possible numbers: {possible}"
            );
            return Err(refused("experts", problem));
        }
        if router == UpcycleRouter::Uniform && used != experts {
            let problem = format!(
                "the uniform router chooses all {experts} experts, not {used}; a random router can choose fewer"
            );
            return Err(refused("top_k", problem));
        }
        let most = experts.min(MAX_USED);
        if !(1..=most).contains(&used) {
            return Err(refused("top_k", format!("{used} is outside 1..={most}")));
        }
        Ok(Cut { family, experts, used, width: width / experts, router })
    }

    /// Returns the factor of the down projections. Weights of experts add up to 1, so the sum of all outputs with the same weight
    /// is their mean; families whose configuration has a factor of its own need none.
    fn down_factor(&self) -> f32 {
        if self.family.has_factor() { 1.0 } else { self.experts as f32 }
    }

    /// Returns the weights of a layer's router, `[experts, hidden]`.
    fn router(&self, layer: usize, hidden: usize) -> Vec<f32> {
        let UpcycleRouter::Random { seed } = self.router else { return vec![0.0; self.experts * hidden] };
        let mut random = Random(seed);
        let mut random = Random(random.next() ^ layer as u64);
        // The products of a row of norm √hidden then have a deviation of about 1.
        let largest = 2.0 / (hidden as f32).sqrt();
        let value = |bits: u64| ((bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * largest;
        (0..self.experts * hidden).map(|_| value(random.next())).collect()
    }
}

/// Returns the number of neighbors along the width of a feed-forward block that a format keeps together.
fn unit(checkpoint: &Checkpoint, format: UpcycleFormat) -> Result<usize, ModelError> {
    let hidden = checkpoint.config().hidden_size;
    match format {
        UpcycleFormat::F32 | UpcycleFormat::Bf16 => Ok(1),
        UpcycleFormat::Int4 | UpcycleFormat::Fp8 if hidden.is_multiple_of(GROUP) => Ok(GROUP),
        UpcycleFormat::Int4 | UpcycleFormat::Fp8 => {
            let problem = format!(
                "{format} needs rows that are multiples of {GROUP}, but the hidden width is {hidden}"
            );
            Err(refused("format", problem))
        }
        UpcycleFormat::Gguf => gguf_file::unit(checkpoint),
    }
}

fn refused(option: &str, problem: String) -> ModelError {
    ModelError::Option { option: option.to_owned(), problem }
}
