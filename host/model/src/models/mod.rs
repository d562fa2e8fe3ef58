//! Architectures as compositions of layers, and what they cost.

pub(crate) mod cost;
pub(crate) mod transformer;
