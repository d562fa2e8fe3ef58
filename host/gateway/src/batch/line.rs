//! Reads the body of one request of a batch, for each endpoint.

use super::request::Target;
use crate::{
    ApiError,
    openai::{
        chat_request::ChatBody,
        completion_request::CompletionBody,
        parameters::Parameters,
        responses::{
            InputItem,
            request::ResponseRequest,
            stored::{self, StoredRequest},
        },
    },
};
use serde::{Deserialize, Serialize};
use skep_engine::{Affinity, Sampling, chat::ChatOptions};
use skep_runtime::{BatchItem, BatchRequest, NewResponse, StoredResponse, response_id};
use std::collections::HashMap;

/// Returns the request of a chat that waits for room.
pub(crate) fn queued(
    body: &ChatBody,
    is_for_agent: bool,
    defaults: &Sampling,
) -> Result<BatchRequest, ApiError> {
    refuse_stream(&body.parameters)?;
    let choices = body.parameters.choices()? as u32;
    if is_for_agent {
        body.refuse_for_agent()?;
        return Ok(BatchRequest::Turn { text: body.last_user_text()?, data: None });
    }
    let options = Box::new(body.options(0, &affinity(&body.parameters), defaults)?);
    Ok(BatchRequest::Chat { messages: body.messages()?, options, choices })
}

/// Returns the request of a text completion that waits for room.
pub(super) fn queued_text(body: &CompletionBody, target: &Target) -> Result<BatchRequest, ApiError> {
    refuse_stream(&body.parameters)?;
    if target.is_agent {
        let message = "agents do not support text completion; use /v1/chat/completions or /v1/responses";
        return Err(ApiError::parameter("model", message));
    }
    let affinity = affinity(&body.parameters);
    let options = ChatOptions { affinity, ..body.batch_options(&target.defaults)? };
    Ok(BatchRequest::Texts {
        prompts: body.batch_prompts()?,
        options: Box::new(options),
        choices: body.parameters.choices()? as u32,
        echo: body.echo,
    })
}

/// The responses that the requests of a batch continue, after those that these continue, by their ids.
pub(crate) type Chains = HashMap<String, Vec<StoredResponse>>;

/// The form of a response, stored with its item: everything but the answer that it takes to show it.
#[derive(Serialize, Deserialize)]
pub(super) struct ResponseForm {
    pub id: String,
    pub previous: Option<String>,
    pub request: StoredRequest,
}

/// Returns the item of a response that waits for room. It is stored for `tenant` when it ends.
pub(super) fn queued_response(
    request: &ResponseRequest,
    target: &Target,
    (tenant, chains): (&str, &Chains),
) -> Result<BatchItem, ApiError> {
    refuse_stream(&request.parameters)?;
    if request.is_background {
        let message = "batch requests always run in the background; remove `background`";
        return Err(ApiError::parameter("background", message));
    }
    let input = request.input.items()?;
    if let Some(index) = input.iter().position(|item| matches!(item, InputItem::ItemReference { .. })) {
        let message = "a request of a batch cannot refer to an item; send the item";
        return Err(ApiError::parameter(format!("input[{index}]"), message));
    }
    let chain = match &request.previous {
        None => &[][..],
        Some(previous) => chains.get(previous).ok_or_else(|| {
            let message = format!("there is no response {:?}", skep_runtime::excerpt(previous));
            ApiError { code: "response_not_found", ..ApiError::parameter("previous_response_id", message) }
        })?,
    };
    let (queued, sampling) = if target.is_agent {
        request.refuse_for_agent()?;
        if request.previous.is_some() {
            let message = "each request of a batch to an agent has a session of its own; remove it";
            return Err(ApiError::parameter("previous_response_id", message));
        }
        (BatchRequest::Turn { text: stored::text_for_agent(&input)?, data: None }, None)
    } else {
        let options = request.options(affinity(&request.parameters), &target.defaults)?;
        let sampling = options.sampling.clone();
        let messages = stored::messages(request.instructions.as_deref(), chain, &input, &target.name)?;
        (BatchRequest::Chat { messages, options: Box::new(options), choices: 1 }, Some(sampling))
    };
    let id = response_id();
    let mut stored = StoredRequest {
        model: target.name.clone(),
        is_background: false,
        settings: request.settings(sampling.as_ref()),
        caller: request.caller.clone(),
        input,
        carries_reasoning: request.reasoning.is_carried,
    };
    let keep = request.is_stored.then(|| NewResponse {
        id: id.clone(),
        principal: tenant.to_owned(),
        previous: request.previous.clone(),
        thread: chain.first().map_or_else(|| id.clone(), |first| first.thread.clone()),
        turn: None,
        request: stored.encode(),
    });
    stored.input.clear();
    let form = ResponseForm { id, previous: request.previous.clone(), request: stored };
    let form = serde_json::to_string(&form).expect("plain data always serializes");
    Ok(BatchItem { request: queued, form, reference: None, keep })
}

fn refuse_stream(parameters: &Parameters) -> Result<(), ApiError> {
    match parameters.streams() {
        true => {
            let message = "the answers of a batch cannot be streamed; remove `stream`";
            Err(ApiError::parameter("stream", message))
        }
        false => Ok(()),
    }
}

/// Returns the affinity of a request, whose tenant is that of its batch.
fn affinity(parameters: &Parameters) -> Affinity {
    Affinity { session: parameters.cache_key().map(str::to_owned), ..Affinity::default() }
}
