//! `/v1/completions`: continues texts or token ids.

use crate::{
    ApiError, Gateway,
    body::{FieldsBody, FromFields, LONG, run_on_compute},
    caller::Caller,
    headers,
    metered::Metered,
    openai::{
        Envelope,
        completion_request::{CompletionBody, empty, few},
        fields::Fields,
        logprobs::TextLogprobs,
        parameters::Parameters,
        prompt::Prompt,
    },
    routes::{
        chat_completions::{all_choices, model_of, named},
        text_choice::{Choice, Continued, Continues, TokenReader, streamed},
    },
    spent::Spent,
};
use axum::{
    Json,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use futures::Stream;
use skep_api::{Completion, ErrorBody};
use skep_engine::{
    Affinity, Cancel, Engine, EngineError, Model, Observer, TokenEvent, TokenStream,
    chat::{ChatEvent, ChatOptions, ChatStream, Routed, encode_prompt},
};
use skep_runtime::{Surface, TenantBudget, WorstCase};
use std::sync::Arc;
use utoipa::ToSchema;

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
        (status = 200, description = "The answer; or with `stream`, its pieces as events without a name, and `[DONE]` after the last one. `x-skep-model` names the model that answers, `x-skep-attempts` how many a route asked, and `x-skep-ignored` the fields that changed nothing.",
            content((Completion = "application/json"), (StreamItem = "text/event-stream"))),
        (status = 404, description = "`model_not_found`"),
        (status = 422, description = "`schema_unsatisfied` or `truncated`"),
        (status = 502, description = "`upstream_refused`, `upstream_cut_off` or `upstream_malformed`"),
        (status = 503, description = "`upstream_unavailable`"),
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
    let observer = caller.observer(&gateway, Surface::Completions, asked, body.parameters.streams());
    let asking = Asking {
        affinity: headers::affinity_with(&headers, &caller, body.parameters.cache_key())?,
        budget: gateway.host.tenant_budget(caller.tenant.as_str(), caller.key())?,
        spent: caller.spent().clone(),
        observer,
    };
    let (tenant, bytes, ignored) = (caller.tenant.as_str(), body.bytes(), body.ignored.clone());
    let streaming = Streaming::of(&body.parameters);
    if let Some(engine) = model.engine().cloned() {
        let begin = move |cancel: &Cancel| body.start(&engine, &asking, cancel);
        let choices = run_on_compute(&gateway, tenant, bytes, begin).await?;
        let warnings = choices[0].stream.stream().warnings().clone();
        let response = headers::warned(answer(&model, choices, streaming).await?, &warnings);
        return Ok(headers::ignored(response, &ignored));
    }
    let started = model.clone();
    let begin = move |cancel: &Cancel| body.start_remote(&started, &asking, cancel);
    let choices = run_on_compute(&gateway, tenant, bytes, begin).await?;
    Ok(headers::ignored(answer(&model, choices, streaming).await?, &ignored))
}

/// Whether and how the answer is streamed.
struct Streaming {
    streams: bool,
    sends_usage: bool,
}

impl Streaming {
    fn of(parameters: &Parameters) -> Self {
        Streaming { streams: parameters.streams(), sends_usage: parameters.streams_usage() }
    }
}

/// The caller's part in a request.
struct Asking {
    affinity: Affinity,
    budget: TenantBudget,
    spent: Spent,
    observer: Option<Arc<dyn Observer>>,
}

/// Returns the response of choices that have been started.
async fn answer<S, E>(
    model: &Model,
    mut choices: Vec<Continued<S, E>>,
    streaming: Streaming,
) -> Result<Response, ApiError>
where
    E: Continues,
    S: 'static,
    Metered<S>: Stream<Item = Result<E, EngineError>> + Unpin + Send + 'static,
{
    choices[0].begin().await?;
    let served = choices[0].choice.routed.clone();
    let served = served.unwrap_or_else(|| Routed { model: model.name().to_owned(), attempts: 1 });
    let envelope = Envelope::new("cmpl", &served.model);
    if streaming.streams {
        return Ok(headers::served(streamed(choices, envelope, streaming.sends_usage), &served));
    }
    let (choices, usage) = all_choices(choices.into_iter().map(Continued::whole)).await?;
    let answer = envelope.text(choices, Some(&usage));
    Ok(headers::served(Json(answer).into_response(), &served))
}

impl FromFields for CompletionBody {
    fn read(fields: Fields) -> Result<Self, ApiError> {
        CompletionBody::read(fields)
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
        asking: &Asking,
        cancel: &Cancel,
    ) -> Result<Vec<Continued<TokenStream, TokenEvent>>, ApiError> {
        let (prompts, per_prompt) = (self.prompts(engine, cancel)?, self.parameters.choices()?);
        let mut choices = Vec::new();
        for prompt in &prompts {
            for choice in 0..per_prompt {
                let mut request = self.request(prompt.clone(), choice, &engine.info().sampling)?;
                request.affinity = asking.affinity.clone();
                request.observer = asking.observer.clone();
                let worst = WorstCase::of_text(prompt.len(), request.max_tokens, engine.sequence_limit());
                let tokens = asking.budget.meter(&Model::from(engine.clone()), worst)?;
                let stream = engine.generate(request);
                let stream = stream.map_err(|error| {
                    ApiError::of_request(error, self.output.as_ref().map(|form| form.field))
                })?;
                let text = if self.echo { engine.tokenizer().decode(prompt, false) } else { String::new() };
                let scores = self.echo && self.logprobs.is_some();
                choices.push(Continued {
                    reader: TokenReader {
                        engine: engine.clone(),
                        scored_prompt: if scores { prompt.clone() } else { Vec::new() },
                        must_be_whole: self.output.is_some(),
                    },
                    stream: Metered::of_text(stream, tokens, asking.spent.clone()),
                    choice: Choice {
                        logprobs: self.logprobs.map(|_| TextLogprobs::default()),
                        ..Choice::new(choices.len(), text)
                    },
                });
            }
        }
        Ok(choices)
    }

    /// Starts the choices of a model that another server computes, or of a route.
    fn start_remote(
        &self,
        model: &Model,
        asking: &Asking,
        cancel: &Cancel,
    ) -> Result<Vec<Continued<ChatStream, ChatEvent>>, ApiError> {
        let (prompts, per_prompt) = (self.texts(model)?, self.parameters.choices()?);
        let mut choices = Vec::new();
        for prompt in prompts {
            for choice in 0..per_prompt {
                let options = ChatOptions {
                    affinity: asking.affinity.clone(),
                    observer: asking.observer.clone(),
                    cancel: cancel.clone(),
                    ..self.options(choice, &model.sampling())?
                };
                let worst = WorstCase::of_text(prompt.len(), options.max_tokens, model.sequence_limit());
                let tokens = asking.budget.meter(model, worst)?;
                let stream = model.complete(prompt, options)?;
                let text = if self.echo { prompt.clone() } else { String::new() };
                choices.push(Continued {
                    choice: Choice::new(choices.len(), text),
                    reader: (),
                    stream: Metered::of_chat(stream, tokens, asking.spent.clone()),
                });
            }
        }
        Ok(choices)
    }

    fn prompts(&self, engine: &Engine, cancel: &Cancel) -> Result<Vec<Vec<u32>>, ApiError> {
        let encode = |text: &String| encode_prompt(engine, text, cancel);
        let prompts = match &self.prompt {
            Prompt::Text(text) => vec![encode(text)?],
            Prompt::Texts(texts) => few(texts)?.iter().map(encode).collect::<Result<_, _>>()?,
            Prompt::Ids(ids) => vec![ids.clone()],
            Prompt::IdLists(lists) => few(lists)?.to_vec(),
        };
        match prompts.iter().any(Vec::is_empty) || prompts.is_empty() {
            true => Err(empty()),
            false => Ok(prompts),
        }
    }
}
