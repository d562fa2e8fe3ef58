//! The number of prompt tokens that a step may compute alongside decodes, so that a long prompt does not delay the
//! next token of others: as many as keep the step within a target time, estimated from earlier steps.
//!
//! The module has no clock; its caller reports how long each step took.

use std::time::Duration;

/// Minimum number of tokens by which a prefill advances in a step, however slow the machine.
pub(super) const MIN_CHUNK_TOKENS: usize = 16;
/// Maximum duration of a step without an operator's target, as a multiple of the duration of decodes alone.
/// [`LEAST_TARGET_S`] is the lower bound.
const DECODE_STEPS: f64 = 4.0;
/// Lower bound of the derived target: below it nobody sees a difference, and small chunks compute at lower
/// rates.
const LEAST_TARGET_S: f64 = 0.03;
/// Number by which the prompt tokens of a step may exceed its derived target, as a fraction of them, if that completes a
/// prompt: a small rest would cost another step.
const COMPLETION_SHARE: f64 = 0.5;
/// The fraction of the decodes' duration by which background work may lengthen a step with interactive work.
const BACKGROUND_SHARE: f64 = 0.25;
/// Weight of the newest step in the moving averages.
const NEWEST: f64 = 0.25;

#[derive(Debug)]
pub(super) struct StepPace {
    target_s: Option<f64>,
    /// Duration of a step with decodes only.
    decode_s: Option<f64>,
    prefill_token_s: Option<f64>,
    planned: StepShape,
}

/// The contents of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StepShape {
    pub decodes: usize,
    pub prefill_tokens: usize,
}

impl StepPace {
    /// Creates a pace. `target` is the maximum duration of a step with both decodes and prompts; `None` derives
    /// it from the decodes.
    pub fn new(target: Option<Duration>) -> Self {
        StepPace {
            target_s: target.map(|target| target.as_secs_f64()),
            decode_s: None,
            prefill_token_s: None,
            planned: StepShape::default(),
        }
    }

    /// Returns the number of prompt tokens for a step that has room for `room` of them alongside the decodes.
    pub fn prefill_tokens(&self, decodes: usize, room: usize) -> usize {
        let (Some(decode_s), Some(token_s)) = (self.decode_s, self.prefill_token_s) else { return room };
        if decodes == 0 {
            return room;
        }
        let target_s = self.target_s.unwrap_or_else(|| LEAST_TARGET_S.max(DECODE_STEPS * decode_s));
        let affordable = ((target_s - decode_s) / token_s).round() as usize;
        affordable.max(MIN_CHUNK_TOKENS).min(room)
    }

    /// Returns the maximum number of prompt tokens for a step that completes a prompt with them, where `tokens` are in
    /// time and there is room for `room`. An operator's target is not exceeded.
    pub fn completing_tokens(&self, tokens: usize, room: usize) -> usize {
        match self.target_s {
            Some(_) => tokens,
            None => (tokens + (tokens as f64 * COMPLETION_SHARE) as usize).min(room),
        }
    }

    /// Returns the number of tokens for background work in a step with interactive work. It is at least one, so
    /// that background work progresses too.
    pub fn background_tokens(&self) -> usize {
        let (Some(decode_s), Some(token_s)) = (self.decode_s, self.prefill_token_s) else { return 1 };
        ((BACKGROUND_SHARE * decode_s / token_s) as usize).max(1)
    }

    /// Records the shape of the step that is about to run, to which the next measured time belongs.
    pub fn begin(&mut self, planned: StepShape) {
        self.planned = planned;
    }

    /// Records the duration of the step that was started last.
    pub fn end(&mut self, took: Duration) {
        let (StepShape { decodes, prefill_tokens }, took_s) = (self.planned, took.as_secs_f64());
        match (decodes, prefill_tokens) {
            (1.., 0) => average(&mut self.decode_s, took_s),
            (_, MIN_CHUNK_TOKENS..) => {
                let decode_s = if decodes > 0 { self.decode_s.unwrap_or(0.0) } else { 0.0 };
                // A step that was quicker than decodes alone says nothing about prefill.
                if took_s > decode_s {
                    average(&mut self.prefill_token_s, (took_s - decode_s) / prefill_tokens as f64);
                }
            }
            _ => {}
        }
    }
}

fn average(value: &mut Option<f64>, newest: f64) {
    *value = Some(value.map_or(newest, |old| old + NEWEST * (newest - old)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns the pace of a machine on which all decodes take `decode_ms` together, and a prompt token takes 1
    /// ms.
    fn measured(target: Option<Duration>, decode_ms: u64) -> StepPace {
        let mut pace = StepPace::new(target);
        pace.begin(StepShape { decodes: 0, prefill_tokens: 200 });
        pace.end(ms(200));
        pace.begin(StepShape { decodes: 4, prefill_tokens: 0 });
        pace.end(ms(decode_ms));
        pace
    }

    #[test]
    fn a_chunk_beside_decodes_fills_the_target_time() {
        let pace = measured(Some(ms(50)), 10);
        assert_eq!(pace.prefill_tokens(4, 256), 40);
        assert_eq!(pace.prefill_tokens(4, 24), 24);
        assert_eq!(pace.prefill_tokens(0, 256), 256, "no sequence waits for a token");
    }

    #[test]
    fn the_default_target_follows_the_decodes() {
        assert_eq!(measured(None, 5).prefill_tokens(4, 256), 25);
        assert_eq!(measured(None, 20).prefill_tokens(4, 256), 60);
    }

    #[test]
    fn only_a_derived_target_is_exceeded_to_complete_a_prompt() {
        assert_eq!(measured(None, 20).completing_tokens(60, 256), 90);
        assert_eq!(measured(None, 20).completing_tokens(60, 70), 70);
        assert_eq!(measured(Some(ms(50)), 10).completing_tokens(40, 256), 40);
    }

    #[test]
    fn prefill_always_progresses() {
        assert_eq!(measured(Some(ms(1)), 10).prefill_tokens(4, 256), MIN_CHUNK_TOKENS);
    }

    #[test]
    fn background_work_lengthens_steps_by_a_share_and_always_progresses() {
        assert_eq!(measured(None, 20).background_tokens(), 5);
        assert_eq!(measured(None, 2).background_tokens(), 1);
        assert_eq!(StepPace::new(None).background_tokens(), 1);
    }

    #[test]
    fn without_measurements_the_whole_step_is_used() {
        assert_eq!(StepPace::new(Some(ms(1))).prefill_tokens(4, 256), 256);
    }

    #[test]
    fn slower_steps_make_smaller_chunks() {
        let mut pace = measured(Some(ms(50)), 10);
        let before = pace.prefill_tokens(4, 256);
        for _ in 0..20 {
            let shape = StepShape { decodes: 4, prefill_tokens: pace.prefill_tokens(4, 256) };
            pace.begin(shape);
            pace.end(ms(10) + ms(2) * shape.prefill_tokens as u32);
        }
        assert_eq!((before, pace.prefill_tokens(4, 256)), (40, 20));
    }
}
