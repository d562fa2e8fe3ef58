//! Tests of agents end to end within this crate: components written as WebAssembly text run against
//! a tiny model.

mod approvals;
mod artifacts;
mod batches;
mod commands;
mod compaction;
mod compute;
mod copies;
mod crashes;
mod deploying;
mod deployments;
mod doer;
mod durability;
mod events;
mod fetch_tool;
pub(crate) mod fixture;
mod guest;
mod hostile;
mod inference;
mod intake;
mod limits;
mod model_changes;
mod models;
mod outside;
mod ownership;
mod receiver;
mod schedules;
mod secrets;
mod session_size;
mod sessions;
mod store_faults;
mod tenants;
mod token_budgets;
mod tools;
mod waker;
mod web;
mod webhooks;
