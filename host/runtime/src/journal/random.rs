//! The random numbers of a guest, drawn from the turn's seed so that a rerun draws the same
//! numbers.

use super::Journal;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Returns a seed for a new turn, from the operating system.
pub(crate) fn seed() -> Vec<u8> {
    rand::random::<[u8; 32]>().to_vec()
}

/// Returns a cryptographically strong generator, independent for each purpose.
pub(crate) fn random(journal: &Journal, purpose: &str) -> impl Rng + Send + 'static {
    StdRng::from_seed(journal.derive(purpose))
}
