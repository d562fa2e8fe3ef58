//! `/v1/batches`: batches of requests in files, as OpenAI's routes of this name have them.

use super::{chat_completions::named, expiry, page_limit_within, stored_responses};
use crate::{
    ApiError, Gateway,
    batch::{
        endpoint::Endpoint,
        line::Chains,
        request::{self, LineError, Requests, Target, Terms},
        shown::{Details, WINDOW, WINDOW_TIME, host_id, shown},
    },
    body::{FieldsBody, FromFields, LONG, run_on_compute},
    caller::Caller,
    headers,
    openai::{fields::Fields, metadata},
};
use axum::{
    Json,
    extract::{Path, Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::json;
use skep_api::{Batch, BatchPage, CreateBatch, ExpiresAfter, Page};
use skep_engine::Cancel;
use skep_runtime::{AGENT_MODEL, BatchStatus, BatchTerms, NewBatch, RuntimeError, excerpt};
use std::{sync::Arc, time::Duration};
use utoipa::IntoParams;

/// Maximum number of responses that the requests of a batch continue, and their size with those that they continue.
const MAX_CONTINUED: usize = 64;
const MAX_CONTINUED_BYTES: usize = 64 << 20;
/// Default and maximum number of batches in a page.
const PAGE: (u32, u32) = (20, 100);

/// The page of a listing.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Id of the last batch of the page before.
    after: Option<String>,
    /// Maximum number of batches, 1 to 100; 20 by default.
    limit: Option<u32>,
}

/// A request for a batch, and the names of its fields that change nothing here.
pub(crate) struct CreateBody(CreateBatch, Endpoint, Vec<String>);

impl FromFields for CreateBody {
    fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let body = CreateBatch {
            input_file_id: fields.take_required("input_file_id")?,
            endpoint: fields.take_required("endpoint")?,
            completion_window: fields.take_required("completion_window")?,
            metadata: metadata::checked(fields.take("metadata")?)?,
            output_expires_after: fields.take("output_expires_after")?,
        };
        let endpoint = Endpoint::read(&body.endpoint)?;
        let window = &body.completion_window;
        if window != WINDOW {
            let message = format!(
                "completion_window is {window:?}; the only one that this host supports is {WINDOW:?}"
            );
            return Err(ApiError::parameter("completion_window", message));
        }
        if let Some(ExpiresAfter { anchor, seconds }) = &body.output_expires_after {
            expiry::check("output_expires_after.anchor", anchor)?;
            expiry::seconds("output_expires_after.seconds", Some(*seconds))?;
        }
        Ok(CreateBody(body, endpoint, fields.into_ignored()))
    }
}

/// Creates a batch from the requests in a file, which are answered when there is room.
///
/// A file with errors becomes a batch that has failed; its `errors` name the lines.
#[utoipa::path(post, path = "/v1/batches", tag = "batches", operation_id = "create_client_batch",
    request_body = CreateBatch,
    responses(
        (status = 200, description = "The batch. `x-skep-ignored` names the fields that changed nothing, also those of its requests.", body = Batch),
        (status = 404, description = "`file_not_found`"),
    ))]
pub(crate) async fn create(
    State(gateway): State<Gateway>,
    caller: Caller,
    FieldsBody(CreateBody(body, endpoint, mut ignored)): FieldsBody<CreateBody>,
) -> Result<Response, ApiError> {
    let tenant = caller.tenant.to_string();
    let file = gateway.host.client_file_content(&tenant, &body.input_file_id).await;
    let file =
        file.map_err(|error| ApiError { param: Some("input_file_id".to_owned()), ..ApiError::from(error) })?;
    let keep_s =
        expiry::seconds("output_expires_after", body.output_expires_after.map(|after| after.seconds))?;
    let keep = Some(Duration::from_secs(keep_s));
    let file = Arc::new(file);
    let chains = match endpoint {
        Endpoint::Responses => continued(&gateway, &caller, file.clone()).await?,
        _ => Chains::new(),
    };
    let finder = (gateway.clone(), caller.clone());
    let max_items = gateway.host.batch_options().max_items;
    let terms = Terms { endpoint, tenant: tenant.clone(), max_items, chains };
    let read = move |_: &Cancel| {
        let find = |name: Option<&str>| target(&finder.0, &finder.1, name);
        Ok(request::read(&file, &terms, find))
    };
    let mut details = Details {
        input_file_id: body.input_file_id,
        endpoint,
        metadata: body.metadata.map(|metadata| json!(metadata)),
        ..Details::default()
    };
    let key = caller.key().map(str::to_owned);
    let batch = match run_on_compute(&gateway, &tenant, LONG, read).await? {
        Ok(Requests { target, items, ignored: of_requests }) => {
            ignored.extend(of_requests);
            let terms = BatchTerms { details: Some(stored(&details)), window: Some(WINDOW_TIME), keep };
            NewBatch { principal: tenant.clone(), key, model: target.name, items, terms }
        }
        Err(errors) => failed((&tenant, key), &mut details, keep, errors),
    };
    let id = gateway.host.queue_batch(batch).await?.id;
    // A failed batch has ended meanwhile.
    let status = gateway.host.batch(&tenant, &id).await?;
    Ok(headers::ignored(Json(shown(&status, details)).into_response(), &ignored))
}

/// Returns the responses that the requests in a file continue. Those that do not exist are missing.
async fn continued(gateway: &Gateway, caller: &Caller, file: Arc<Vec<u8>>) -> Result<Chains, ApiError> {
    let tenant = caller.tenant.as_str();
    let ids = run_on_compute(gateway, tenant, LONG, move |_: &Cancel| Ok(request::continued(&file))).await?;
    let too_many = |what: String| {
        ApiError::parameter(
            "input_file_id",
            format!("the requests continue {what}; split the file, or send the items"),
        )
    };
    if ids.len() > MAX_CONTINUED {
        return Err(too_many(format!("more than {MAX_CONTINUED} responses")));
    }
    let (mut chains, mut bytes) = (Chains::new(), 0);
    for id in ids {
        let chain = match stored_responses::chain_of_caller(gateway, caller, &id).await {
            Err(error) if error.status == StatusCode::NOT_FOUND => continue,
            chain => chain?,
        };
        bytes += chain.iter().map(|response| response.bytes()).sum::<usize>();
        if bytes > MAX_CONTINUED_BYTES {
            return Err(too_many(format!("responses of more than {} MiB", MAX_CONTINUED_BYTES >> 20)));
        }
        chains.insert(id, chain);
    }
    Ok(chains)
}

/// Returns a batch without requests, whose details have the errors of its file.
fn failed(
    (tenant, key): (&str, Option<String>),
    details: &mut Details,
    keep: Option<Duration>,
    errors: Vec<LineError>,
) -> NewBatch {
    details.errors = errors;
    let terms = BatchTerms { details: Some(stored(details)), window: None, keep };
    NewBatch { principal: tenant.to_owned(), key, model: String::new(), items: Vec::new(), terms }
}

fn stored(details: &Details) -> String {
    serde_json::to_string(details).expect("plain data always serializes")
}

/// Returns the model or the agent that a request of a batch names, if the caller may use it.
fn target(gateway: &Gateway, caller: &Caller, name: Option<&str>) -> Result<Target, ApiError> {
    if let Some(agent) = name.and_then(|name| name.strip_prefix(AGENT_MODEL)) {
        caller.may_reach(agent)?;
        gateway.host.agent(agent)?;
        let name = format!("{AGENT_MODEL}{agent}");
        return Ok(Target { name, is_agent: true, defaults: Default::default() });
    }
    let model = gateway.host.models().find(named(name))?;
    caller.may_use(gateway, &model)?;
    // A model whose files are not on this machine yet has no known defaults, unless it is in the catalog.
    let defaults = model.sampling().unwrap_or_default();
    Ok(Target { name: model.name().to_owned(), is_agent: false, defaults })
}

/// Lists the batches of the caller's tenant, the newest first.
#[utoipa::path(get, path = "/v1/batches", tag = "batches", operation_id = "list_client_batches",
    params(ListQuery),
    responses(
        (status = 200, description = "A page of the batches.", body = BatchPage),
    ))]
pub(crate) async fn list(
    State(gateway): State<Gateway>,
    caller: Caller,
    Query(ListQuery { after, limit }): Query<ListQuery>,
) -> Result<Json<BatchPage>, ApiError> {
    let limit = page_limit_within(limit, PAGE)?;
    let before = after.as_deref().map(host_id);
    let mut found = gateway.host.detailed_batches(caller.tenant.as_str(), before, limit + 1).await?;
    let has_more = found.len() > limit as usize;
    found.truncate(limit as usize);
    let mut batches = Vec::with_capacity(found.len());
    for status in &found {
        batches.extend(Details::of(status)?.map(|details| shown(status, details)));
    }
    Ok(Json(Page::new(batches, has_more)))
}

/// Shows a batch.
#[utoipa::path(get, path = "/v1/batches/{id}", tag = "batches", operation_id = "get_client_batch",
    params(("id" = String, Path, description = "Id of the batch")),
    responses(
        (status = 200, description = "The batch.", body = Batch),
        (status = 404, description = "`batch_not_found`"),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Batch>, ApiError> {
    let (status, details) = of_client(&gateway, &caller, &id).await?;
    Ok(Json(shown(&status, details)))
}

/// Cancels a batch: requests that have not been answered are given up. The answers so far are kept.
#[utoipa::path(post, path = "/v1/batches/{id}/cancel", tag = "batches", operation_id = "cancel_client_batch",
    params(("id" = String, Path, description = "Id of the batch")),
    responses(
        (status = 200, description = "The batch.", body = Batch),
        (status = 404, description = "`batch_not_found`"),
    ))]
pub(crate) async fn cancel(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Batch>, ApiError> {
    let (status, details) = of_client(&gateway, &caller, &id).await?;
    let tenant = caller.tenant.as_str();
    gateway.host.cancel_batch(tenant, &status.id).await?;
    let status = gateway.host.batch(tenant, &status.id).await?;
    Ok(Json(shown(&status, details)))
}

/// Returns a batch that was made from a file, by the client's id.
async fn of_client(gateway: &Gateway, caller: &Caller, id: &str) -> Result<(BatchStatus, Details), ApiError> {
    let status = gateway.host.batch(caller.tenant.as_str(), host_id(id)).await?;
    let details = Details::of(&status)?.ok_or_else(|| {
        let hours = gateway.host.batch_options().retention.as_secs() / 3600;
        RuntimeError::BatchNotFound { id: excerpt(id), hours }
    })?;
    Ok((status, details))
}
