//! Tests of the routes against a tiny model with random weights: formats, statuses and bounds, but not the generated
//! text.

mod access;
mod ai_batches;
mod bounds;
mod chat;
mod completions;
mod connections;
mod described;
mod drain;
mod events;
mod fixture;
mod heavy;
mod mcp;
mod mcp_servers;
mod openapi;
mod rates;
mod request_logs;
mod sessions;
mod status;
mod streaming;
mod streams;
mod token_budgets;
mod turns;
mod usage;
mod web_pages;
mod workers_ai;
