//! Agents in the test harness, from the view of their authors. One program has all of these tests, because each program is linked
//! with the SDK.

/// Names that methods had before.
mod deprecated;
/// Examples for the model, and random numbers.
mod examples;
/// References to tools of other agents and servers.
mod host_tools;
/// Agents that consist of instructions.
mod instructions;
/// Sessions with many messages and much state.
mod long_sessions;
/// Names of authors that the macros could use, too.
mod names;
/// The reasoning of a model.
mod reasoning;
/// Alarms and events.
mod schedules;
/// Conversations, tools, streams and errors of a turn.
mod turns;
/// Requests over HTTP.
mod web;
