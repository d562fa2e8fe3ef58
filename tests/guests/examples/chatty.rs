//! Logs lines: `N` writes N numbered lines, `long N` writes one line of N characters, `levels` writes one
//! line per level.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Floods its log.
#[agent]
async fn chatty(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let log = cx.log();
    if message.text == "levels" {
        log.debug("a debug line");
        log.info("an info line");
        log.warn("a warn line");
        log.error("an error line");
    } else if let Some(length) = message.text.strip_prefix("long ") {
        log.info("x".repeat(number(length)?));
    } else {
        (0..number(&message.text)?).for_each(|line| log.info(format!("line {line}")));
    }
    Ok(Reply::text("logged"))
}

fn number(text: &str) -> Result<usize, AgentError> {
    text.parse().map_err(|_| AgentError::InvalidMessage("say how many".into()))
}
