//! Architectures as compositions of layers.

pub(crate) mod transformer;
