//! Tests of Skep from outside: a real host with the default model and real guests, over HTTP and through the
//! binary.
//!
//! All tests are in one binary, which links once and shares one host. Everything that a test needs (the
//! model, the guest toolchain, the guests) is prepared by the same code that the command line uses.

/// Starts hosts and sends requests to them.
mod harness;
/// A server that stands for one with OpenAI's API.
mod scripted_upstream;
/// The packages of the workspace.
mod workspace;

/// Agents: turns, state, conversations, tools, triggers, restarts.
mod agents;
/// Calls that need approval.
mod approvals;
/// Backups of a host under load, and restored hosts.
mod backup;
/// Batches: a host that is killed with a full queue, and the commands that fill and read a queue.
mod batches;
/// The benchmarks that use a server.
mod bench;
/// Answers of upstreams that break off, requested again for agents.
mod broken_answers;
/// The prefix of conversations that stays cached with published templates.
mod cached_prefix;
/// Published chat templates, compared with how `transformers` renders them.
mod chat_templates;
/// The commands of the binary, their output and exit codes.
mod cli;
/// The official clients of the APIs that the host speaks.
mod clients;
/// Several hosts on one PostgreSQL database.
mod cluster;
/// A host whose configuration tests change.
mod config_host;
/// The configuration of a running host, read again.
mod config_reload;
/// The console in a real browser.
mod console;
/// Structured output: schemas, regular expressions, grammars, tools.
mod constraints;
/// The default model on a GPU, if there is one.
mod cuda;
/// The data folder of a host: one host at a time, and access by the command line.
mod data_folder;
/// Hosts whose data is in PostgreSQL.
mod databases;
/// `skep up --watch` and `skep logs --follow`.
mod dev_loop;
/// The language of the documentation, and what it says about the repository.
mod documentation;
/// A host that is killed under load, and the events that its clients see.
mod durability;
/// The examples, used as their READMEs say, and copies of them.
mod examples;
/// Two hosts, of which one stands by and replaces the other.
mod failover;
/// First messages of users, answered by the default model.
mod first_words;
/// The guides, whose blocks run as they stand.
mod guides;
/// Tools of other agents over HTTP, and the tools that the command line shows.
mod host_tools;
/// Hostile or broken guests, requests and files.
mod hostile;
/// Cheap checks of project rules.
mod house;
/// The image of a release, built and run by a container engine.
mod image;
/// Images in messages, and texts to continue, that upstreams get.
mod images_and_texts;
/// KV pages on disk: restarts that stay warm, and what is erased.
mod kv_disk;
/// Agents in languages other than Rust.
mod languages;
/// Limits of agents and tenants, and their persistence.
mod limits;
/// The links of the Markdown pages.
mod links;
/// llama-server as an upstream, on machines that have one.
mod llama_server;
/// Overload and disconnecting clients.
mod load;
/// A host whose log of requests is read.
mod logged_host;
/// Agents as tools of an MCP server.
mod mcp;
/// The conformance suite of the Model Context Protocol, in both directions.
mod mcp_conformance;
/// A client of the Model Context Protocol that agents can ask.
mod mcp_interaction;
/// The log lines that a client of the Model Context Protocol gets.
mod mcp_logging;
/// The metrics of `/metrics`, compared with their documentation.
mod metrics;
/// A hub of models with faults.
mod model_hub;
/// Plans of a model's memory, printed by the binary.
mod model_plan;
/// Several models in one host: loads, unloads and aliases.
mod model_set;
/// Pulls of models, and the cache that they fill.
mod models;
/// KV pages in Mooncake Store, and hosts whose owners or masters are killed.
mod mooncake;
/// OpenAI-compatible routes: shapes, streaming, batching, prefix reuse.
mod openai_routes;
/// The service manager, a machine without compilers, and what a release consists of.
mod packages;
/// Ports that are known before a process listens on them.
mod ports;
/// A PostgreSQL server of the test's own.
mod postgres_server;
/// Rate limits and weights of a `skep.toml`, on a host that uses it.
mod rates;
/// The reasoning of a model that computes.
mod reasoning;
/// Token ids and log-probabilities of the default model against an independent implementation.
mod reference;
/// Agents in an OCI registry.
mod registry;
/// The log of requests to models.
mod requests;
/// Stored responses and those in the background, on a host that is killed.
mod responses;
/// The default model's answers under settings that must not change any bit.
mod same_bits;
/// Alarms and events, on a host that is killed.
mod schedules;
/// Sessions from the command line, and conversations that outgrow the model.
mod sessions;
/// The default model divided among ranks.
mod sharding;
/// The structure of the crates.
mod structure;
/// Mixtures with random weights, here and in llama.cpp.
mod synthesize;
/// The deletion of a tenant with everything that belongs to it.
mod tenants;
/// Published vocabularies against the libraries of their families.
mod tokenizers;
/// Traces over OTLP, and the request ids of the log.
mod traces;
/// The default model, cut into experts.
mod upcycle;
/// Data, sessions, backups and agents of earlier versions.
mod upgrade;
/// The bill of upstreams, whatever becomes of their answers.
mod upstream_bills;
/// The keys of upstreams, searched in everything that a host writes.
mod upstream_keys;
/// Models that another host computes, and routes.
mod upstreams;
/// Agents that make HTTP requests, and the secrets that they send.
mod web;
/// Webhooks from the command line, and the log of a failing webhook.
mod webhooks;
