//! The memory that a loaded model takes, decided before any of it is allocated.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// Memory by use, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    pub weight_bytes: u64,
    pub activation_bytes: u64,
    /// Device memory for recorded graphs and for what the driver allocates while it runs.
    pub graph_bytes: u64,
    pub kv_bytes: u64,
}

/// The memory that one rank of an executor takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMemory {
    /// Index of the pipeline stage.
    pub stage: usize,
    /// Index of the part that the rank holds of each weight of the stage.
    pub shard: usize,
    /// Human-readable name of the device: `cpu`, or `cuda:0 (NVIDIA H200)`.
    pub device: String,
    pub memory: MemoryPlan,
}

/// The memory of one rank before its number of KV pages is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankPlan {
    /// Everything but the pages.
    pub(crate) memory: MemoryPlan,
    pub(crate) page_bytes: u64,
    /// The part of a page that layers with a window take, and the number of pages that have it. `None` means all.
    pub(crate) windowed: Option<(u64, u64)>,
    /// Number of pages that hold no sequence.
    pub(crate) spare_pages: u64,
}

impl RankPlan {
    /// Returns the number of pages that fit into the memory that is left, without the spare ones.
    pub(crate) fn pages(&self, left: u64) -> u64 {
        let whole = left / self.page_bytes.max(1);
        let pages = match self.windowed {
            Some((windowed_bytes, kept)) if whole > kept => {
                let rest = left.saturating_sub(kept.saturating_mul(self.page_bytes));
                kept.saturating_add(rest / self.page_bytes.saturating_sub(windowed_bytes).max(1))
            }
            _ => whole,
        };
        pages.saturating_sub(self.spare_pages)
    }
}

impl MemoryPlan {
    /// Returns the memory that several executors take together. Each plan comes with the device
    /// that it is for; executors on the same device share their weights.
    pub fn of_replicas<'a>(plans: impl IntoIterator<Item = (&'a str, &'a MemoryPlan)>) -> MemoryPlan {
        let mut weights: BTreeMap<&str, u64> = BTreeMap::new();
        let mut sum = MemoryPlan::default();
        for (device, plan) in plans {
            let shared = weights.entry(device).or_default();
            *shared = plan.weight_bytes.max(*shared);
            sum.activation_bytes = sum.activation_bytes.saturating_add(plan.activation_bytes);
            sum.graph_bytes = sum.graph_bytes.saturating_add(plan.graph_bytes);
            sum.kv_bytes = sum.kv_bytes.saturating_add(plan.kv_bytes);
        }
        MemoryPlan { weight_bytes: weights.values().sum(), ..sum }
    }

    /// Returns the memory of both together.
    pub(crate) fn plus(self, other: &MemoryPlan) -> MemoryPlan {
        MemoryPlan {
            weight_bytes: self.weight_bytes.saturating_add(other.weight_bytes),
            activation_bytes: self.activation_bytes.saturating_add(other.activation_bytes),
            graph_bytes: self.graph_bytes.saturating_add(other.graph_bytes),
            kv_bytes: self.kv_bytes.saturating_add(other.kv_bytes),
        }
    }

    /// Returns the sum of all uses in bytes. It saturates instead of overflowing.
    pub fn total_bytes(&self) -> u64 {
        let rest = self.activation_bytes.saturating_add(self.graph_bytes).saturating_add(self.kv_bytes);
        self.weight_bytes.saturating_add(rest)
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let (weights, activations) = (mib(self.weight_bytes), mib(self.activation_bytes));
        write!(f, "weights {weights:.1} MiB + activations {activations:.1} MiB")?;
        if self.graph_bytes > 0 {
            write!(f, " + graphs {:.1} MiB", mib(self.graph_bytes))?;
        }
        write!(f, " + KV cache {:.1} MiB = {:.1} MiB", mib(self.kv_bytes), mib(self.total_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displays_every_use_and_the_total_on_one_line() {
        let plan = MemoryPlan {
            weight_bytes: 1 << 20,
            activation_bytes: 1 << 19,
            kv_bytes: 1 << 21,
            ..MemoryPlan::default()
        };
        assert_eq!(plan.to_string(), "weights 1.0 MiB + activations 0.5 MiB + KV cache 2.0 MiB = 3.5 MiB");
        let with_graphs = MemoryPlan { graph_bytes: 1 << 20, ..plan };
        assert!(with_graphs.to_string().contains("0.5 MiB + graphs 1.0 MiB + KV cache 2.0 MiB = 4.5 MiB"));
    }

    #[test]
    fn replicas_on_the_same_device_count_their_weights_once() {
        let plan = MemoryPlan { weight_bytes: 100, activation_bytes: 10, kv_bytes: 1, graph_bytes: 2 };
        let together = MemoryPlan { weight_bytes: 100, activation_bytes: 30, kv_bytes: 3, graph_bytes: 6 };
        assert_eq!(MemoryPlan::of_replicas([("cpu", &plan); 3]), together);
        let apart = MemoryPlan::of_replicas([("cuda:0", &plan), ("cuda:1", &plan), ("cuda:1", &plan)]);
        assert_eq!(apart, MemoryPlan { weight_bytes: 200, ..together });
    }
}
