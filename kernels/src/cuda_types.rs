//! Plain values about CUDA that errors name: architectures, versions and the layouts of products.
//!
//! The module holds no device and calls no library, so that errors and everything about devices can use it.

use std::fmt;

/// A GPU architecture that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Architecture {
    Sm80,
    Sm86,
    Sm89,
    Sm90a,
    Sm100,
    Sm120,
}

impl Architecture {
    /// All architectures that kernels are compiled for.
    pub const ALL: [Architecture; 6] = [
        Architecture::Sm80,
        Architecture::Sm86,
        Architecture::Sm89,
        Architecture::Sm90a,
        Architecture::Sm100,
        Architecture::Sm120,
    ];

    /// Returns the name that NVRTC uses.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Sm80 => "sm_80",
            Architecture::Sm86 => "sm_86",
            Architecture::Sm89 => "sm_89",
            Architecture::Sm90a => "sm_90a",
            Architecture::Sm100 => "sm_100",
            Architecture::Sm120 => "sm_120",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The version that `nvrtcVersion` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NvrtcVersion {
    pub major: i32,
    pub minor: i32,
}

impl fmt::Display for NvrtcVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Everything about a product that the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductLayout {
    pub weights: MatrixLayout,
    pub x: MatrixLayout,
    pub y: MatrixLayout,
    pub bias: bool,
    /// The alignment common to all addresses, in bytes.
    pub alignment: u32,
}

/// A matrix as the library sees it, with columns that start `stride` values apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixLayout {
    pub format: Format,
    pub rows: u32,
    pub columns: u32,
    pub stride: u32,
}

/// The number format of a matrix that cuBLASLt reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    Bf16,
    F16,
    F32,
}

impl fmt::Display for ProductLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> std::fmt::Result {
        let ProductLayout { weights, x, y, bias, alignment } = *self;
        let (rows, inputs, outputs) = (x.columns, weights.rows, weights.columns);
        let bias = if bias { " and a bias" } else { "" };
        write!(f, "{rows} rows of {inputs} inputs and {outputs} outputs ({:?} to {:?}", x.format, y.format)?;
        write!(f, ", rows {} apart, aligned to {alignment} bytes){bias}", y.stride)
    }
}
