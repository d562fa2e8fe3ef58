//! `/v1/messages`: messages from a model, as Anthropic's API has them.

use super::chat_completions::{Asked, StartedChat, model_of, named};
use crate::{
    ApiError, Gateway,
    anthropic::{request::MessageRequest, response},
    body::{FieldsBody, LONG, run_on_compute},
    caller::Caller,
    headers,
};
use axum::{
    Json,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use skep_api::{AnthropicError, AnthropicEvent, AnthropicMessage, AnthropicTokenCount};
use skep_engine::{
    Cancel, EngineError, Model, SpecialTokens,
    chat::{ChatMessage, Opening, Transcript},
};
use skep_runtime::Surface;
use std::sync::Arc;

/// Creates a message with a model, as Anthropic's route of this name does.
///
/// `x-api-key` is the key, if the host requires one. `cache_control` is accepted without effect: every prefix is cached.
#[utoipa::path(post, path = "/v1/messages", tag = "models", operation_id = "create_anthropic_message",
    params(
        ("x-session-affinity" = Option<String>, Header, description = "The session, whose prefix is likely cached"),
    ),
    request_body = MessageRequest,
    responses(
        (status = 200, description = "The message; or with `stream`, its events. `x-skep-model` names the model that answers, and `x-skep-ignored` the fields that the host does not know.",
            content((AnthropicMessage = "application/json"), (AnthropicEvent = "text/event-stream"))),
        (status = 400, description = "`invalid_request_error`", body = AnthropicError),
        (status = 404, description = "`not_found_error`", body = AnthropicError),
        (status = 422, description = "`invalid_request_error`: no output satisfies the schema", body = AnthropicError),
        (status = 429, description = "`rate_limit_error`", body = AnthropicError),
        (status = 502, description = "`api_error`", body = AnthropicError),
        (status = 503, description = "`overloaded_error`", body = AnthropicError),
        (status = 504, description = "`timeout_error`", body = AnthropicError),
    ))]
pub(crate) async fn create(
    State(gateway): State<Gateway>,
    caller: Caller,
    headers: HeaderMap,
    FieldsBody(request): FieldsBody<MessageRequest>,
) -> Result<Response, ApiError> {
    let asked = named(Some(&request.model));
    let model = model_of(&gateway, &caller, asked).await?;
    let observer = caller.observer(&gateway, Surface::Messages, asked, request.streams());
    let affinity = headers::affinity_with(&headers, &caller, request.user())?;
    let bytes = if request.is_constrained() { LONG } else { request.text_bytes() };
    let request = Arc::new(request);
    let read = request.clone();
    let asked = move |model: &Model| {
        let options = read.options(affinity, &model.sampling(), model.sequence_limit())?;
        Ok(Asked {
            messages: read.messages()?,
            choices: vec![options],
            form_field: Some("output_config.format"),
        })
    };
    let mut chat = StartedChat::begin(&gateway, &caller, (model, observer), bytes, asked).await?;
    let (warnings, served, ignored) = (chat.warnings.clone(), chat.served(), request.ignored_by(&chat.model));
    let response = if request.streams() {
        chat.respond_with(response::EventWriter::new(&served.model))
    } else {
        let choice = chat.choices.remove(0);
        Json(response::message(&served.model, choice.outcome().await?)?).into_response()
    };
    let response = headers::ignored(headers::warned(response, &warnings), &ignored);
    Ok(headers::served(response, &served))
}

/// Counts the tokens of the prompt that a request for a message would have.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "models", operation_id = "count_anthropic_tokens",
    request_body = MessageRequest,
    responses(
        (status = 200, description = "The number of tokens; for a model of an upstream, an estimate. `x-skep-ignored` names the fields that the host does not know.", body = AnthropicTokenCount),
        (status = 400, description = "`invalid_request_error`", body = AnthropicError),
        (status = 404, description = "`not_found_error`", body = AnthropicError),
    ))]
pub(crate) async fn count_tokens(
    State(gateway): State<Gateway>,
    caller: Caller,
    FieldsBody(request): FieldsBody<MessageRequest>,
) -> Result<Response, ApiError> {
    let model = model_of(&gateway, &caller, named(Some(&request.model))).await?;
    let ignored = request.ignored_by(&model);
    let count = move |cancel: &Cancel| {
        let tools = request.tools()?;
        let mut messages = request.messages()?;
        let begun = match model.engine() {
            Some(engine) if request.begins_answer() => {
                let begun = messages.pop().unwrap_or_else(|| ChatMessage::assistant("")).content;
                engine.tokenizer().encode(&begun, SpecialTokens::Literal).map_err(EngineError::from)?.len()
            }
            _ => 0,
        };
        let mut transcript = Transcript::new();
        messages.into_iter().for_each(|message| transcript.push(message));
        let opening = Opening { tools: &tools, examples: &[], reasoning: Some(request.reasoning()) };
        let input_tokens = (model.prompt_tokens(&transcript, opening, cancel)? + begun) as u64;
        Ok(AnthropicTokenCount { input_tokens })
    };
    let count = run_on_compute(&gateway, caller.tenant.as_str(), LONG, count).await?;
    Ok(headers::ignored(Json(count).into_response(), &ignored))
}
