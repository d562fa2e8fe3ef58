//! Loops forever. `spin` uses CPU time; `spin TEXT` writes state first, so that a test can check the
//! rollback. Any other text is echoed, to check that the session still works.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Spins until it is stopped.
#[agent]
async fn spin(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let Some(note) = message.text.strip_prefix("spin") else { return Ok(Reply::text(message.text)) };
    cx.state().set("note", note)?;
    let mut turns = 0_u64;
    loop {
        turns = std::hint::black_box(turns.wrapping_add(1));
    }
}
