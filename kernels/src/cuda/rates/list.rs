//! The list of operations that are measured, and their names.

use std::fmt;

use crate::DType;
use crate::cuda::PageFormat;
use crate::cuda::ceilings::FAR_BEYOND_L2_BYTES;
use crate::cuda::matmul::Weights;
use crate::cuda::tiles::Tiles;
use crate::cuda::timing::Pace;

/// The sizes of a layer and of the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub hidden: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_size: u32,
    /// Width of the feed-forward block.
    pub wide: u32,
    pub vocabulary: u32,
}

/// A matrix of a layer, or the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Qkv,
    Output,
    GateUp,
    Down,
    Head,
}

/// Sequences that are decoded together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contexts {
    pub sequences: u32,
    /// Number of positions of each, including its own rows.
    pub context: u32,
    /// Number of rows of each.
    pub rows: u32,
    pub prefix: Prefix,
    pub pages: PageFormat,
}

/// The first positions of sequences, which may be in the same pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefix {
    /// Every sequence has pages of its own.
    Own,
    /// This many positions are in common pages, which are read once for all sequences.
    Together(u32),
    /// This many positions are in common pages, which are read for each sequence.
    Apart(u32),
}

/// The rows of a prompt, after positions that are in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt {
    pub rows: u32,
    pub prefix: u32,
    pub pages: PageFormat,
}

/// An operation of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A launch that does almost nothing: the norm of one row of eight values.
    Launch,
    RmsNorm {
        rows: u32,
    },
    /// The product with a matrix. The one with gate and up includes the gate.
    Product {
        role: Role,
        weights: Weights,
        rows: u32,
    },
    Qkv {
        rows: u32,
    },
    AttentionDecode(Contexts),
    AttentionPrefill(Prompt),
    Swiglu {
        rows: u32,
    },
    Embedding {
        rows: u32,
    },
    Sample {
        rows: u32,
        is_greedy: bool,
    },
}

/// The amounts of each operation, and how they are measured.
#[derive(Clone, Debug)]
pub struct Cases {
    /// Rows of operations on rows alone.
    pub rows: Vec<u32>,
    /// Rows of products with 16-bit weights, and with quantized ones.
    pub dense_rows: Vec<u32>,
    pub quantized_rows: Vec<u32>,
    /// Maximum number of rows that need logits.
    pub most_logit_rows: u32,
    pub decodes: Vec<Contexts>,
    pub prompts: Vec<Prompt>,
    /// Rows that a token is chosen for.
    pub draws: Vec<u32>,
    /// Number of bytes over which reads rotate, so that they miss caches.
    pub far_bytes: usize,
    pub pace: Pace,
}

impl Contexts {
    /// Returns the number of positions that the sequences have in common pages.
    pub(super) fn shared(&self) -> u32 {
        match self.prefix {
            Prefix::Own => 0,
            Prefix::Together(shared) | Prefix::Apart(shared) => shared,
        }
    }
}

impl Role {
    /// All matrices.
    pub const ALL: [Role; 5] = [Role::Qkv, Role::Output, Role::GateUp, Role::Down, Role::Head];
    /// The matrices of a layer.
    pub const OF_LAYER: [Role; 4] = [Role::Qkv, Role::Output, Role::GateUp, Role::Down];

    /// Returns the numbers of inputs and outputs.
    pub fn shape(self, sizes: &Sizes) -> [u32; 2] {
        let Sizes { hidden, heads, head_size, wide, vocabulary, .. } = *sizes;
        match self {
            Role::Qkv => [hidden, sizes.qkv_width()],
            Role::Output => [heads * head_size, hidden],
            Role::GateUp => [hidden, 2 * wide],
            Role::Down => [wide, hidden],
            Role::Head => [hidden, vocabulary],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Role::Qkv => "qkv",
            Role::Output => "output",
            Role::GateUp => "gate/up",
            Role::Down => "down",
            Role::Head => "head",
        }
    }
}

impl Sizes {
    /// Returns the number of values of a row's queries, keys and values.
    pub(super) fn qkv_width(&self) -> u32 {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }
}

impl Cases {
    /// Returns the amounts of decode steps of up to 64 sequences, and of prompts of up to 32,768 tokens. About twenty
    /// milliseconds are measured for each.
    pub fn whole() -> Self {
        let pages = PageFormat::Activations;
        let of = |sequences, context, rows| Contexts { sequences, context, rows, prefix: Prefix::Own, pages };
        let shared = |prefix| Contexts { prefix, ..of(64, 1024 + 128, 1) };
        let prompt = |rows, prefix| Prompt { rows, prefix, pages };
        let fp8 = |contexts: Contexts| Contexts { pages: PageFormat::Fp8, ..contexts };
        Cases {
            rows: vec![1, 64, 4096],
            dense_rows: vec![1, 8, 64, 512, 4096],
            quantized_rows: vec![1, 8, 64, 512],
            most_logit_rows: 64,
            decodes: vec![
                of(1, 8192, 1),
                of(1, 32768, 1),
                of(64, 1024, 1),
                of(64, 8192, 1),
                of(1, 8192, 4),
                of(64, 1024, 4),
                shared(Prefix::Together(1024)),
                shared(Prefix::Apart(1024)),
                fp8(of(1, 32768, 1)),
                fp8(of(64, 1024, 1)),
                fp8(of(64, 8192, 1)),
                fp8(shared(Prefix::Together(1024))),
            ],
            prompts: vec![
                prompt(1024, 0),
                prompt(4096, 0),
                prompt(8192, 0),
                prompt(32768, 0),
                prompt(512, 8192),
                Prompt { pages: PageFormat::Fp8, ..prompt(4096, 0) },
            ],
            draws: vec![1, 8, 64],
            far_bytes: FAR_BEYOND_L2_BYTES,
            pace: Pace { runs: 7, run_ms: 3.0 },
        }
    }

    /// Returns the operations in the order of a step. Formats whose blocks do not fit into a matrix are left out.
    pub fn operations(&self, sizes: &Sizes) -> Vec<Operation> {
        let rows = || self.rows.iter().copied();
        let mut list = vec![Operation::Launch];
        list.extend(rows().map(|rows| Operation::Embedding { rows }));
        list.extend(rows().map(|rows| Operation::RmsNorm { rows }));
        list.extend(self.products(sizes, Weights::Plain, &self.dense_rows));
        list.extend(rows().map(|rows| Operation::Qkv { rows }));
        list.extend(self.decodes.iter().copied().map(Operation::AttentionDecode));
        list.extend(self.prompts.iter().copied().map(Operation::AttentionPrefill));
        list.extend(rows().map(|rows| Operation::Swiglu { rows }));
        let draws = [true, false].into_iter().flat_map(|is_greedy| {
            self.draws.iter().map(move |rows| Operation::Sample { rows: *rows, is_greedy })
        });
        list.extend(draws);
        for dtype in DType::ALL.into_iter().filter(|dtype| Tiles::of(*dtype).is_some()) {
            list.extend(self.products(sizes, Weights::Tiles(dtype), &self.quantized_rows));
        }
        list
    }

    fn products(&self, sizes: &Sizes, weights: Weights, rows: &[u32]) -> impl Iterator<Item = Operation> {
        let fitting = Role::ALL.into_iter().filter(move |role| fits(weights, role.shape(sizes)[0]));
        fitting.flat_map(move |role| {
            let all = rows.iter().copied();
            let wanted = all.filter(move |rows| role != Role::Head || *rows <= self.most_logit_rows);
            wanted.map(move |rows| Operation::Product { role, weights, rows })
        })
    }
}

/// Returns whether rows of this many inputs are whole blocks.
fn fits(weights: Weights, inputs: u32) -> bool {
    match weights {
        Weights::Plain => inputs.is_multiple_of(8),
        Weights::Tiles(dtype) => dtype.row_bytes(inputs as usize).is_some(),
    }
}

impl Operation {
    /// Returns the name of the kernel, or of the library's or several kernels' work.
    pub fn name(&self) -> String {
        match self {
            Operation::Launch => "launch".to_owned(),
            Operation::RmsNorm { .. } => "rms_norm".to_owned(),
            Operation::Product { role, weights, .. } => {
                let format = match weights {
                    Weights::Plain => "BF16".to_owned(),
                    Weights::Tiles(dtype) => dtype.to_string(),
                };
                format!("{} {format}", role.name())
            }
            Operation::Qkv { .. } => "qkv".to_owned(),
            Operation::AttentionDecode(_) => "attention_decode".to_owned(),
            Operation::AttentionPrefill(_) => "attention_prefill".to_owned(),
            Operation::Swiglu { .. } => "swiglu".to_owned(),
            Operation::Embedding { .. } => "embedding".to_owned(),
            Operation::Sample { is_greedy: true, .. } => "sample greedy".to_owned(),
            Operation::Sample { is_greedy: false, .. } => "sample top-k, top-p".to_owned(),
        }
    }

    /// Returns the sizes for display.
    pub fn shape(&self, sizes: &Sizes) -> String {
        let Sizes { hidden, heads, kv_heads, head_size, wide, vocabulary } = *sizes;
        match *self {
            Operation::Launch => "empty, in a recording".to_owned(),
            Operation::RmsNorm { rows } | Operation::Embedding { rows } => format!("{rows} x {hidden}"),
            Operation::Product { role, rows, .. } => {
                let [inputs, outputs] = role.shape(sizes);
                format!("{rows} x {inputs} x {outputs}")
            }
            Operation::Qkv { rows } => format!("{rows} x ({heads} + 2 x {kv_heads}) x {head_size}"),
            Operation::AttentionDecode(Contexts { sequences, context, rows, prefix, pages }) => {
                let rows = if rows == 1 { String::new() } else { format!(", {rows} rows each") };
                let prefix = match prefix {
                    Prefix::Own => String::new(),
                    Prefix::Together(shared) => format!(", {shared} shared"),
                    Prefix::Apart(shared) => format!(", {shared} shared, read apart"),
                };
                format!("{sequences} x {context}{rows}{prefix}{}", in_format(pages))
            }
            Operation::AttentionPrefill(Prompt { rows, prefix: 0, pages }) => {
                format!("{rows} causal{}", in_format(pages))
            }
            Operation::AttentionPrefill(Prompt { rows, prefix, pages }) => {
                format!("{rows} after {prefix}{}", in_format(pages))
            }
            Operation::Swiglu { rows } => format!("{rows} x {wide}"),
            Operation::Sample { rows, .. } => format!("{rows} x {vocabulary}"),
        }
    }
}

/// Returns what the name of a format adds to sizes.
fn in_format(pages: PageFormat) -> &'static str {
    match pages {
        PageFormat::Activations => "",
        PageFormat::Fp8 => ", FP8 pages",
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sizes { hidden, heads, kv_heads, head_size, wide, vocabulary } = *self;
        write!(
            f,
            "hidden {hidden}, {heads} query and {kv_heads} key-value heads of {head_size}, \
             feed-forward {wide}, vocabulary {vocabulary}"
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The shape of a small layer into which all formats fit.
    pub(in crate::cuda::rates) const SMALL: Sizes =
        Sizes { hidden: 256, heads: 4, kv_heads: 2, head_size: 64, wide: 256, vocabulary: 320 };

    #[test]
    fn every_operation_and_every_format_that_fits_is_in_the_list_once() {
        let list = Cases::whole().operations(&SMALL);
        // Three rows each of embedding, norm, qkv and swiglu; 4 matrices with 5 numbers of rows and the head with 3;
        // attention; draws; 7 formats of 4 matrices with 4 numbers of rows and of the head with 3.
        assert_eq!(list.len(), 1 + 4 * 3 + (4 * 5 + 3) + 12 + 6 + 2 * 3 + 7 * (4 * 4 + 3));
        let labels: std::collections::BTreeSet<_> =
            list.iter().map(|operation| (operation.name(), operation.shape(&SMALL))).collect();
        assert_eq!(labels.len(), list.len(), "labels must differ");
        let narrow = Sizes { hidden: 288, ..SMALL };
        let of = |format: &str, list: &[Operation]| {
            list.iter().filter(|operation| operation.name().ends_with(format)).count()
        };
        let list = Cases::whole().operations(&narrow);
        assert_eq!((of(" Q4_K", &list), of(" Q4_0", &list)), (2 * 4, 19), "output and down have 256 inputs");
    }
}
