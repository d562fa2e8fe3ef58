//! Limits on the resources of an instance: linear memory over all its memories, tables and their entries, core instances.

use super::{Counted, Limits, MEMORIES_PER_AGENT, TurnUse};
use std::sync::Arc;
use wasmtime::{ResourceLimiter, Result};

/// Refuses growth beyond the limits, and remembers that it did, because a guest that runs out of memory traps somewhere
/// else.
#[derive(Debug)]
pub(crate) struct InstanceLimiter {
    memory_bytes: usize,
    tables: usize,
    table_elements: usize,
    instances: usize,
    /// Bytes of linear memory in use, over all memories.
    taken_bytes: usize,
    refused: Option<Refused>,
    used: Arc<TurnUse>,
}

/// The resource whose growth was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Memory,
    Table,
}

impl InstanceLimiter {
    pub(crate) fn new(limits: &Limits, used: Arc<TurnUse>) -> Self {
        InstanceLimiter {
            memory_bytes: (limits.memory_mb as usize) << 20,
            tables: limits.tables as usize,
            table_elements: limits.table_elements as usize,
            instances: limits.instances as usize,
            taken_bytes: 0,
            refused: None,
            used,
        }
    }

    /// Returns the first refusal.
    pub(crate) fn refused(&self) -> Option<Refused> {
        self.refused
    }
}

impl ResourceLimiter for InstanceLimiter {
    fn memory_growing(&mut self, current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        let bytes = self.taken_bytes.saturating_add(desired.saturating_sub(current));
        if bytes > self.memory_bytes {
            self.refused.get_or_insert(Refused::Memory);
            return Ok(false);
        }
        self.taken_bytes = bytes;
        self.used.set(Counted::MemoryBytes, bytes as u64);
        Ok(true)
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        if desired > self.table_elements {
            self.refused.get_or_insert(Refused::Table);
            return Ok(false);
        }
        Ok(true)
    }

    fn instances(&self) -> usize {
        self.instances
    }

    fn tables(&self) -> usize {
        self.tables
    }

    fn memories(&self) -> usize {
        MEMORIES_PER_AGENT as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_limit_covers_all_memories_together() {
        let used = Arc::<TurnUse>::default();
        let limits = Limits { memory_mb: 1, ..Limits::default() };
        let mut limiter = InstanceLimiter::new(&limits, used);
        assert!(limiter.memory_growing(0, 600 << 10, None).expect("no fault"));
        assert!(limiter.memory_growing(0, 400 << 10, None).expect("no fault"));
        assert_eq!(limiter.refused(), None);
        assert!(!limiter.memory_growing(400 << 10, 500 << 10, None).expect("no fault"));
        assert_eq!(limiter.refused(), Some(Refused::Memory));
    }

    #[test]
    fn a_table_over_its_limit_is_refused() {
        let limits = Limits { table_elements: 10, ..Limits::default() };
        let mut limiter = InstanceLimiter::new(&limits, Arc::default());
        assert!(limiter.table_growing(0, 10, None).expect("no fault"));
        assert!(!limiter.table_growing(10, 11, None).expect("no fault"));
        assert_eq!(limiter.refused(), Some(Refused::Table));
    }
}
