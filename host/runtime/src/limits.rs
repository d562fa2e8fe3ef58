//! What a turn, a session or an agent may use. Each bound here is enforced; one that is not must not be in here.
//!
//! One table says everything of a limit: what an agent gets that does not ask, what an operator allows who says nothing,
//! and what holds whatever both say. `tests/limits.rs` has a guest for each line that goes over it.

use serde::{Deserialize, Serialize};

macro_rules! limits {
    ($($(#[$doc:meta])* $name:ident: $default:expr, at most $ceiling:expr, within $least:literal..=$most:literal;)*) => {
        /// Limits in force, or the operator's ceilings.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Limits {
            $($(#[$doc])* pub $name: u32,)*
        }

        /// The `[limits]` of an `agent.toml`, which are what the agent asks for, or of `skep.toml`, which are ceilings. What
        /// is left out is the default.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(try_from = "AnyNumbers")]
        pub struct LimitsToml {
            $(#[serde(skip_serializing_if = "Option::is_none")] pub $name: Option<u32>,)*
        }

        /// As written, so that a number that no limit can be is told with the bounds of that limit.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct AnyNumbers {
            $($name: Option<i64>,)*
        }

        impl TryFrom<AnyNumbers> for LimitsToml {
            type Error = String;
            fn try_from(written: AnyNumbers) -> Result<Self, String> {
                Ok(LimitsToml { $($name: checked(stringify!($name), written.$name, $least, $most)?,)* })
            }
        }

        /// What an agent gets that asks for nothing.
        const DEFAULT: Limits = Limits { $($name: $default,)* };

        impl Default for Limits {
            /// The ceilings of an operator who sets none.
            fn default() -> Self {
                Limits { $($name: $ceiling,)* }
            }
        }

        impl Limits {
            /// Each by its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u32)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }

        impl LimitsToml {
            /// The smaller of what the agent asks for and what the operator allows.
            pub fn within(&self, ceilings: &Limits) -> Limits {
                Limits { $($name: self.$name.unwrap_or(DEFAULT.$name).min(ceilings.$name),)* }
            }

            /// The operator's ceilings: these, and for what is left out those of `default`.
            pub fn over(&self, default: &Limits) -> Limits {
                Limits { $($name: self.$name.unwrap_or(default.$name),)* }
            }

            /// Bounds that hold whoever asks.
            pub fn check(&self) -> Result<(), String> {
                $(checked(stringify!($name), self.$name.map(i64::from), $least, $most)?;)*
                Ok(())
            }
        }
    };
}

limits! {
    /// Linear memory of one instance, all its memories together.
    memory_mb: 64, at most 256, within 1..=4_096;
    /// Tables of one instance.
    tables: 16, at most 16, within 0..=64;
    /// Entries of each of them.
    table_elements: 100_000, at most 100_000, within 0..=10_000_000;
    /// Core instances that a component is made of.
    instances: 16, at most 16, within 1..=64;
    /// CPU time that the guest itself uses in a turn. Waiting for the model is not counted.
    cpu_ms: 2_000, at most 30_000, within 1..=3_600_000;
    /// From the start of a turn to its end.
    turn_ms: 60_000, at most 600_000, within 1..=86_400_000;
    /// How long one call waits for a person's word. The turn's own time stands meanwhile.
    approval_ms: 86_400_000, at most 604_800_000, within 1..=2_592_000_000;
    /// Tokens that the models produce in a turn.
    tokens_per_turn: 4_096, at most 32_768, within 1..=16_777_216;
    /// Tokens that the models produce in all turns of the agent that end on one day, of UTC.
    tokens_per_day: 100_000_000, at most 1_000_000_000, within 1..=4_000_000_000;
    /// Keys and values of a session.
    state_kb: 1_024, at most 16_384, within 0..=1_048_576;
    /// State and conversations of a session together, as they are stored: messages, and the tokens that the model saw.
    session_kb: 32_768, at most 131_072, within 1..=4_194_303;
    /// Calls of the `skep:agent` interfaces in a turn.
    host_calls: 100_000, at most 1_000_000, within 0..=1_000_000_000;
    /// What those calls pass to the host and get from it, in a turn.
    host_call_kb: 65_536, at most 1_048_576, within 0..=1_073_741_824;
    /// HTTP requests of a turn.
    fetches: 100, at most 1_000, within 0..=10_000;
    /// What those requests and their responses hold, in a turn. Its journal keeps that, and is bounded.
    fetch_kb: 16_384, at most 32_768, within 0..=32_768;
    /// Log lines of a turn.
    log_kb: 256, at most 1_024, within 0..=16_384;
    /// Turns of the agent that run or wait.
    concurrent_turns: 1_000, at most 10_000, within 1..=1_000_000;
    /// Schedules that a session has set.
    schedules: 32, at most 1_000, within 0..=10_000;
    /// Events that a turn emits.
    events: 64, at most 1_000, within 0..=10_000;
}

fn checked(name: &str, value: Option<i64>, least: u32, most: u32) -> Result<Option<u32>, String> {
    let Some(value) = value else { return Ok(None) };
    match u32::try_from(value) {
        Ok(value) if (least..=most).contains(&value) => Ok(Some(value)),
        _ => Err(format!("[limits] {name} is {value}; it may be {least} to {most}")),
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
        let message = zero.check().expect_err("no CPU time is no limit");
        assert!(message.contains("[limits] cpu_ms is 0; it may be 1 to"), "{message}");
    }

    #[test]
    fn what_an_agent_gets_unasked_an_operator_allows_who_says_nothing() {
        for ((name, default), (_, ceiling)) in DEFAULT.named().zip(Limits::default().named()) {
            assert!(default <= ceiling, "{name}");
        }
    }
}
