//! The key travels in one header, and appears nowhere else.

use std::sync::Mutex;

use futures::future::{BoxFuture, ready};

use super::{
    ask, model, options, said,
    server::{Server, status, stream},
    stopped,
};
use crate::{FixedKey, Key, KeySource, Upstream, UpstreamKind};

const SECRET: &str = "sk-very-secret-0123456789";

/// Gives another key each time, as a vault does whose secret is changed.
struct Rotating(Mutex<Vec<&'static str>>);

impl KeySource for Rotating {
    fn key(&self) -> BoxFuture<'_, Result<Key, String>> {
        let next = self.0.lock().expect("not poisoned").pop();
        Box::pin(ready(next.ok_or_else(|| "the vault is empty".to_owned()).and_then(Key::new)))
    }
}

#[tokio::test]
async fn a_key_is_read_for_each_request_and_sent_as_the_kind_wants_it() {
    for (kind, header) in [
        (UpstreamKind::OpenAi, "authorization: Bearer "),
        (UpstreamKind::Anthropic, "x-api-key: "),
        (UpstreamKind::WorkersAi, "authorization: Bearer "),
    ] {
        let server = Server::always(|| status(400, "", "{}")).await;
        let keys = Rotating(Mutex::new(vec!["second", "first"]));
        let model = model(crate::UpstreamOptions {
            key: Some(std::sync::Arc::new(keys)),
            ..options(kind, &server.url)
        });
        for key in ["first", "second"] {
            ask(&*model).await;
            let head = server.request(server.count() - 1).head;
            assert!(head.contains(&format!("{header}{key}\r\n")), "{head}");
            assert_eq!(head.contains("anthropic-version: "), kind == UpstreamKind::Anthropic);
        }
        let error = ask(&*model).await.error();
        assert!(error.contains("its key cannot be read: the vault is empty"), "{error}");
        assert_eq!(server.count(), 2, "nothing is sent without the key");
    }
}

#[tokio::test]
async fn errors_and_debug_output_do_not_contain_the_key() {
    let echo = |text: String| move || status(401, "", &text);
    let long = format!("Incorrect key: {SECRET} {}", "z".repeat(200_000));
    let stream_error = || stream(&[said("Hi"), serde_json::json!({"error": {"message": SECRET}}), stopped()]);
    for server in [
        Server::always(echo(long)).await,
        Server::always(echo(format!("{{\"error\": {{\"message\": \"{SECRET} is wrong\"}}}}"))).await,
        Server::always(stream_error).await,
        Server::always(|| super::server::Reply::from([super::server::stream_head()])).await,
    ] {
        let key = FixedKey(Key::new(SECRET).expect("valid"));
        let mut options = options(UpstreamKind::OpenAi, &server.url);
        options.key = Some(std::sync::Arc::new(key));
        let upstream = Upstream::new(options).expect("valid");
        let model = upstream.models().remove(0);
        let heard = ask(&*model).await;
        let error = heard.error();
        assert!(server.request(0).head.contains(SECRET), "the key was sent");
        for text in [&error, &format!("{:?}", heard.result), &format!("{upstream:?} {model:?}")] {
            assert!(!text.contains(SECRET) && text.len() < 1500, "{text}");
        }
    }
}
