//! State by commands, one a line; the reply has a line for each.
//!
//! `get K`, `set K V`, `delete K`, `keys PREFIX`, `cas K EXPECTED V` (`-` is absent), `fail` (ends the turn with an error),
//! `reply-turn`. Values are words.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Reads and writes state.
#[agent]
async fn state(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let lines = message.text.lines().map(|line| command(cx, line));
    Ok(Reply::text(lines.collect::<Result<Vec<_>, _>>()?.join("\n")))
}

fn command(cx: &Context, line: &str) -> Result<String, AgentError> {
    let state = cx.state();
    let words: Vec<&str> = line.split(' ').collect();
    Ok(match words[..] {
        ["get", key] => state.get::<String>(key)?.unwrap_or_else(|| "-".to_owned()),
        ["set", key, value] => {
            state.set(key, value)?;
            "ok".to_owned()
        }
        ["delete", key] => state.delete(key).to_string(),
        ["keys", prefix] => state.keys(prefix).join(","),
        ["cas", key, expected, value] => {
            let expected = (expected != "-").then_some(expected);
            state.compare_and_set(key, expected, value)?.to_string()
        }
        ["reply-turn"] => cx.turn().to_string(),
        ["fail"] => return Err(AgentError::Failed("as told".into())),
        _ => return Err(AgentError::InvalidMessage(format!("unknown command: {line}"))),
    })
}
