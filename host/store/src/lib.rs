//! Durable tables of Skep: agents, their components, sessions with state and conversations, logs, schedules,
//! and events in flight to agents and webhooks.
//!
//! This is the only crate with SQL. It knows rows and transactions, but not the meaning of a component, a
//! conversation or a message, which are bytes here. A turn is a row from the moment it is accepted and a
//! journal while it runs. It ends with one [`TurnCommit`] in one transaction, so that after a crash either
//! the whole turn is stored or everything that is needed to run it again.
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
mod choices;
mod chunks;
#[cfg(test)]
mod chunks_tests;
mod clock_record;
mod cluster;
#[cfg(test)]
mod cluster_tests;
mod connecting;
#[cfg(test)]
mod contention_tests;
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
mod files;
#[cfg(any(test, feature = "faults"))]
mod for_tests;
#[cfg(test)]
mod host_tests;
mod host_versions;
#[cfg(test)]
mod host_versions_tests;
mod hosts;
mod inspecting;
#[cfg(test)]
mod joint_tests;
mod journal;
#[cfg(test)]
mod judging_tests;
mod keys;
mod line_counts;
mod listings;
#[cfg(test)]
mod log_tests;
mod logs;
mod losses;
mod mcp_sessions;
mod membership;
mod moving;
mod notices;
mod open_work;
mod owners;
mod page_erasures;
mod postgres;
#[cfg(test)]
mod request_tests;
mod requests;
mod responses;
mod restored;
mod retention;
mod row_groups;
mod rows;
#[cfg(test)]
mod schedule_tests;
mod schedules;
mod schema;
mod schema_backup;
mod schema_steps;
mod secrets;
#[cfg(test)]
mod server_tests;
mod session_reads;
mod sessions;
#[cfg(test)]
mod silence_tests;
mod snapshot;
mod sql;
mod sqlite;
#[cfg(test)]
mod statement_tests;
#[cfg(test)]
mod table_rows;
mod tenants;
#[cfg(test)]
mod tests;
mod token_use;
#[cfg(test)]
mod turn_tests;
mod turns;
mod uploads;
mod usage;
mod webhooks;
mod work_states;
mod writer;

pub use agents::{AgentRow, VersionRow};
pub use api_keys::ApiKeyRow;
pub use approvals::{ApprovalRow, Decision, NewApproval, Verdict};
pub use artifacts::ArtifactRow;
pub use batch_items::{BusyTenant, ItemEnd, ItemEnded, ItemKey, Take, TakenItem};
pub use batches::{
    BatchRoom, BatchRow, BatchTerms, ItemCounts, ItemRow, ItemState, NewBatch, NewItem, QueueDepth, Queued,
};
pub use clock_record::ClockRow;
pub use cluster::{HostRow, HostState};
pub use connecting::MAX_CONNECTIONS;
pub use copies::{Existing, Fork};
pub use deliveries::{Delivery, DeliveryKey, DeliveryState, NewDelivery, Target};
pub use error::StoreError;
pub use events::{EVENT_IDS_KEPT_MS, EventRow, NewEvent, Published};
#[cfg(any(test, feature = "faults"))]
pub use faults::{Fault, Faults, Moment};
#[cfg(any(test, feature = "faults"))]
pub use for_tests::TEST_SERVER;
pub use host_versions::{CLUSTER_PROTOCOL, HostVersions, speak_with};
pub use inspecting::{DatabaseReport, HostReport, ServerReport, inspect_file, inspect_server};
pub use journal::{MAX_RECORD_BYTES, Record};
pub use keys::{SessionFolder, TurnKey};
pub use listings::{ListedSession, ListedTurn, SessionCursor, SessionSearch};
pub use logs::{LogEntry, LogFilter, LogRow};
pub use mcp_sessions::{McpSessionKey, TakenMcpSession};
pub use moving::{RowProgress, TableRows};
pub use notices::{NoticeKind, Notices};
pub use open_work::{DiskUse, KeptSizes, OpenWork, QueuedWork};
pub use owners::Claim;
pub use page_erasures::{PageErasure, PageErasures};
pub use requests::{RequestBody, RequestFilter, RequestPage, RequestRange, RequestRow};
pub use responses::{ChainSize, NewResponse, ResponseRoom, ResponseRow, ResponseState, ResponseTurn};
pub use restored::{Held, HeldTurn, Release};
pub use schedules::{NewSchedule, ScheduleChange, ScheduleRow, ScheduleState};
pub use secrets::SecretRow;
pub use sessions::{
    ConversationOutline, ConversationPlace, ConversationRow, KeptOutcome, ModelUse, Outcome, SessionOutline,
    SessionRow, SessionSnapshot, StateChange, TurnCommit, TurnTrigger,
};
pub use snapshot::{Snapshot, known_schema, snapshot};
pub use sqlite::{DataPlace, Durability, Store};
pub use tenants::{TenantRow, TenantRows};
pub use token_use::TokenUse;
pub use turns::{Acceptance, NewTurn, OpenTurn, TURNS_KEPT, TurnFailure, TurnRow, TurnState};
pub use uploads::{FileRow, NewFile};
pub use usage::{UsageBy, UsageCounts, UsageFilter, UsageRow, UsageSum};
pub use webhooks::{WebhookQueue, WebhookRow, WebhookTry};
pub use writer::COMMIT_TIME;
