//! `/v1/schemas/check`: whether outputs can follow a JSON schema, for its author.

use super::chat_completions::model_of;
use crate::{
    ApiError, Gateway,
    body::{JsonBody, run_on_compute},
    caller::Caller,
};
use axum::{Json, extract::State};
use skep_api::{CheckSchema, SchemaCheck, SchemaError, SchemaNote, marker};
use skep_engine::{CheckedValue, EngineError, SchemaNotes};

/// Checks a JSON schema without generating: whether it is accepted, and which values are checked only when they are
/// complete.
#[utoipa::path(post, path = "/v1/schemas/check", tag = "models", operation_id = "check_schema", request_body = CheckSchema,
    responses(
        (status = 200, description = "The result; a schema that is refused has an `error`.", body = SchemaCheck),
        (status = 404, description = "`model_not_found`"),
    ))]
pub(crate) async fn check(
    State(gateway): State<Gateway>,
    caller: Caller,
    JsonBody(CheckSchema { schema, model }): JsonBody<CheckSchema>,
) -> Result<Json<SchemaCheck>, ApiError> {
    let model = model_of(&gateway, &caller, model.as_deref()).await?;
    let Some(engine) = model.engine().cloned() else {
        let message = format!("{} runs on another server, which decides about schemas itself", model.name());
        return Err(ApiError::parameter("model", message));
    };
    let tenant = caller.tenant.to_string();
    let checked_for = tenant.clone();
    let check = move |_: &_| Ok(engine.check_schema(&checked_for, schema));
    let checked = run_on_compute(&gateway, &tenant, usize::MAX, check).await?;
    match checked {
        Ok(notes) => Ok(Json(accepted(notes))),
        Err(EngineError::Constraint { message, .. }) => Ok(Json(SchemaCheck {
            object: marker::SchemaCheck,
            enforced: false,
            notes: Vec::new(),
            error: Some(SchemaError { message }),
        })),
        Err(error) => Err(error.into()),
    }
}

fn accepted(SchemaNotes { warnings, checked }: SchemaNotes) -> SchemaCheck {
    let warnings = warnings.into_iter().map(|message| SchemaNote {
        kind: "warning".to_owned(),
        path: None,
        keywords: Vec::new(),
        message,
    });
    let checked = checked.into_iter().map(|CheckedValue { path, keywords }| SchemaNote {
        kind: "checked".to_owned(),
        message:
            "The value is checked when it is complete, and generated again if it does not satisfy its schema."
                .to_owned(),
        path: Some(path),
        keywords,
    });
    SchemaCheck {
        object: marker::SchemaCheck,
        enforced: true,
        notes: warnings.chain(checked).collect(),
        error: None,
    }
}
