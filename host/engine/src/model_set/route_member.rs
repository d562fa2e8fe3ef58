//! A local model as a member of a route. A route outlives the loads of its members, so it holds no engine.

use std::sync::Arc;

use futures::future::BoxFuture;
use futures::{StreamExt, TryStreamExt, stream};
use skep_model::ModelDigest;

use super::device_turns::DeviceTurns;
use super::slot::Slot;
use crate::chat::{ChatEvent, ChatOptions, ChatOutcome, Input, RemoteStream, chat, continue_text};
use crate::{Abilities, EngineError, Model, Priority, RemoteInfo, RemoteModel};

pub(super) struct RouteMember {
    info: RemoteInfo,
    slot: Arc<Slot>,
    turns: DeviceTurns,
}

impl RouteMember {
    /// Creates a member with the slot's name. Its context length is unknown, because nothing may be loaded.
    pub fn new(slot: Arc<Slot>, turns: DeviceTurns) -> Self {
        let info = RemoteInfo {
            name: slot.name().to_owned(),
            digest: ModelDigest::remote("", slot.name()),
            context_length: None,
            created_unix_s: 0,
        };
        RouteMember { info, slot, turns }
    }
}

impl RemoteModel for RouteMember {
    fn info(&self) -> &RemoteInfo {
        &self.info
    }

    fn context_length(&self) -> Option<usize> {
        self.slot.known().map(|known| known.context_length)
    }

    fn is_local(&self) -> bool {
        true
    }

    fn ready(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async { self.slot.ready(&self.turns).await.map(drop) })
    }

    fn abilities(&self) -> Abilities {
        self.slot.engine().map_or(Abilities::local(None), |engine| Model::Local(engine).abilities())
    }

    fn ask(&self, input: Input, mut options: ChatOptions) -> RemoteStream {
        let (slot, turns) = (self.slot.clone(), self.turns.clone());
        let mut attempt = Some(options.attempts.begin(None, slot.name()));
        let begin = async move {
            let engine = slot.ready(&turns).await?;
            options.fill_sampling(&engine.info().sampling);
            // Rendering and encoding a long prompt blocks.
            let begin = move || match input {
                Input::Messages(messages) => chat(&engine, &messages, options),
                Input::Text(text) => continue_text(&engine, &text, options),
            };
            let begun = tokio::task::spawn_blocking(begin).await;
            begun.map_err(|_| EngineError::Failed("the prompt could not be rendered".to_owned()))?
        };
        let events = stream::once(begin).try_flatten();
        Box::pin(events.map(move |event| {
            let outcome = match &event {
                Ok(ChatEvent::Finished(_)) => Some("ok"),
                Ok(_) => None,
                Err(error) => Some(error.code()),
            };
            if let Some((outcome, attempt)) = outcome.zip(attempt.take_if(|_| outcome.is_some())) {
                attempt.ended(outcome, None);
            }
            event.map(without_tokens)
        }))
    }

    fn free_slots(&self) -> usize {
        // A model that is not loaded has nothing to wait for but its load.
        self.slot.engine().map_or(1, |engine| engine.free_slots(Priority::Interactive))
    }

    fn problem(&self) -> Option<String> {
        self.slot.engine()?.problem()
    }
}

/// Drops the tokens of an answer: the next answer of the route may be another model's.
fn without_tokens(event: ChatEvent) -> ChatEvent {
    match event {
        ChatEvent::Finished(outcome) => ChatEvent::Finished(ChatOutcome {
            prompt: Vec::new(),
            tokens: Vec::new(),
            raw: String::new(),
            rendered: String::new(),
            ..outcome
        }),
        event => event,
    }
}
