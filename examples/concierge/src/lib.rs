//! A hotel concierge without a function: instructions, three typed tools, and a folio for each guest that outlives
//! turns and restarts.
//!
//! The model decides which tool to call, if any, and with which arguments. The code only says what the tools are and
//! does what they say. `measure.py` counts how often a model decides well.

mod folio;
mod order;
mod tools;

use skep_sdk::agent;

use tools::{call_service, order_food, read_folio};

/// The concierge of a small hotel: orders food, calls services, and remembers its guests.
#[agent(
    instructions = include_str!("system.md"),
    temperature = 0.0,
    max_tokens = 120,
    tools = [order_food, call_service, read_folio],
)]
struct Concierge;

#[cfg(test)]
mod tests;
