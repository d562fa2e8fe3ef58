//! Counts what requests to models use, however they end.

use super::UsageDay;
use skep_engine::{
    Usage,
    chat::{ChatMessage, ChatOptions},
};
use skep_store::{UsageCounts, UsageRow};
use std::collections::BTreeMap;

/// Tokens that a chat template may add to a prompt, and to each of its messages.
const TEMPLATE_TOKENS: usize = 256;
const TOKENS_PER_MESSAGE: usize = 32;

/// The origin of requests to models.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) tenant: String,
    /// Id of the key that sent the request.
    pub(crate) key: Option<String>,
    pub(crate) agent: Option<String>,
    pub(crate) session: Option<String>,
}

/// Usage by model.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelUse(BTreeMap<String, UsageCounts>);

/// Maximum number of tokens that a request can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorstCase {
    pub input_tokens: usize,
    pub output_tokens: u32,
}

impl WorstCase {
    /// Returns the most tokens of a chat. `limit` is the length of the model's context; tools and images may take all
    /// of it, because their tokens are not those of a text.
    pub fn of_chat(messages: &[ChatMessage], options: &ChatOptions, limit: usize) -> Self {
        let has_images = messages.iter().any(|message| !message.images.is_empty());
        let texts = match has_images || !options.tools.is_empty() {
            true => limit,
            false => messages.iter().map(ChatMessage::text_bytes).sum(),
        };
        let input_tokens = most_prompt_tokens(texts, messages.len(), limit);
        WorstCase { input_tokens, output_tokens: most_output(options.max_tokens, limit) }
    }

    /// Returns the most tokens of a text and of its continuation.
    pub fn of_text(text: &str, max_tokens: Option<usize>, limit: usize) -> Self {
        WorstCase { input_tokens: text.len().min(limit), output_tokens: most_output(max_tokens, limit) }
    }
}

fn most_output(max_tokens: Option<usize>, limit: usize) -> u32 {
    u32::try_from(max_tokens.unwrap_or(limit)).unwrap_or(u32::MAX)
}

/// The usage of one request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum RequestUse {
    /// The model has not begun, so nothing was used.
    #[default]
    Waiting,
    /// The model computes. If the request is cut off now, this is the estimate.
    Running(Usage),
    Finished(Usage),
}

impl Source {
    /// Returns the rows for what was used.
    pub(crate) fn rows(&self, day: UsageDay, used: &ModelUse) -> Vec<UsageRow> {
        let Source { tenant, key, agent, session } = self;
        let row = |(model, counts): (&String, &UsageCounts)| UsageRow {
            day: day.number(),
            tenant: tenant.clone(),
            key: key.clone(),
            agent: agent.clone(),
            session: session.clone(),
            model: model.clone(),
            counts: *counts,
        };
        used.0.iter().map(row).collect()
    }
}

impl ModelUse {
    pub(crate) fn add(&mut self, model: &str, counts: &UsageCounts) {
        if counts.requests > 0 {
            self.0.entry(model.to_owned()).or_default().add(counts);
        }
    }
}

impl RequestUse {
    pub(crate) fn started(&mut self, prompt_tokens: u32, cached_tokens: u32) {
        let completion_tokens = match self {
            // A request that continues has produced tokens before.
            RequestUse::Running(usage) => usage.completion_tokens,
            RequestUse::Waiting | RequestUse::Finished(_) => 0,
        };
        let usage = Usage { prompt_tokens, cached_tokens, completion_tokens, ..Usage::default() };
        *self = RequestUse::Running(usage);
    }

    /// Sets the number of tokens produced so far.
    pub(crate) fn produced(&mut self, tokens: u32) {
        let mut usage = match self {
            RequestUse::Running(usage) => *usage,
            RequestUse::Waiting if tokens > 0 => Usage::default(),
            RequestUse::Waiting | RequestUse::Finished(_) => return,
        };
        usage.completion_tokens = tokens;
        *self = RequestUse::Running(usage);
    }

    pub(crate) fn finished(&mut self, usage: &Usage) {
        *self = RequestUse::Finished(*usage);
    }

    /// Sets the estimate for a request that was cut off in an earlier run.
    pub(crate) fn was_cut(&mut self, estimate: &Usage) {
        *self = RequestUse::Running(*estimate);
    }

    /// Returns the estimate for a request that does not continue.
    pub(crate) fn estimate(&self) -> Option<Usage> {
        match self {
            RequestUse::Running(usage) => Some(*usage),
            RequestUse::Waiting | RequestUse::Finished(_) => None,
        }
    }

    /// Returns the number of tokens that were produced, whether they were kept or not.
    pub(crate) fn produced_tokens(&self) -> u64 {
        match self {
            RequestUse::Waiting => 0,
            RequestUse::Running(usage) | RequestUse::Finished(usage) => usage.produced_tokens() as u64,
        }
    }

    /// Returns the counts of a request that does not continue.
    pub(crate) fn counts(&self) -> UsageCounts {
        let of = |usage: &Usage| UsageCounts {
            requests: 1,
            input_tokens: usage.prompt_tokens.into(),
            cached_tokens: usage.cached_tokens.into(),
            output_tokens: usage.completion_tokens.into(),
            ..UsageCounts::default()
        };
        match self {
            RequestUse::Waiting => UsageCounts::default(),
            RequestUse::Finished(usage) => of(usage),
            RequestUse::Running(usage) => {
                let counts = of(usage);
                UsageCounts {
                    estimated_requests: 1,
                    estimated_input_tokens: counts.input_tokens,
                    estimated_output_tokens: counts.output_tokens,
                    ..counts
                }
            }
        }
    }
}

/// Returns the most tokens that a prompt of this size can have: a token has at least one byte. `limit` is the
/// length of the model's context.
pub(crate) fn most_prompt_tokens(text_bytes: usize, messages: usize, limit: usize) -> usize {
    let added = messages.saturating_mul(TOKENS_PER_MESSAGE).saturating_add(TEMPLATE_TOKENS);
    text_bytes.saturating_add(added).min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_engine::chat::{Image, ImageSource, ToolSpec};

    #[test]
    fn images_and_tools_may_take_the_whole_context() {
        let limit = 10_000;
        let of = |message: ChatMessage, options: &ChatOptions| WorstCase::of_chat(&[message], options, limit);
        let (plain, options) =
            (ChatMessage::user("hello"), ChatOptions { max_tokens: Some(7), ..ChatOptions::default() });
        assert_eq!(of(plain.clone(), &options), WorstCase { input_tokens: 5 + 32 + 256, output_tokens: 7 });
        let source = ImageSource::Url("https://a/b".to_owned().into());
        let images = vec![Image { at: 0, part: 0, source, detail: None }];
        assert_eq!(of(ChatMessage { images, ..plain.clone() }, &options).input_tokens, limit);
        let tool =
            ToolSpec { name: "f".into(), description: String::new(), parameters: serde_json::json!({}) };
        let calling = ChatOptions { tools: vec![tool], ..ChatOptions::default() };
        assert_eq!(of(plain, &calling), WorstCase { input_tokens: limit, output_tokens: 10_000 });
        assert_eq!(WorstCase::of_text("hello", Some(3), 4), WorstCase { input_tokens: 4, output_tokens: 3 });
    }

    #[test]
    fn a_request_that_was_cut_is_an_estimate_and_one_that_never_began_is_nothing() {
        let mut request = RequestUse::default();
        request.produced(0);
        assert_eq!(request.counts(), UsageCounts::default());
        request.started(10, 4);
        request.produced(3);
        let cut = UsageCounts {
            requests: 1,
            input_tokens: 10,
            cached_tokens: 4,
            output_tokens: 3,
            estimated_requests: 1,
            estimated_input_tokens: 10,
            estimated_output_tokens: 3,
        };
        assert_eq!(request.counts(), cut);
        let mut again = RequestUse::default();
        again.was_cut(&request.estimate().expect("it has begun"));
        assert_eq!(again.counts(), cut, "a rerun counts the same");
        request.finished(&Usage {
            prompt_tokens: 10,
            cached_tokens: 4,
            completion_tokens: 5,
            ..Usage::default()
        });
        request.produced(7);
        let exact = UsageCounts {
            requests: 1,
            input_tokens: 10,
            cached_tokens: 4,
            output_tokens: 5,
            ..Default::default()
        };
        assert_eq!((request.counts(), request.estimate()), (exact, None));
    }
}
