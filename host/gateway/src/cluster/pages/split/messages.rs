//! The messages between a decode host and a prefill host, as JSON.

use super::super::lending::Offer;
use serde::{Deserialize, Serialize};
use skep_engine::{Affinity, Digest, PrefillOrder, Priority};
use std::time::Duration;

/// An order of a prompt's pages.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::cluster) struct PrefillOrderBody {
    /// The name of the transfer, which the host that orders has made up.
    pub(super) transfer: String,
    pub(super) model: String,
    pub(super) affinity: Affinity,
    /// Whether other prompts go before.
    #[serde(default)]
    pub(super) is_background: bool,
    /// The tokens of whole pages, from the first one on.
    pub(super) tokens: Vec<u32>,
    /// The number of the first page that is wanted.
    pub(super) first: usize,
    /// The digest of the layout that the pages must have.
    pub(super) layout: [u8; 32],
    /// Bytes of a page.
    pub(super) page_bytes: usize,
    /// Time after which nobody waits for the pages anymore.
    pub(super) within_ms: u64,
}

/// The name of a transfer, to end it.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::cluster) struct TransferName {
    pub(super) transfer: String,
}

/// The part of a transfer's pages that the host that has ordered them wants next.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::cluster) struct TransferPart {
    pub(in crate::cluster::pages) transfer: String,
    /// The number of the first page in the prompt. Hosts of earlier versions do not say it, and want all pages.
    pub(in crate::cluster::pages) from: Option<usize>,
    /// All pages before this number have arrived, and were those that were ordered.
    #[serde(default)]
    pub(in crate::cluster::pages) held: usize,
}

/// The answer to a host that wants to read the next pages of a transfer in the memory of this one.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::cluster) enum TransferOffer {
    /// These pages are ready.
    Pages(Offer),
    /// The next page is still being computed.
    NotYet {},
    /// No further page comes.
    Over {},
}

/// A line of the answer to an order. A reader skips lines that it does not know.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    /// The prompt is being computed. Its first tokens were cached, and are given as well.
    Started {
        reused_tokens: usize,
    },
    /// All pages have been computed.
    Done {
        computed_tokens: usize,
        queue_us: u64,
        compute_us: u64,
    },
    Failed {
        code: String,
        message: String,
    },
    Alive {},
}

impl TransferName {
    pub(in crate::cluster::pages) fn as_str(&self) -> &str {
        &self.transfer
    }
}

impl PrefillOrderBody {
    pub(super) fn new(transfer: String, order: &PrefillOrder) -> Self {
        PrefillOrderBody {
            transfer,
            model: order.model.clone(),
            affinity: order.affinity.clone(),
            is_background: order.priority == Priority::Background,
            tokens: order.tokens.clone(),
            first: order.first,
            layout: order.question.layout.0,
            page_bytes: order.question.payload_bytes,
            within_ms: u64::try_from(order.within.as_millis()).unwrap_or(u64::MAX),
        }
    }

    pub(super) fn layout(&self) -> Digest {
        Digest(self.layout)
    }

    pub(super) fn priority(&self) -> Priority {
        if self.is_background { Priority::Background } else { Priority::Interactive }
    }

    pub(super) fn within(&self) -> Duration {
        Duration::from_millis(self.within_ms)
    }
}
