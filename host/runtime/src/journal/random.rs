//! Random numbers of a guest, drawn from the turn's seed: a turn that is run again draws the same.

use super::Journal;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// A new turn's seed, from the operating system.
pub(crate) fn seed() -> Vec<u8> {
    rand::random::<[u8; 32]>().to_vec()
}

/// A generator of its own for each purpose; cryptographically strong.
pub(crate) fn random(journal: &Journal, purpose: &str) -> impl Rng + Send + 'static {
    StdRng::from_seed(journal.derive(purpose))
}
