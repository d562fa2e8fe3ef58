//! Inputs of the component that calls the host's functions with arbitrary arguments.

use crate::{guest::PROGRAM_BYTES, host::host};
use skep_engine::Priority;
use skep_runtime::{Invocation, Origin};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(5);

/// Sends an input to the guest, encoded in letters because messages are text.
pub(crate) fn call(input: &[u8]) {
    let program: String = input.iter().take(PROGRAM_BYTES / 2).fold(String::new(), |mut program, byte| {
        program.push(char::from(b'A' + (byte >> 4)));
        program.push(char::from(b'A' + (byte & 15)));
        program
    });
    let invocation = Invocation {
        key: None,
        principal: "local".into(),
        agent: "caller".into(),
        session: "s".into(),
        text: program,
        data: None,
        origin: Origin::Direct,
        priority: Priority::Interactive,
        deadline: None,
        idempotency_key: None,
        detached: false,
    };
    host().runtime.block_on(async {
        let turn = async { host().agents.invoke(invocation).await?.outcome().await };
        let _ = tokio::time::timeout(PATIENCE, turn).await;
    });
}
