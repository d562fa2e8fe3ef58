//! The timeline of a turn: when it started, when its guest ran, and how long each of its host calls took.
//!
//! It is kept in memory while the turn runs and stored with its end. A turn that is run again after a restart or an
//! approval begins a new one; calls that the journal answers are marked as repeated.

use crate::{
    RunEvent,
    invocation::StoredUsage,
    limits::{TurnLimit, TurnUse},
};
use serde::{Deserialize, Serialize};
use skep_engine::{Timing, Usage};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// Maximum number of calls in a timeline; it leaves out later ones.
const MAX_CALLS: usize = 1_000;
/// Maximum length of a label in characters.
const MAX_LABEL: usize = 120;

/// The host calls of a turn and their times, which are in microseconds since its start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TurnTimeline {
    /// The time at which the turn started; `None` while it waits for other turns.
    pub started_at_ms: Option<u64>,
    /// Time until the turn had an instance slot and called its guest.
    #[serde(default)]
    pub called_us: Option<u64>,
    /// Time until the guest returned.
    #[serde(default)]
    pub returned_us: Option<u64>,
    pub calls: Vec<CallSpan>,
    /// Number of calls that were left out.
    #[serde(default)]
    pub left_out: u32,
    /// The limits of the turn with what it has used of them; empty before it starts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<TurnLimit>,
    /// Time that the commit took, if this host made it recently. It is not stored, because the timeline is a part of
    /// what is committed.
    #[serde(skip)]
    pub commit_us: Option<u64>,
}

/// A host call of a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallSpan {
    /// The call's number in the turn.
    pub call: u32,
    /// Name of the call, such as `generate`.
    pub name: String,
    pub began_us: u64,
    /// `None` if the call had not ended when the turn did, or still runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took_us: Option<u64>,
    /// Whether the journal answered the call, because it was made before a restart.
    #[serde(default, skip_serializing_if = "is_false")]
    pub repeated: bool,
    /// The tool that was called, or the origin that was fetched from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The model that generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationSpan>,
    /// How far a generation has come that still runs.
    #[serde(skip)]
    pub progress: GenerationProgress,
    /// Whether a tool failed.
    #[serde(default, skip_serializing_if = "is_false")]
    pub failed: bool,
}

/// The tokens and the parts of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerationSpan {
    #[serde(with = "StoredUsage")]
    pub usage: Usage,
    pub queue_us: u64,
    pub first_token_us: u64,
}

/// How far a running generation has come; times are since the call began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GenerationProgress {
    /// Time until the engine began to compute the prompt.
    pub queue_us: Option<u64>,
    /// Time until the first token.
    pub first_token_us: Option<u64>,
}

/// The stages of a generation, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// The generation waits in the engine's queue.
    Waiting,
    /// The engine computes the prompt.
    Prefill,
    /// There are tokens.
    Decode,
}

/// The timeline of a turn that runs.
#[derive(Debug, Default)]
pub(crate) struct LiveTimeline {
    inner: Mutex<Inner>,
    used: Arc<TurnUse>,
}

#[derive(Debug, Default)]
struct Inner {
    timeline: TurnTimeline,
    started: Option<Instant>,
    /// The end of the last generation, at which the guest could begin to run a tool of its own.
    generated_us: Option<u64>,
}

impl LiveTimeline {
    /// Starts the timeline. Only the first call has an effect.
    pub(crate) fn start(&self, now_ms: u64) {
        let mut inner = self.lock();
        if inner.started.is_none() {
            inner.started = Some(Instant::now());
            inner.timeline.started_at_ms = Some(now_ms);
        }
    }

    /// Returns the counts of what the turn uses.
    pub(crate) fn used(&self) -> &Arc<TurnUse> {
        &self.used
    }

    /// Records that the guest is called.
    pub(crate) fn guest_called(&self) {
        let mut inner = self.lock();
        let now = inner.now_us();
        inner.timeline.called_us.get_or_insert(now);
    }

    /// Records that the guest returned.
    pub(crate) fn guest_returned(&self) {
        let mut inner = self.lock();
        inner.timeline.returned_us = Some(inner.now_us());
    }

    /// Records that a call begins. A suspended turn that is run again repeats calls that the timeline has.
    pub(crate) fn begin(&self, call: u32, name: &str, repeated: bool) {
        let mut inner = self.lock();
        let began_us = inner.now_us();
        let timeline = &mut inner.timeline;
        if timeline.calls.iter().rev().any(|known| known.call == call) {
            return;
        }
        if timeline.calls.len() == MAX_CALLS {
            timeline.left_out += 1;
            return;
        }
        let (name, took_us) = (name.to_owned(), repeated.then_some(0));
        let (label, model, generation) = (None, None, None);
        timeline.calls.push(CallSpan {
            call,
            name,
            began_us,
            took_us,
            repeated,
            label,
            model,
            generation,
            progress: GenerationProgress::default(),
            failed: false,
        });
    }

    /// Records that a generation has reached a stage. The first time counts.
    pub(crate) fn reached(&self, call: u32, stage: Stage) {
        let mut inner = self.lock();
        let now = inner.now_us();
        let Some(span) = inner.span(call) else { return };
        let since = now.saturating_sub(span.began_us);
        let GenerationProgress { queue_us, first_token_us } = &mut span.progress;
        match stage {
            Stage::Waiting => {}
            Stage::Prefill => {
                queue_us.get_or_insert(since);
            }
            Stage::Decode => {
                first_token_us.get_or_insert(since);
            }
        }
    }

    /// Records what a call is about.
    pub(crate) fn label(&self, call: u32, label: &str) {
        self.change(call, |span| span.label = Some(label.chars().take(MAX_LABEL).collect()));
    }

    /// Records the model of a generation.
    pub(crate) fn model(&self, call: u32, model: &str) {
        self.change(call, |span| {
            if span.model.as_deref() != Some(model) {
                span.model = Some(model.chars().take(MAX_LABEL).collect());
            }
        });
    }

    /// Records that a call ended, and what the events say that its caller is shown with its end.
    pub(crate) fn end(&self, call: u32, events: &[RunEvent]) {
        let mut inner = self.lock();
        let now = inner.now_us();
        let generated_us = inner.generated_us;
        let Some(span) = inner.span(call) else { return };
        span.progress = GenerationProgress::default();
        span.took_us = Some(now.saturating_sub(span.began_us));
        for event in events {
            match event {
                RunEvent::Generation { usage, timing: Timing { queue_us, first_token_us, .. } } => {
                    let (queue_us, first_token_us) = (*queue_us, *first_token_us);
                    span.generation = Some(GenerationSpan { usage: *usage, queue_us, first_token_us });
                }
                RunEvent::ToolResult { name, outcome, .. } => {
                    span.label.get_or_insert_with(|| name.chars().take(MAX_LABEL).collect());
                    span.failed = outcome.is_err();
                    // The guest ran the tool itself, after the generation that called it.
                    if let Some(generated_us) = generated_us.filter(|_| span.name == "append-tool-result") {
                        span.began_us = generated_us;
                        span.took_us = Some(now.saturating_sub(generated_us));
                    }
                }
                _ => {}
            }
        }
        if span.generation.is_some() || span.name == "append-tool-result" {
            inner.generated_us = Some(now);
        }
    }

    /// Returns the timeline so far.
    pub(crate) fn snapshot(&self) -> TurnTimeline {
        TurnTimeline { limits: self.used.snapshot(), ..self.lock().timeline.clone() }
    }

    /// Returns the stored form.
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(&self.snapshot()).expect("strings and numbers always serialize")
    }

    fn change(&self, call: u32, change: impl FnOnce(&mut CallSpan)) {
        if let Some(span) = self.lock().span(call) {
            change(span);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Returns the span of a call, which is one of the latest.
    fn span(&mut self, call: u32) -> Option<&mut CallSpan> {
        self.timeline.calls.iter_mut().rev().find(|span| span.call == call)
    }

    fn now_us(&self) -> u64 {
        self.started.map_or(0, |started| u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Json;

    fn result(name: &str) -> RunEvent {
        let outcome = Ok(Json::written(&1).unwrap());
        RunEvent::ToolResult { id: "1".into(), name: name.into(), outcome }
    }

    #[test]
    fn a_tool_of_the_guest_lasts_from_the_generation_to_its_result() {
        let live = LiveTimeline::default();
        live.start(7);
        live.start(8);
        live.begin(1, "generate", false);
        let (usage, timing) = (Usage::default(), Timing::default());
        live.end(1, &[RunEvent::Generation { usage, timing }]);
        std::thread::sleep(std::time::Duration::from_millis(3));
        live.begin(2, "append-tool-result", false);
        live.end(2, &[result("price")]);
        let TurnTimeline { started_at_ms, calls, .. } = live.snapshot();
        assert_eq!(started_at_ms, Some(7));
        assert_eq!(calls[1].label.as_deref(), Some("price"));
        assert!(calls[1].took_us.unwrap() >= 3_000, "{calls:?}");
        assert_eq!(calls[1].began_us, calls[0].began_us + calls[0].took_us.unwrap());
        let stored: TurnTimeline = serde_json::from_slice(&live.encode()).unwrap();
        assert_eq!(stored, live.snapshot());
    }

    #[test]
    fn a_running_generation_reports_its_progress() {
        let live = LiveTimeline::default();
        live.start(0);
        live.begin(1, "generate", false);
        let progress = || live.snapshot().calls[0].progress;
        assert_eq!(progress(), GenerationProgress::default());
        live.reached(1, Stage::Prefill);
        let admitted = progress();
        assert!(admitted.queue_us.is_some() && admitted.first_token_us.is_none(), "{admitted:?}");
        live.reached(1, Stage::Decode);
        let produced = progress();
        assert!(produced.first_token_us >= produced.queue_us, "{produced:?}");
        live.reached(1, Stage::Decode);
        assert_eq!(progress(), produced, "later tokens change nothing");
        live.end(1, &[]);
        assert_eq!(
            progress(),
            GenerationProgress::default(),
            "the generation itself tells its times at its end"
        );
    }

    #[test]
    fn repeated_and_surplus_calls_are_counted_once() {
        let live = LiveTimeline::default();
        live.start(0);
        live.begin(1, "fetch", true);
        live.begin(1, "fetch", false);
        for call in 2..=MAX_CALLS as u32 + 5 {
            live.begin(call, "sleep", false);
        }
        live.label(1, &"x".repeat(500));
        let TurnTimeline { calls, left_out, .. } = live.snapshot();
        assert_eq!((calls.len(), left_out), (MAX_CALLS, 5));
        assert!(calls[0].repeated && calls[0].took_us == Some(0));
        assert_eq!(calls[0].label.as_ref().map(String::len), Some(MAX_LABEL));
        assert_eq!(calls[1].took_us, None);
    }
}
