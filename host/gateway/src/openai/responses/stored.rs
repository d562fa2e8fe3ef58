//! Responses as they are stored and as clients see them.

use super::{
    InputItem,
    input::Messages,
    item_id::{self, Position},
    output,
};
use crate::ApiError;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use skep_api::{
    IncompleteDetails, InputTokens, OutputTokens, Response, ResponseCaller, ResponseError, ResponseItem,
    ResponseSettings, ResponseStatus, ResponseUsage, marker,
};
use skep_engine::{
    EngineError, Usage,
    chat::{ChatFinish, ChatMessage},
};
use skep_runtime::{ResponseEnd, ResponsePhase, StoredResponse, excerpt};
use std::collections::{BTreeSet, HashMap};

/// Maximum number of responses that the references of one input name.
const MAX_REFERRED: usize = 64;

/// The part of a stored response that the gateway reads.
#[derive(Serialize, Deserialize)]
pub(crate) struct StoredRequest {
    /// The model that responds, or `agent:NAME`.
    pub model: String,
    pub is_background: bool,
    pub settings: ResponseSettings,
    pub caller: ResponseCaller,
    pub input: Vec<InputItem>,
    /// Whether the client carries the reasoning to later requests itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub carries_reasoning: bool,
}

impl StoredRequest {
    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain data always serializes")
    }

    pub(crate) fn decode(stored: &StoredResponse) -> Result<Self, ApiError> {
        serde_json::from_slice(&stored.request).map_err(|error| {
            ApiError::internal(&format!("the stored request of {} is unreadable: {error}", stored.id))
        })
    }
}

/// Returns a response without output, before its model has answered.
pub(crate) fn without_output(
    id: &str,
    previous: Option<&str>,
    request: &StoredRequest,
    created_at: u64,
) -> Response {
    let StoredRequest { model, is_background, settings, caller, .. } = request;
    Response {
        id: id.to_owned(),
        object: marker::Response,
        created_at,
        completed_at: None,
        status: ResponseStatus::InProgress,
        background: *is_background,
        error: None,
        incomplete_details: None,
        model: model.clone(),
        output: Vec::new(),
        previous_response_id: previous.map(str::to_owned),
        usage: None,
        settings: settings.clone(),
        caller: caller.clone(),
    }
}

/// Returns a stored response as clients see it.
pub(crate) fn shown(stored: &StoredResponse) -> Result<Response, ApiError> {
    let request = StoredRequest::decode(stored)?;
    let mut response =
        without_output(&stored.id, stored.previous.as_deref(), &request, stored.created_at_ms / 1000);
    match &stored.phase {
        ResponsePhase::Queued => response.status = ResponseStatus::Queued,
        ResponsePhase::Running => {}
        ResponsePhase::Ended { at_ms, end } => match end {
            ResponseEnd::Done(answer) => {
                response.output = output::of_answer(&stored.id, answer, request.carries_reasoning);
                finish(&mut response, answer.finish, &answer.usage, at_ms / 1000);
            }
            ResponseEnd::Failed { code, message } => {
                fail(&mut response, (*code).to_owned(), message.clone());
            }
            ResponseEnd::Cancelled => response.status = ResponseStatus::Cancelled,
        },
    }
    Ok(response)
}

/// Ends a response whose output is complete.
pub(super) fn finish(response: &mut Response, finish: ChatFinish, tokens: &Usage, now_s: u64) {
    response.usage = Some(usage(tokens));
    response.status = output::end_of(finish);
    match finish {
        ChatFinish::Length => {
            response.incomplete_details = Some(IncompleteDetails { reason: "max_output_tokens".to_owned() });
        }
        ChatFinish::Stop | ChatFinish::ToolCalls => response.completed_at = Some(now_s),
    }
}

pub(super) fn fail(response: &mut Response, code: String, message: String) {
    response.status = ResponseStatus::Failed;
    response.error = Some(ResponseError { code, message });
}

fn usage(usage: &Usage) -> ResponseUsage {
    let (input_tokens, output_tokens) = (u64::from(usage.prompt_tokens), u64::from(usage.completion_tokens));
    ResponseUsage {
        input_tokens,
        input_tokens_details: InputTokens { cached_tokens: usage.cached_tokens.into() },
        output_tokens,
        output_tokens_details: OutputTokens { reasoning_tokens: usage.reasoning_tokens.into() },
        total_tokens: input_tokens + output_tokens,
    }
}

/// Returns the ids of the responses that the references of an input name.
pub(crate) fn referred(items: &[InputItem]) -> Result<BTreeSet<String>, ApiError> {
    let mut responses = BTreeSet::new();
    for (index, item) in items.iter().enumerate() {
        let InputItem::ItemReference { id } = item else { continue };
        responses.insert(item_id::read(id).ok_or_else(|| unknown_item(index, id))?.0);
        if responses.len() > MAX_REFERRED {
            let message = format!("the references name more than {MAX_REFERRED} responses; send the items");
            return Err(ApiError::parameter(format!("input[{index}].id"), message));
        }
    }
    Ok(responses)
}

/// Replaces each reference of an input by the item that it names, which belongs to one of these responses.
pub(crate) fn resolve(
    items: &mut [InputItem],
    responses: &HashMap<String, StoredResponse>,
) -> Result<(), ApiError> {
    for (index, item) in items.iter_mut().enumerate() {
        let InputItem::ItemReference { id } = item else { continue };
        let named = item_id::read(id).and_then(|(id, position)| Some((responses.get(&id)?, position)));
        let found = match named {
            None => None,
            Some((stored, Position::Input(index))) => {
                StoredRequest::decode(stored)?.input.get(index).cloned()
            }
            Some((stored, Position::Output(index))) => shown(stored)?.output.get(index).map(of_output),
        };
        *item = found.ok_or_else(|| unknown_item(index, id))?;
    }
    Ok(())
}

fn unknown_item(index: usize, id: &str) -> ApiError {
    let shown = excerpt(id);
    let message =
        format!("there is no item {shown:?}; its response was not stored, or was deleted or has expired");
    let error = ApiError::new(StatusCode::NOT_FOUND, "item_not_found", message);
    ApiError { param: Some(format!("input[{index}].id")), ..error }
}

/// Returns an item of an output as an item of an input.
fn of_output(item: &ResponseItem) -> InputItem {
    match item {
        ResponseItem::Reasoning { content, .. } => {
            let texts = content.iter().map(|skep_api::ReasoningPart::ReasoningText { text }| text.as_str());
            InputItem::Reasoning { text: texts.collect() }
        }
        ResponseItem::Message { content, .. } => {
            let parts = content.iter().map(|part| serde_json::to_value(part).unwrap_or(Value::Null));
            InputItem::Message { role: "assistant".to_owned(), content: parts.collect() }
        }
        ResponseItem::FunctionCall { call_id, name, arguments, .. } => InputItem::FunctionCall {
            call_id: call_id.clone(),
            name: name.clone(),
            arguments: arguments.clone(),
        },
    }
}

/// Returns the messages of a chat that continues these responses with an input.
pub(crate) fn messages(
    instructions: Option<&str>,
    chain: &[StoredResponse],
    input: &[InputItem],
    model: &str,
) -> Result<Vec<ChatMessage>, ApiError> {
    let mut messages = Messages::new(instructions);
    for stored in chain {
        let request = StoredRequest::decode(stored)?;
        messages.input(&request.input)?;
        match &stored.phase {
            ResponsePhase::Ended { end: ResponseEnd::Done(answer), .. } => {
                messages.answer(answer, request.model == model);
            }
            ResponsePhase::Ended { .. } => {
                let message = format!("the response {} has no answer, so it cannot be continued", stored.id);
                return Err(ApiError::parameter("previous_response_id", message));
            }
            ResponsePhase::Queued | ResponsePhase::Running => {
                let message =
                    format!("the response {} has not ended; wait until it is `completed`", stored.id);
                return Err(ApiError::parameter("previous_response_id", message));
            }
        }
    }
    messages.input(input)?;
    messages.finish()
}

/// Returns the text that an agent gets: that of the last message of the user.
pub(crate) fn text_for_agent(input: &[InputItem]) -> Result<String, ApiError> {
    let mut messages = Messages::new(None);
    messages.input(input)?;
    let messages = messages.finish()?;
    match messages.last() {
        Some(last)
            if last.role == skep_engine::chat::Role::User
                && last.images.is_empty()
                && !last.content.is_empty() =>
        {
            Ok(last.content.clone())
        }
        _ => {
            let message =
                "with an agent as the model, the input must end with a message of the user that has text";
            Err(ApiError::parameter("input", message))
        }
    }
}

/// Returns the error of a response that ended without an answer, for a client that waited for it.
pub(crate) fn failure(error: EngineError) -> ApiError {
    ApiError::of_request(error, Some(super::request::FORM_FIELD))
}
