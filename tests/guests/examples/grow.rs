//! Allocates memory. The text is the number of MiB, or `grow` for more than there is. The reply is the
//! number, after all of the memory has been touched.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

const MIB: usize = 1 << 20;

/// Allocates the given amount of memory.
#[agent]
async fn grow(_cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let count: usize = match message.text.as_str() {
        "grow" => 1 << 20,
        count => count.parse().map_err(|_| AgentError::InvalidMessage("say how many MiB".into()))?,
    };
    let blocks: Vec<Vec<u8>> =
        (0..count).map(|index| std::hint::black_box(vec![index as u8 | 1; MIB])).collect();
    Ok(Reply::text(blocks.len().to_string()))
}
