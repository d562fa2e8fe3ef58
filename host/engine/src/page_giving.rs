//! Copies pages out of the executor as a prompt is computed, for another host that has asked for them.
//!
//! The pages stay in the pool and in the prefix tree as those of any other request. So nothing is locked for the other host, and a
//! page that it gets is one that was computed.

use skep_model::Executor;

use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::sequence_id::SequenceId;

/// Gives the pages that a sequence has computed since the last step to the page sink of its request, if there is one.
pub(crate) fn give(id: SequenceId, scheduler: &mut Scheduler, executor: &mut dyn Executor) {
    let Some((sink, first, pages)) = scheduler.sequence_mut(id).and_then(Sequence::take_given) else {
        return;
    };
    let Some(page_bytes) = executor.page_form().map(|form| form.bytes) else { return };
    for (number, page) in (first..).zip(pages) {
        let mut bytes = vec![0; page_bytes];
        if let Err(error) = executor.read_pages(&[page], &mut bytes) {
            tracing::warn!(%error, "a KV page cannot be copied for another host");
            return;
        }
        if !sink.put(number, bytes) {
            return;
        }
    }
}
