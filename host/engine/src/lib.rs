//! The engine decides what runs next. It holds the sequences, the scheduler, the KV pages, the prefix tree, the
//! output constraints and the conversations.
//!
//! An engine is one model with one or more replicas. One loop thread per replica owns all of that; callers hold
//! a cheap [`Engine`] handle, whose router chooses the replica, and read a [`TokenStream`]. The crate holds no
//! tensors: it hands a `Batch` of token ids and page numbers to an `Executor` and gets token ids back. It knows
//! nothing of HTTP, agents or storage.
//!
//! Read the modules in the order of a request: `handle` → `router` → `replica` → `engine_loop` → `scheduler` →
//! `kv` → `sequence` → `stream`.

#![forbid(unsafe_code)]

mod abilities;
mod agent_metrics;
mod cancel;
pub mod chat;
mod constraint;
mod detokenize;
mod disk_pages;
mod distribution;
mod draft;
mod engine_loop;
mod error;
mod event;
mod fairness;
mod generation_span;
mod handle;
mod health;
mod json_pointer;
mod keyed_hash;
mod kv;
mod live_setting;
mod lookahead;
mod lost_executor;
mod mask_worker;
pub mod metric;
mod model;
mod model_info;
mod model_set;
mod observation;
mod options;
mod page_giving;
mod page_peers;
mod queue_shares;
mod recovery;
mod replica;
mod request;
mod rollback;
mod router;
mod scheduler;
mod sequence;
mod sequence_id;
mod service;
mod speculation;
mod stats;
mod step;
mod stream;
mod submission;
mod telemetry;
#[cfg(test)]
mod tests;
mod timeline;
mod unreported;

pub use abilities::Abilities;
pub use cancel::Cancel;
pub use constraint::{CheckedValue, SchemaNotes};
pub use disk_pages::{EraseScope, Warmed};
pub use distribution::Counts;
pub use error::{EngineError, UpstreamFault};
pub use event::{FinishReason, Finished, RolledBack, Timing, Token, TokenEvent, TokenLogprob, Usage};
pub use fairness::{TokenMeter, Weights};
pub use handle::Engine;
pub use live_setting::LiveSetting;
pub use model::{Model, RemoteInfo, RemoteModel};
pub use model_info::{ModelInfo, ReplicaMemory};
pub use model_set::{
    DEFAULT_LOAD_WAIT, LoadProgress, Loader, LocalModel, ModelChanges, ModelSet, ModelState, OtherModels,
    ServedModel, WeakModelSet, check_name,
};
pub use observation::{
    Attempt, Attempts, Ending, Observation, Observer, PendingAttempt, PromptMessage, RequestObserver,
    SpentTokens, ToolCallRef,
};
pub use options::{DraftLimits, EngineOptions, Routing, Speculation};
pub use page_peers::{PagePeers, PageSink, PrefillOrder, PrefillReport, PrefillView, PrefilledPages};
pub use request::{
    Affinity, AnswerMarkup, BeforeCalls, CallMarkup, CallPart, CallableTool, Constraint, GenerateRequest,
    ObjectMarkup, ParameterMarkup, PartsMarkup, Priority, PublicPart, Thinking, ToolCallForm,
};
pub use router::policy;
pub use skep_cache::{
    Digest, DiskTier, EraseFilter, FetchEnding, ImageError, LayoutId, MAX_ASKED_PAGES, PageNamer,
    PageQuestion, PageRead, PageStream, PageWrite, Pin, PinError, PinStatus, QuestionError, SealingSecret,
    TierError, TierOptions, TierShares, TierStatus, TransferRate, TransitSeal,
};
pub use skep_model::{
    LayerLoad, MemoryPlan, ModelDigest, OfDevice, RankMemory, RankTime, Sampling, SpecialTokens,
    device_figures,
};
pub use skep_validator::{Dialect, Invalid, SchemaValidator};
pub use stats::{AheadStats, EngineStats, EngineTimes, PageOwner};
pub use stream::TokenStream;
pub use timeline::{Phase, StepRecord, StepWork, Timeline};
pub use unreported::{Unreported, UnreportedEntry, UnreportedUse};
