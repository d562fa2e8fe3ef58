//! The journal record of an HTTP request's outcome. The request itself is not recorded: on replay the guest makes it again,
//! and a hash verifies that it is the same.

use crate::bindings::http::{HttpError, Response};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::capability) enum FetchRecord {
    Answered { status: u16, url: String, headers: Vec<(String, String)>, body: Body },
    Failed(HttpError),
}

/// A response body, in base64, because a list of numbers would take four characters for each byte.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(in crate::capability) struct Body(Vec<u8>);

impl FetchRecord {
    pub(in crate::capability) fn new(result: &Result<Response, HttpError>) -> Self {
        match result {
            Ok(response) => FetchRecord::Answered {
                status: response.status,
                url: response.url.clone(),
                headers: response.headers.clone(),
                body: Body(response.body.clone()),
            },
            Err(error) => FetchRecord::Failed(error.clone()),
        }
    }

    pub(in crate::capability) fn body_bytes(&self) -> usize {
        match self {
            FetchRecord::Answered { body, .. } => body.0.len(),
            FetchRecord::Failed(_) => 0,
        }
    }

    pub(in crate::capability) fn into_result(self) -> Result<Response, HttpError> {
        match self {
            FetchRecord::Answered { status, url, headers, body } => {
                Ok(Response { status, url, headers, body: body.0 })
            }
            FetchRecord::Failed(error) => Err(error),
        }
    }
}

impl From<Body> for String {
    fn from(body: Body) -> String {
        BASE64_STANDARD.encode(body.0)
    }
}

impl TryFrom<String> for Body {
    type Error = base64::DecodeError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        BASE64_STANDARD.decode(text).map(Body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip() {
        let response = Response {
            status: 200,
            url: "https://x.org/".into(),
            headers: vec![("a".into(), "b".into())],
            body: (0..=255).collect(),
        };
        for result in [Ok(response), Err(HttpError::Timeout), Err(HttpError::Denied("no".into()))] {
            let written = serde_json::to_string(&FetchRecord::new(&result)).expect("JSON");
            let read: FetchRecord = serde_json::from_str(&written).expect("its own text");
            assert_eq!(read.into_result(), result);
        }
    }
}
