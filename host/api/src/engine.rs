//! Figures of the engine over the last hour.

use crate::marker;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// The figures of all models, in columns.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct EngineFigures {
    #[schema(inline)]
    pub object: marker::Engine,
    /// Length of an interval.
    pub interval_ms: u64,
    /// Ends of the intervals, oldest first.
    pub at_ms: Vec<u64>,
    pub models: Vec<ModelFigures>,
}

/// The figures of a model.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ModelFigures {
    pub name: String,
    pub device: String,
    pub replicas: u64,
    pub context_length: u64,
    /// Number of tokens in a page of the KV cache.
    pub page_tokens: u64,
    /// The memory of all replicas, as planned when the model was loaded.
    pub memory: Vec<MemoryUse>,
    /// The memory of each replica.
    #[serde(default)]
    pub replica_memory: Vec<ReplicaMemory>,
    /// One value for each interval, by the name of the figure. A value is `null` if nothing happened in its interval.
    pub columns: BTreeMap<String, Vec<Option<f64>>>,
    /// The columns of each replica, if there are several.
    #[serde(default)]
    pub each_replica: Vec<BTreeMap<String, Vec<Option<f64>>>>,
}

/// Memory of one kind.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MemoryUse {
    /// `weights`, `activations`, `graphs` or `kv`.
    pub kind: String,
    pub bytes: u64,
}

/// The memory of a replica, and where it is.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ReplicaMemory {
    /// The devices that the replica runs on.
    pub device: String,
    /// The memory of the replica. Replicas on one device share its weights, which each of them counts.
    pub memory: Vec<MemoryUse>,
    /// The memory of each rank, if there are several. Buffers that the ranks share are only in that of the replica.
    pub ranks: Vec<RankMemory>,
}

/// The memory of a rank, and where it is.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RankMemory {
    /// Index of the pipeline stage, from 0.
    pub stage: u64,
    /// Index of the part that the rank holds of each weight of the stage, from 0.
    pub shard: u64,
    pub device: String,
    pub memory: Vec<MemoryUse>,
}

/// The figures of one interval.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct EngineSample {
    pub at_ms: u64,
    pub models: Vec<ModelSample>,
}

/// The figures of a model in one interval.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ModelSample {
    pub name: String,
    pub values: BTreeMap<String, Option<f64>>,
    /// The values of each replica, if there are several.
    #[serde(default)]
    pub each_replica: Vec<BTreeMap<String, Option<f64>>>,
}

/// The work of a model's experts and ranks since the model was loaded.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct EngineLoad {
    #[schema(inline)]
    pub object: marker::EngineLoad,
    pub model: String,
    /// The layers that have experts, in the order of the model, with the tokens of all replicas together. Empty for a model
    /// without experts.
    pub experts: Vec<ExpertLayer>,
    /// The ranks of all replicas. Empty for a model that is not divided, and for one whose device does not measure them.
    pub ranks: Vec<RankTime>,
}

/// The tokens of the experts of a layer.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ExpertLayer {
    /// Index of the layer, from 0.
    pub layer: u64,
    /// Number of tokens that each expert computed, in the order of the experts. Each token passes through several.
    pub tokens: Vec<u64>,
}

/// The time of a rank in steps.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RankTime {
    /// Index of the replica, from 0.
    pub replica: u64,
    /// Index of the pipeline stage, from 0.
    pub stage: u64,
    /// Index of the part that the rank holds of each weight of the stage, from 0.
    pub shard: u64,
    pub steps: u64,
    /// Time in steps that the rank did not wait.
    pub computing_us: u64,
    /// Time in steps that the rank waited for other ranks.
    pub waiting_us: u64,
}

/// The owners of a model's KV pages.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KvPageOwners {
    #[schema(inline)]
    pub object: marker::KvPageOwners,
    pub model: String,
    /// Number of tokens in a page.
    pub page_tokens: u64,
    pub total: u64,
    /// Pages that nobody owns.
    pub free: u64,
    pub owners: Vec<KvPageOwner>,
}

/// Pages of one owner.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KvPageOwner {
    pub tenant: String,
    /// `None` for pages that several agents share, or that were computed for requests to the model.
    #[schema(required)]
    pub agent: Option<String>,
    /// `None` for pages that several sessions share.
    #[schema(required)]
    pub session: Option<String>,
    /// `running` for pages of a running sequence, `cached` for prefixes that later requests can use.
    pub kind: String,
    pub pages: u64,
}
