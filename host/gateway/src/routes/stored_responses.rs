//! `/v1/responses/{response}`: stored responses, their inputs, and the events of those in the background.

use super::{ascends, page_limit_within};
use crate::{
    ApiError, Gateway,
    caller::Caller,
    openai::responses::{
        stored::{self, StoredRequest},
        writer::{AgentFollowWriter, AgentWriter, Events, FollowWriter, Progress},
    },
    routes::messages::run_events,
    sse,
};
use axum::{
    Json,
    extract::{Path, Query, State},
    response::{IntoResponse, Response},
};
use futures::{Stream, StreamExt, stream};
use serde::Deserialize;
use serde_json::Value;
use skep_api::{DeletedResponse, NumberedResponseEvent, ResponseInputPage, marker};
use skep_runtime::{LiveAnswer, PartialAnswer, ResponsePhase, StoredResponse};
use std::{sync::Arc, time::Duration};
use utoipa::IntoParams;

/// Longest wait for more of an answer before its end is looked for in the database.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Default and maximum number of items in a page.
const PAGE: (u32, u32) = (20, 100);

/// The form of the answer.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ShowQuery {
    /// Whether the answer is the stream of the response's events, which only responses in the background have.
    #[serde(default)]
    stream: bool,
    /// The number of the last event that the client has seen.
    starting_after: Option<u64>,
}

/// Shows a stored response; or with `stream`, the events of one in the background, from any event on.
#[utoipa::path(get, path = "/v1/responses/{response}", tag = "responses", operation_id = "get_response",
    params(("response" = String, Path, description = "Id of the response"), ShowQuery),
    responses(
        (status = 200, description = "The response, or its events.",
            content((skep_api::Response = "application/json"), (NumberedResponseEvent = "text/event-stream"))),
        (status = 404, description = "`response_not_found`"),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    Query(query): Query<ShowQuery>,
) -> Result<Response, ApiError> {
    let response = of_caller(&gateway, &caller, &id).await?;
    if query.stream {
        return follow(&gateway, caller.tenant.as_str(), response, query.starting_after).await;
    }
    Ok(Json(stored::shown(&response)?).into_response())
}

/// Deletes a response. One that is being produced is cancelled.
#[utoipa::path(delete, path = "/v1/responses/{response}", tag = "responses", operation_id = "delete_response",
    params(("response" = String, Path, description = "Id of the response")),
    responses(
        (status = 200, description = "The response is gone, and cannot be continued.", body = DeletedResponse),
        (status = 404, description = "`response_not_found`"),
    ))]
pub(crate) async fn delete(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<DeletedResponse>, ApiError> {
    of_caller(&gateway, &caller, &id).await?;
    gateway.host.delete_response(caller.tenant.as_str(), &id).await?;
    Ok(Json(DeletedResponse { id, object: marker::Response, deleted: true }))
}

/// Cancels a response in the background. One that has ended stays as it is.
#[utoipa::path(post, path = "/v1/responses/{response}/cancel", tag = "responses", operation_id = "cancel_response",
    params(("response" = String, Path, description = "Id of the response")),
    responses(
        (status = 200, description = "The response.", body = skep_api::Response),
        (status = 400, description = "The response is not in the background."),
        (status = 404, description = "`response_not_found`"),
    ))]
pub(crate) async fn cancel(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<skep_api::Response>, ApiError> {
    let tenant = caller.tenant.as_str();
    let response = of_caller(&gateway, &caller, &id).await?;
    if !StoredRequest::decode(&response)?.is_background {
        let message =
            "only a response in the background can be cancelled; close the connection to cancel another";
        return Err(ApiError::parameter("response", message));
    }
    gateway.host.cancel_response(tenant, &id).await?;
    Ok(Json(stored::shown(&gateway.host.response(tenant, &id).await?)?))
}

/// The part of a list.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ItemsQuery {
    /// Maximum number of items; the default is 20.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `asc` or `desc`, which is the default.
    order: Option<String>,
    /// The id of an item; the list continues after it.
    after: Option<String>,
}

/// Lists the items of a response's input, without those of the responses that it continues.
#[utoipa::path(get, path = "/v1/responses/{response}/input_items", tag = "responses", operation_id = "list_response_input",
    params(("response" = String, Path, description = "Id of the response"), ItemsQuery),
    responses(
        (status = 200, description = "The items.", body = ResponseInputPage),
        (status = 404, description = "`response_not_found`"),
    ))]
pub(crate) async fn input_items(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    Query(query): Query<ItemsQuery>,
) -> Result<Json<ResponseInputPage>, ApiError> {
    let response = of_caller(&gateway, &caller, &id).await?;
    let items = StoredRequest::decode(&response)?.input;
    let mut items: Vec<Value> =
        items.iter().enumerate().map(|(index, item)| item.shown(&id, index)).collect();
    if !ascends(query.order.as_deref())? {
        items.reverse();
    }
    let limit = page_limit_within(query.limit, PAGE)? as usize;
    if let Some(after) = &query.after {
        let Some(at) = items.iter().position(|item| item["id"] == after.as_str()) else {
            return Err(ApiError::parameter("after", format!("the input has no item {after:?}")));
        };
        items.drain(..=at);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id_of = |item: Option<&Value>| item.and_then(|item| item["id"].as_str()).map(str::to_owned);
    let (first_id, last_id) = (id_of(items.first()), id_of(items.last()));
    Ok(Json(ResponseInputPage { object: marker::List, data: items, first_id, last_id, has_more }))
}

/// Returns a response of the caller's tenant. A key for some agents reaches only responses of these.
pub(super) async fn of_caller(
    gateway: &Gateway,
    caller: &Caller,
    id: &str,
) -> Result<StoredResponse, ApiError> {
    let response = gateway.host.response(caller.tenant.as_str(), id).await?;
    check_reach(caller, &response)?;
    Ok(response)
}

/// Returns a response of the caller's tenant after those that it continues.
pub(super) async fn chain_of_caller(
    gateway: &Gateway,
    caller: &Caller,
    id: &str,
) -> Result<Vec<StoredResponse>, ApiError> {
    let chain = gateway.host.response_chain(caller.tenant.as_str(), id).await?;
    chain.last().map_or(Ok(()), |response| check_reach(caller, response))?;
    Ok(chain)
}

/// Refuses a response that the caller's key does not reach.
fn check_reach(caller: &Caller, response: &StoredResponse) -> Result<(), ApiError> {
    let reaches = match &response.turn {
        Some(turn) => caller.reaches(&turn.agent),
        None => !caller.is_narrow(),
    };
    if reaches { Ok(()) } else { Err(caller.refuse_wide()) }
}

/// Streams the events of a response in the background, after the one with the number `seen`.
pub(super) async fn follow(
    gateway: &Gateway,
    tenant: &str,
    response: StoredResponse,
    seen: Option<u64>,
) -> Result<Response, ApiError> {
    let request = StoredRequest::decode(&response)?;
    if !request.is_background {
        let message = "only a response in the background can be streamed later; get it without `stream`";
        return Err(ApiError::parameter("stream", message));
    }
    let created_at = response.created_at_ms / 1000;
    let begun = stored::without_output(&response.id, response.previous.as_deref(), &request, created_at);
    let events = Events::new(begun, seen, request.carries_reasoning);
    let mut draining = gateway.draining.subscribe();
    let shutdown = async move {
        // A server that is gone does not wait for the stream either.
        let _ = draining.wait_for(|draining| *draining).await;
    };
    // The turn of an agent is followed from its first event, unless it is so old that only its end is stored.
    let turn = match &response.turn {
        Some(turn) => gateway.host.follow(&turn.agent, &turn.session, &turn.turn).await.ok(),
        None => None,
    };
    if let Some(run) = turn {
        let run = run_events(run).map(|event| Some(event.map_err(ApiError::from)));
        let events_of_turn = stream::iter([None]).chain(run);
        let writer = AgentFollowWriter(AgentWriter::new(events));
        return Ok(sse::respond(events_of_turn.take_until(Box::pin(shutdown)).boxed(), writer));
    }
    let following = Following {
        live: gateway.host.live_response(&response.id),
        gateway: gateway.clone(),
        tenant: tenant.to_owned(),
        id: response.id,
        seen: PartialAnswer::default(),
        has_ended: false,
    };
    let progress = stream::iter([Ok(Progress::Started)]).chain(following.progress());
    Ok(sse::respond(progress.take_until(Box::pin(shutdown)).boxed(), FollowWriter::new(events)))
}

/// A response of a model that is followed to its end.
struct Following {
    live: Arc<LiveAnswer>,
    gateway: Gateway,
    tenant: String,
    id: String,
    seen: PartialAnswer,
    has_ended: bool,
}

impl Following {
    fn progress(self) -> impl Stream<Item = Result<Progress, ApiError>> + Send {
        stream::unfold(self, |mut following| async move {
            if following.has_ended {
                return None;
            }
            let progress = following.next().await;
            following.has_ended = !matches!(progress, Ok(Progress::Partial(_)));
            Some((progress, following))
        })
    }

    async fn next(&mut self) -> Result<Progress, ApiError> {
        loop {
            let more = self.live.beyond(self.seen.reasoning.len(), self.seen.text.len());
            if let Ok(Some(said)) = tokio::time::timeout(LOOK_INTERVAL, more).await {
                self.seen.reasoning.push_str(&said.reasoning);
                self.seen.text.push_str(&said.text);
                return Ok(Progress::Partial(said));
            }
            let response = self.gateway.host.response(&self.tenant, &self.id).await?;
            if let ResponsePhase::Ended { at_ms, end } = response.phase {
                return Ok(Progress::Ended { at_ms, end });
            }
        }
    }
}
