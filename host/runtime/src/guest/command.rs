//! A turn of a plain WASI command: the message is its standard input, and its standard output is the reply.

use super::{CallEnd, Code, bounded, judge};
use crate::{RuntimeError, capability::TurnContext, deadline::Deadline};
use wasmtime_wasi::I32Exit;

/// Runs the command and returns what it printed, if it exits with status 0.
pub(super) async fn run<S>(
    code: Code<'_>,
    deadline: Deadline,
    stop: impl Future<Output = S>,
    mut context: TurnContext,
    message: String,
) -> (CallEnd<String, S>, TurnContext) {
    context.as_command(message);
    let (left, mut context) =
        bounded(code, deadline, stop, context, async |agent, accessor| agent.run(accessor).await).await;
    let status = left.and_then(|ended| match ended {
        Ok(result) => Ok(i32::from(result.is_err())),
        Err(trap) => match trap.downcast_ref() {
            Some(I32Exit(status)) => Ok(*status),
            None => Err(judge(code.limits, &mut context, trap)),
        },
    });
    let printed = context.take_output();
    let reply = status.and_then(|status| match status {
        0 => printed.into_reply(),
        status => Err(failed(status, printed.last_error())),
    });
    (reply, context)
}

fn failed(status: i32, said: Option<&str>) -> RuntimeError {
    let message = match said {
        None => format!("it exited with status {status} and printed no reason on standard error"),
        Some(reason) => format!("it exited with status {status}: {reason}"),
    };
    RuntimeError::AgentFailed { message }
}
