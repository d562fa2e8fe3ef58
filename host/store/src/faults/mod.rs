//! Fault injection for tests: statements and commits that fail, are slow, or succeed without reporting it.
//!
//! None of this exists without the feature `faults`; the calls then compile to nothing.

#[cfg(any(test, feature = "faults"))]
mod enabled;
#[cfg(any(test, feature = "faults"))]
pub use enabled::{Fault, Faults, Moment};

#[cfg(not(any(test, feature = "faults")))]
mod disabled;
#[cfg(not(any(test, feature = "faults")))]
pub(crate) use disabled::{Faults, Moment};
