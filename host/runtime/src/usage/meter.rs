//! Counts what requests to models use, however they end.

use super::{Amount, Price, UsageDay};
use skep_engine::{
    Model, UnreportedUse, Usage,
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
    /// Number of requests to another server, each with these tokens, that the answer may take.
    pub asks: u32,
}

impl WorstCase {
    /// Returns the most tokens of a chat. Tools and images may take the whole context of the model, because their tokens
    /// are not those of a text.
    pub fn of_chat(model: &Model, messages: &[ChatMessage], options: &ChatOptions) -> Self {
        let limit = model.sequence_limit();
        WorstCase { asks: model.most_asks(options), ..Self::in_context(messages, options, limit) }
    }

    fn in_context(messages: &[ChatMessage], options: &ChatOptions, limit: usize) -> Self {
        let has_images = messages.iter().any(|message| !message.images.is_empty());
        let texts = match has_images || !options.tools.is_empty() {
            true => limit,
            false => messages.iter().map(ChatMessage::text_bytes).sum(),
        };
        let input_tokens = most_prompt_tokens(texts, messages.len(), limit);
        WorstCase { input_tokens, output_tokens: most_output(options.max_tokens, limit), asks: 1 }
    }

    /// Returns the most tokens of a prompt with this many tokens, or bytes, and of its continuation.
    pub fn of_text(prompt: usize, max_tokens: Option<usize>, limit: usize) -> Self {
        let output_tokens = most_output(max_tokens, limit);
        WorstCase { input_tokens: prompt.min(limit), output_tokens, asks: 1 }
    }

    /// Returns the cost with this many output tokens instead of the most.
    pub(super) fn cost(&self, price: &Price, output_tokens: u32) -> Amount {
        let asks = u64::from(self.asks);
        let input = (self.input_tokens as u64).saturating_mul(asks);
        price.dearest_input().of(input) + price.output.of(u64::from(output_tokens).saturating_mul(asks))
    }

    /// Returns the number of output tokens that an amount pays for beside the input, up to the most.
    pub(super) fn affordable(&self, price: &Price, room: Amount) -> Option<u32> {
        let input = self.cost(price, 0);
        let tokens = (room >= input).then(|| price.output.tokens_for(room - input))?;
        Some(u32::try_from(tokens / u64::from(self.asks.max(1))).unwrap_or(u32::MAX).min(self.output_tokens))
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
    /// Returns what one request used: what its events report, and what they do not.
    pub(crate) fn of_request(model: &str, used: &RequestUse, unreported: &[UnreportedUse]) -> Self {
        let mut models = ModelUse::default();
        models.add(model, &used.counts());
        for hidden in unreported {
            models.add(&hidden.model, &unreported_counts(hidden));
        }
        models
    }

    pub(crate) fn add(&mut self, model: &str, counts: &UsageCounts) {
        if *counts != UsageCounts::default() {
            self.0.entry(model.to_owned()).or_default().add(counts);
        }
    }

    pub(crate) fn add_all(&mut self, other: &ModelUse) {
        other.iter().for_each(|(model, counts)| self.add(model, counts));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &UsageCounts)> {
        self.0.iter().map(|(model, counts)| (model.as_str(), counts))
    }
}

impl RequestUse {
    pub(crate) fn started(&mut self, prompt_tokens: u32, cached_tokens: u32, cache_write_tokens: u32) {
        let completion_tokens = match self {
            // A request that continues has produced tokens before.
            RequestUse::Running(usage) => usage.completion_tokens,
            RequestUse::Waiting | RequestUse::Finished(_) => 0,
        };
        let usage =
            Usage { prompt_tokens, cached_tokens, cache_write_tokens, completion_tokens, ..Usage::default() };
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
            cache_write_tokens: usage.cache_write_tokens.into(),
            output_tokens: u64::from(usage.completion_tokens) + u64::from(usage.refused_tokens),
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

/// Returns the names of the models that the bill may name for a request: those that a route may choose, or the model
/// itself.
pub(crate) fn billed_models(model: &Model) -> Vec<String> {
    let mut names = model.names();
    if names.len() > 1 {
        names.remove(0);
    }
    names
}

/// Returns the counts of what no event reports. The rest of a request whose prompt is reported is not another request.
fn unreported_counts(hidden: &UnreportedUse) -> UsageCounts {
    let mut used = RequestUse::default();
    match hidden.is_estimate {
        true => used.was_cut(&hidden.usage),
        false => used.finished(&hidden.usage),
    }
    match (used.counts(), hidden.usage.prompt_tokens) {
        (rest, 0) => UsageCounts { requests: 0, estimated_requests: 0, ..rest },
        (counts, _) => counts,
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
        let of =
            |message: ChatMessage, options: &ChatOptions| WorstCase::in_context(&[message], options, limit);
        let worst = |input_tokens, output_tokens| WorstCase { input_tokens, output_tokens, asks: 1 };
        let (plain, options) =
            (ChatMessage::user("hello"), ChatOptions { max_tokens: Some(7), ..ChatOptions::default() });
        assert_eq!(of(plain.clone(), &options), worst(5 + 32 + 256, 7));
        let source = ImageSource::Url("https://a/b".to_owned().into());
        let images = vec![Image { at: 0, part: 0, source, detail: None }];
        assert_eq!(of(ChatMessage { images, ..plain.clone() }, &options).input_tokens, limit);
        let tool =
            ToolSpec { name: "f".into(), description: String::new(), parameters: serde_json::json!({}) };
        let calling = ChatOptions { tools: vec![tool], ..ChatOptions::default() };
        assert_eq!(of(plain, &calling), worst(limit, 10_000));
        assert_eq!(WorstCase::of_text(5, Some(3), 4), worst(4, 3));
    }

    #[test]
    fn what_no_event_reports_is_counted_for_the_model_that_used_it() {
        let usage =
            |prompt_tokens, completion_tokens| Usage { prompt_tokens, completion_tokens, ..Usage::default() };
        let mut used = RequestUse::default();
        used.started(10, 0, 0);
        used.produced(2);
        let hidden =
            |model: &str, usage, is_estimate| UnreportedUse { model: model.into(), usage, is_estimate };
        let unreported = [
            hidden("a", usage(10, 5), true),
            hidden("b", usage(0, 7), true),
            hidden("b", usage(10, 3), false),
        ];
        let models = ModelUse::of_request("b", &used, &unreported);
        let of: Vec<_> = models
            .iter()
            .map(|(model, counts)| {
                let exact = (counts.requests, counts.input_tokens, counts.output_tokens);
                (model, exact, (counts.estimated_requests, counts.estimated_output_tokens))
            })
            .collect();
        assert_eq!(of, [("a", (1, 10, 5), (1, 5)), ("b", (2, 20, 12), (1, 9))]);
        let refused = Usage { refused_tokens: 8, ..usage(20, 4) };
        used.finished(&refused);
        assert_eq!(used.counts().output_tokens, 12, "refused answers are billed");
    }

    #[test]
    fn a_request_that_was_cut_is_an_estimate_and_one_that_never_began_is_nothing() {
        let mut request = RequestUse::default();
        request.produced(0);
        assert_eq!(request.counts(), UsageCounts::default());
        request.started(10, 4, 5);
        request.produced(3);
        let cut = UsageCounts {
            requests: 1,
            input_tokens: 10,
            cached_tokens: 4,
            cache_write_tokens: 5,
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
