//! A running generation: passes its tokens and text to the journal, the guest and the caller as they are produced.

use crate::{
    RunEvent,
    capability::{
        inference::text_stream::CollectingSink,
        turn::{Reservation, Turn},
    },
    journal::Call,
    turn_timeline::Stage,
};
use skep_engine::{
    EngineError, Model, RolledBack, Usage,
    chat::{ChatEvent, ChatOutcome, ChatStream, Routed},
};

/// Number of tokens of a remote model after which the journal learns how many there are.
const USED_STEP: u32 = 32;

/// Journals the tokens of one generation as they are produced, and the text that the caller is shown.
pub(in crate::capability) struct Progress<'a> {
    turn: &'a Turn,
    call: &'a Call,
    model: &'a Model,
    visible: bool,
    /// Number of produced tokens when the journal last learned what the generation used.
    used: Option<u32>,
    /// Number of tokens that are in the journal.
    journaled: usize,
    /// Reasoning that the caller has not been shown yet.
    reasoning: String,
    /// Number of bytes of text that the caller was shown before a restart and that have not been repeated yet.
    shown_before: usize,
    /// How far the generation has come, as the timeline knows.
    stage: Stage,
}

impl<'a> Progress<'a> {
    pub(in crate::capability) fn new(
        turn: &'a Turn,
        call: &'a Call,
        model: &'a Model,
        visible: bool,
    ) -> Self {
        // A remote model answers again from the beginning after a restart, and so does a local one after a remote one.
        let continues = model.engine().is_some() && !call.was_shown_by_remote();
        let shown_before = if continues { call.shown_bytes() } else { 0 };
        let journaled = call.tokens().len();
        // A resumed local model has already reported its prompt length.
        let used = (model.engine().is_some() && !call.attempts().is_empty()).then_some(0);
        let (reasoning, stage) = (String::new(), Stage::Waiting);
        Progress { turn, call, model, visible, used, journaled, reasoning, shown_before, stage }
    }

    /// Journals new tokens. `produced` holds all tokens so far, `delta` the text of the latest ones, and `taken_back` what had
    /// been taken back by the last of them.
    pub(in crate::capability) fn note(&mut self, produced: &[u32], taken_back: RolledBack, delta: &str) {
        let known = self.shown_before.min(delta.len());
        let text = if self.visible { &delta[known..] } else { "" };
        if self.visible {
            self.shown_before -= known;
        }
        let new = produced.get(self.journaled..).unwrap_or_default();
        if new.is_empty() && text.is_empty() {
            return;
        }
        self.journaled += new.len();
        self.turn.journal.tokens(self.call, self.model.digest(), new, taken_back, text);
    }

    /// Tells the turn's timeline how far the generation has come.
    pub(in crate::capability) fn reached(&mut self, stage: Stage) {
        if stage <= self.stage {
            return;
        }
        self.stage = stage;
        self.turn.journal.generation_reached(self.call, stage);
    }

    /// Journals what the generation has used so far. The tokens of a local model are in the journal anyway.
    pub(in crate::capability) fn used(&mut self, reservation: &Reservation) {
        let Some((billed, usage)) = reservation.in_flight() else { return };
        let is_due = self.used.is_none_or(|before| {
            self.model.engine().is_none() && usage.completion_tokens >= before.saturating_add(USED_STEP)
        });
        if is_due {
            self.used = Some(usage.completion_tokens);
            self.turn.journal.used(self.call, self.model, billed, usage);
        }
    }

    /// Journals that a server that failed before its answer began has used nothing.
    fn failed(&self, reservation: &Reservation) {
        if self.model.engine().is_none() && reservation.in_flight().is_none() {
            self.turn.journal.used(self.call, self.model, self.model.name(), Usage::default());
        }
    }
}

/// Size of the pieces in which reasoning is shown, because each one is a record of the journal.
const REASONING_BYTES: usize = 256;

impl Progress<'_> {
    /// Shows the caller the model that a route chose.
    fn routed(&self, Routed { model, attempts }: Routed) {
        self.turn.journal.shown(self.call, RunEvent::ModelChosen { model, attempts });
    }

    /// Takes a chunk of the model's reasoning.
    fn reason(&mut self, delta: &str) {
        if self.visible {
            self.reasoning.push_str(delta);
            if self.reasoning.len() >= REASONING_BYTES {
                self.show_reasoning();
            }
        }
    }

    fn show_reasoning(&mut self) {
        if !self.reasoning.is_empty() {
            let text = std::mem::take(&mut self.reasoning);
            self.turn.journal.shown(self.call, RunEvent::Thinking { text });
        }
    }
}

/// Reads a chat stream to its end.
pub(in crate::capability) async fn follow(
    mut progress: Progress<'_>,
    mut stream: ChatStream,
    reservation: &mut Reservation,
    mut collecting: Option<&mut CollectingSink>,
) -> Result<ChatOutcome, EngineError> {
    while let Some(event) = stream.next().await {
        reservation.produced(stream.spent_tokens());
        if let Ok(event) = &event {
            progress.reached(match event {
                ChatEvent::Routed(_) => Stage::Waiting,
                ChatEvent::Started { .. } => Stage::Prefill,
                _ => Stage::Decode,
            });
        }
        match event.inspect_err(|_| progress.failed(reservation))? {
            ChatEvent::Text { delta, .. } => {
                progress.show_reasoning();
                progress.note(stream.produced(), stream.rolled_back(), &delta);
                if let Some(collecting) = &mut collecting {
                    collecting.push(&delta);
                }
            }
            ChatEvent::ToolCallArguments { .. } => {
                progress.note(stream.produced(), stream.rolled_back(), "");
            }
            ChatEvent::Routed(routed) => {
                reservation.routed(&routed.model);
                progress.routed(routed);
            }
            ChatEvent::Reasoning { delta } => progress.reason(&delta),
            ChatEvent::Started { prompt_tokens, cached_tokens, cache_write_tokens } => {
                reservation.started(prompt_tokens, cached_tokens, cache_write_tokens);
            }
            ChatEvent::ToolCallStarted { .. } | ChatEvent::ToolCallFinished { .. } => {}
            ChatEvent::Finished(outcome) => {
                progress.show_reasoning();
                reservation.settle(&outcome.usage);
                return Ok(outcome);
            }
        }
        progress.used(reservation);
    }
    Err(EngineError::Failed("it finished without a result".into()))
}
