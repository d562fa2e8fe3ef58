//! The prompt of a text completion.

use serde::Deserialize;
use utoipa::ToSchema;

/// One prompt or several, each as text or as token ids.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "the prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
)]
pub(crate) enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}
