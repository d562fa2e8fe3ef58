//! Limits on what a turn, a session or an agent may use. Every limit in this file is enforced; a limit that is not enforced
//! must not be listed here.
//!
//! One table defines each limit: the default for an agent that does not set it, the default ceiling for an operator who does
//! not set it, and the absolute bounds on both. `tests/limits.rs` has a guest that exceeds each line of the table.

mod limiter;
mod recent_use;
mod trap;
mod turn_use;

pub(crate) use limiter::{InstanceLimiter, Refused};
pub use recent_use::RecentTurns;
pub(crate) use recent_use::RecentUse;
pub(crate) use trap::LimitTrap;
pub use turn_use::TurnLimit;
pub(crate) use turn_use::{Counted, TurnUse};

use serde::{Deserialize, Serialize};

/// Number of memories that one component may have; `memory_mb` limits their sum.
pub(crate) const MEMORIES_PER_AGENT: u32 = 4;

macro_rules! limits {
    ($($(#[$doc:meta])* $name:ident: $default:expr, at most $ceiling:expr, within $least:literal..=$most:literal;)*) => {
        /// The effective limits of an agent, or the operator's ceilings.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Limits {
            $($(#[$doc])* pub $name: u32,)*
        }

        /// The `[limits]` table of an `agent.toml`, which holds the agent's requests, or of `skep.toml`, which holds the
        /// operator's ceilings. Omitted limits take their default.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(from = "Written")]
        pub struct LimitsToml {
            $(#[serde(skip_serializing_if = "Option::is_none")] pub $name: Option<u32>,)*
        }

        /// The numbers as written. Each is checked where it is read, so that an error names its line and its bounds.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Written {
            $($name: Option<Bounded<$least, $most>>,)*
        }

        impl From<Written> for LimitsToml {
            fn from(written: Written) -> Self {
                LimitsToml { $($name: written.$name.map(|number| number.0),)* }
            }
        }

        /// The limits of an agent that sets none.
        const DEFAULT: Limits = Limits { $($name: $default,)* };

        impl Default for Limits {
            /// Returns the ceilings of an operator who sets none.
            fn default() -> Self {
                Limits { $($name: $ceiling,)* }
            }
        }

        impl Limits {
            /// The ceilings that instances are reserved with when the host starts. The others can change while it runs.
            pub const OF_POOL: [&str; 4] = ["memory_mb", "tables", "table_elements", "instances"];

            /// Returns these ceilings with those of a pool that exists.
            pub(crate) fn with_pool_of(self, pool: &Limits) -> Limits {
                let Limits { memory_mb, tables, table_elements, instances, .. } = *pool;
                Limits { memory_mb, tables, table_elements, instances, ..self }
            }

            /// Returns each limit with its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u32)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }

        impl LimitsToml {
            /// Returns the effective limits: the smaller of the agent's request and the operator's ceiling.
            pub fn within(&self, ceilings: &Limits) -> Limits {
                Limits { $($name: self.$name.unwrap_or(DEFAULT.$name).min(ceilings.$name),)* }
            }

            /// Returns the operator's ceilings, with omitted ones taken from `default`.
            pub fn over(&self, default: &Limits) -> Limits {
                Limits { $($name: self.$name.unwrap_or(default.$name),)* }
            }

            /// Checks the absolute bounds, which apply to developers and operators alike.
            pub fn check(&self) -> Result<(), String> {
                $(if let Some(number) = self.$name {
                    Bounded::<$least, $most>::try_from(i64::from(number))
                        .map_err(|message| format!("[limits] {}: {message}", stringify!($name)))?;
                })*
                Ok(())
            }
        }
    };
}

limits! {
    /// Linear memory of one instance, summed over all its memories, in MiB.
    memory_mb: 64, at most 256, within 1..=4_096;
    /// Number of tables in one instance.
    tables: 16, at most 16, within 0..=64;
    /// Number of entries in each table.
    table_elements: 100_000, at most 100_000, within 0..=10_000_000;
    /// Number of core instances in a component.
    instances: 16, at most 16, within 1..=64;
    /// CPU time that the guest itself uses in a turn, in milliseconds. Waiting for the model is not counted.
    cpu_ms: 2_000, at most 30_000, within 1..=3_600_000;
    /// Time from the start of a turn to its end, in milliseconds.
    turn_ms: 60_000, at most 600_000, within 1..=86_400_000;
    /// Time that one call may wait for a person's approval, in milliseconds. The turn's own clock is paused meanwhile.
    approval_ms: 86_400_000, at most 604_800_000, within 1..=2_592_000_000;
    /// Number of tokens that models produce in a turn.
    tokens_per_turn: 4_096, at most 32_768, within 1..=16_777_216;
    /// Number of tokens that models produce in all turns of the agent that finish on one UTC day.
    tokens_per_day: 100_000_000, at most 1_000_000_000, within 1..=4_000_000_000;
    /// Size of a session's state, keys and values together, in KiB.
    state_kb: 1_024, at most 16_384, within 0..=1_048_576;
    /// Stored size of a session's state and conversations together, in KiB: messages, and the tokens that the model saw.
    session_kb: 32_768, at most 131_072, within 1..=4_194_303;
    /// Number of calls to the `skep:agent` interfaces in a turn.
    host_calls: 100_000, at most 1_000_000, within 0..=1_000_000_000;
    /// Data that those calls exchange with the host in a turn, in both directions, in KiB.
    host_call_kb: 65_536, at most 1_048_576, within 0..=1_073_741_824;
    /// Number of HTTP requests in a turn.
    fetches: 100, at most 1_000, within 0..=10_000;
    /// Size of those requests and their responses in a turn, in KiB. The turn's journal stores them, and is bounded.
    fetch_kb: 16_384, at most 32_768, within 0..=32_768;
    /// Size of a turn's log lines, in KiB.
    log_kb: 256, at most 1_024, within 0..=16_384;
    /// Number of the agent's turns that are running or waiting.
    concurrent_turns: 1_000, at most 10_000, within 1..=1_000_000;
    /// Number of schedules that a session has set.
    schedules: 32, at most 1_000, within 0..=10_000;
    /// Number of events that a turn emits.
    events: 64, at most 1_000, within 0..=10_000;
}

/// A number from `LEAST` to `MOST`.
#[derive(Deserialize)]
#[serde(try_from = "i64")]
struct Bounded<const LEAST: u32, const MOST: u32>(u32);

impl<const LEAST: u32, const MOST: u32> TryFrom<i64> for Bounded<LEAST, MOST> {
    type Error = String;

    fn try_from(number: i64) -> Result<Self, String> {
        match u32::try_from(number) {
            Ok(number) if (LEAST..=MOST).contains(&number) => Ok(Bounded(number)),
            _ => Err(format!("{number} is out of range; it must be between {LEAST} and {MOST}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_limits_are_the_smaller_of_requested_and_allowed() {
        let asked = LimitsToml { memory_mb: Some(1_000), cpu_ms: Some(10), ..LimitsToml::default() };
        let ceilings = Limits { memory_mb: 128, state_kb: 8, ..Limits::default() };
        let limits = asked.within(&ceilings);
        assert_eq!((limits.memory_mb, limits.cpu_ms, limits.state_kb), (128, 10, 8));
        assert_eq!(limits.turn_ms, DEFAULT.turn_ms);
    }

    #[test]
    fn ceilings_of_the_pool_stay() {
        let (before, after) = (Limits::default(), Limits { memory_mb: 1, cpu_ms: 1, ..Limits::default() });
        let changed: Vec<&str> = before
            .named()
            .zip(after.with_pool_of(&before).named())
            .filter(|(a, b)| a != b)
            .map(|(a, _)| a.0)
            .collect();
        assert_eq!(changed, ["cpu_ms"]);
        let names: Vec<&str> = before.named().map(|(name, _)| name).collect();
        assert!(Limits::OF_POOL.iter().all(|name| names.contains(name)));
    }

    #[test]
    fn an_out_of_range_limit_is_reported_with_its_bounds() {
        let zero = LimitsToml { cpu_ms: Some(0), ..LimitsToml::default() };
        let message = zero.check().expect_err("0 ms of CPU time is not a valid limit");
        assert!(
            message.contains("[limits] cpu_ms: 0 is out of range; it must be between 1 and"),
            "{message}"
        );
    }

    #[test]
    fn agent_defaults_are_within_the_default_ceilings() {
        for ((name, default), (_, ceiling)) in DEFAULT.named().zip(Limits::default().named()) {
            assert!(default <= ceiling, "{name}");
        }
    }
}
