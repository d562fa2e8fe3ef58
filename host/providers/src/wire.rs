//! The choice of the wire format: address, headers, body, decoder and errors of each kind of upstream.

use std::time::Duration;

use reqwest::{
    Url,
    header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue},
};
use serde_json::Value;
use skep_engine::chat::Input;

use crate::{
    anthropic, delta::Decoder, failure::Failure, key::Key, openai, options::UpstreamKind, question::Question,
    workers_ai,
};

const ANTHROPIC_VERSION: &str = "2023-06-01";

/// Returns the address that an input for a model is sent to. `base` may or may not have the version that the paths of OpenAI and Anthropic
/// begin with.
pub(crate) fn address(kind: UpstreamKind, base: &Url, model: &str, input: &Input) -> Url {
    let mut url = base.clone();
    let is_bare = base.path().trim_matches('/').is_empty();
    let ends_with_version = base.path().trim_end_matches('/').ends_with("/v1");
    let segments: Vec<&str> = match kind {
        UpstreamKind::OpenAi => {
            let version = is_bare.then_some("v1");
            let chat = matches!(input, Input::Messages(_)).then_some("chat");
            version.into_iter().chain(chat).chain(["completions"]).collect()
        }
        UpstreamKind::Anthropic if ends_with_version => vec!["messages"],
        UpstreamKind::Anthropic => vec!["v1", "messages"],
        UpstreamKind::WorkersAi => ["ai", "run"].into_iter().chain(model.split('/')).collect(),
    };
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().extend(segments);
    }
    url
}

/// Returns the headers of the format, besides those of every JSON request.
pub(crate) fn headers(kind: UpstreamKind, key: Option<&Key>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if kind == UpstreamKind::Anthropic {
        let version = HeaderName::from_static("anthropic-version");
        headers.insert(version, HeaderValue::from_static(ANTHROPIC_VERSION));
    }
    if let Some(key) = key {
        let (name, value) = match kind {
            UpstreamKind::Anthropic => (HeaderName::from_static("x-api-key"), key.reveal().to_owned()),
            UpstreamKind::OpenAi | UpstreamKind::WorkersAi => {
                (AUTHORIZATION, format!("Bearer {}", key.reveal()))
            }
        };
        let mut value = HeaderValue::from_str(&value).expect("a key has visible ASCII characters only");
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    headers
}

pub(crate) fn body(kind: UpstreamKind, question: &Question<'_>, base: &Url) -> Value {
    match kind {
        UpstreamKind::OpenAi => match question.input {
            Input::Messages(_) => openai::body(question, base.host_str().unwrap_or_default()),
            Input::Text(text) => openai::text_body(question, text),
        },
        UpstreamKind::Anthropic => anthropic::body(question),
        UpstreamKind::WorkersAi => workers_ai::body(question),
    }
}

/// Returns the decoder of one response. `max_tokens` is the number of output tokens that the body allows.
pub(crate) fn decoder(kind: UpstreamKind, max_tokens: Option<u64>) -> Box<dyn Decoder> {
    match kind {
        UpstreamKind::OpenAi => Box::new(openai::OpenAiDecoder),
        UpstreamKind::Anthropic => Box::new(anthropic::AnthropicDecoder),
        UpstreamKind::WorkersAi => Box::new(workers_ai::WorkersAiDecoder::new(max_tokens)),
    }
}

/// Reads the body of a response that is not a success.
pub(crate) fn failure(kind: UpstreamKind, status: u16, body: &str, retry_after: Option<Duration>) -> Failure {
    match kind {
        UpstreamKind::OpenAi => openai::failure(status, body, retry_after),
        UpstreamKind::Anthropic => anthropic::failure(status, body, retry_after),
        UpstreamKind::WorkersAi => workers_ai::failure(status, body, retry_after),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_follow_the_kind() {
        use UpstreamKind::{Anthropic, OpenAi, WorkersAi};
        for (kind, base, expected) in [
            (OpenAi, "http://a:8000", "http://a:8000/v1/chat/completions"),
            (OpenAi, "http://a/v1", "http://a/v1/chat/completions"),
            (OpenAi, "http://a/openai/", "http://a/openai/chat/completions"),
            (Anthropic, "https://a", "https://a/v1/messages"),
            (Anthropic, "https://a/v1/", "https://a/v1/messages"),
            (WorkersAi, "https://a/accounts/1", "https://a/accounts/1/ai/run/@cf/m%3F"),
        ] {
            let base: Url = base.parse().expect("valid");
            assert_eq!(address(kind, &base, "@cf/m?", &Vec::new().into()).as_str(), expected);
        }
        for (base, expected) in [
            ("http://a:8000", "http://a:8000/v1/completions"),
            ("http://a/openai/", "http://a/openai/completions"),
        ] {
            let base: Url = base.parse().expect("valid");
            assert_eq!(address(OpenAi, &base, "m", &Input::Text("x".into())).as_str(), expected);
        }
    }
}
