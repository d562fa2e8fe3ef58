//! Durable tables of Skep: agents, their components, sessions with state and conversations, and logs.
//!
//! This is the only crate with SQL. It knows rows and transactions, and nothing of what a component, a conversation
//! or a message means: those are bytes here. A turn is written by one [`TurnCommit`] in one transaction, so that a
//! crash leaves either all of a turn or nothing of it.
#![forbid(unsafe_code)]

mod agents;
mod artifacts;
mod error;
mod logs;
mod schema;
mod sessions;
mod sqlite;
#[cfg(test)]
mod tests;

pub use agents::{AgentRow, VersionRow};
pub use artifacts::ArtifactRow;
pub use error::StoreError;
pub use logs::{LogEntry, LogRow};
pub use sessions::{ConversationRow, Outcome, SessionRow, SessionSnapshot, StateChange, TurnCommit};
pub use sqlite::{Durability, Store};
