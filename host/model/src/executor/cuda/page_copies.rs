//! Copies pages between the devices and the host, through pinned memory.
//!
//! Pages are read in a queue of their own beside that of each rank, so a read does not wait for a step that was started ahead, and
//! the device computes meanwhile. Pages are written in the rank's queue, behind whatever a step that nobody uses still writes to
//! them.
//!
//! Invariant: a read sees all that was queued before it, except what a step that was started ahead writes. Such a step writes to
//! no page that is computed.

use std::fmt;

use skep_kernels::cuda::Activation;
use skep_kernels::cuda::device::{Device, Event, HostBuffer, Slice};

use super::rank::Rank;
use crate::batch::PageId;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::executor::ExecutorOptions;
use crate::executor::page_form::{PageForm, PageParts};

/// Number of pages that may be on their way to the devices.
const MAX_ENTERING: usize = 8;

/// The copies of an executor's pages. Ranks are numbered by stage.
pub(super) struct PageCopies {
    form: PageForm,
    parts: PageParts,
    ranks: Vec<RankQueue>,
    /// Whether the marks of all ranks are behind everything that has written to pages, except a step that was started ahead.
    is_marked: bool,
    /// A page on its way from the devices.
    leaving: HostBuffer,
    /// Pages on their way to the devices, whose memory is used in turn.
    entering: Vec<Entering>,
    next: usize,
}

/// The queue in which pages of a rank are read.
struct RankQueue {
    copies: Device,
    /// The point in the rank's queue that a read waits for.
    mark: Event,
}

struct Entering {
    page: HostBuffer,
    /// Marks that each rank has copied its part.
    taken: Vec<Event>,
}

/// Everything that the bits of pages depend on besides what all executors have in common.
struct Computed<'a> {
    stages: &'a [Vec<Rank>],
    activation: Activation,
    deterministic: bool,
}

impl fmt::Debug for Computed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut architectures: Vec<_> =
            self.stages.iter().flatten().map(|rank| rank.device.architecture()).collect();
        architectures.dedup();
        let Computed { activation, deterministic, .. } = self;
        write!(f, "CUDA {architectures:?} in {activation:?}, fixed order {deterministic}")
    }
}

impl PageCopies {
    /// Allocates the memory for the copies of these ranks.
    pub(super) fn new(
        config: &ModelConfig,
        options: &ExecutorOptions,
        stages: &[Vec<Rank>],
    ) -> Result<Self, ModelError> {
        let ranks = || stages.iter().flatten();
        let layers: Vec<Vec<usize>> = ranks().map(|rank| rank.sizes.layer_page_bytes().collect()).collect();
        let parts = PageParts::new(&layers, options.tensor_parallel);
        let leader = &stages[stages.len() - 1][0];
        let activation = leader.weights.layout.activation;
        let computed = Computed { stages, activation, deterministic: options.deterministic };
        let form = PageForm::new(config, options, computed, parts.bytes);
        let queue = |rank: &Rank| {
            Ok::<_, ModelError>(RankQueue { copies: rank.device.copy_queue()?, mark: rank.device.event()? })
        };
        let entering = || {
            let taken = ranks().map(|rank| Ok(rank.device.event()?)).collect::<Result<_, ModelError>>()?;
            Ok::<_, ModelError>(Entering { page: leader.device.host_buffer(form.bytes)?, taken })
        };
        Ok(PageCopies {
            ranks: ranks().map(queue).collect::<Result<_, _>>()?,
            is_marked: false,
            leaving: leader.device.host_buffer(form.bytes)?,
            entering: (0..MAX_ENTERING).map(|_| entering()).collect::<Result<_, _>>()?,
            next: 0,
            parts,
            form,
        })
    }

    /// Returns the form of the pages.
    pub(super) fn form(&self) -> &PageForm {
        &self.form
    }

    /// Marks the point that reads wait for, before a step that is started ahead.
    pub(super) fn mark(&mut self) -> Result<(), ModelError> {
        self.is_marked = false;
        for rank in &self.ranks {
            rank.mark.record()?;
        }
        self.is_marked = true;
        Ok(())
    }

    /// Forgets the mark, before a step that writes to pages which may be read.
    pub(super) fn unmark(&mut self) {
        self.is_marked = false;
    }

    /// Copies a page from the devices.
    pub(super) fn read(
        &mut self,
        stages: &[Vec<Rank>],
        page: PageId,
        out: &mut [u8],
    ) -> Result<(), ModelError> {
        if !self.is_marked {
            self.mark()?;
        }
        let begun = self.begin_read(stages, page);
        // Copies that were begun before a failure have to end as well before the memory is used again.
        let ended = self.ranks.iter().map(|rank| rank.copies.synchronize()).fold(Ok(()), Result::and);
        begun?;
        ended?;
        out.copy_from_slice(self.leaving.bytes());
        Ok(())
    }

    fn begin_read(&mut self, stages: &[Vec<Rank>], page: PageId) -> Result<(), ModelError> {
        for (number, rank) in stages.iter().flatten().enumerate() {
            let RankQueue { copies, mark } = &self.ranks[number];
            copies.wait(mark)?;
            for part in parts_of(&self.parts, number, rank, page) {
                let (slice, at) = part?;
                copies.download(slice, &mut self.leaving, at)?;
            }
        }
        Ok(())
    }

    /// Queues a copy of a page to the devices, in front of the next step.
    pub(super) fn write(
        &mut self,
        stages: &[Vec<Rank>],
        page: PageId,
        bytes: &[u8],
    ) -> Result<(), ModelError> {
        self.is_marked = false;
        let entering = &mut self.entering[self.next];
        self.next = (self.next + 1) % MAX_ENTERING;
        for taken in &entering.taken {
            taken.synchronize()?;
        }
        entering.page.bytes_mut().copy_from_slice(bytes);
        let begun = begin_write(&self.parts, stages, page, entering);
        if begun.is_err() {
            // No event marks the end of what was begun. Another error is reported by the next step.
            stages.iter().flatten().for_each(|rank| drop(rank.device.synchronize()));
        }
        begun
    }
}

fn begin_write(
    parts: &PageParts,
    stages: &[Vec<Rank>],
    page: PageId,
    Entering { page: from, taken }: &Entering,
) -> Result<(), ModelError> {
    for (number, rank) in stages.iter().flatten().enumerate() {
        for part in parts_of(parts, number, rank, page) {
            let (slice, at) = part?;
            rank.device.upload(from, at, slice)?;
        }
        taken[number].record()?;
    }
    Ok(())
}

/// Returns the parts of a page that a rank holds, each with its offset in the page's bytes: the keys, the values and the scales of
/// each layer.
fn parts_of<'a>(
    parts: &'a PageParts,
    number: usize,
    rank: &'a Rank,
    page: PageId,
) -> impl Iterator<Item = Result<(Slice<'a>, usize), ModelError>> {
    let layers = parts.of_rank(number).iter().enumerate();
    layers.flat_map(move |(layer, (offset, _))| {
        rank.sizes.page_of(layer, page.0 as usize).scan(*offset, |next, range| {
            let at = *next;
            *next += range.len();
            Some(rank.pages.slice().part(range).map(|part| (part, at)).map_err(ModelError::from))
        })
    })
}

#[cfg(test)]
#[path = "page_copies_tests.rs"]
pub(super) mod tests;
