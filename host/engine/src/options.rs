//! The operator's settings of an engine: its bounds, its routing and its speculative decoding.
//!
//! The options are plain values, which the engine checks when it starts. This module knows nothing about the parts
//! that use them.

use std::sync::Arc;
use std::time::Duration;

use skep_cache::DiskTier;

use crate::{LiveSetting, PagePeers, Timeline, TokenMeter, Weights};

/// The bounds and settings of an engine.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Maximum number of requests that wait at each replica; further ones get `Busy`.
    pub max_queue: usize,
    /// Maximum number of sequences that run at the same time on each replica.
    pub max_sequences: usize,
    /// Maximum number of tokens of a sequence, if it is to be less than the model's context.
    pub context: Option<usize>,
    /// Token budget of one step: decodes come first, prefill chunks use what is left. A smaller budget keeps
    /// the time between tokens short while long prompts arrive.
    pub step_tokens: Option<usize>,
    /// Target duration of a step that computes prompts alongside decodes, and hence of the time between tokens
    /// while long prompts arrive. `None` means four times the duration of decodes alone, and at least 30 ms.
    pub step_target: Option<Duration>,
    /// Deadline of requests that set none.
    pub default_deadline: Duration,
    /// The policy that spreads requests over replicas.
    pub routing: Routing,
    pub speculation: Speculation,
    /// The shares of tenants and agents in each replica while demand exceeds capacity.
    pub weights: LiveSetting<Weights>,
    /// The name of the markup in which the model writes calls; `None` takes the one that its template shows.
    pub markup: Option<&'static str>,
    /// Receives the number of tokens that each tenant got.
    pub meter: Option<Arc<dyn TokenMeter>>,
    /// Records every step.
    pub timeline: Option<Arc<Timeline>>,
    /// Keeps KV pages on disk.
    pub disk: Option<Arc<DiskTier>>,
    /// Gets KV pages from other hosts. Where there is a disk, they name its pages alike.
    pub peers: Option<Arc<dyn PagePeers>>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            max_queue: 256,
            max_sequences: 32,
            context: None,
            step_tokens: None,
            step_target: None,
            default_deadline: Duration::from_secs(600),
            routing: Routing::default(),
            speculation: Speculation::Off,
            weights: LiveSetting::default(),
            markup: None,
            meter: None,
            timeline: None,
            disk: None,
            peers: None,
        }
    }
}

/// The policy that spreads requests over the replicas of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Routing {
    /// Routes by session, then by cached prefix and load.
    #[default]
    Affinity,
    /// Routes in turn, whatever is cached where. This is for comparison, and for work without sessions or
    /// common prefixes.
    RoundRobin,
}

/// The speculative decoding of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speculation {
    /// Looks up drafts where the executor finishes a step before the next one is planned, as on the CPU. A device that
    /// begins steps ahead draws their tokens itself, and drafts would hold it up.
    Auto,
    /// Drafts only what the output format predicts.
    Off,
    /// Also drafts the tokens that followed the same tokens earlier in the prompt or the output.
    PromptLookup(DraftLimits),
}

/// Bounds on drafting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftLimits {
    /// Maximum number of draft tokens of one sequence in one step.
    pub max_tokens: usize,
    /// Whether to draft only as much as is expected to pay, by the measured time of steps and the sequence's
    /// own history; that may be nothing. False drafts everything that can be predicted, to measure what drafts
    /// are worth.
    pub adaptive: bool,
}

impl Default for DraftLimits {
    fn default() -> Self {
        DraftLimits { max_tokens: 15, adaptive: true }
    }
}

impl Speculation {
    /// Returns prompt lookup with the default limits.
    pub fn prompt_lookup() -> Self {
        Speculation::PromptLookup(DraftLimits::default())
    }
}
