//! The `skep` command line. It is the only crate that depends on all the others, and the only one that reads
//! command-line flags, configuration files and the environment.
//!
//! The integration tests set themselves up with `catalog`, `guest_build` and `server`, so that tests and
//! users run the same code.

#![forbid(unsafe_code)]

pub mod agent_source;
mod authorities;
pub mod backup;
pub mod catalog;
pub mod client;
pub mod cluster_cache;
pub mod cluster_setup;
pub mod commands;
pub mod compute_flags;
pub mod config;
mod data_lock;
pub mod database_flag;
pub mod device_flag;
pub mod embedded;
pub mod engines;
mod example_copy;
pub mod failure;
mod file_settings;
pub mod guest_build;
pub mod kv_disk;
pub mod kv_transfer;
mod local_models;
pub mod logging;
mod machine;
mod memory_budget;
pub mod model_options;
mod model_prices;
mod number;
mod open_files;
pub mod paths;
pub mod progress;
pub mod registry;
pub mod server;
pub mod server_options;
mod settings;
mod source_watch;
pub mod style;
pub mod traces;
mod upstreams;
