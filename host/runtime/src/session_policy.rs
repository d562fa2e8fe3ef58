//! The `[sessions]` table of `agent.toml`: how long the agent's sessions are kept, and what
//! happens to conversations that outgrow the model's context.

use crate::RuntimeError;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// One century.
const MAX_TTL_H: u32 = 876_000;

/// The agent's settings for its sessions. The host's settings apply to omitted fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionsToml {
    /// Hours after its last turn at which a session is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_h: Option<u32>,
    /// Handling of a conversation that no longer fits into the model's context, unless the agent
    /// overrides it at run time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compaction: Option<CompactionMode>,
}

/// Handling of a conversation that outgrows the model's context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CompactionMode {
    /// The middle of the conversation is summarized.
    #[default]
    Auto,
    /// The generation is refused.
    Off,
}

impl SessionsToml {
    pub(crate) fn is_default(&self) -> bool {
        *self == SessionsToml::default()
    }

    pub(crate) fn check(&self) -> Result<(), RuntimeError> {
        match self.ttl_h {
            Some(hours) if !(1..=MAX_TTL_H).contains(&hours) => Err(RuntimeError::Manifest {
                message: format!("ttl_h under [sessions] is {hours}; it may be 1 to {MAX_TTL_H}"),
            }),
            _ => Ok(()),
        }
    }

    pub(crate) fn compaction(&self) -> CompactionMode {
        self.compaction.unwrap_or_default()
    }

    /// Returns how long a session is kept: the shorter of the agent's and the operator's limit.
    /// `None` means until it is deleted.
    pub(crate) fn ttl_within(&self, ceiling: Option<Duration>) -> Option<Duration> {
        let asked = self.ttl_h.map(|hours| Duration::from_secs(u64::from(hours) * 3_600));
        [asked, ceiling].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shorter_ttl_wins_and_none_means_unlimited() {
        let hours = |hours: u64| Some(Duration::from_secs(hours * 3_600));
        for (asked, ceiling, expected) in [
            (None, None, None),
            (Some(2), None, 2.into()),
            (None, Some(3), 3.into()),
            (Some(5), Some(3), 3.into()),
        ] {
            let expected: Option<u64> = expected;
            let ttl = SessionsToml { ttl_h: asked, ..Default::default() }.ttl_within(ceiling.and_then(hours));
            assert_eq!(ttl, expected.and_then(hours), "{asked:?} within {ceiling:?}");
        }
    }
}
