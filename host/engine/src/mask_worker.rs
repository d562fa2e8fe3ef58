//! Token masks, computed on a separate thread in parallel with the forward pass.
//!
//! The mask of a row depends only on tokens that are known before the step is computed, so nobody has to wait
//! for it. A job owns the state of its constraint and gives it back; a job that panics loses it, which fails
//! its own sequence and no other. Steps without constrained sequences send nothing to the thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use crate::EngineError;
use crate::constraint::{OutputConstraint, TokenMask};
use crate::draft::Draft;
use crate::sequence_id::SequenceId;

/// The masks of one sequence's rows in a step.
pub(crate) struct MaskJob {
    pub id: SequenceId,
    pub constraint: Box<OutputConstraint>,
    pub draft: Draft,
    /// Token ids that are never drawn.
    pub banned: Vec<u32>,
    /// Token ids that are not drawn after the given number of draft tokens.
    pub excluded: Vec<(usize, u32)>,
}

/// The result of a job.
pub(crate) struct Masked {
    pub id: SequenceId,
    /// The job's constraint; `None` if it was lost in a panic.
    pub constraint: Option<Box<OutputConstraint>>,
    /// The masks of the drawn rows in order, up to the first row that has nothing left to draw.
    pub masks: Result<Vec<TokenMask>, EngineError>,
}

pub(crate) struct MaskWorker {
    /// `None` only while dropping: closing the channel terminates the thread.
    jobs: Option<Sender<Vec<MaskJob>>>,
    done: Receiver<Vec<Masked>>,
    thread: Option<JoinHandle<()>>,
}

/// Masks that are being computed.
#[must_use]
pub(crate) enum Pending<'a> {
    Nothing,
    Sent(&'a MaskWorker),
}

impl MaskWorker {
    /// Starts the thread `masks-NAME`, which ends when the worker is dropped.
    pub fn start(name: &str) -> std::io::Result<Self> {
        let (jobs, queue) = channel::<Vec<MaskJob>>();
        let (results, done) = channel();
        let work = move || {
            for jobs in queue {
                if results.send(jobs.into_iter().map(MaskJob::run).collect()).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("masks-{name}")).spawn(work)?;
        Ok(MaskWorker { jobs: Some(jobs), done, thread: Some(thread) })
    }

    /// Starts the jobs of one step. The results must be taken before the next step.
    pub fn begin(&self, jobs: Vec<MaskJob>) -> Pending<'_> {
        if jobs.is_empty() {
            return Pending::Nothing;
        }
        let sent = self.jobs.as_ref().is_some_and(|queue| queue.send(jobs).is_ok());
        if sent { Pending::Sent(self) } else { Pending::Nothing }
    }
}

impl Pending<'_> {
    /// Waits for the results and returns them in the order of the jobs. Returns an empty list if the worker is
    /// gone.
    pub fn join(self) -> Vec<Masked> {
        match self {
            Pending::Nothing => Vec::new(),
            Pending::Sent(worker) => worker.done.recv().unwrap_or_default(),
        }
    }
}

impl Drop for MaskWorker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Jobs catch their own panics.
            let _ = thread.join();
        }
    }
}

impl MaskJob {
    fn run(self) -> Masked {
        self.run_with(masks)
    }

    fn run_with(
        self,
        masks: impl FnOnce(&mut OutputConstraint, &Draft, &ForbiddenTokens) -> Result<Vec<TokenMask>, EngineError>,
    ) -> Masked {
        let MaskJob { id, mut constraint, draft, banned, excluded } = self;
        let barred = ForbiddenTokens { banned, excluded };
        let computed = catch_unwind(AssertUnwindSafe(move || {
            let masks = masks(&mut constraint, &draft, &barred);
            (constraint, masks)
        }));
        match computed {
            Ok((constraint, masks)) => Masked { id, constraint: Some(constraint), masks },
            Err(_) => {
                let message = "the output constraint panicked".to_string();
                Masked { id, constraint: None, masks: Err(EngineError::Failed(message)) }
            }
        }
    }
}

/// Tokens that are not drawn although the constraint allows them.
struct ForbiddenTokens {
    banned: Vec<u32>,
    excluded: Vec<(usize, u32)>,
}

impl ForbiddenTokens {
    /// Returns the mask without these tokens, after the first `after` tokens of the draft, or `None` if nothing
    /// is left to draw.
    fn applied_to(&self, mut mask: TokenMask, after: usize) -> Option<TokenMask> {
        let here = self.excluded.iter().filter(|(at, _)| *at == after);
        here.for_each(|(_, token)| mask.exclude(*token));
        (mask.choices(&self.banned) > 0).then_some(mask)
    }
}

/// Computes the masks of the rows that draw after the known tokens and after the draft's tokens. Only a failure
/// of the first row fails the sequence: the other rows may never be reached.
fn masks(
    constraint: &mut OutputConstraint,
    draft: &Draft,
    barred: &ForbiddenTokens,
) -> Result<Vec<TokenMask>, EngineError> {
    let Some(first) = barred.applied_to(constraint.mask()?, 0) else { return Ok(Vec::new()) };
    let mut masks = vec![first];
    if draft.tokens.is_empty() {
        return Ok(masks);
    }
    let mut ahead = constraint.fork();
    for (at, token) in draft.tokens.iter().enumerate() {
        if !ahead.try_accept(token.id) {
            break;
        }
        if draft.draws_after(at + 1) {
            match ahead.mask().ok().and_then(|mask| barred.applied_to(mask, at + 1)) {
                Some(mask) => masks.push(mask),
                None => break,
            }
        }
    }
    Ok(masks)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Constraint;
    use crate::constraint::ConstraintCompiler;
    use crate::draft::{DraftToken, Source};
    use crate::tests::fixture::{EOS, byte_tokenizer};

    fn job(id: u64, pattern: &str, draft: &str) -> MaskJob {
        let compiler = ConstraintCompiler::new(&Arc::new(byte_tokenizer()), 320, &[EOS], "bytes").unwrap();
        let constraint = compiler.compile(&Constraint::Regex(pattern.to_string())).unwrap();
        let tokens =
            draft.bytes().map(|id| DraftToken { id: u32::from(id), forced: false, source: Source::Grammar });
        MaskJob {
            id: SequenceId(id),
            constraint: Box::new(constraint),
            draft: Draft { tokens: tokens.collect() },
            banned: vec![EOS],
            excluded: Vec::new(),
        }
    }

    fn letters(masked: &Masked) -> Vec<String> {
        let allowed = |mask: &TokenMask, id: u8| mask.words()[id as usize / 32] >> (id % 32) & 1 == 1;
        let masks = masked.masks.as_ref().unwrap().iter();
        masks.map(|mask| (b'a'..=b'z').filter(|id| allowed(mask, *id)).map(char::from).collect()).collect()
    }

    #[test]
    fn each_row_has_the_mask_after_its_draft_prefix() {
        let worker = MaskWorker::start("test").unwrap();
        for _step in 0..2 {
            let jobs = vec![job(1, "[ab][cd][ef]g*", "adf"), job(2, "[xy]*", ""), job(3, "[pq]{2}", "pz")];
            let masked = worker.begin(jobs).join();
            assert_eq!(masked.iter().map(|masked| masked.id.0).collect::<Vec<_>>(), [1, 2, 3]);
            assert_eq!(letters(&masked[0]), ["ab", "cd", "ef", "g"]);
            assert_eq!(letters(&masked[1]), ["xy"]);
            // No row follows a draft token that the constraint rejects.
            assert_eq!(letters(&masked[2]), ["pq", "pq"]);
            assert!(masked.iter().all(|masked| masked.constraint.is_some()));
        }
    }

    #[test]
    fn excluded_tokens_are_masked_at_their_position() {
        let excluded = vec![(0, u32::from(b'b')), (2, u32::from(b'e'))];
        let masked = MaskJob { excluded, ..job(1, "[ab][cd][ef]g*", "acf") }.run();
        assert_eq!(letters(&masked), ["a", "cd", "f", "g"]);
        let excluded = vec![(0, u32::from(b'a')), (0, u32::from(b'b'))];
        assert!(letters(&MaskJob { excluded, ..job(1, "[ab][cd]", "") }.run()).is_empty());
    }

    #[test]
    fn a_job_returns_its_constraint_unchanged() {
        let mut constraint = job(1, "[ab][cd][ef]g*", "adf").run().constraint.unwrap();
        assert!(!constraint.try_accept(u32::from(b'c')));
        assert!(constraint.try_accept(u32::from(b'a')) && constraint.try_accept(u32::from(b'd')));
    }

    #[test]
    fn a_panic_fails_only_its_own_job() {
        let masked = job(1, "[ab]*", "").run_with(|_, _, _| panic!("a defect in the grammar"));
        assert!(masked.constraint.is_none());
        assert!(masked.masks.is_err_and(|error| error.to_string().contains("panicked")));
    }

    #[test]
    fn an_empty_job_list_sends_nothing() {
        let worker = MaskWorker::start("test").unwrap();
        assert!(matches!(worker.begin(Vec::new()), Pending::Nothing));
    }
}
