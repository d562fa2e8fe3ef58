//! Produces the choices of a request, one after another, so that an item needs the room of one sequence.

use super::{BatchAnswer, BatchPrompt, LiveAnswer, ScoredToken};
use crate::{Compute, RuntimeError, TenantBudget, WorstCase};
use skep_engine::{
    Cancel, Engine, EngineError, FinishReason, GenerateRequest, Model, TokenEvent,
    chat::{ChatEvent, ChatFinish, ChatMessage, ChatOptions, ChatOutcome, encode_prompt},
};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Everything that the choices of a request share.
pub(super) struct Choices<'a> {
    pub(super) compute: &'a Compute,
    pub(super) principal: &'a str,
    pub(super) model: Model,
    pub(super) budget: TenantBudget,
    /// The followers of the first choice.
    pub(super) live: Option<Arc<LiveAnswer>>,
    /// Signaled once the engine has accepted the first choice.
    pub(super) begun: Option<oneshot::Sender<()>>,
}

impl Choices<'_> {
    /// Answers a chat.
    pub(super) async fn chat(
        mut self,
        form: String,
        messages: Vec<ChatMessage>,
        options: ChatOptions,
        choices: u32,
    ) -> Result<BatchAnswer, RuntimeError> {
        let messages: Arc<[ChatMessage]> = messages.into();
        let mut answers = Vec::new();
        for choice in 0..choices.max(1) {
            answers.push(self.chat_choice(&form, &messages, of_choice(&options, choice)).await?);
        }
        Ok(together(answers))
    }

    async fn chat_choice(
        &mut self,
        form: &str,
        messages: &Arc<[ChatMessage]>,
        mut options: ChatOptions,
    ) -> Result<BatchAnswer, RuntimeError> {
        // The model may not have been known when the request was queued.
        options.fill_sampling(&self.model.sampling());
        let worst = WorstCase::of_chat(&self.model, messages, &options);
        let tokens = self.budget.meter(&self.model, worst)?;
        let wants_scores = options.top_logprobs.is_some();
        let (model, messages) = (self.model.clone(), messages.clone());
        // Rendering and encoding a long prompt takes long.
        let begin =
            move |cancel: &Cancel| model.chat(&messages, ChatOptions { cancel: cancel.clone(), ..options });
        let chat = self.compute.run(self.principal, begin).await?;
        self.has_begun();
        let live = self.live.take();
        live.iter().for_each(|live| live.begin());
        let (engine, mut scores) = (self.model.engine().cloned(), wants_scores.then(Vec::new));
        let note = |event: &ChatEvent| {
            live.iter().for_each(|live| live.note(event));
            let (ChatEvent::Text { logprobs, .. }, Some(scores), Some(engine)) =
                (event, &mut scores, &engine)
            else {
                return;
            };
            scores.extend(logprobs.iter().map(|token| ScoredToken::of(engine, token.id, Some(token))));
        };
        let outcome = tokens.follow(chat, note).await?;
        Ok(BatchAnswer { scores, ..BatchAnswer::of_chat(form.to_owned(), &outcome) })
    }

    /// Continues texts.
    pub(super) async fn texts(
        mut self,
        form: String,
        prompts: Vec<BatchPrompt>,
        options: ChatOptions,
        (choices, echo): (u32, bool),
    ) -> Result<BatchAnswer, RuntimeError> {
        let mut answers = Vec::new();
        for prompt in prompts {
            for choice in 0..choices.max(1) {
                let options = of_choice(&options, choice);
                let answer = match (self.model.engine().cloned(), &prompt) {
                    (Some(engine), _) => self.text_choice(&form, engine, prompt.clone(), options, echo).await,
                    (None, BatchPrompt::Text(text)) => self.remote_choice(&form, text, options, echo).await,
                    (None, BatchPrompt::Ids(_)) => {
                        let rule = "may be an upstream model with a different tokenizer; send text";
                        Err(refused(&self.model, "prompt", rule))
                    }
                };
                answers.push(answer?);
            }
        }
        Ok(together(answers))
    }

    async fn text_choice(
        &mut self,
        form: &str,
        engine: Engine,
        prompt: BatchPrompt,
        mut options: ChatOptions,
        echo: bool,
    ) -> Result<BatchAnswer, RuntimeError> {
        options.fill_sampling(&engine.info().sampling);
        let encoding = engine.clone();
        let encode = move |cancel: &Cancel| match prompt {
            BatchPrompt::Text(text) => encode_prompt(&encoding, &text, cancel),
            BatchPrompt::Ids(ids) => Ok(ids),
        };
        let prompt = self.compute.run(self.principal, encode).await?;
        let worst = WorstCase::of_text(prompt.len(), options.max_tokens, engine.sequence_limit());
        let mut tokens = self.budget.meter(&self.model, worst)?;
        let is_formed = options.output.is_some();
        let mut text = if echo { engine.tokenizer().decode(&prompt, false) } else { String::new() };
        let mut scores = options.top_logprobs.is_some().then(Vec::new);
        let request = GenerateRequest {
            sampling: options.sampling,
            seed: options.seed,
            max_tokens: options.max_tokens,
            stop: options.stop,
            ignore_eos: options.ignore_eos,
            constraint: options.output,
            top_logprobs: options.top_logprobs,
            prompt_logprobs: options.top_logprobs.filter(|_| echo),
            affinity: options.affinity,
            priority: options.priority,
            deadline: options.deadline,
            observer: options.observer,
            ..GenerateRequest::new(prompt.clone())
        };
        let starting = engine.clone();
        // Compiling a schema takes long.
        let begin = move |_: &Cancel| starting.generate(request);
        let mut stream = self.compute.run(self.principal, begin).await?;
        self.has_begun();
        while let Some(event) = stream.next().await {
            tokens.produced(stream.spent_tokens());
            let event = event?;
            tokens.note_completion(&event);
            match event {
                TokenEvent::Started { .. } => {}
                TokenEvent::PromptLogprobs(found) => {
                    let found = prompt.iter().zip(&found);
                    let found = found.map(|(id, score)| ScoredToken::of(&engine, *id, score.as_ref()));
                    scores.iter_mut().for_each(|scores| scores.extend(found.clone()));
                }
                TokenEvent::Token(token) => {
                    text.push_str(&token.text);
                    // The token that ends the text is not part of it.
                    let ends = token.text.is_empty() && engine.info().eos.contains(&token.id);
                    if let Some(scores) = scores.as_mut().filter(|_| !ends) {
                        scores.push(ScoredToken::of(&engine, token.id, token.logprob.as_ref()));
                    }
                }
                TokenEvent::Finished(finished) => {
                    text.push_str(&finished.text_rest);
                    let finish = match finished.reason {
                        FinishReason::Length => ChatFinish::Length,
                        reason if is_formed && reason.cuts_off() => ChatFinish::Length,
                        _ => ChatFinish::Stop,
                    };
                    let outcome = ChatOutcome { usage: finished.usage, ..ChatOutcome::remote(text, finish) };
                    return Ok(BatchAnswer { scores, ..BatchAnswer::of_chat(form.to_owned(), &outcome) });
                }
            }
        }
        Err(EngineError::Cancelled.into())
    }

    async fn remote_choice(
        &mut self,
        form: &str,
        prompt: &str,
        options: ChatOptions,
        echo: bool,
    ) -> Result<BatchAnswer, RuntimeError> {
        if options.output.is_some() {
            let rule = "may be an upstream model, which does not support structured output for text completions; use \
                 /v1/chat/completions";
            return Err(refused(&self.model, "response_format", rule));
        }
        if options.top_logprobs.is_some() {
            let rule = "may be an upstream model, for which log-probabilities are not available here";
            return Err(refused(&self.model, "logprobs", rule));
        }
        let worst = WorstCase::of_text(prompt.len(), options.max_tokens, self.model.sequence_limit());
        let tokens = self.budget.meter(&self.model, worst)?;
        let stream = self.model.complete(prompt, options)?;
        self.has_begun();
        let outcome = tokens.follow(stream, |_| {}).await?;
        let mut answer = BatchAnswer::of_chat(form.to_owned(), &outcome);
        if echo {
            answer.text.insert_str(0, prompt);
        }
        Ok(answer)
    }

    fn has_begun(&mut self) {
        let _ = self.begun.take().map(|begun| begun.send(()));
    }
}

/// Returns the options of a choice; each choice draws with a different seed.
fn of_choice(options: &ChatOptions, choice: u32) -> ChatOptions {
    let seed = options.seed.map(|seed| seed.wrapping_add(choice.into()));
    ChatOptions { seed, ..options.clone() }
}

fn together(answers: Vec<BatchAnswer>) -> BatchAnswer {
    let mut answers = answers.into_iter();
    let first = answers.next().expect("a request has at least one choice");
    BatchAnswer { others: answers.collect(), ..first }
}

fn refused(model: &Model, parameter: &'static str, rule: &str) -> RuntimeError {
    let message = format!("{} {rule}", model.name());
    EngineError::InvalidRequest { parameter: parameter.to_owned(), message }.into()
}
