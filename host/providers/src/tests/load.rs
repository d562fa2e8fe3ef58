//! An upstream dies under many streams: nothing is lost, and nothing is sent twice.

use std::sync::Arc;

use serde_json::Value;
use skep_engine::{
    Model, RemoteModel as _, UpstreamFault,
    chat::{ChatEvent, ChatMessage, ChatOptions},
};
use tokio::{sync::Notify, task::JoinSet};

use super::{
    Heard, hear, model, options, said,
    server::{Part, Request, Server, event, stream, stream_head},
    stopped,
};
use crate::{Choice, Member, Route, RouteOptions, UpstreamKind::OpenAi, UpstreamOptions};

const STREAMS: usize = 64;

fn caller(request: &Request) -> usize {
    let text = request.body["messages"][0]["content"].as_str().expect("text");
    text.parse().expect("the caller's number")
}

/// Returns the chunks of an answer that names its server and its caller in each.
fn chunks(server: &str, caller: usize) -> Vec<Value> {
    (0..5).map(|part| said(&format!("{server}{caller}.{part} "))).collect()
}

fn whole(server: &str, caller: usize) -> String {
    (0..5).map(|part| format!("{server}{caller}.{part} ")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_message_is_lost_or_sent_twice() {
    // A sends two parts to every even caller, none to the others, and then waits for its death.
    let a = Server::start(|_, request| {
        let caller = caller(request);
        let parts = chunks("a", caller).into_iter().take(if caller.is_multiple_of(2) { 2 } else { 0 });
        let stall = Part::Stall(Arc::new(Notify::new()));
        [stream_head()].into_iter().chain(parts.map(|part| event(&part))).chain([stall]).collect()
    })
    .await;
    let b =
        Server::start(|_, request| stream(&[chunks("b", caller(request)), vec![stopped()]].concat())).await;
    let member = |name: &str, server: &Server| {
        let named = UpstreamOptions { name: name.to_owned(), ..options(OpenAi, &server.url) };
        Member::new(Model::Remote(model(named)))
    };
    let options = RouteOptions {
        name: "smart".to_owned(),
        choice: Choice::Ordered,
        members: vec![member("a", &a), member("b", &b)],
        first_token: None,
        created_unix_s: 0,
    };
    let route = Route::new(options).expect("valid");
    let mut callers = JoinSet::new();
    let (sent, mut begun) = tokio::sync::mpsc::unbounded_channel();
    for caller in 0..STREAMS {
        let (route, sent) = (route.clone(), sent.clone());
        callers.spawn(async move {
            let stream =
                route.ask(vec![ChatMessage::user(caller.to_string())].into(), ChatOptions::default());
            // Reports the second part, so that the test knows when A has sent what it will.
            let mut parts = 0;
            let watched = futures::StreamExt::inspect(stream, move |event| {
                parts += usize::from(matches!(event, Ok(ChatEvent::Text { .. })));
                if parts == 2 {
                    let _ = sent.send(caller);
                }
            });
            (caller, hear(Box::pin(watched)).await)
        });
    }
    for _ in 0..STREAMS / 2 {
        begun.recv().await.expect("a caller");
    }
    while a.count() < STREAMS {
        tokio::task::yield_now().await;
    }
    drop(a);
    let (mut cut, mut moved) = (0, 0);
    while let Some(caller) = callers.join_next().await {
        let (caller, heard): (usize, Heard) = caller.expect("no panic");
        let Some(ChatEvent::Routed(routed)) = heard.events.first() else { panic!("{:?}", heard.events) };
        match caller % 2 {
            0 => {
                assert_eq!(heard.text(), format!("a{caller}.0 a{caller}.1 "));
                assert_eq!((heard.fault(), routed.model.as_str()), (UpstreamFault::CutOff, "a/m"));
                cut += 1;
            }
            _ => {
                assert_eq!(heard.outcome().text, whole("b", caller));
                assert_eq!((routed.model.as_str(), routed.attempts), ("b/m", 2));
                moved += 1;
            }
        }
    }
    assert_eq!((cut, moved, b.count()), (STREAMS / 2, STREAMS / 2, STREAMS / 2));
    println!(
        "{cut} callers were notified of the cut-off once, {moved} got the whole answer of the other upstream"
    );
}
