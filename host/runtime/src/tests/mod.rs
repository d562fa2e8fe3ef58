//! Agents end to end inside this crate: components written as WebAssembly text, against a tiny model.

mod approvals;
mod artifacts;
mod batches;
mod commands;
mod compaction;
mod copies;
mod deploying;
mod deployments;
mod durability;
mod events;
mod fetch_tool;
mod fixture;
mod guest;
mod hostile;
mod inference;
mod limits;
mod models;
mod receiver;
mod schedules;
mod secrets;
mod sessions;
mod token_budgets;
mod tools;
mod waker;
mod web;
mod webhooks;
