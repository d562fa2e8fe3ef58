//! What tests make of a database: one whose statements and commits fail, are slow, or succeed and do not say so.
//!
//! Without the feature `faults` there is nothing of it, and the calls compile to nothing.

#[cfg(any(test, feature = "faults"))]
mod enabled;
#[cfg(any(test, feature = "faults"))]
pub use enabled::{Fault, Faults, Moment};

#[cfg(not(any(test, feature = "faults")))]
mod disabled;
#[cfg(not(any(test, feature = "faults")))]
pub(crate) use disabled::{Faults, Moment};
