//! What the rows of one step are for: which are scored, which draw a token under which mask, and what their outputs
//! make of a sequence.
//!
//! Invariant: a row behind a draft counts only if every token of the draft before it came true, so a sequence is told
//! exactly the tokens that it would have been told one step at a time.

use std::collections::HashMap;

use skep_model::{Batch, BatchSequence, LogitRow, LogitsWanted, RowOutput, SampleRow, ScoreRow};

use crate::constraint::TokenMask;
use crate::kv::pages_for;
use crate::mask_worker::{MaskJob, Masked};
use crate::scheduler::{Ending, PlannedSequence, Scheduler};
use crate::sequence::{Draw, Sequence, SequenceId};
use crate::speculation::{Draft, DraftToken, Tried};
use crate::{EngineError, FinishReason};

/// What the logit rows of one planned sequence are for.
pub(crate) struct RowUse {
    pub id: SequenceId,
    /// Known tokens that the step computes.
    tokens: usize,
    /// Row in the step and the prompt token that it predicts.
    scores: Vec<ScoreRow>,
    next: Next,
    draft: Draft,
    /// The output and the draft behind it, where there is one.
    drafted_output: Vec<u32>,
}

/// What comes after the tokens that the step computes.
enum Next {
    /// More of the prompt is to come, or nothing is wanted.
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

/// What a step made of a sequence.
pub(crate) struct Committed {
    pub ending: Option<Ending>,
    /// Tokens that it computed and that are the sequence's own.
    pub computed: usize,
    /// `None` if there was no draft.
    pub draft: Option<CheckedDraft>,
    /// Tokens that were known before were taken back.
    pub cut: bool,
}

/// What became of a draft.
pub(crate) struct CheckedDraft {
    /// Of the tokens that a row had to draw: those that came true, and the one after which another was drawn.
    pub tried: Vec<Tried>,
    /// Drafted tokens that were computed in vain.
    pub rejected: usize,
}

pub(crate) fn batch(scheduler: &Scheduler, plan: &[PlannedSequence]) -> Batch {
    let sequences = plan.iter().filter_map(|planned| {
        let sequence = scheduler.sequence(planned.id)?;
        let end = sequence.computed + planned.tokens;
        let logits = match sequence.next_scored_row() {
            Some(_) => LogitsWanted::All,
            None if end == sequence.tokens.len() && !sequence.is_prefill_only() => {
                LogitsWanted::Tail(1 + planned.draft.tokens.len())
            }
            None => LogitsWanted::None,
        };
        let known = sequence.tokens[sequence.computed..end].iter().copied();
        let pages = pages_for(end + planned.draft.tokens.len());
        Some(BatchSequence {
            tokens: known.chain(planned.draft.ids()).collect(),
            start: sequence.computed,
            pages: sequence.pages.pages()[..pages].to_vec(),
            logits,
        })
    });
    Batch { sequences: sequences.collect() }
}

/// The masks that will be wanted, with the constraints that they come of.
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

/// Gives the constraints back and says what each sequence's rows are for.
pub(crate) fn row_uses(
    scheduler: &mut Scheduler,
    plan: Vec<PlannedSequence>,
    batch: &Batch,
    masked: Vec<Masked>,
) -> Vec<RowUse> {
    let mut masked: HashMap<SequenceId, Masked> =
        masked.into_iter().map(|masked| (masked.id, masked)).collect();
    let mut first_row = 0;
    let mut uses = Vec::with_capacity(plan.len());
    for (planned, rows) in plan.into_iter().zip(&batch.sequences) {
        let Some(sequence) = scheduler.sequence_mut(planned.id) else { continue };
        let masks = masked.remove(&planned.id).map(|masked| {
            masked.constraint.into_iter().for_each(|constraint| sequence.return_constraint(constraint));
            masked.masks
        });
        uses.push(RowUse::of(sequence, planned, rows, first_row, masks));
        first_row += rows.logit_rows();
    }
    uses
}

/// Whether the next `tokens` tokens are all that is known of the sequence, so that another is drawn.
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
        RowUse { id, tokens, scores, next, draft, drafted_output }
    }

    /// One token is drawn, of all that there are.
    pub fn draws_freely(&self) -> bool {
        let free = |rows: &[DrawnRow]| matches!(rows, [DrawnRow { mask: None, .. }]);
        self.scores.is_empty() && matches!(&self.next, Next::Draw(rows) if free(rows))
    }

    /// What the executor is asked, in the order in which [`RowUse::commit`] takes the answers.
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
        let tried: Vec<Tried> = tried
            .filter(|(_, token)| !token.forced)
            .map(|(at, token)| Tried { source: token.source, came_true: at < agreed })
            .collect();
        let checked = CheckedDraft { tried, rejected: drawn(tokens) - drawn(&tokens[..agreed]) };
        let cut = sequence.tokens.len() < known;
        let draft = (!draft.is_empty()).then_some(checked);
        Committed { ending, computed: self.tokens + agreed, draft, cut }
    }
}

/// Tokens of a draft that are not certain if those before them come true.
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
    let missing = || EngineError::Failed("the executor gave no token for a row".to_string());
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

/// What comes after the last known token and after each token of the draft, of which the last has the row before
/// `end_row`.
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
            return Next::End(Err(EngineError::Failed("the output constraint gave no mask".to_string())));
        }
        None => drawn.map(|after| (after, None)).collect(),
        Some(Ok(masks)) if masks.is_empty() => return Next::End(Ok(FinishReason::ConstraintDone)),
        Some(Ok(masks)) => drawn.zip(masks.into_iter().map(Some)).collect(),
        Some(Err(error)) => return Next::End(Err(error)),
    };
    let rows = masks.into_iter();
    Next::Draw(rows.map(|(after, mask)| DrawnRow { row: first_drawn + after, after, mask }).collect())
}
