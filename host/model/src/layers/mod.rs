//! The parts that architectures are made of. Each owns its weights and computes on rows of tokens.
//!
//! Invariant: a layer treats every row alone, except attention, which reads its own sequence's pages. Layers know no
//! files and no requests.

pub(crate) mod attention;
pub(crate) mod compute;
pub(crate) mod embedding;
pub(crate) mod linear;
pub(crate) mod mlp;
pub(crate) mod norm;
