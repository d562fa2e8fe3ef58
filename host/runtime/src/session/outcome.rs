//! The outcome of a turn as it is kept under an idempotency key.

use crate::Outcome;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use skep_engine::Usage;

#[derive(Serialize, Deserialize)]
struct Stored {
    text: String,
    data: Option<Value>,
    turn: u64,
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u32,
    forced_tokens: u32,
    // Outcomes that were kept before there were drafts have none of these.
    #[serde(default)]
    accepted_tokens: u32,
    #[serde(default)]
    rejected_tokens: u32,
    elapsed_us: u64,
}

pub(super) fn encode(outcome: &Outcome) -> Vec<u8> {
    let Outcome { text, data, turn, usage, elapsed_us } = outcome.clone();
    let Usage {
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        forced_tokens,
        accepted_tokens,
        rejected_tokens,
    } = usage;
    let stored = Stored {
        text,
        data,
        turn,
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        forced_tokens,
        accepted_tokens,
        rejected_tokens,
        elapsed_us,
    };
    serde_json::to_vec(&stored).expect("strings and numbers are always JSON")
}

pub(super) fn decode(body: &[u8]) -> Result<Outcome, serde_json::Error> {
    let Stored {
        text,
        data,
        turn,
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        forced_tokens,
        accepted_tokens,
        rejected_tokens,
        elapsed_us,
    } = serde_json::from_slice(body)?;
    let usage = Usage {
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        forced_tokens,
        accepted_tokens,
        rejected_tokens,
    };
    Ok(Outcome { text, data, turn, usage, elapsed_us })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_read_as_it_was_written() {
        let usage = Usage {
            prompt_tokens: 1,
            cached_tokens: 2,
            completion_tokens: 3,
            forced_tokens: 4,
            accepted_tokens: 6,
            rejected_tokens: 7,
        };
        let outcome =
            Outcome { text: "hi".into(), data: Some(Value::from(7)), turn: 9, usage, elapsed_us: 5 };
        assert_eq!(decode(&encode(&outcome)).expect("its own bytes"), outcome);
    }
}
