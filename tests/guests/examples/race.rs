//! Waits for the first of two sleeps and drops the other, then generates visibly. The reply says which sleep
//! finished first.

use skep_sdk::{AgentError, Context, Message, Reply, agent};
use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::Duration,
};

/// Races two sleeps.
#[agent]
async fn race(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let first = {
        let mut short = pin!(cx.sleep(Duration::from_millis(20)));
        let mut long = pin!(cx.sleep(Duration::from_secs(60)));
        poll_fn(|task| {
            if short.as_mut().poll(task).is_ready() {
                return Poll::Ready("short");
            }
            long.as_mut().poll(task).map(|()| "long")
        })
        .await
    };
    cx.conversation().user(message.text).max_tokens(400).generate().await?;
    Ok(Reply::text(first))
}
