//! Runs state commands, one per line. The reply has one line for each command.
//!
//! `get K` (empty if absent), `set K V`, `delete K`, `keys [PREFIX]`, `cas K EXPECTED V` (`-` means absent),
//! `increment K`, `set-and-fail K V` (writes, then fails the turn), `turn`. Values are single words.

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
        ["get", key] => state.get::<String>(key)?.unwrap_or_default(),
        ["set", key, value] => {
            state.set(key, value)?;
            "ok".to_owned()
        }
        ["delete", key] => state.delete(key).to_string(),
        ["keys"] => state.keys("").join(","),
        ["keys", prefix] => state.keys(prefix).join(","),
        ["cas", key, expected, value] => {
            let expected = (expected != "-").then_some(expected);
            state.compare_and_set(key, expected, value)?.to_string()
        }
        ["increment", key] => {
            let count: u64 = state.get_or_default::<String>(key)?.parse().unwrap_or_default();
            state.set(key, &(count + 1).to_string())?;
            (count + 1).to_string()
        }
        ["set-and-fail", key, value] => {
            state.set(key, value)?;
            return Err(AgentError::Failed("as told".into()));
        }
        ["turn"] => cx.turn().to_string(),
        _ => return Err(AgentError::InvalidMessage(format!("unknown command: {line}"))),
    })
}
