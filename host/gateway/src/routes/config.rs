//! `/v1/config`: the operator's configuration, which can be read again while the host runs.

use crate::{
    ApiError, Gateway,
    access::Details,
    configuration::{self, Configuration, ReloadError},
};
use axum::{Extension, Json, extract::State, http::StatusCode};
use skep_api::{Config, ConfigReload};
use std::sync::Arc;

/// Shows the active configuration.
///
/// Secrets are not shown. Settings that are not listed have their default.
#[utoipa::path(get, path = "/v1/config", tag = "host", operation_id = "get_config", responses(
    (status = 200, description = "The settings.", body = Config),
    (status = 409, description = "`no_config`: this server has no configuration of its own."),
))]
pub(crate) async fn show(State(gateway): State<Gateway>) -> Result<Json<Config>, ApiError> {
    Ok(Json(of(&gateway)?.show()))
}

/// Reads the configuration's file again.
///
/// All of the file is checked before anything changes: a file that is not valid changes nothing. Requests and turns end with
/// the settings with which they began. Settings that only a start can apply are listed in `needs_restart`.
#[utoipa::path(post, path = "/v1/config/reload", tag = "host", operation_id = "reload_config", responses(
    (status = 200, description = "The changes.", body = ConfigReload),
    (status = 409, description = "`no_config`: the host was started without a file."),
    (status = 422, description = "`invalid_config`: the file is not valid, and nothing has changed."),
))]
pub(crate) async fn reload(
    State(gateway): State<Gateway>,
) -> Result<(Extension<Details>, Json<ConfigReload>), ApiError> {
    let reloaded = configuration::reload(of(&gateway)?.clone()).await?;
    let count = |name: &str, count: usize| format!("{name}={count}");
    let details = [
        count("changed", reloaded.changed.len()),
        count("needs_restart", reloaded.needs_restart.len()),
        count("warnings", reloaded.warnings.len()),
    ];
    Ok((Extension(Details(details.join(" "))), Json(reloaded)))
}

fn of(gateway: &Gateway) -> Result<&Arc<dyn Configuration>, ApiError> {
    gateway.options.configuration.as_ref().ok_or_else(|| ReloadError::NoFile.into())
}

impl From<ReloadError> for ApiError {
    fn from(error: ReloadError) -> Self {
        let (status, code) = match &error {
            ReloadError::NoFile => (StatusCode::CONFLICT, "no_config"),
            ReloadError::Invalid(_) => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_config"),
            ReloadError::Failed(_) => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        };
        ApiError::new(status, code, error.to_string())
    }
}
