//! The layers that architectures are composed of. Each layer owns its weights and computes on rows of tokens.
//!
//! Invariant: a layer treats every row independently, except attention, which reads the pages of the row's own
//! sequence. Layers know nothing of files or requests.

pub(crate) mod attention;
pub(crate) mod cache;
pub(crate) mod compute;
pub(crate) mod embedding;
pub(crate) mod latent;
pub(crate) mod linear;
pub(crate) mod mixture;
pub(crate) mod mlp;
pub(crate) mod norm;
pub(crate) mod router;
