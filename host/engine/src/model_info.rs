//! The properties of a running model that callers and request checks need, as fixed when its engine started.

use skep_model::{MemoryPlan, ModelDigest, RankMemory, Sampling};

/// The memory of one replica, and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaMemory {
    /// The devices that the replica runs on, for people.
    pub device: String,
    /// The memory of the replica. Replicas on one device share its weights, which each of them counts.
    pub memory: MemoryPlan,
    /// The memory of each of its ranks, if there are several.
    pub ranks: Vec<RankMemory>,
}

/// The properties of the model that callers need.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    pub name: String,
    /// Distinguishes the model from an earlier one of the same name.
    pub digest: ModelDigest,
    /// Maximum number of tokens of a sequence: those that the model was made for, as far as the settings allow them and the
    /// KV cache holds them.
    pub context_length: usize,
    /// Number of tokens that the model was made for.
    pub full_context_length: usize,
    pub vocabulary_size: usize,
    pub eos: Vec<u32>,
    pub bos: Option<u32>,
    pub add_bos: bool,
    pub replicas: usize,
    /// The device that the model runs on, for people; several if its replicas run on different ones.
    pub device: String,
    /// The memory of all replicas.
    pub memory: MemoryPlan,
    pub replica_memory: Vec<ReplicaMemory>,
    /// The sampling parameters of a request that sets none.
    pub sampling: Sampling,
    /// The name of the markup in which the model writes calls, if it was chosen when the engine started. Otherwise the
    /// template shows it.
    pub markup: Option<&'static str>,
    /// The format of the most bytes of the weights, such as `Q8_0`, if it is known.
    pub weights: Option<String>,
    pub created_unix_s: u64,
}
