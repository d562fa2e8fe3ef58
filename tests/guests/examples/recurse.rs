//! Recurses as deep as the text says, or endlessly for `go`.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Recurses.
#[agent]
async fn recurse(_cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let depth = match message.text.as_str() {
        "go" => u64::MAX,
        depth => depth.parse().map_err(|_| AgentError::InvalidMessage("say how deep".into()))?,
    };
    Ok(Reply::text(sum(depth).to_string()))
}

/// Keeps its frame alive across the call, so that no compiler turns the recursion into a loop.
#[inline(never)]
fn sum(depth: u64) -> u64 {
    if depth == 0 {
        return 0;
    }
    let frame = [depth; 16];
    let rest = sum(depth - 1);
    std::hint::black_box(&frame);
    rest + 1
}
