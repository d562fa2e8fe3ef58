//! Agents end to end inside this crate: components written as WebAssembly text, against a tiny model.

mod artifacts;
mod commands;
mod copies;
mod deploying;
mod deployments;
mod durability;
mod fixture;
mod guest;
mod hostile;
mod inference;
mod limits;
mod sessions;
mod tools;
