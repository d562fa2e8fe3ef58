//! Model architectures, composed from layers, and their measured cost.

pub(crate) mod cost;
mod load;
pub(crate) mod parts;
pub(crate) mod transformer;
