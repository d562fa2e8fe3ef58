//! Text completion without a conversation or a chat template. It is journaled like other generations.

use crate::{
    QUICK_BYTES, RunEvent,
    bindings::{
        inference::{self, GenerateOptions},
        types::Error,
    },
    capability::{
        inference::{
            answer::{Prompt, Request},
            attempts::{bill, count_lost, passed_refusal},
            conversion::{generation_of, timing, usage},
            generation::{Generated, QUICK_HASH_BYTES, check_model, end, refuse, repeat},
            model_errors,
            options::{chat_options, tokens_to_reserve},
            progress::Progress,
            record::{GenerationRecord, WrittenUsage, written},
            remote,
        },
        turn::{AskedTokens, GenerationStart, Reservation, Turn},
    },
    journal::{Call, Identity},
    turn_timeline::Stage,
};
use skep_engine::{
    Cancel, Engine, EngineError, FinishReason, Finished, GenerateRequest, Model, RolledBack, Timing,
    TokenEvent, TokenStream, Usage,
    chat::{ChatOptions, refuse_oversized},
};
use skep_model::SpecialTokens;
use std::sync::Arc;
use tokio::task;

/// Continues a text.
pub(crate) async fn complete(
    turn: Arc<Turn>,
    model: Option<String>,
    prompt: String,
    options: GenerateOptions,
) -> Generated {
    let asked = Identity::new("complete-with", &model);
    if let Some(error) = model_errors::before(&turn, &asked)? {
        return Ok(Err(error));
    }
    let model = loop {
        match turn.model(model.as_deref()).await {
            Ok(model) => break model,
            Err(error) if model_errors::waits(&turn, &error).await => {}
            Err(error) => {
                model_errors::note(&turn, asked, &error)?;
                return Ok(Err(error));
            }
        }
    };
    if !options.tools.is_empty() {
        let message = "tools: a completion cannot call tools; use a conversation";
        return Ok(Err(Error::InvalidArgument(message.into())));
    }
    let visible = options.visible;
    let mut chat = match chat_options(&turn, &model, &options) {
        Ok(chat) => chat,
        Err(error) => return Ok(Err(error)),
    };
    if model.engine().is_none() && chat.output.is_some() {
        let name = model.name();
        let message = format!(
            "output: {name} runs on another server, which cannot constrain a completion; use a conversation"
        );
        return Ok(Err(Error::InvalidArgument(message)));
    }
    if !chat.examples.is_empty() {
        let message =
            "a completion has no chat turns, so it cannot have examples; write them into the prompt";
        return Ok(Err(Error::InvalidArgument(message.into())));
    }
    let made = turn.journal.make()?;
    // It never answers without yielding once, because other calls may overtake it.
    task::yield_now().await;
    let is_quick = prompt.len() <= QUICK_BYTES && chat.output.is_none();
    let (named, prompt) = (model.name().to_owned(), Arc::new(prompt));
    let asked_for = prompt.clone();
    let identify = move |_: &Cancel| Identity::new("complete", &(&named, &*asked_for, &options));
    let identity = turn.compute(prompt.len() <= QUICK_HASH_BYTES, identify).await;
    let mut call = turn.journal.identify(made, identity)?;
    let recorded = turn.journal.recorded(&mut call)?;
    count_lost(&turn, &call, &model, &recorded);
    let recorded = match passed_refusal(&turn, recorded).await {
        Ok(recorded) => recorded,
        Err(error) => return Ok(Err(error)),
    };
    let asked = AskedTokens::new(&call, &model, prompt.len(), 0, tokens_to_reserve(chat.max_tokens), 1);
    let mut reservation = match turn.reserve(asked, GenerationStart::of(&call, &recorded)) {
        Ok(reservation) => reservation,
        Err(error) => return Ok(Err(refuse(&turn, &call, error))),
    };
    if let Some((record, position)) = recorded {
        bill(&call, &mut reservation);
        position.reached().await;
        return Ok(repeat(record, reservation, None));
    }
    if let Err(error) = check_model(&call, &model) {
        return Ok(Err(refuse(&turn, &call, error)));
    }
    chat.max_tokens = Some(reservation.max_tokens as usize);
    chat.seed = Some(chat.seed.unwrap_or_else(|| turn.journal.seed_for(&call)));
    let Some(engine) = model.engine().cloned() else {
        return complete_elsewhere(&turn, &call, &model, prompt, chat, visible, reservation).await;
    };
    if call.was_shown_by_remote()
        && let Err(error) = remote::make_again(&turn, &call, false).await?
    {
        return Ok(Err(refuse(&turn, &call, error)));
    }
    // The tokens of the prompt are not known yet.
    let mut request = GenerateRequest::new(Vec::new());
    request.sampling = chat.sampling;
    request.seed = chat.seed;
    request.max_tokens = chat.max_tokens;
    request.stop = chat.stop;
    request.constraint = chat.output;
    request.affinity = chat.affinity;
    request.priority = chat.priority;
    request.deadline = chat.deadline;
    request.observer = chat.observer;
    request.resume = call.tokens().to_vec();
    request.resume_rolled_back = call.taken_back();
    let must_complete = request.constraint.is_some();
    let begins = engine.clone();
    let begin = move |cancel: &Cancel| begin(&begins, &prompt, request, cancel);
    let stream = match turn.compute(is_quick, begin).await.map_err(Error::from) {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(refuse(&turn, &call, error))),
    };
    let progress = Progress::new(&turn, &call, &model, visible);
    let followed = follow_text(progress, stream, reservation).await;
    turn.journal.caught_up().await;
    let (text, finished) = match followed {
        Ok(followed) => followed,
        Err(error) => return Ok(Err(end(&turn, &call, error, None, None))),
    };
    let figures = Some((finished.usage, finished.timing));
    if must_complete && finished.reason.cuts_off() {
        return Ok(Err(end(&turn, &call, Error::Truncated, figures, None)));
    }
    let generation = inference::Generation {
        text,
        tool_calls: Vec::new(),
        finish: match finished.reason {
            FinishReason::Length => inference::FinishReason::Length,
            _ => inference::FinishReason::Stop,
        },
        usage: usage(&finished.usage),
        timing: timing(&finished.timing),
    };
    Ok(Ok(record(&turn, &call, generation, (finished.usage, finished.timing))))
}

/// Lets another server continue the text. After a crash, it does so from the beginning.
async fn complete_elsewhere(
    turn: &Turn,
    call: &Call,
    model: &Model,
    prompt: Arc<String>,
    chat: ChatOptions,
    visible: bool,
    reservation: Reservation,
) -> Generated {
    if let Err(error) = remote::make_again(turn, call, false).await? {
        return Ok(Err(refuse(turn, call, error)));
    }
    let chat = Box::new(ChatOptions { unreported: reservation.unreported(), ..chat });
    let request = Request { turn, call, model, prompt: Prompt::Text(prompt), visible };
    // Without a template, there is nothing to render.
    let stream = match request.submit(true, (*chat).clone()).await {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(refuse(turn, call, error.into()))),
    };
    let followed = request.follow(stream, chat, reservation, None).await;
    turn.journal.caught_up().await;
    let outcome = match followed {
        Ok(outcome) => outcome,
        Err(error) => return Ok(Err(end(turn, call, error, None, None))),
    };
    let figures = (outcome.usage, outcome.timing);
    Ok(Ok(record(turn, call, generation_of(outcome), figures)))
}

/// Records a completion that has ended, and returns it.
fn record(
    turn: &Turn,
    call: &Call,
    generation: inference::Generation,
    (usage, timing): (Usage, Timing),
) -> inference::Generation {
    let record = GenerationRecord::Ended {
        result: Ok(generation.clone()),
        usage: Some(WrittenUsage(usage)),
        message: None,
        compacted_at: None,
        read: String::new(),
        cut: None,
        unreported: written(turn.take_unreported(call)),
    };
    turn.journal.ended(call, &record, vec![RunEvent::Generation { usage, timing }]);
    generation
}

/// Encodes the prompt and submits the request with its tokens.
fn begin(
    engine: &Engine,
    prompt: &str,
    request: GenerateRequest,
    cancel: &Cancel,
) -> Result<TokenStream, EngineError> {
    refuse_oversized(engine, prompt, cancel)?;
    let mut tokens = engine.tokenizer().encode(prompt, SpecialTokens::Parse)?;
    let info = engine.info();
    if info.add_bos
        && let Some(bos) = info.bos
    {
        tokens.insert(0, bos);
    }
    cancel.check()?;
    engine.generate(GenerateRequest { prompt: tokens, ..request })
}

/// Reads a completion stream to its end.
async fn follow_text(
    mut progress: Progress<'_>,
    mut stream: TokenStream,
    mut reservation: Reservation,
) -> Result<(String, Finished), Error> {
    let (mut text, mut produced, mut taken_back) = (String::new(), Vec::new(), RolledBack::default());
    while let Some(event) = stream.next().await {
        reservation.produced(stream.spent_tokens());
        match event.map_err(Error::from)? {
            TokenEvent::Token(token) => {
                progress.reached(Stage::Decode);
                produced.push(token.id);
                taken_back = token.rolled_back;
                text.push_str(&token.text);
                progress.note(&produced, taken_back, &token.text);
            }
            TokenEvent::Finished(finished) => {
                text.push_str(&finished.text_rest);
                progress.note(&produced, taken_back, &finished.text_rest);
                reservation.settle(&finished.usage);
                return Ok((text, finished));
            }
            TokenEvent::Started { prompt_tokens, cached_tokens } => {
                progress.reached(Stage::Prefill);
                reservation.started(prompt_tokens, cached_tokens, 0);
            }
            TokenEvent::PromptLogprobs(_) => {}
        }
        progress.used(&reservation);
    }
    Err(Error::Internal("the generation finished without a result".into()))
}
