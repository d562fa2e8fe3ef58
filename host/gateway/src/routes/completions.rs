//! `/v1/completions`: continues texts or token ids.

use crate::{
    ApiError, Gateway,
    body::{FieldsBody, FromFields, LONG, run_on_compute},
    caller::Caller,
    headers,
    metered::Metered,
    openai::{
        Envelope,
        fields::Fields,
        logprobs::TextLogprobs,
        parameters::Parameters,
        prompt::Prompt,
        response_format::{self, Form},
    },
    routes::chat_completions::{model_of, named},
    spent::Spent,
    sse::{self, Message, Step, Writer},
};
use axum::{
    Json,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use skep_api::{Completion, CompletionChoice, ErrorBody};
use skep_engine::{
    Affinity, Cancel, Engine, EngineError, FinishReason, GenerateRequest, Observer, Sampling, TokenEvent,
    TokenStream, Usage, chat::encode_prompt,
};
use skep_runtime::{Surface, TenantBudget, WorstCase};
use std::sync::Arc;
use utoipa::ToSchema;

const MAX_PROMPTS: usize = 64;
const MAX_LOGPROBS: u32 = 20;
const DEFAULT_MAX_TOKENS: u32 = 16;

#[derive(Debug)]
pub(crate) struct CompletionBody {
    prompt: Prompt,
    echo: bool,
    logprobs: Option<u32>,
    output: Option<Form>,
    parameters: Parameters,
}

/// An event of a streamed completion: a piece of the answer, or the error that breaks the stream off.
#[derive(ToSchema)]
#[schema(as = CompletionStreamItem)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes the answer")]
enum StreamItem {
    Piece(Completion),
    Broken(ErrorBody),
}

/// Continues texts or token ids, as OpenAI's route of this name does.
#[utoipa::path(post, path = "/v1/completions", tag = "models", operation_id = "create_completion",
    request_body = crate::openai::schema::CompletionRequest,
    responses(
        (status = 200, description = "The answer; or with `stream`, its pieces as events without a name, and `[DONE]` after the last one.",
            content((Completion = "application/json"), (StreamItem = "text/event-stream"))),
        (status = 404, description = "`model_not_found`"),
        (status = 422, description = "`schema_unsatisfied` or `truncated`"),
        (status = 504, description = "`deadline_exceeded`"),
    ))]
pub(crate) async fn create(
    State(gateway): State<Gateway>,
    caller: Caller,
    headers: HeaderMap,
    FieldsBody(body): FieldsBody<CompletionBody>,
) -> Result<Response, ApiError> {
    let asked = named(body.parameters.model.as_deref());
    let model = model_of(&gateway, &caller, asked).await?;
    let Some(engine) = model.engine().cloned() else {
        let message = format!(
            "{} runs on another server, which answers messages and continues no plain text; use /v1/chat/completions",
            model.name()
        );
        return Err(ApiError::parameter("model", message));
    };
    let affinity = headers::affinity(&headers, &caller)?;
    let budget = gateway.host.tenant_budget(caller.tenant.as_str(), caller.key())?;
    let (started, bytes) = (engine.clone(), body.bytes());
    let spent = caller.spent().clone();
    let observer = caller.observer(&gateway, Surface::Completions, asked, body.parameters.streams());
    let begin = move |cancel: &Cancel| {
        let choices = body.start(&started, (&affinity, &observer), &budget, &spent, cancel)?;
        Ok((body, choices))
    };
    let (body, mut choices) = run_on_compute(&gateway, caller.tenant.as_str(), bytes, begin).await?;
    let warnings = choices[0].1.stream().warnings().clone();
    // A refusal is a status, not an event, so the first event is awaited before the response starts.
    let first = choices[0].1.next().await.unwrap_or(Err(EngineError::Cancelled))?;
    choices[0].0.take(first);
    let envelope = Envelope::new("cmpl", model.name());
    if body.parameters.streams() {
        let response = streamed(choices, envelope, body.parameters.streams_usage());
        return Ok(headers::warned(response, &warnings));
    }
    let mut usage = Usage::default();
    let mut answers = Vec::new();
    for (choice, stream) in choices {
        answers.push(choice.whole(stream, &mut usage).await?);
    }
    let answer = envelope.text(answers, Some(&usage));
    Ok(headers::warned(Json(answer).into_response(), &warnings))
}

impl FromFields for CompletionBody {
    fn read(mut fields: Fields) -> Result<Self, ApiError> {
        fields.refuse(&[
            ("suffix", "put the whole text into the prompt"),
            ("messages", "use /v1/chat/completions"),
        ])?;
        Ok(CompletionBody {
            prompt: fields.take_required("prompt")?,
            echo: fields.take("echo")?.unwrap_or(false),
            logprobs: fields.take("logprobs")?,
            output: response_format::take(&mut fields)?,
            parameters: Parameters::take(&mut fields)?,
        })
    }
}

impl CompletionBody {
    /// Returns the size of the text to encode, or `LONG` if a constraint has to be compiled.
    fn bytes(&self) -> usize {
        match &self.prompt {
            _ if self.output.is_some() => LONG,
            Prompt::Text(text) => text.len(),
            Prompt::Texts(texts) => texts.iter().map(String::len).sum(),
            Prompt::Ids(ids) => size_of_val(&ids[..]),
            Prompt::IdLists(lists) => lists.iter().map(|ids| size_of_val(&ids[..])).sum(),
        }
    }

    fn start(
        &self,
        engine: &Engine,
        (affinity, observer): (&Affinity, &Option<Arc<dyn Observer>>),
        budget: &TenantBudget,
        spent: &Spent,
        cancel: &Cancel,
    ) -> Result<Vec<(Choice, Metered<TokenStream>)>, ApiError> {
        let (prompts, per_prompt) = (self.prompts(engine, cancel)?, self.parameters.choices()?);
        let mut choices = Vec::new();
        for prompt in &prompts {
            for choice in 0..per_prompt {
                let mut request = self.request(prompt.clone(), choice, &engine.info().sampling)?;
                request.affinity = affinity.clone();
                request.observer = observer.clone();
                let most = request.max_tokens.unwrap_or_else(|| engine.sequence_limit());
                let worst = WorstCase {
                    input_tokens: prompt.len(),
                    output_tokens: u32::try_from(most).unwrap_or(u32::MAX),
                };
                let tokens = budget.meter(&engine.info().name, worst)?;
                let stream = engine.generate(request);
                let stream = stream.map_err(|error| {
                    ApiError::of_request(error, self.output.as_ref().map(|form| form.field))
                })?;
                let stream = Metered::new(stream, tokens, spent.clone());
                choices.push((Choice::new(choices.len(), engine, self, prompt), stream));
            }
        }
        Ok(choices)
    }

    fn prompts(&self, engine: &Engine, cancel: &Cancel) -> Result<Vec<Vec<u32>>, ApiError> {
        let encode = |text: &String| encode_prompt(engine, text, cancel);
        let prompts = match &self.prompt {
            Prompt::Text(text) => vec![encode(text)?],
            Prompt::Texts(texts) if texts.len() <= MAX_PROMPTS => {
                texts.iter().map(encode).collect::<Result<_, _>>()?
            }
            Prompt::Texts(texts) => return Err(too_many(texts.len())),
            Prompt::Ids(ids) => vec![ids.clone()],
            Prompt::IdLists(lists) if lists.len() <= MAX_PROMPTS => lists.clone(),
            Prompt::IdLists(lists) => return Err(too_many(lists.len())),
        };
        match prompts.iter().any(Vec::is_empty) || prompts.is_empty() {
            true => Err(ApiError::parameter("prompt", "the prompt is empty; send at least one token")),
            false => Ok(prompts),
        }
    }

    fn request(
        &self,
        prompt: Vec<u32>,
        choice: usize,
        defaults: &Sampling,
    ) -> Result<GenerateRequest, ApiError> {
        if self.logprobs.is_some_and(|logprobs| logprobs > MAX_LOGPROBS) {
            return Err(ApiError::parameter("logprobs", format!("logprobs must be at most {MAX_LOGPROBS}")));
        }
        Ok(GenerateRequest {
            sampling: self.parameters.sampling(defaults)?,
            seed: self.parameters.seed_of(choice),
            max_tokens: Some(self.parameters.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) as usize),
            stop: self.parameters.stops(),
            ignore_eos: self.parameters.ignore_eos.unwrap_or(false),
            constraint: self.output.as_ref().map(|form| form.constraint.clone()),
            top_logprobs: self.logprobs,
            prompt_logprobs: self.logprobs.filter(|_| self.echo),
            ..GenerateRequest::new(prompt)
        })
    }
}

fn too_many(prompts: usize) -> ApiError {
    ApiError::parameter(
        "prompt",
        format!("the request has {prompts} prompts; at most {MAX_PROMPTS} are allowed"),
    )
}

/// One choice while it is being generated.
struct Choice {
    index: usize,
    engine: Engine,
    /// Text that has not been sent yet. It starts with the prompt if the prompt is to be echoed.
    text: String,
    /// The prompt, if it is to be echoed and scored.
    scored_prompt: Vec<u32>,
    logprobs: Option<TextLogprobs>,
    /// Whether the text must have a form, so that an incomplete one is reported as cut off.
    must_be_whole: bool,
    finish: Option<&'static str>,
    usage: Usage,
}

impl Choice {
    fn new(index: usize, engine: &Engine, body: &CompletionBody, prompt: &[u32]) -> Self {
        let logprobs = body.logprobs.map(|_| TextLogprobs::default());
        Choice {
            index,
            engine: engine.clone(),
            text: if body.echo { engine.tokenizer().decode(prompt, false) } else { String::new() },
            scored_prompt: if body.echo && logprobs.is_some() { prompt.to_vec() } else { Vec::new() },
            logprobs,
            must_be_whole: body.output.is_some(),
            finish: None,
            usage: Usage::default(),
        }
    }

    fn take(&mut self, event: TokenEvent) {
        match event {
            TokenEvent::Started { .. } => {}
            TokenEvent::PromptLogprobs(scores) => {
                let Some(logprobs) = &mut self.logprobs else { return };
                for (id, score) in self.scored_prompt.iter().zip(&scores) {
                    logprobs.push(&self.engine, *id, score.as_ref());
                }
            }
            TokenEvent::Token(token) => {
                self.text.push_str(&token.text);
                // The token that ends the text is not part of it.
                let ends = token.text.is_empty() && self.engine.info().eos.contains(&token.id);
                if let Some(logprobs) = self.logprobs.as_mut().filter(|_| !ends) {
                    logprobs.push(&self.engine, token.id, token.logprob.as_ref());
                }
            }
            TokenEvent::Finished(finished) => {
                self.text.push_str(&finished.text_rest);
                self.usage = finished.usage;
                self.finish = Some(match finished.reason {
                    FinishReason::Length => "length",
                    reason if self.must_be_whole && reason.cuts_off() => "length",
                    _ => "stop",
                });
            }
        }
    }

    /// Returns everything generated since the last call.
    fn piece(&mut self) -> CompletionChoice {
        CompletionChoice {
            index: self.index as u32,
            text: std::mem::take(&mut self.text),
            logprobs: self.logprobs.as_mut().map(TextLogprobs::take),
            finish_reason: self.finish.map(str::to_owned),
        }
    }

    async fn whole(
        mut self,
        mut stream: Metered<TokenStream>,
        usage: &mut Usage,
    ) -> Result<CompletionChoice, ApiError> {
        while let Some(event) = stream.next().await {
            self.take(event?);
        }
        usage.add(&self.usage);
        Ok(self.piece())
    }
}

fn streamed(choices: Vec<(Choice, Metered<TokenStream>)>, envelope: Envelope, sends_usage: bool) -> Response {
    let mut known = Vec::new();
    let mut streams = Vec::new();
    for (index, (choice, stream)) in choices.into_iter().enumerate() {
        known.push(choice);
        streams.push(stream.map(move |event| (index, event)));
    }
    sse::respond(stream::select_all(streams), ChunkWriter { choices: known, envelope, sends_usage })
}

struct ChunkWriter {
    choices: Vec<Choice>,
    envelope: Envelope,
    sends_usage: bool,
}

impl Writer for ChunkWriter {
    type Item = (usize, Result<TokenEvent, EngineError>);

    fn write(&mut self, (index, event): Self::Item) -> Step {
        let choice = &mut self.choices[index];
        match event {
            Ok(event) => choice.take(event),
            Err(error) => return Step::Break(vec![Message::data(&ApiError::from(error).body())]),
        }
        // A token whose text is held back is sent with the one that completes it.
        if choice.text.is_empty() && choice.finish.is_none() {
            return Step::Go(Vec::new());
        }
        let piece = choice.piece();
        Step::Go(vec![Message::data(&self.envelope.text(vec![piece], None))])
    }

    fn end(&mut self) -> Vec<Message> {
        let mut usage = Usage::default();
        self.choices.iter().for_each(|choice| usage.add(&choice.usage));
        let usage = self.sends_usage.then(|| Message::data(&self.envelope.text(Vec::new(), Some(&usage))));
        usage.into_iter().chain([Message::done()]).collect()
    }
}
