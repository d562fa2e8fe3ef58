//! What an instance may hold: linear memory over all its memories, table entries, instances.

use crate::engine::{CORE_INSTANCES_PER_AGENT, MEMORIES_PER_AGENT, TABLE_ELEMENTS, TABLES_PER_AGENT};
use wasmtime::{ResourceLimiter, Result};

/// Refuses growth over the limit, and remembers that it did: a guest that runs out of memory traps somewhere else.
#[derive(Debug)]
pub(crate) struct MemoryLimiter {
    limit_bytes: usize,
    bytes: usize,
    refused: Option<Refused>,
}

/// What a guest asked too much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Memory,
    Table,
}

impl MemoryLimiter {
    pub(crate) fn new(limit_mb: u32) -> Self {
        MemoryLimiter { limit_bytes: (limit_mb as usize) << 20, bytes: 0, refused: None }
    }

    /// The first refusal.
    pub(super) fn refused(&self) -> Option<Refused> {
        self.refused
    }
}

impl ResourceLimiter for MemoryLimiter {
    fn memory_growing(&mut self, current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        let bytes = self.bytes.saturating_add(desired.saturating_sub(current));
        if bytes > self.limit_bytes {
            self.refused.get_or_insert(Refused::Memory);
            return Ok(false);
        }
        self.bytes = bytes;
        Ok(true)
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        if desired > TABLE_ELEMENTS {
            self.refused.get_or_insert(Refused::Table);
            return Ok(false);
        }
        Ok(true)
    }

    fn instances(&self) -> usize {
        CORE_INSTANCES_PER_AGENT as usize * 2
    }

    fn tables(&self) -> usize {
        TABLES_PER_AGENT as usize
    }

    fn memories(&self) -> usize {
        MEMORIES_PER_AGENT as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_over_all_memories_together() {
        let mut limiter = MemoryLimiter::new(1);
        assert!(limiter.memory_growing(0, 600 << 10, None).expect("no fault"));
        assert!(limiter.memory_growing(0, 400 << 10, None).expect("no fault"));
        assert_eq!(limiter.refused(), None);
        assert!(!limiter.memory_growing(400 << 10, 500 << 10, None).expect("no fault"));
        assert_eq!(limiter.refused(), Some(Refused::Memory));
    }

    #[test]
    fn a_table_over_its_bound_is_refused() {
        let mut limiter = MemoryLimiter::new(1);
        assert!(limiter.table_growing(0, TABLE_ELEMENTS, None).expect("no fault"));
        assert!(!limiter.table_growing(TABLE_ELEMENTS, TABLE_ELEMENTS + 1, None).expect("no fault"));
        assert_eq!(limiter.refused(), Some(Refused::Table));
    }
}
