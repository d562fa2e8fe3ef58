//! Waits for several futures at once, on one thread.
//!
//! Each poll polls every future that is not done. This suits an agent, which waits for a handful of futures
//! and never for thousands.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use crate::host::Task;

/// Runs two futures concurrently and returns both outputs.
///
/// ```
/// # use skep_sdk::{AgentError, Context, Message, Reply, agent};
/// /// Asks two questions at once.
/// #[agent]
/// async fn twice(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
///     let short = cx.conversation_named("short").user(format!("In one word: {}", message.text)).generate();
///     let long = cx.conversation_named("long").user(message.text).generate();
///     let (short, long) = skep_sdk::join(short, long).await;
///     Ok(Reply::text(format!("{}\n{}", short?.text, long?.text)))
/// }
/// ```
pub async fn join<A: Future, B: Future>(a: A, b: B) -> (A::Output, B::Output) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut from_a, mut from_b) = (None, None);
    poll_fn(move |cx| {
        if from_a.is_none()
            && let Poll::Ready(value) = a.as_mut().poll(cx)
        {
            from_a = Some(value);
        }
        if from_b.is_none()
            && let Poll::Ready(value) = b.as_mut().poll(cx)
        {
            from_b = Some(value);
        }
        match (from_a.take(), from_b.take()) {
            (Some(a), Some(b)) => Poll::Ready((a, b)),
            (a, b) => {
                (from_a, from_b) = (a, b);
                Poll::Pending
            }
        }
    })
    .await
}

/// Runs futures concurrently and returns their outputs in the order of the futures.
pub async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut tasks: Vec<Result<F::Output, Task<'_, F::Output>>> =
        futures.into_iter().map(|future| Err(Box::pin(future) as Task<'_, F::Output>)).collect();
    poll_fn(move |cx| {
        let mut pending = false;
        for task in &mut tasks {
            if let Err(future) = task {
                match future.as_mut().poll(cx) {
                    Poll::Ready(value) => *task = Ok(value),
                    Poll::Pending => pending = true,
                }
            }
        }
        if pending {
            return Poll::Pending;
        }
        Poll::Ready(std::mem::take(&mut tasks).into_iter().filter_map(Result::ok).collect())
    })
    .await
}
