//! An upstream and its models.

use std::{
    fmt,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use skep_engine::{
    Abilities, EngineError, ModelDigest, RemoteInfo, RemoteModel,
    chat::{ChatOptions, Input, Reasoning, RemoteStream},
};
use tokio::time::Instant;

use crate::{
    answer::Asking,
    breaker::Breaker,
    event_sink,
    http::Http,
    limits::Limits,
    options::{
        OptionsError, ReasoningControl, StructuredOutput, UpstreamKind, UpstreamModelOptions, UpstreamOptions,
    },
    question,
    shared::Shared,
};

/// A server that computes models. Clones share its connections, limits and circuit breaker.
#[derive(Clone)]
pub struct Upstream(Arc<Shared>);

/// One model of an upstream.
pub struct UpstreamModel {
    shared: Arc<Shared>,
    index: usize,
    info: RemoteInfo,
}

impl Upstream {
    /// Checks the options. Nothing is sent before the first request.
    pub fn new(options: UpstreamOptions) -> Result<Self, OptionsError> {
        let base = options.check()?;
        let http = Http::new(&base, &options.timeouts)?;
        let limits = Limits::new(&options.limits);
        let breaker = Breaker::new(&options.name, options.breaker);
        Ok(Upstream(Arc::new(Shared { options, base, http, limits, breaker })))
    }

    /// Returns the options that the upstream was created with.
    pub fn options(&self) -> &UpstreamOptions {
        &self.0.options
    }

    /// Returns the models, in the order of the options.
    pub fn models(&self) -> Vec<Arc<UpstreamModel>> {
        (0..self.0.options.models.len()).map(|index| Arc::new(self.model(index))).collect()
    }

    fn model(&self, index: usize) -> UpstreamModel {
        let UpstreamOptions { name, models, .. } = &self.0.options;
        let model = &models[index];
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let info = RemoteInfo {
            name: format!("{name}/{}", model.name),
            digest: ModelDigest::remote(self.0.base.as_str(), model.remote_name()),
            context_length: model.context_length,
            created_unix_s: now.as_secs(),
        };
        UpstreamModel { shared: self.0.clone(), index, info }
    }
}

impl UpstreamModel {
    /// Returns the options of this model.
    pub fn options(&self) -> &UpstreamModelOptions {
        &self.shared.options.models[self.index]
    }
}

impl RemoteModel for UpstreamModel {
    fn info(&self) -> &RemoteInfo {
        &self.info
    }

    fn abilities(&self) -> Abilities {
        let UpstreamModelOptions { capabilities, max_output, .. } = self.options();
        Abilities {
            tools: capabilities.tools,
            json_schema: capabilities.structured != StructuredOutput::None,
            images: capabilities.images,
            reasoning: None,
            tokens: false,
            max_output: *max_output,
        }
    }

    fn most_asks(&self, options: &ChatOptions) -> u32 {
        let has_schema =
            !options.unconstrained && (options.output.is_some() || question::calls_tools(options));
        if has_schema { 1 + self.shared.options.retries.form_attempts } else { 1 }
    }

    fn ignores_reasoning(&self, options: &ChatOptions) -> bool {
        let Reasoning { enabled, effort, variables, .. } = &options.reasoning;
        let is_off = *enabled == Some(false);
        let sends = match self.options().reasoning_control {
            ReasoningControl::None => false,
            ReasoningControl::Template => enabled.is_some() || !variables.is_empty(),
            ReasoningControl::Effort => {
                effort.is_some() || (is_off && self.shared.options.kind == UpstreamKind::OpenAi)
            }
            ReasoningControl::Budget => is_off || question::thinking_budget(options, usize::MAX).is_some(),
        };
        options.reasoning != Reasoning::default() && !sends
    }

    fn check(&self, options: &ChatOptions) -> Result<(), EngineError> {
        question::check(self.shared.options.kind, self.options(), options)
    }

    fn accepts(&self, input: &Input) -> Result<(), EngineError> {
        question::accepts(self.shared.options.kind, self.options(), input)
    }

    fn ask(&self, input: Input, options: ChatOptions) -> RemoteStream {
        let asking = Asking::new(self.shared.clone(), self.index, &self.info.name, input, options);
        event_sink::stream(move |sink| asking.run(sink))
    }

    fn free_slots(&self) -> usize {
        match self.problem() {
            Some(_) => 0,
            None => self.shared.limits.free(),
        }
    }

    fn problem(&self) -> Option<String> {
        self.shared.breaker.problem(Instant::now())
    }
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Upstream").field(&self.0.options).finish()
    }
}

impl fmt::Debug for UpstreamModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UpstreamModel").field(&self.info.name).finish()
    }
}
