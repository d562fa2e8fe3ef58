//! Random numbers from the host.
//!
//! They are drawn from the turn's seed, so that a turn that runs again after a restart draws the same
//! numbers.

#[cfg(target_arch = "wasm32")]
#[allow(unsafe_code)]
mod wasi;

use std::ops::RangeInclusive;

#[cfg(not(target_arch = "wasm32"))]
use crate::host::Host;

/// A source of random numbers. The agent needs the line `random = true` under `[grants]` in `agent.toml`.
#[derive(Clone, Copy)]
pub struct Random<'a> {
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) host: &'a dyn Host,
    #[cfg(target_arch = "wasm32")]
    pub(crate) turn: std::marker::PhantomData<&'a ()>,
}

impl Random<'_> {
    /// Returns 64 uniformly random bits.
    pub fn bits(&self) -> u64 {
        #[cfg(not(target_arch = "wasm32"))]
        return self.host.random();
        // This does not go through the host's trait: a component imports everything that its code can reach,
        // and an agent that draws no random numbers must not need the grant.
        #[cfg(target_arch = "wasm32")]
        return wasi::random();
    }

    /// Returns a uniformly random number of the range: `cx.random().number(1..=6)`.
    ///
    /// # Panics
    /// Panics if the range is empty.
    pub fn number(&self, range: RangeInclusive<u32>) -> u32 {
        let (first, last) = range.into_inner();
        assert!(first <= last, "the range from {first} to {last} is empty");
        let count = u64::from(last - first) + 1;
        // Draws beyond the last whole multiple of `count` would make the first numbers more likely.
        let fair = u64::MAX - u64::MAX % count;
        loop {
            let bits = self.bits();
            if bits < fair {
                return first + (bits % count) as u32;
            }
        }
    }

    /// Returns one of the items, or `None` if there are none.
    pub fn pick<'i, T>(&self, items: &'i [T]) -> Option<&'i T> {
        let last = u32::try_from(items.len()).unwrap_or(u32::MAX).checked_sub(1)?;
        items.get(self.number(0..=last) as usize)
    }
}
