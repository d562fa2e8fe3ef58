//! Durable tables of Skep: agents, their components, sessions with state and conversations, logs, schedules, and events on
//! their way to agents and webhooks.
//!
//! This is the only crate with SQL. It knows rows and transactions, and nothing of what a component, a conversation
//! or a message means: those are bytes here. A turn is a row from the moment it is accepted, a journal while it runs, and
//! one [`TurnCommit`] in one transaction when it ends, so that a crash leaves either all of a turn or what is needed to
//! run it again.
#![forbid(unsafe_code)]

mod agents;
mod api_keys;
mod approvals;
mod artifacts;
mod batch_items;
mod batch_rows;
#[cfg(test)]
mod batch_tests;
mod batches;
mod copies;
mod deliveries;
mod disk;
mod erasure;
mod error;
#[cfg(test)]
mod event_tests;
mod events;
#[cfg(test)]
mod fault_tests;
mod faults;
mod journal;
mod logs;
mod pieces;
#[cfg(test)]
mod pieces_tests;
mod restored;
mod rows;
#[cfg(test)]
mod schedule_tests;
mod schedules;
mod schema;
mod secrets;
mod sessions;
mod snapshot;
mod sqlite;
mod standing;
#[cfg(test)]
mod tests;
mod token_use;
#[cfg(test)]
mod turn_tests;
mod turns;
mod webhooks;
mod writer;

pub use agents::{AgentRow, VersionRow};
pub use api_keys::ApiKeyRow;
pub use approvals::{ApprovalRow, Decision, NewApproval, Verdict};
pub use artifacts::ArtifactRow;
pub use batch_items::{ItemEnd, ItemEnded, ItemKey, Take, TakenItem};
pub use batches::{
    BatchRoom, BatchRow, ItemCounts, ItemRow, ItemState, NewBatch, NewItem, QueueDepth, Queued,
};
pub use copies::{Existing, Fork};
pub use deliveries::{Delivery, DeliveryKey, DeliveryState, NewDelivery, Target};
pub use error::StoreError;
pub use events::{EVENT_IDS_KEPT_MS, EventRow, NewEvent, Published};
#[cfg(any(test, feature = "faults"))]
pub use faults::{Fault, Faults, Moment};
pub use journal::{MAX_RECORD_BYTES, Record};
pub use logs::{LogEntry, LogFilter, LogRow};
pub use restored::{Held, HeldTurn, Release};
pub use schedules::{NewSchedule, ScheduleChange, ScheduleRow, ScheduleState};
pub use secrets::SecretRow;
pub use sessions::{
    ConversationRow, Occasion, Outcome, SessionFolder, SessionRow, SessionSnapshot, StateChange, TurnCommit,
};
pub use snapshot::{Snapshot, known_schema, snapshot};
pub use sqlite::{Durability, Store};
pub use standing::{COMMIT_TIME, DiskUse, OpenWork, table_rows};
pub use token_use::TokenUse;
pub use turns::{Acceptance, NewTurn, OpenTurn, TURNS_KEPT, TurnFailure, TurnKey, TurnRow, TurnState};
pub use webhooks::{WebhookQueue, WebhookRow, WebhookTry};
