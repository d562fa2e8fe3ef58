//! The uses of the rows in one step: which rows are scored, which draw a token under which mask, and how their
//! outputs change a sequence.
//!
//! Invariant: a row after a draft counts only if every draft token before it was accepted, so a sequence
//! reports exactly the tokens that it would have reported one step at a time.

use std::collections::HashMap;

use skep_model::{Batch, BatchSequence, LogitRow, LogitsWanted, RowOutput, SampleRow, ScoreRow};

use crate::constraint::TokenMask;
use crate::draft::{Draft, DraftOutcome, DraftToken};
use crate::kv::pages_for;
use crate::mask_worker::{MaskJob, Masked};
use crate::scheduler::{Ending, PlannedSequence, Scheduler};
use crate::sequence::{Draw, Sequence};
use crate::sequence_id::SequenceId;
use crate::{EngineError, FinishReason};

/// The sequences of a step and the rows that the executor computes.
pub(crate) struct StepRows {
    pub plan: Vec<PlannedSequence>,
    /// The rows. A step that was started ahead may have rows that nobody uses anymore.
    pub batch: Batch,
    /// The index into the batch of each planned sequence.
    pub slots: Vec<usize>,
}

impl StepRows {
    /// Returns the rows of a plan, all of whose sequences are running.
    pub fn of_plan(scheduler: &Scheduler, plan: Vec<PlannedSequence>) -> Self {
        let batch = batch(scheduler, &plan);
        let slots = (0..plan.len()).collect();
        StepRows { plan, batch, slots }
    }

    /// Returns the number of tokens that are computed for the planned sequences.
    pub fn token_count(&self) -> usize {
        self.plan.iter().map(|planned| planned.tokens + planned.draft.tokens.len()).sum()
    }

    /// Returns the number of logit rows of the planned sequences.
    pub fn logit_rows(&self) -> usize {
        self.slots.iter().map(|slot| self.batch.sequences[*slot].logit_rows()).sum()
    }
}

/// The way in which a sequence continues after its rows in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Course {
    /// Tokens of its prompt are scored.
    Scores,
    /// One token is drawn.
    DrawsOne,
    /// The tokens of a draft are drawn, and how many of them count is known afterwards.
    ChecksDraft,
    /// This number of its known tokens is computed, and more of them follow.
    Computes(usize),
    Ends,
}

/// The uses of the logit rows of one planned sequence.
pub(crate) struct RowUse {
    pub id: SequenceId,
    /// Number of known tokens that the step computes.
    tokens: usize,
    /// Rows to score: the row in the step and the prompt token that it predicts.
    scores: Vec<ScoreRow>,
    next: Next,
    draft: Draft,
    /// The output followed by the draft, if there is a draft.
    drafted_output: Vec<u32>,
}

/// The action after the tokens that the step computes.
enum Next {
    /// More of the prompt follows, or no token is wanted.
    Nothing,
    /// The sequence ends here without another token.
    End(Ending),
    Draw(Vec<DrawnRow>),
}

/// A row that draws the token after the first `after` tokens of the draft.
struct DrawnRow {
    row: usize,
    after: usize,
    mask: Option<TokenMask>,
}

/// The effect of a step on a sequence.
pub(crate) struct Committed {
    pub ending: Option<Ending>,
    /// Number of tokens that it computed and that are the sequence's own.
    pub computed: usize,
    /// The result of the draft; `None` if there was no draft.
    pub draft: Option<CheckedDraft>,
    /// Whether tokens that were known before were rolled back.
    pub cut: bool,
}

/// The result of a draft.
pub(crate) struct CheckedDraft {
    /// The draft tokens that a row had to draw: those that were accepted, and the one in whose place another
    /// was drawn.
    pub tried: Vec<DraftOutcome>,
    /// Number of drafted tokens that were computed but rejected.
    pub rejected: usize,
}

fn batch(scheduler: &Scheduler, plan: &[PlannedSequence]) -> Batch {
    let sequences = plan.iter().filter_map(|planned| {
        let sequence = scheduler.sequence(planned.id)?;
        let end = sequence.computed.tokens + planned.tokens;
        let logits = match sequence.next_scored_row() {
            Some(_) => LogitsWanted::All,
            None if end == sequence.tokens.len() && !sequence.is_prefill_only() => {
                LogitsWanted::Tail(1 + planned.draft.tokens.len())
            }
            None => LogitsWanted::None,
        };
        let known = sequence.tokens[sequence.computed.tokens..end].iter().copied();
        let pages = pages_for(end + planned.draft.tokens.len());
        Some(BatchSequence {
            tokens: known.chain(planned.draft.ids()).collect(),
            start: sequence.computed.tokens,
            pages: sequence.computed.pages.pages()[..pages].to_vec(),
            logits,
        })
    });
    Batch { sequences: sequences.collect() }
}

/// Returns the jobs for the masks of the step, each with its constraint.
pub(crate) fn mask_jobs(scheduler: &mut Scheduler, plan: &[PlannedSequence]) -> Vec<MaskJob> {
    let job = |planned: &PlannedSequence| {
        let sequence = scheduler.sequence_mut(planned.id)?;
        let (draws, banned) = (draws(sequence, planned.tokens), sequence.banned().to_vec());
        let constraint = if draws { sequence.lend_constraint() } else { None };
        let excluded = sequence.excluded();
        Some(MaskJob {
            id: planned.id,
            constraint: constraint?,
            draft: planned.draft.clone(),
            banned,
            excluded,
        })
    };
    plan.iter().filter_map(job).collect()
}

/// Gives the constraints of a step back that was not computed.
pub(crate) fn return_constraints(scheduler: &mut Scheduler, masked: Vec<Masked>) {
    for Masked { id, constraint, .. } in masked {
        if let Some((sequence, constraint)) = scheduler.sequence_mut(id).zip(constraint) {
            sequence.return_constraint(constraint);
        }
    }
}

/// Gives the constraints back and determines the use of each sequence's rows.
pub(crate) fn row_uses(scheduler: &mut Scheduler, step: &StepRows, masked: Vec<Masked>) -> Vec<RowUse> {
    let mut masked: HashMap<SequenceId, Masked> =
        masked.into_iter().map(|masked| (masked.id, masked)).collect();
    let mut first_rows = Vec::with_capacity(step.batch.sequences.len());
    let mut logit_rows = 0;
    for rows in &step.batch.sequences {
        first_rows.push(logit_rows);
        logit_rows += rows.logit_rows();
    }
    let mut uses = Vec::with_capacity(step.plan.len());
    for (planned, slot) in step.plan.iter().zip(&step.slots) {
        let Some(sequence) = scheduler.sequence_mut(planned.id) else { continue };
        let masks = masked.remove(&planned.id).map(|masked| {
            masked.constraint.into_iter().for_each(|constraint| sequence.return_constraint(constraint));
            masked.masks
        });
        let (rows, first_row) = (&step.batch.sequences[*slot], first_rows[*slot]);
        uses.push(RowUse::of(sequence, planned.clone(), rows, first_row, masks));
    }
    uses
}

/// Returns whether the next `tokens` tokens are all known tokens of the sequence, so that another one is drawn.
fn draws(sequence: &Sequence, tokens: usize) -> bool {
    tokens == sequence.pending() && !sequence.is_prefill_only()
}

impl RowUse {
    fn of(
        sequence: &mut Sequence,
        planned: PlannedSequence,
        rows: &BatchSequence,
        first_row: usize,
        masks: Option<Result<Vec<TokenMask>, EngineError>>,
    ) -> RowUse {
        let PlannedSequence { id, tokens, draft } = planned;
        let end = rows.start + tokens;
        let scores = match sequence.next_scored_row() {
            None => Vec::new(),
            Some(next) => (next..end.min(sequence.prompt().len() - 1))
                .map(|position| ScoreRow {
                    row: first_row + position - rows.start,
                    target: sequence.tokens[position + 1],
                    top: sequence.request.prompt_logprobs.unwrap_or(0),
                })
                .collect(),
        };
        let drafted_output = match draft.tokens.is_empty() {
            true => Vec::new(),
            false => sequence.output().iter().copied().chain(draft.ids()).collect(),
        };
        let next = match end < sequence.tokens.len() {
            true => Next::Nothing,
            false => next_of(sequence, &draft, first_row + rows.logit_rows(), masks),
        };
        if matches!(next, Next::Draw(_)) {
            sequence.mark_seen();
            sequence.count_output();
        }
        RowUse { id, tokens, scores, next, draft, drafted_output }
    }

    /// Returns how the sequence continues after the step.
    pub fn course(&self) -> Course {
        match &self.next {
            _ if !self.scores.is_empty() => Course::Scores,
            Next::Nothing => Course::Computes(self.tokens),
            Next::End(_) => Course::Ends,
            Next::Draw(_) if self.draft.tokens.is_empty() => Course::DrawsOne,
            Next::Draw(_) => Course::ChecksDraft,
        }
    }

    /// Returns the number of rows that [`RowUse::logit_rows`] returns.
    pub fn row_count(&self) -> usize {
        let drawn = if let Next::Draw(rows) = &self.next { rows.len() } else { 0 };
        self.scores.len() + drawn
    }

    /// Returns the rows for the executor, in the order in which [`RowUse::commit`] takes their outputs.
    pub fn logit_rows<'a>(&'a self, sequence: &'a Sequence) -> Vec<LogitRow<'a>> {
        let known = sequence.output().len();
        let output = if self.drafted_output.is_empty() { sequence.output() } else { &self.drafted_output };
        let drawn: &[DrawnRow] = if let Next::Draw(rows) = &self.next { rows } else { &[] };
        let drawn = drawn.iter().map(|drawn| SampleRow {
            row: drawn.row,
            sampling: &sequence.request.sampling,
            seed: sequence.seed,
            step: (known + drawn.after) as u64,
            mask: drawn.mask.as_ref().map(TokenMask::words),
            banned: sequence.banned(),
            prompt: sequence.prompt(),
            output: &output[..known + drawn.after],
            seen: sequence.seen(),
            occurrences: sequence.occurrences(),
            top_logprobs: sequence.request.top_logprobs,
        });
        self.scores.iter().copied().map(LogitRow::Score).chain(drawn.map(LogitRow::Sample)).collect()
    }

    /// Hands the outputs to the sequence.
    pub fn commit(self, sequence: &mut Sequence, outputs: Vec<Result<RowOutput, EngineError>>) -> Committed {
        let known = sequence.tokens.len();
        let draft: Vec<u32> = self.draft.ids().collect();
        let ending = append(sequence, self.scores.len(), self.next, &draft, outputs);
        let came = sequence.tokens.get(known..).unwrap_or_default();
        let agreed = draft.iter().zip(came).take_while(|(drafted, token)| drafted == token).count();
        let refuted = agreed < draft.len() && agreed < came.len();
        let tokens = &self.draft.tokens;
        let tried = tokens.iter().take(agreed + usize::from(refuted)).enumerate();
        let tried: Vec<DraftOutcome> = tried
            .filter(|(_, token)| !token.forced)
            .map(|(at, token)| DraftOutcome { source: token.source, accepted: at < agreed })
            .collect();
        let checked = CheckedDraft { tried, rejected: drawn(tokens) - drawn(&tokens[..agreed]) };
        let cut = sequence.tokens.len() < known;
        let draft = (!draft.is_empty()).then_some(checked);
        Committed { ending, computed: self.tokens + agreed, draft, cut }
    }
}

/// Counts the tokens of a draft that the tokens before them do not force.
fn drawn(draft: &[DraftToken]) -> usize {
    draft.iter().filter(|token| !token.forced).count()
}

fn append(
    sequence: &mut Sequence,
    scores: usize,
    next: Next,
    draft: &[u32],
    outputs: Vec<Result<RowOutput, EngineError>>,
) -> Option<Ending> {
    let known = sequence.tokens.len();
    let mut outputs = outputs.into_iter();
    let missing = || EngineError::Failed("the executor returned no token for a row".to_string());
    for _ in 0..scores {
        match outputs.next().unwrap_or_else(|| Err(missing())) {
            Ok(score) => sequence.record_score(score),
            Err(error) => return Some(Err(error)),
        }
    }
    let rows = match next {
        Next::Nothing => return None,
        Next::End(Ok(FinishReason::ConstraintDone)) => return sequence.end_complete().transpose(),
        Next::End(ending) => return Some(ending),
        Next::Draw(rows) => rows,
    };
    for drawn in rows {
        if sequence.tokens.get(known..) != Some(&draft[..drawn.after]) {
            return None;
        }
        let choices = drawn.mask.as_ref().map_or(usize::MAX, |mask| mask.choices(sequence.banned()));
        let output = outputs.next().unwrap_or_else(|| Err(missing()));
        let draw = output.map(|row| {
            let accepted = draft.get(drawn.after) == Some(&row.token);
            Draw { row, choices, accepted }
        });
        let ending = draw.and_then(|draw| sequence.append_sampled(draw)).transpose();
        if ending.is_some() {
            return ending;
        }
    }
    None
}

/// Returns the action after the last known token and after each token of the draft. The row of the last draft
/// token is the one before `end_row`.
fn next_of(
    sequence: &Sequence,
    draft: &Draft,
    end_row: usize,
    masks: Option<Result<Vec<TokenMask>, EngineError>>,
) -> Next {
    if sequence.is_prefill_only() {
        return Next::End(Ok(FinishReason::Length));
    }
    let first_drawn = end_row - 1 - draft.tokens.len();
    let drawn = (0..=draft.tokens.len()).filter(|after| draft.draws_after(*after));
    let masks: Vec<_> = match masks {
        None if sequence.is_constrained() => {
            return Next::End(Err(EngineError::Failed("the output constraint produced no mask".to_string())));
        }
        None => drawn.map(|after| (after, None)).collect(),
        Some(Ok(masks)) if masks.is_empty() => return Next::End(Ok(FinishReason::ConstraintDone)),
        Some(Ok(masks)) => drawn.zip(masks.into_iter().map(Some)).collect(),
        Some(Err(error)) => return Next::End(Err(error)),
    };
    let rows = masks.into_iter();
    Next::Draw(rows.map(|(after, mask)| DrawnRow { row: first_drawn + after, after, mask }).collect())
}
