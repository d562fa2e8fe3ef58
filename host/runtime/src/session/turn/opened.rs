//! A turn whose row says that it runs: what its states share from then until it ends.

use super::assignment::Assignment;
use crate::{capability::Turn, component::Deployed, journal::Journal};
use skep_store::TurnKey;
use std::sync::Arc;

/// A turn that is durable.
pub(super) struct Opened {
    /// The version of the agent that runs the turn.
    pub(super) agent: Arc<Deployed>,
    /// The turn's number in its session.
    pub(super) number: u64,
    pub(super) key: TurnKey,
    pub(super) journal: Arc<Journal>,
    /// The turn as the host functions see it.
    pub(super) turn: Arc<Turn>,
    pub(super) assignment: Assignment,
}
