//! `/v1/files`: the requests of batches and their results, as OpenAI's routes of this name have them.
//!
//! An uploaded file is stored. A result file is not: its content is made from the results of its batch, and it is
//! kept as long as they are. When a batch has no result files anymore, its results are deleted.

use super::{ascends, expiry, page_limit};
use crate::{
    ApiError, Gateway,
    batch::{
        answer::{ResultFile, lines},
        shown::{Details, file_id, file_name, has_result, host_id, member, result_file},
    },
    body::{LONG, run_on_compute},
    caller::Caller,
    headers,
};
use axum::{
    Json,
    body::Bytes,
    extract::{
        Multipart, Path, Query, State,
        multipart::{MultipartError, MultipartRejection},
    },
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::json;
use skep_api::{ClientFile, ClientFilePage, DeletedFile, Page, UploadFile, marker};
use skep_engine::Cancel;
use skep_runtime::{BatchPhase, BatchStatus, NewClientFile, RuntimeError, excerpt};
use std::time::Duration;
use utoipa::IntoParams;

/// Maximum size of a file.
pub(crate) const MAX_FILE_BYTES: usize = 64 << 20;
const MAX_FIELD_BYTES: usize = 1 << 10;
const MAX_NAME_BYTES: usize = 256;
/// The only purpose of uploaded files.
const PURPOSE: &str = "batch";
const RESULT_PURPOSE: &str = "batch_output";
/// Maximum number of batches whose results are listed. Those of older ones are found by their batch.
const MAX_BATCHES: u32 = 200;

/// The page of a listing.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Id of the last file of the page before.
    after: Option<String>,
    /// Maximum number of files, 1 to 1000; 100 by default.
    limit: Option<u32>,
    /// `asc` or `desc`, by the time of creation; `desc` by default.
    order: Option<String>,
    /// Lists only the files with this purpose.
    purpose: Option<String>,
}

/// Uploads a file with the requests of a batch, from `multipart/form-data`.
#[utoipa::path(post, path = "/v1/files", tag = "batches", operation_id = "upload_file",
    request_body(content = UploadFile, content_type = "multipart/form-data"),
    responses(
        (status = 200, description = "The file. `x-skep-ignored` names the parts that changed nothing.", body = ClientFile),
    ))]
pub(crate) async fn upload(
    State(gateway): State<Gateway>,
    caller: Caller,
    form: Result<Multipart, MultipartRejection>,
) -> Result<Response, ApiError> {
    let form = form.map_err(|rejection| {
        let expected = "expected multipart/form-data with the parts `file` and `purpose`";
        let message = format!("{expected}: {}", rejection.body_text());
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_form", message)
    })?;
    let timeout = gateway.options.upload_timeout;
    let form = tokio::time::timeout(timeout, Form::read(form)).await.map_err(|_| {
        let message = format!("the form was not received within {} s", timeout.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
    })??;
    let (file, ignored) = form.into_file(caller.tenant.as_str())?;
    let stored = gateway.host.store_client_file(file).await?;
    Ok(headers::ignored(Json(uploaded(stored)).into_response(), &ignored))
}

/// The parts of an upload.
#[derive(Default)]
struct Form {
    file: Option<(String, Bytes)>,
    purpose: Option<String>,
    expires_after_s: Option<String>,
    anchor: Option<String>,
    ignored: Vec<String>,
}

impl Form {
    async fn read(mut form: Multipart) -> Result<Self, ApiError> {
        let mut read = Form::default();
        while let Some(part) = form.next_field().await.map_err(|error| form_error(&error))? {
            let name = part.name().unwrap_or_default().to_owned();
            if name == "file" {
                let file_name = part.file_name().unwrap_or("file").to_owned();
                if file_name.len() > MAX_NAME_BYTES {
                    let message = format!("the name of the file may have at most {MAX_NAME_BYTES} bytes");
                    return Err(ApiError::parameter("file", message));
                }
                let body = part.bytes().await.map_err(|error| form_error(&error))?;
                if body.len() > MAX_FILE_BYTES {
                    return Err(too_large());
                }
                read.file = Some((file_name, body));
                continue;
            }
            let bytes = part.bytes().await.map_err(|error| form_error(&error))?;
            if bytes.len() > MAX_FIELD_BYTES {
                let message = format!("the part may have at most {MAX_FIELD_BYTES} bytes");
                return Err(ApiError::parameter(name, message));
            }
            let value = String::from_utf8_lossy(&bytes).into_owned();
            match name.as_str() {
                "purpose" => read.purpose = Some(value),
                "expires_after[seconds]" => read.expires_after_s = Some(value),
                "expires_after[anchor]" => read.anchor = Some(value),
                _ => read.ignored.push(name),
            }
        }
        Ok(read)
    }

    fn into_file(self, tenant: &str) -> Result<(NewClientFile, Vec<String>), ApiError> {
        let missing = |part: &str| ApiError::parameter(part, format!("the part `{part}` is missing"));
        let (name, body) = self.file.ok_or_else(|| missing("file"))?;
        let purpose = self.purpose.ok_or_else(|| missing("purpose"))?;
        if purpose != PURPOSE {
            let message =
                format!("purpose is {purpose:?}; the only one that this host supports is {PURPOSE:?}");
            return Err(ApiError::parameter("purpose", message));
        }
        if let Some(anchor) = &self.anchor {
            expiry::check("expires_after[anchor]", anchor)?;
        }
        // A text that is not a number is out of range.
        let given = self.expires_after_s.map(|given| given.parse().unwrap_or(0));
        let seconds = expiry::seconds("expires_after[seconds]", given)?;
        let file = NewClientFile {
            principal: tenant.to_owned(),
            name,
            purpose,
            keep: Duration::from_secs(seconds),
            body: body.as_ref().into(),
        };
        Ok((file, self.ignored))
    }
}

/// Lists the files of the caller's tenant, and the results of its 200 newest batches.
#[utoipa::path(get, path = "/v1/files", tag = "batches", operation_id = "list_files",
    params(ListQuery),
    responses(
        (status = 200, description = "A page of the files.", body = ClientFilePage),
    ))]
pub(crate) async fn list(
    State(gateway): State<Gateway>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> Result<Json<ClientFilePage>, ApiError> {
    let limit = page_limit(query.limit)? as usize;
    let ascends = ascends(query.order.as_deref())?;
    let tenant = caller.tenant.as_str();
    let stored = gateway.host.client_files(tenant).await?;
    let mut found: Vec<Found> = stored.into_iter().map(|file| Found::Uploaded(uploaded(file))).collect();
    for status in gateway.host.detailed_batches(tenant, None, MAX_BATCHES).await? {
        let Some(details) = Details::of(&status)? else { continue };
        for file in [ResultFile::Output, ResultFile::Errors] {
            if has_result(&status, &details, file) {
                found.push(Found::Result(Box::new((status.clone(), details.clone(), file))));
            }
        }
    }
    found.sort_by_cached_key(|file| (file.created_at_s(), file.id()));
    if !ascends {
        found.reverse();
    }
    if let Some(after) = &query.after {
        let position = found.iter().position(|file| file.id() == *after);
        let position =
            position.ok_or_else(|| ApiError::parameter("after", format!("there is no file {after:?}")))?;
        found.drain(..=position);
    }
    found.retain(|file| query.purpose.as_deref().is_none_or(|purpose| file.purpose() == purpose));
    let has_more = found.len() > limit;
    found.truncate(limit);
    let mut files = Vec::with_capacity(found.len());
    for file in found {
        files.push(match file {
            Found::Uploaded(file) => file,
            Found::Result(result) => {
                let (status, details, file) = *result;
                described(&gateway, tenant, &status, &details, file).await?
            }
        });
    }
    Ok(Json(Page::new(files, has_more)))
}

/// A file in a listing. The size of a result file is found out only if the page has it.
enum Found {
    Uploaded(ClientFile),
    Result(Box<(BatchStatus, Details, ResultFile)>),
}

impl Found {
    fn id(&self) -> String {
        match self {
            Found::Uploaded(file) => file.id.clone(),
            Found::Result(result) => file_id(&result.0.id, result.2),
        }
    }

    fn purpose(&self) -> &str {
        match self {
            Found::Uploaded(file) => &file.purpose,
            Found::Result(_) => RESULT_PURPOSE,
        }
    }

    fn created_at_s(&self) -> u64 {
        match self {
            Found::Uploaded(file) => file.created_at,
            Found::Result(result) => ended_s(&result.0),
        }
    }
}

/// Shows a file without its content.
#[utoipa::path(get, path = "/v1/files/{id}", tag = "batches", operation_id = "get_file",
    params(("id" = String, Path, description = "Id of the file")),
    responses(
        (status = 200, description = "The file.", body = ClientFile),
        (status = 404, description = "`file_not_found`"),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<ClientFile>, ApiError> {
    let tenant = caller.tenant.as_str();
    let Some((batch, file)) = result_file(&id) else {
        return Ok(Json(uploaded(gateway.host.client_file(tenant, &id).await?)));
    };
    let (status, details) = result_of(&gateway, tenant, batch, file, &id).await?;
    Ok(Json(described(&gateway, tenant, &status, &details, file).await?))
}

/// Returns the content of a file.
#[utoipa::path(get, path = "/v1/files/{id}/content", tag = "batches", operation_id = "get_file_content",
    params(("id" = String, Path, description = "Id of the file")),
    responses(
        (status = 200, description = "The content.", body = String, content_type = "application/octet-stream"),
        (status = 404, description = "`file_not_found`"),
    ))]
pub(crate) async fn content(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let tenant = caller.tenant.as_str();
    let content = match result_file(&id) {
        Some((batch, file)) => {
            let (status, _) = result_of(&gateway, tenant, batch, file, &id).await?;
            result_content(&gateway, tenant, &status, file).await?.into_bytes()
        }
        None => gateway.host.client_file_content(tenant, &id).await?,
    };
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], content).into_response())
}

/// Deletes a file. Batches that were made from it continue.
#[utoipa::path(delete, path = "/v1/files/{id}", tag = "batches", operation_id = "delete_file",
    params(("id" = String, Path, description = "Id of the file")),
    responses(
        (status = 200, description = "The file is deleted.", body = DeletedFile),
        (status = 404, description = "`file_not_found`"),
    ))]
pub(crate) async fn delete(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<DeletedFile>, ApiError> {
    let tenant = caller.tenant.as_str();
    match result_file(&id) {
        Some((batch, file)) => {
            let (status, details) = result_of(&gateway, tenant, batch, file, &id).await?;
            let patch = json!({ member(file): {"deleted": true} }).to_string();
            gateway.host.patch_batch_details(tenant, &status.id, &patch).await?;
            let details = details.without(file);
            let is_left = |file| has_result(&status, &details, file);
            if !is_left(ResultFile::Output) && !is_left(ResultFile::Errors) {
                gateway.host.empty_batch(tenant, &status.id).await?;
            }
        }
        None => gateway.host.delete_client_file(tenant, &id).await?,
    }
    Ok(Json(DeletedFile { id, object: marker::File, deleted: true }))
}

/// Returns the batch of a result file that exists.
async fn result_of(
    gateway: &Gateway,
    tenant: &str,
    batch: &str,
    file: ResultFile,
    id: &str,
) -> Result<(BatchStatus, Details), ApiError> {
    let not_found = || ApiError::from(RuntimeError::FileNotFound { id: excerpt(id) });
    let status = match gateway.host.batch(tenant, host_id(batch)).await {
        Err(RuntimeError::BatchNotFound { .. }) => return Err(not_found()),
        status => status?,
    };
    let details = Details::of(&status)?.filter(|details| has_result(&status, details, file));
    Ok((status, details.ok_or_else(not_found)?))
}

/// Describes a result file. Its size is found out once, and then kept with the batch.
async fn described(
    gateway: &Gateway,
    tenant: &str,
    status: &BatchStatus,
    details: &Details,
    file: ResultFile,
) -> Result<ClientFile, ApiError> {
    let bytes = match details.result(file).bytes {
        Some(bytes) => bytes,
        None => {
            let bytes = result_content(gateway, tenant, status, file).await?.len() as u64;
            let patch = json!({ member(file): {"bytes": bytes} }).to_string();
            gateway.host.patch_batch_details(tenant, &status.id, &patch).await?;
            bytes
        }
    };
    let ended = ended_s(status);
    Ok(ClientFile {
        id: file_id(&status.id, file),
        object: marker::File,
        bytes,
        created_at: ended,
        expires_at: status.kept_until_ms.unwrap_or_default() / 1000,
        filename: file_name(&status.id, file),
        purpose: RESULT_PURPOSE.to_owned(),
        status: "processed".to_owned(),
    })
}

async fn result_content(
    gateway: &Gateway,
    tenant: &str,
    status: &BatchStatus,
    file: ResultFile,
) -> Result<String, ApiError> {
    let (_, results) = gateway.host.batch_results(tenant, &status.id).await?;
    let results = results.ok_or_else(|| ApiError::internal("a batch that has ended has no results"))?;
    run_on_compute(gateway, tenant, LONG, move |_: &Cancel| Ok(lines(&results, file))).await
}

fn ended_s(status: &BatchStatus) -> u64 {
    match status.phase {
        BatchPhase::Ended { at_ms, .. } => at_ms / 1000,
        _ => status.created_at_ms / 1000,
    }
}

fn uploaded(file: skep_runtime::ClientFile) -> ClientFile {
    ClientFile {
        id: file.id,
        object: marker::File,
        bytes: file.bytes,
        created_at: file.created_at_ms / 1000,
        expires_at: file.expires_at_ms / 1000,
        filename: file.name,
        purpose: file.purpose,
        status: "processed".to_owned(),
    }
}

fn too_large() -> ApiError {
    let message = format!("a file may have at most {MAX_FILE_BYTES} bytes; split it into several");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}

fn form_error(error: &MultipartError) -> ApiError {
    match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => too_large(),
        status => ApiError::new(status, "invalid_form", error.body_text()),
    }
}
