//! One answer of a model: requested, followed to its end, and requested again if its server breaks it off.
//!
//! Invariant: the journal knows what an attempt used before the next one begins, so that every attempt is billed once, whether
//! the host crashes meanwhile or not. A text that was void by then is neither in the result nor in the conversation.

use crate::{
    bindings::types::Error,
    capability::{
        inference::{
            progress::{Progress, follow},
            remote,
            text_stream::CollectingSink,
        },
        turn::{Reservation, Turn},
    },
    journal::Call,
};
use skep_engine::{
    Cancel, EngineError, Model, Usage,
    chat::{ChatOptions, ChatOutcome, ChatStream, Input, Opening, Transcript, estimated_tokens},
};
use std::sync::Arc;

/// The text that a model is asked to continue.
#[derive(Clone)]
pub(in crate::capability) enum Prompt {
    Conversation(Arc<Transcript>),
    Text(Arc<String>),
}

/// The request of a generation, without its options.
pub(in crate::capability) struct Request<'a> {
    pub(in crate::capability) turn: &'a Turn,
    pub(in crate::capability) call: &'a Call,
    pub(in crate::capability) model: &'a Model,
    pub(in crate::capability) prompt: Prompt,
    /// Whether the caller is shown the answer.
    pub(in crate::capability) visible: bool,
}

impl Prompt {
    fn estimated_tokens(&self, opening: Opening<'_>) -> usize {
        match self {
            Prompt::Conversation(before) => estimated_tokens(before.messages(), opening),
            Prompt::Text(text) => Input::Text(String::clone(text)).estimated_tokens(opening),
        }
    }

    fn ask(&self, model: &Model, chat: ChatOptions) -> Result<ChatStream, EngineError> {
        match self {
            Prompt::Conversation(before) => model.answer(before, chat),
            Prompt::Text(text) => model.complete(text, chat),
        }
    }
}

impl Request<'_> {
    /// Renders and encodes the part that the model has not seen, and submits it. From here on, a server may bill the prompt,
    /// unless it refuses the request.
    pub(in crate::capability) async fn submit(
        &self,
        is_quick: bool,
        chat: ChatOptions,
    ) -> Result<ChatStream, EngineError> {
        let Request { turn, call, model, .. } = *self;
        let used = |prompt_tokens| {
            if model.engine().is_none() {
                turn.journal.used(call, model, model.name(), Usage { prompt_tokens, ..Usage::default() });
            }
        };
        if model.engine().is_none() {
            turn.egress.until_certain().await;
        }
        used(u32::try_from(self.prompt.estimated_tokens(chat.opening())).unwrap_or(u32::MAX));
        let (prompt, asked, unreported) = (self.prompt.clone(), model.clone(), chat.unreported.clone());
        let begin = move |cancel: &Cancel| prompt.ask(&asked, ChatOptions { cancel: cancel.clone(), ..chat });
        let begun = match turn.compute(is_quick, begin).await {
            Ok(stream) => stream.begun().await,
            Err(error) => Err(error),
        };
        begun.inspect_err(|_| {
            used(0);
            turn.keep_unreported(call, unreported.uses());
        })
    }

    /// Follows an answer to its end. One that its server breaks off is requested again with the same options, as the agent's
    /// manifest says. The text is also written to `collecting` as it is produced.
    pub(in crate::capability) async fn follow(
        &self,
        mut stream: ChatStream,
        mut chat: Box<ChatOptions>,
        mut reservation: Reservation,
        mut collecting: Option<&mut CollectingSink>,
    ) -> Result<ChatOutcome, Error> {
        let Request { turn, call, model, visible, .. } = *self;
        loop {
            let progress = Progress::new(turn, call, model, visible);
            let followed = follow(progress, stream, &mut reservation, collecting.as_deref_mut()).await;
            let error = match followed {
                Ok(outcome) => return Ok(outcome),
                Err(error) if remote::is_broken_off(&error) => error,
                Err(error) => return Err(error.into()),
            };
            // The journal learns of the tokens only now and then.
            if let Some((billed, usage)) = reservation.in_flight() {
                turn.journal.used(call, model, billed, usage);
            }
            let discard = || collecting.as_deref_mut().is_none_or(CollectingSink::discard);
            remote::request_again(turn, call, &error, discard)?;
            reservation.begin_again()?;
            call.begin_again();
            tracing::warn!(model = model.name(), "an answer is requested again: {error}");
            remote::notify(turn, call);
            chat.max_tokens = Some(reservation.max_tokens as usize);
            chat.unreported = reservation.unreported();
            stream = self.submit(false, (*chat).clone()).await?;
        }
    }
}
