//! What an instance may hold: linear memory over all its memories, table entries, instances.

use crate::engine::{CORE_INSTANCES_PER_AGENT, MEMORIES_PER_AGENT, TABLE_ELEMENTS, TABLES_PER_AGENT};
use wasmtime::{ResourceLimiter, Result};

/// Refuses growth over the limit, and remembers that it did: a guest that runs out of memory traps somewhere else.
#[derive(Debug)]
pub(crate) struct MemoryLimiter {
    limit_bytes: usize,
    bytes: usize,
    refused: bool,
}

impl MemoryLimiter {
    pub(crate) fn new(limit_mb: u32) -> Self {
        MemoryLimiter { limit_bytes: (limit_mb as usize) << 20, bytes: 0, refused: false }
    }

    pub(super) fn refused(&self) -> bool {
        self.refused
    }
}

impl ResourceLimiter for MemoryLimiter {
    fn memory_growing(&mut self, current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        let bytes = self.bytes.saturating_add(desired.saturating_sub(current));
        if bytes > self.limit_bytes {
            self.refused = true;
            return Ok(false);
        }
        self.bytes = bytes;
        Ok(true)
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        Ok(desired <= TABLE_ELEMENTS)
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
        assert!(!limiter.refused());
        assert!(!limiter.memory_growing(400 << 10, 500 << 10, None).expect("no fault"));
        assert!(limiter.refused());
    }
}
