//! The length of drafts that pays, by the measured durations of steps and the acceptance of earlier drafts.
//!
//! A step costs more with more rows, and a draft's row is a gain only if the draft is accepted. A draft
//! therefore has the length that maximizes the step's expected tokens over its expected time; often that length
//! is zero. Drafting that is off is tried again from time to time, ever more rarely, because both the text and
//! the machine's load change.
//!
//! The module reads no clock; times are passed to it.

use std::time::Duration;

use crate::draft::{Draft, DraftOutcome, DraftToken, Source};

/// Maximum rows of a step with drafts from earlier text. Steps with more rows are bound by arithmetic, where a
/// row costs its full price.
const MAX_ROWS: usize = 64;
/// Weights of a new measurement. Steps are slowed down mostly by other work on the machine, so an average falls
/// fast and rises slowly.
const FASTER_STEP: f64 = 0.5;
const SLOWER_STEP: f64 = 0.05;
const NEW_DRAFT: f64 = 0.05;
/// Maximum number of rows to try, as a multiple of the largest measured number.
const TRIED_GROWTH: usize = 4;
/// Factor by which a history decays with each token that was tried.
const HISTORY_DECAY: f64 = 0.95;
/// Number of tokens that the engine's own experience counts for in a new sequence.
const PRIOR_TOKENS: f64 = 4.0;
/// Assumed acceptance of drafts that have not been tried yet: a grammar's drafts are mostly right, drafts from
/// earlier text half of the time.
const FIRST_ACCEPTANCE: [f64; Source::ALL.len()] = [0.9, 0.5];
/// A step with this many rows is bound by arithmetic, where a further row costs a third of a decode's share of a step.
const LONG_STEP_ROWS: usize = 32;
/// Minimum probability of a draft in a long step. It is above what the row costs, because a prompt in the step waits for it.
const LONG_STEP_ACCEPTANCE: f64 = 0.5;
/// Number of tokens that are drafted when drafting is tried again.
const PROBE_TOKENS: usize = 4;
/// Number of steps that could have a draft but had none, before drafting is tried again for the first time.
const FIRST_PROBE_AFTER: u32 = 16;
/// Maximum of that number, which doubles with each try.
const LAST_PROBE_AFTER: u32 = 512;

/// The load of one step so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub rows: usize,
    /// Number of the rows that belong to prompts. The durations of steps with prompts are not measured.
    pub prompt_rows: usize,
    /// Number of tokens that the step is expected to produce.
    pub tokens: f64,
}

/// Measurements from all sequences of an engine.
#[derive(Debug)]
pub(super) struct Pace {
    /// Duration of a step in seconds, by its rows, as moving averages.
    step_s: [Option<f64>; MAX_ROWS + 1],
    /// Fraction of drafted tokens that were accepted, by source.
    acceptance: [f64; Source::ALL.len()],
    /// Number of drafts not made since the last one, and the number after which drafting is tried again. Both
    /// count all sequences together: most are too short to find out for themselves.
    quiet: u32,
    probe_after: u32,
}

/// The results of one sequence's drafts, by source.
#[derive(Debug, Clone)]
pub(super) struct History([AcceptanceStats; Source::ALL.len()]);

#[derive(Debug, Clone, Copy)]
struct AcceptanceStats {
    accepted: f64,
    tried: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            step_s: [None; MAX_ROWS + 1],
            acceptance: FIRST_ACCEPTANCE,
            quiet: 0,
            probe_after: FIRST_PROBE_AFTER,
        }
    }
}

impl Pace {
    /// Returns the number of rows up to which steps are measured. Drafts from earlier text do not exceed it.
    pub fn row_limit(&self) -> usize {
        MAX_ROWS
    }

    /// Returns the history of a new sequence, which starts with the engine's own experience.
    pub fn new_history(&self) -> History {
        let prior =
            |acceptance: f64| AcceptanceStats { accepted: acceptance * PRIOR_TOKENS, tried: PRIOR_TOKENS };
        History(self.acceptance.map(prior))
    }

    /// Returns the number of the draft's tokens that gives the most tokens per second in a step of that load.
    pub fn best_length(&mut self, draft: &Draft, history: &History, load: &Load) -> usize {
        let is_measured = load.prompt_rows == 0 && load.rows <= MAX_ROWS && self.step_s(load.rows).is_some();
        if load.rows >= LONG_STEP_ROWS && !is_measured {
            return best_length_in_long_step(draft, history);
        }
        let rate = |count: usize| {
            let tokens = load.tokens + history.expected(&draft.tokens[..count]);
            Some(tokens / self.step_s(load.rows + count)?)
        };
        let counts = (1..=draft.tokens.len()).filter(|count| draft.draws_after(*count));
        // The duration of a step without drafts must be known, or there is nothing to compare with.
        let Some(mut best) = rate(0).map(|rate| (rate, 0)) else { return 0 };
        for count in counts.clone() {
            best = rate(count).filter(|rate| *rate > best.0).map_or(best, |rate| (rate, count));
        }
        if best.1 > 0 {
            self.quiet = 0;
            return best.1;
        }
        self.quiet += 1;
        if self.quiet < self.probe_after {
            return 0;
        }
        self.quiet = 0;
        self.probe_after = (self.probe_after * 2).min(LAST_PROBE_AFTER);
        counts.take_while(|count| *count <= PROBE_TOKENS).last().unwrap_or(0)
    }

    /// Records the result of any sequence's draft. An accepted token makes drafting be tried again soon.
    pub fn record_draft(&mut self, tried: &[DraftOutcome]) {
        if tried.iter().any(|tried| tried.accepted) {
            self.probe_after = FIRST_PROBE_AFTER;
        }
        for tried in tried {
            let acceptance = &mut self.acceptance[tried.source as usize];
            let accepted = f64::from(u8::from(tried.accepted));
            *acceptance += NEW_DRAFT * (accepted - *acceptance);
        }
    }

    /// Records the duration of a step. Steps with more rows than are measured are ignored.
    pub fn record_step(&mut self, rows: usize, time: Duration) {
        let Some(average) = self.step_s.get_mut(rows) else { return };
        let time = time.as_secs_f64();
        let weight = |old: f64| if time < old { FASTER_STEP } else { SLOWER_STEP };
        *average = Some(average.map_or(time, |old| old + weight(old) * (time - old)));
    }

    /// Returns the duration of a step with `rows` rows: as measured, or interpolated between its measured
    /// neighbors. More rows than ever measured are assumed to cost what the most rows did, so that they are
    /// tried, but not too many more at once.
    fn step_s(&self, rows: usize) -> Option<f64> {
        let known = |rows: usize| self.step_s.get(rows).copied().flatten().map(|time| (rows, time));
        let below = (1..=rows.min(MAX_ROWS)).rev().find_map(known);
        let above = (rows..=MAX_ROWS).find_map(known);
        match (below, above) {
            (Some((low, fast)), Some((high, slow))) if low < high => {
                Some(fast + (slow - fast) * (rows - low) as f64 / (high - low) as f64)
            }
            (Some((low, time)), None) => (rows <= low * TRIED_GROWTH).then_some(time),
            (Some((_, time)), Some(_)) => Some(time),
            (None, _) => None,
        }
    }
}

/// Returns the number of leading tokens that are likely.
fn best_length_in_long_step(draft: &Draft, history: &History) -> usize {
    let mut expected = 1.0;
    let likely = draft.tokens.iter().take_while(|token| {
        expected *= if token.forced { 1.0 } else { history.acceptance(token.source) };
        expected >= LONG_STEP_ACCEPTANCE
    });
    let likely = likely.count();
    (0..=likely).rev().find(|count| draft.draws_after(*count)).unwrap_or(0)
}

impl Source {
    const ALL: [Source; 2] = [Source::Grammar, Source::Lookup];
}

impl History {
    /// Returns the expected number of the draft's tokens that come true.
    pub fn expected(&self, draft: &[DraftToken]) -> f64 {
        let drawn = draft.iter().filter(|token| !token.forced);
        // A token counts only if all tokens before it come true.
        let mut all = 1.0;
        let likely = drawn.map(|token| {
            all *= self.acceptance(token.source);
            all
        });
        likely.sum()
    }

    /// Records the result of the sequence's own draft; older results lose weight.
    pub fn record(&mut self, tried: &[DraftOutcome]) {
        for tried in tried {
            let stats = &mut self.0[tried.source as usize];
            stats.accepted = stats.accepted * HISTORY_DECAY + f64::from(u8::from(tried.accepted));
            stats.tried = stats.tried * HISTORY_DECAY + 1.0;
        }
    }

    fn acceptance(&self, source: Source) -> f64 {
        let AcceptanceStats { accepted, tried } = self.0[source as usize];
        accepted / tried
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a step of `rows` rows takes `step_us(rows)`, and a text in which every `period`th
    /// guess is wrong.
    struct Scripted {
        pace: Pace,
        history: History,
        step_us: fn(usize) -> u64,
        period: usize,
        position: usize,
    }

    fn token(forced: bool) -> DraftToken {
        DraftToken { id: 1, forced, source: Source::Lookup }
    }

    /// The totals of a run.
    #[derive(Debug, Default)]
    struct Run {
        us: u64,
        drafted: usize,
        steps_with_drafts: usize,
    }

    impl Scripted {
        fn new(step_us: fn(usize) -> u64, period: usize) -> Self {
            let pace = Pace::default();
            Scripted { history: pace.new_history(), pace, step_us, period, position: 0 }
        }

        fn run(&mut self, tokens: usize) -> Run {
            let (mut run, end) = (Run::default(), self.position + tokens);
            while self.position < end {
                let draft = Draft { tokens: vec![token(false); 15] };
                let drafted = self.pace.best_length(
                    &draft,
                    &self.history,
                    &Load { rows: 1, prompt_rows: 0, tokens: 1.0 },
                );
                let right =
                    (0..drafted).take_while(|n| !(self.position + n).is_multiple_of(self.period)).count();
                let tried = |accepted| DraftOutcome { source: Source::Lookup, accepted };
                let mut all = vec![tried(true); right];
                all.extend((right < drafted).then(|| tried(false)));
                self.history.record(&all);
                self.pace.record_draft(&all);
                let us = (self.step_us)(1 + drafted);
                self.pace.record_step(1 + drafted, Duration::from_micros(us));
                self.position += right + 1;
                run.us += us;
                run.drafted += drafted;
                run.steps_with_drafts += usize::from(drafted > 0);
            }
            run
        }
    }

    /// Returns costs of a memory-bound machine: rows are nearly free up to sixteen.
    fn flat_row_cost_us(rows: usize) -> u64 {
        5000 + 50 * rows as u64
    }

    fn moderate_row_cost_us(rows: usize) -> u64 {
        5000 + 500 * rows as u64
    }

    /// Returns costs of a compute-bound machine: a row costs as much as a step.
    fn linear_row_cost_us(rows: usize) -> u64 {
        5000 * rows as u64
    }

    #[test]
    fn correct_guesses_are_used_where_rows_are_cheap() {
        let run = Scripted::new(flat_row_cost_us, 1000).run(2000);
        assert!(run.us < 2000 * flat_row_cost_us(1) / 8, "{run:?}");
    }

    #[test]
    fn expensive_rows_switch_drafting_off_however_good_the_guesses_are() {
        let mut scripted = Scripted::new(linear_row_cost_us, 1000);
        scripted.run(200);
        let run = scripted.run(4000);
        assert!(run.us < 4000 * linear_row_cost_us(1) * 21 / 20, "{run:?}");
        assert!(run.steps_with_drafts > 0, "drafting is tried again: {run:?}");
    }

    #[test]
    fn wrong_guesses_switch_drafting_off() {
        let mut scripted = Scripted::new(moderate_row_cost_us, 1);
        scripted.run(200);
        let run = scripted.run(4000);
        assert!(run.drafted < 200, "{run:?}");
        assert!(run.drafted > 0, "drafting is tried again: {run:?}");
    }

    #[test]
    fn drafting_resumes_when_the_text_starts_to_repeat() {
        let mut scripted = Scripted::new(moderate_row_cost_us, 1);
        scripted.run(2000);
        scripted.period = 1000;
        scripted.run(600);
        let run = scripted.run(1000);
        assert!(run.us < 1000 * moderate_row_cost_us(1) / 2, "{run:?}");
    }

    #[test]
    fn short_sequences_together_detect_that_steps_became_cheap() {
        let mut scripted = Scripted::new(linear_row_cost_us, 1000);
        scripted.run(2000);
        scripted.step_us = flat_row_cost_us;
        let mut run = Run::default();
        for _ in 0..200 {
            scripted.history = scripted.pace.new_history();
            run = scripted.run(12);
        }
        assert!(run.us < 12 * flat_row_cost_us(1) / 2, "{run:?}");
    }

    #[test]
    fn a_new_sequence_starts_from_the_experience_of_others() {
        let mut scripted = Scripted::new(moderate_row_cost_us, 1);
        for _ in 0..10 {
            scripted.history = scripted.pace.new_history();
            scripted.run(50);
        }
        scripted.history = scripted.pace.new_history();
        let run = scripted.run(15);
        assert!(run.steps_with_drafts <= 1, "at most one step tries a draft: {run:?}");
    }

    #[test]
    fn nothing_is_drafted_before_a_step_without_drafts_was_measured() {
        let mut pace = Pace::default();
        let draft = Draft { tokens: vec![token(false); 4] };
        let history = pace.new_history();
        assert_eq!(pace.best_length(&draft, &history, &Load { rows: 1, prompt_rows: 0, tokens: 1.0 }), 0);
    }

    #[test]
    fn a_draft_never_ends_where_the_next_token_is_forced() {
        let mut pace = Pace::default();
        pace.record_step(1, Duration::from_millis(5));
        // The last draft token costs more than it is worth, and so do the forced tokens before it.
        (2..=3).for_each(|rows| pace.record_step(rows, Duration::from_millis(5)));
        (4..=MAX_ROWS).for_each(|rows| pace.record_step(rows, Duration::from_millis(50)));
        let draft = Draft { tokens: [false, false, true, true, false].map(token).to_vec() };
        let history = pace.new_history();
        assert_eq!(pace.best_length(&draft, &history, &Load { rows: 1, prompt_rows: 0, tokens: 1.0 }), 1);
    }

    #[test]
    fn a_long_step_takes_likely_drafts() {
        let mut pace = Pace::default();
        (1..=MAX_ROWS).for_each(|rows| pace.record_step(rows, Duration::from_millis(5)));
        let mut history = pace.new_history();
        let grammar = DraftToken { source: Source::Grammar, ..token(false) };
        let draft = Draft { tokens: [vec![grammar; 3], vec![token(false); 3]].concat() };
        let [decodes, prompt, many] =
            [(40, 0), (40, 39), (300, 0)].map(|(rows, prompt_rows)| Load { rows, prompt_rows, tokens: 1.0 });
        assert_eq!(pace.best_length(&draft, &history, &decodes), 6, "rows cost nothing as measured");
        assert_eq!(pace.best_length(&draft, &history, &prompt), 3);
        assert_eq!(pace.best_length(&draft, &history, &many), 3);
        history.record(&[DraftOutcome { source: Source::Lookup, accepted: true }; 60]);
        history.record(&[DraftOutcome { source: Source::Grammar, accepted: true }; 60]);
        assert_eq!(pace.best_length(&draft, &history, &prompt), 6);
        history.record(&[DraftOutcome { source: Source::Grammar, accepted: false }; 20]);
        assert_eq!(pace.best_length(&draft, &history, &prompt), 0);
    }
}
