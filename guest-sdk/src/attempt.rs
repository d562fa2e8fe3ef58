//! Calls of the agent's own tools, with a timeout and with retries where the tool allows them.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use serde_json::Value;

use crate::context::{Context, Tool};
use crate::error::ToolError;
use crate::host::Task;

const FIRST_WAIT_MS: u32 = 100;
const LONGEST_WAIT_MS: u32 = 10_000;

/// Calls a tool until it returns a result or has no retries left. The error is the text for the model.
pub(crate) async fn call(
    cx: &Context,
    tool: &Tool,
    call_id: &str,
    arguments: &Value,
) -> Result<Value, String> {
    let mut attempt = 0;
    loop {
        let result = with_timeout(cx, tool, (tool.call)(cx, arguments.clone())).await;
        if result.is_ok() || attempt >= tool.retries {
            return result;
        }
        cx.host().sleep(wait_ms(call_id, attempt)).await;
        attempt += 1;
    }
}

async fn with_timeout(
    cx: &Context,
    tool: &Tool,
    call: Task<'_, Result<Value, ToolError>>,
) -> Result<Value, String> {
    let call = async { call.await.map_err(|error| error.message().to_owned()) };
    let Some(timeout_ms) = tool.timeout_ms else { return call.await };
    let (mut call, mut timeout) = (pin!(call), pin!(cx.host().sleep(timeout_ms)));
    poll_fn(|task| match call.as_mut().poll(task) {
        Poll::Ready(result) => Poll::Ready(result),
        Poll::Pending => timeout.as_mut().poll(task).map(|()| {
            Err(format!(
                "`{}` gave no result within {timeout_ms} ms; it may still have done its work",
                tool.name
            ))
        }),
    })
    .await
}

/// Returns the wait before the next attempt: it doubles after each failure, with jitter per call so that
/// calls that failed together are not retried together. It depends on the call alone, so a turn that runs
/// again waits for the same time.
fn wait_ms(call_id: &str, attempt: u32) -> u32 {
    let longest = FIRST_WAIT_MS.saturating_mul(1 << attempt.min(16)).min(LONGEST_WAIT_MS);
    // FNV-1a.
    let hash = call_id.bytes().chain(attempt.to_le_bytes());
    let hash = hash.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let draw = (hash >> 32) % (u64::from(longest) / 2 + 1);
    longest / 2 + u32::try_from(draw).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_vary_and_stay_bounded() {
        for attempt in 0..20 {
            let longest = 100u32.saturating_mul(1 << attempt.min(16)).min(10_000);
            let waits: Vec<u32> = (0..40).map(|call| wait_ms(&format!("call_{call}"), attempt)).collect();
            assert!(waits.iter().all(|wait| (longest / 2..=longest).contains(wait)), "{attempt}: {waits:?}");
            assert!(waits.iter().any(|wait| *wait != waits[0]), "{attempt}: not all together");
        }
    }
}
