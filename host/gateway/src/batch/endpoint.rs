//! The routes for whose requests there are batches.

use crate::ApiError;
use serde::{Deserialize, Serialize};

/// The route that the requests of a batch are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Endpoint {
    /// Batches stored by earlier versions do not name another.
    #[default]
    ChatCompletions,
    Completions,
    Responses,
}

impl Endpoint {
    const ALL: [Endpoint; 3] = [Endpoint::ChatCompletions, Endpoint::Completions, Endpoint::Responses];

    pub(crate) fn path(self) -> &'static str {
        match self {
            Endpoint::ChatCompletions => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Responses => "/v1/responses",
        }
    }

    /// Reads the field `endpoint` of a batch.
    pub(crate) fn read(path: &str) -> Result<Self, ApiError> {
        Endpoint::ALL.into_iter().find(|endpoint| endpoint.path() == path).ok_or_else(|| {
            let known = Endpoint::ALL.map(Endpoint::path).join(", ");
            let message = match path {
                "/v1/embeddings" => {
                    format!("no model of this host makes embeddings, so there are no batches of them; there are batches of {known}")
                }
                _ => format!("there are no batches of {path:?}; there are batches of {known}"),
            };
            ApiError::parameter("endpoint", message)
        })
    }
}
