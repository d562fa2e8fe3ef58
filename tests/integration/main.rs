//! Skep from outside: a real host with the default model and real guests, over HTTP and through the binary.
//!
//! One binary, so that it links once and its tests share one host. What a test needs (the model, the guest toolchain,
//! the guests) is prepared through the same code that the command line uses.

/// Starts hosts and talks to them.
mod harness;

/// Agents: turns, state, conversations, tools, triggers, what survives a restart.
mod agents;
/// Calls that people decide about.
mod approvals;
/// Backups of a host under load, and what a restored one does.
mod backup;
/// Batches: a host that is killed with a full queue, and the commands that fill and read it.
mod batches;
/// The benchmarks that drive a server.
mod bench;
/// The binary's commands, their output and exit codes.
mod cli;
/// Structured output: schemas, regular expressions, grammars, tools.
mod constraints;
/// The default model on a GPU, where there is one.
mod cuda;
/// The folder of a host: one host at a time, and what the command line does in it.
mod data_folder;
/// `skep up --watch` and `skep logs --follow`.
mod dev_loop;
/// A host that is killed under load, and what its clients are told.
mod durability;
/// What a stranger says first, to the default model.
mod first_words;
/// Tools of other agents, over HTTP, and what the command line shows of tools.
mod host_tools;
/// What a hostile or broken guest, request or file gets.
mod hostile;
/// Cheap rules of the house.
mod house;
/// Agents that are not written in Rust.
mod languages;
/// What agents and tenants may have, and that it lasts.
mod limits;
/// More requests than there is room for, and clients that go away.
mod load;
/// Agents as tools of an MCP server.
mod mcp;
/// What `/metrics` says, against its documentation.
mod metrics;
/// The official Python client against our routes.
mod openai_client;
/// OpenAI-compatible routes: shapes, streaming, batching, prefix reuse.
mod openai_routes;
/// Limits and weights of a `skep.toml`, on a host that has it.
mod rates;
/// Token ids and log-probabilities of the default model against an independent implementation.
mod reference;
/// Agents in an OCI registry.
mod registry;
/// The default model's answers under settings that must not change a bit.
mod same_bits;
/// What wakes agents, and what they tell each other, on a host that is killed.
mod schedules;
/// Sessions from the command line, and conversations that outgrow the model.
mod sessions;
/// The default model divided among ranks.
mod sharding;
/// Traces over OTLP, and the request ids of the log.
mod traces;
/// Agents that reach out, and the secrets that they send.
mod web;
/// Webhooks from the command line, and what the log says of one that fails.
mod webhooks;
