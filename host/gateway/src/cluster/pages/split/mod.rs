//! Prompts that one host computes for another one: prefill disaggregated from decode.
//!
//! A decode host that has a long prompt chooses a prefill host (`choice`), orders the pages that it lacks (`asking`), and fetches
//! them as they become ready (`lane`). The prefill host computes the prompt as any other request (`desk`), and keeps copies of its
//! pages under the name of the transfer until they are fetched, or until the lease of the transfer ends (`transfers`).
//!
//! The first request of a transfer orders it, and its answer has a line for each thing that happens (`messages`): it is the
//! control, and closing it ends the work. Further ones fetch the images of the pages: one for each loan of pages that the decode host reads
//! in the memory of the prefill host, where both can, and one for all pages that are left over HTTP. The last one gives up what was not
//! fetched.
//!
//! Invariant: a page is used only if its image is the one that was asked for, as everywhere in `pages`. Whatever fails, the
//! decode host computes the rest of the prompt itself, and it waits no longer than its order said.

mod asking;
mod choice;
mod desk;
mod figures;
mod lane;
mod messages;
mod transfers;

pub(super) use asking::PrefillOrders;
pub(super) use desk::PrefillDesk;
pub(super) use figures::begin;
pub(in crate::cluster) use messages::{PrefillOrderBody, TransferName, TransferOffer, TransferPart};
