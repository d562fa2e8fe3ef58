//! What a turn may use. Each bound here is enforced; one that is not must not be in here.

use crate::RuntimeError;
use serde::{Deserialize, Serialize};

/// Limits in force, or the operator's ceilings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Linear memory of one instance.
    pub memory_mb: u32,
    /// CPU time that the guest itself uses in a turn. Waiting for the model is not counted.
    pub cpu_ms: u32,
    /// From the start of a turn to its end.
    pub turn_ms: u32,
    /// How long one call waits for a person's word. The turn's own time stands meanwhile.
    pub approval_ms: u32,
    /// Tokens that the models produce in a turn.
    pub tokens_per_turn: u32,
    /// Keys and values of a session.
    pub state_kb: u32,
    /// Calls of the `skep:agent` interfaces in a turn.
    pub host_calls: u32,
    /// What those calls pass to the host and get from it, in a turn.
    pub host_call_kb: u32,
    /// HTTP requests of a turn.
    pub fetches: u32,
    /// What those requests and their responses hold, in a turn.
    pub fetch_kb: u32,
    /// Log lines of a turn.
    pub log_kb: u32,
    /// Turns of the agent that run or wait.
    pub concurrent_turns: u32,
    /// Schedules that a session has set.
    pub schedules: u32,
    /// Events that a turn emits.
    pub events: u32,
}

/// The `[limits]` of an `agent.toml`: what the agent asks for. What it leaves out is the default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitsToml {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turn_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approval_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_turn: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_kb: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_calls: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_call_kb: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetches: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetch_kb: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_kb: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrent_turns: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedules: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<u32>,
}

/// What an agent gets that asks for nothing.
const DEFAULT: Limits = Limits {
    memory_mb: 64,
    cpu_ms: 2_000,
    turn_ms: 60_000,
    approval_ms: 86_400_000,
    tokens_per_turn: 4_096,
    state_kb: 1_024,
    host_calls: 100_000,
    host_call_kb: 65_536,
    fetches: 100,
    fetch_kb: 16_384,
    log_kb: 256,
    concurrent_turns: 1_000,
    schedules: 32,
    events: 64,
};

impl Default for Limits {
    /// The ceilings of an operator who sets none.
    fn default() -> Self {
        Limits {
            memory_mb: 256,
            cpu_ms: 30_000,
            turn_ms: 600_000,
            approval_ms: 604_800_000,
            tokens_per_turn: 32_768,
            state_kb: 16_384,
            host_calls: 1_000_000,
            host_call_kb: 1_048_576,
            fetches: 1_000,
            fetch_kb: 32_768,
            log_kb: 1_024,
            concurrent_turns: 10_000,
            schedules: 1_000,
            events: 1_000,
        }
    }
}

impl LimitsToml {
    /// The smaller of what the agent asks for and what the operator allows.
    pub fn within(&self, ceilings: &Limits) -> Limits {
        let least = |asked: Option<u32>, default: u32, ceiling: u32| asked.unwrap_or(default).min(ceiling);
        Limits {
            memory_mb: least(self.memory_mb, DEFAULT.memory_mb, ceilings.memory_mb),
            cpu_ms: least(self.cpu_ms, DEFAULT.cpu_ms, ceilings.cpu_ms),
            turn_ms: least(self.turn_ms, DEFAULT.turn_ms, ceilings.turn_ms),
            approval_ms: least(self.approval_ms, DEFAULT.approval_ms, ceilings.approval_ms),
            tokens_per_turn: least(self.tokens_per_turn, DEFAULT.tokens_per_turn, ceilings.tokens_per_turn),
            state_kb: least(self.state_kb, DEFAULT.state_kb, ceilings.state_kb),
            host_calls: least(self.host_calls, DEFAULT.host_calls, ceilings.host_calls),
            host_call_kb: least(self.host_call_kb, DEFAULT.host_call_kb, ceilings.host_call_kb),
            fetches: least(self.fetches, DEFAULT.fetches, ceilings.fetches),
            fetch_kb: least(self.fetch_kb, DEFAULT.fetch_kb, ceilings.fetch_kb),
            log_kb: least(self.log_kb, DEFAULT.log_kb, ceilings.log_kb),
            concurrent_turns: least(
                self.concurrent_turns,
                DEFAULT.concurrent_turns,
                ceilings.concurrent_turns,
            ),
            schedules: least(self.schedules, DEFAULT.schedules, ceilings.schedules),
            events: least(self.events, DEFAULT.events, ceilings.events),
        }
    }

    /// Bounds that hold whatever the operator allows.
    pub(crate) fn check(&self) -> Result<(), RuntimeError> {
        let bounds = [
            ("memory_mb", self.memory_mb, 1, 4_096),
            ("cpu_ms", self.cpu_ms, 1, 3_600_000),
            ("turn_ms", self.turn_ms, 1, 86_400_000),
            ("approval_ms", self.approval_ms, 1, 2_592_000_000),
            ("tokens_per_turn", self.tokens_per_turn, 1, 16_777_216),
            ("state_kb", self.state_kb, 0, 1_048_576),
            ("host_calls", self.host_calls, 0, 1_000_000_000),
            ("host_call_kb", self.host_call_kb, 0, 1_073_741_824),
            ("fetches", self.fetches, 0, 10_000),
            // The journal of a turn keeps what was answered, and is bounded.
            ("fetch_kb", self.fetch_kb, 0, 32_768),
            ("log_kb", self.log_kb, 0, 16_384),
            ("concurrent_turns", self.concurrent_turns, 1, 1_000_000),
            ("schedules", self.schedules, 0, 10_000),
            ("events", self.events, 0, 10_000),
        ];
        for (name, value, least, most) in bounds {
            if let Some(value) = value
                && !(least..=most).contains(&value)
            {
                return Err(RuntimeError::Manifest {
                    message: format!("{name} under [limits] is {value}; it may be {least} to {most}"),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_in_force_are_the_smaller_of_asked_and_allowed() {
        let asked = LimitsToml { memory_mb: Some(1_000), cpu_ms: Some(10), ..LimitsToml::default() };
        let ceilings = Limits { memory_mb: 128, state_kb: 8, ..Limits::default() };
        let limits = asked.within(&ceilings);
        assert_eq!((limits.memory_mb, limits.cpu_ms, limits.state_kb), (128, 10, 8));
        assert_eq!(limits.turn_ms, DEFAULT.turn_ms);
    }

    #[test]
    fn a_limit_out_of_bounds_is_named_with_its_bounds() {
        let zero = LimitsToml { cpu_ms: Some(0), ..LimitsToml::default() };
        let message = zero.check().expect_err("no CPU time is no limit").to_string();
        assert!(message.contains("cpu_ms under [limits] is 0; it may be 1 to"), "{message}");
    }
}
